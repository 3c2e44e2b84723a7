"""The checkers of chapter 05 accept right answers, however written, and reject plausible wrong ones in useful words."""

import hashlib, itertools, math, random, zlib

import numpy as np
import pytest
import torch
from coupled_qk.exercises.data import check_bits, check_encoder, check_side


def said(capsys, checker, answer):
    "The verdict and its words; exactly one line of them."
    right = checker(answer)
    out = capsys.readouterr()
    assert out.err == "" and out.out.count("\n") == 1 and out.out.startswith("Right: " if right else "Not yet: ")
    return right, out.out


# ---- exercise 1


def by_merge(word, merges):
    tokens = list(word)
    for a, b in merges:
        i = 0
        while i < len(tokens) - 1:
            if (tokens[i], tokens[i + 1]) == (a, b):
                tokens[i : i + 2] = [a + b]
            i += 1
    return tokens


def by_rank(word, merges):
    "As GPT-2's own code: the oldest merge that can be made, until none can."
    tokens = list(word)
    while True:
        pairs = [p for p in itertools.pairwise(tokens) if p in merges]
        if not pairs:
            return tuple(tokens)
        tokens = by_merge_tokens(tokens, min(pairs, key=merges.index))


def by_merge_tokens(tokens, pair):
    out = []
    for token in tokens:
        if out and (out[-1], token) == pair:
            out[-1] += token
        else:
            out.append(token)
    return out


def longest(word, merges):
    known, out = {a + b for a, b in merges}, []
    while word:
        n = max((n for n in range(1, len(word) + 1) if word[:n] in known), default=1)
        out, word = [*out, word[:n]], word[n:]
    return out


@pytest.mark.parametrize("answer", [by_merge, by_rank])
def test_encoder_accepts(capsys, answer):
    assert said(capsys, check_encoder, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("no merge", lambda word, merges: list(word)),
        ("the first merge only", lambda word, merges: by_merge(word, merges[:1])),
        ("longest token that fits", longest),
        ("last merge first", lambda word, merges: by_merge(word, merges[::-1])),
        ("", lambda word, merges: [word]),
        ("spell", lambda word, merges: [a + b for a, b in merges]),
        ("list of strings", lambda word, merges: "".join(by_merge(word, merges))),
        ("list of strings", lambda word, merges: [(t,) for t in by_merge(word, merges)]),
        ("changed the list", lambda word, merges: (by_merge(word, merges), merges.clear())[0]),
    ],
)
def test_encoder_rejects(capsys, words, answer):
    right, text = said(capsys, check_encoder, answer)
    assert not right and words in text


# ---- exercise 2


def counted():
    seen = itertools.count()
    return lambda document: "valid" if next(seen) % 10 == 0 else "train"


@pytest.mark.parametrize(
    "answer",
    [
        lambda d: "valid" if hashlib.sha256(d.encode()).digest()[0] < 26 else "train",
        lambda d: ["train", "valid"][int(hashlib.md5(d.encode()).hexdigest(), 16) % 10 == 3],
        lambda d: "valid" if zlib.crc32(d.encode()) % 10 == 0 else "train",
        lambda d: "valid" if random.Random(d).random() < 0.1 else "train",  # seeded by the text: the same everywhere
    ],
)
def test_side_accepts(capsys, answer):
    assert said(capsys, check_side, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("another side", lambda d: "valid" if random.random() < 0.1 else "train"),
        ("another side", counted()),
        ("Python's hash", lambda d: "valid" if hash(d) % 10 == 0 else "train"),
        ("holds out", lambda d: "valid" if len(d) % 30 == 0 else "train"),
        ("holds out", lambda d: "valid" if d[0] in "tuvwxyz" else "train"),
        ("begin alike", lambda d: "valid" if zlib.crc32(d[:100].encode()) % 10 == 0 else "train"),
        ("end alike", lambda d: "valid" if zlib.crc32(d[-25:].encode()) % 10 == 0 else "train"),
        ("holds out 0%", lambda d: "train"),
        ("holds out 100%", lambda d: "valid"),
        ("holds out", lambda d: "valid" if zlib.crc32(d.encode()) % 2 else "train"),
        ("'train' or 'valid'", lambda d: zlib.crc32(d.encode()) % 10 == 0),
        ("UnicodeEncodeError", lambda d: "valid" if zlib.crc32(d.encode("ascii")) % 10 == 0 else "train"),
    ],
)
def test_side_rejects(capsys, words, answer):
    right, text = said(capsys, check_side, answer)
    assert not right and words in text


# ---- exercise 3


@pytest.mark.parametrize(
    "answer",
    [
        lambda p, n: math.log2(p) / n,
        lambda p, n: torch.tensor(p).log2() / n,
        lambda p, n: np.log(p) / np.log(2) / n,
        lambda p, n: math.log(p, 2**n),
    ],
)
def test_bits_accepts(capsys, answer):
    assert said(capsys, check_bits, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("nats per byte", lambda p, n: math.log(p) / n),
        ("bits per token", lambda p, n: math.log2(p)),
        ("you multiplied", lambda p, n: math.log2(p) * n),
        ("base 10", lambda p, n: math.log10(p) / n),
        ("the logarithm comes first", lambda p, n: math.log2(p / n)),
        ("it should be", lambda p, n: p / n),
        ("it should be", lambda p, n: 0),
        ("without nan and infinity", lambda p, n: math.nan),
        ("without nan and infinity", lambda p, n: -math.inf),
    ],
)
def test_bits_rejects(capsys, words, answer):
    right, text = said(capsys, check_bits, answer)
    assert not right and words in text
