"""The checkers of chapter 05 accept right answers, however written, and reject plausible wrong ones in useful words."""

import hashlib, itertools, math, random, zlib

import numpy as np
import pytest
import torch
from conftest import said
from coupled_qk.exercises.data import check_bits, check_encoder, check_side


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


def first_byte(document):
    return hashlib.sha256(document.encode()).digest()[0]


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
        ("the length of", lambda d: "valid" if len(d) % 30 == 0 else "train"),
        ("the length of", lambda d: "valid" if len(d) > 500 else "train"),
        ("the first letter of", lambda d: "valid" if d[0] in "tuvwxyz" else "train"),
        ("the first letter of", lambda d: "valid" if d.encode()[0] < 50 else "train"),
        ("the beginning of", lambda d: "valid" if zlib.crc32(d[:100].encode()) % 10 == 0 else "train"),
        ("the last letter of", lambda d: "valid" if d[-1] == "7" else "train"),
        ("the end of", lambda d: "valid" if zlib.crc32(d[-25:].encode()) % 10 == 0 else "train"),
        ("on one side, 'train'", lambda d: "train"),
        ("on one side, 'valid'", lambda d: "valid"),
        ("on one side, 'train'", lambda d: "valid" if first_byte(d) > 255 else "train"),
        ("swapped", lambda d: "train" if first_byte(d) < 26 else "valid"),
        ("for which tenth", lambda d: "valid" if first_byte(d) < 10 else "train"),  # ten in 256, not in 100
        ("for which tenth", lambda d: "valid" if first_byte(d) < 0.1 else "train"),  # as if it were between 0 and 1
        ("for which tenth", lambda d: "valid" if first_byte(d) < 128 else "train"),
        ("for which tenth", lambda d: "valid" if zlib.crc32(d.encode()) % 2 else "train"),
        ("swapped", lambda d: "valid" if zlib.crc32(d.encode()) % 10 else "train"),  # everything but a tenth
        ("divide each kind of document alike", lambda d: "valid" if sum(d.encode()) % 10 == 0 else "train"),
        ("'train' or 'valid', and returned 'Valid'", lambda d: "Valid"),
        ("returned int", lambda d: first_byte(d)),
        ("must be encoded", lambda d: hashlib.sha256(d)),
        ("text alone", counted()),
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
        ("its logarithm is missing", lambda p, n: p / n),
        ("the sign", lambda p, n: -math.log2(p) / n),
        ("upside down", lambda p, n: n / math.log2(p)),  # which cannot divide by the last one's zero bits
        ("upside down", lambda p, n: n / torch.tensor(p).log2()),
        ("swapped", lambda p, n: math.log2(n) / p),
        ("changed to bits twice", lambda p, n: math.log2(p) / math.log(2) / n),
        ("multiplied by ln 2", lambda p, n: math.log(p) * math.log(2) / n),
        ("divided by 8", lambda p, n: math.log2(p) / 8 / n),
        ("inside the logarithm", lambda p, n: math.log2(p * n)),
        ("e to the bits", lambda p, n: math.exp(math.log2(p) / n)),
        ("nats per token", lambda p, n: math.log(p)),
        ("rounded", lambda p, n: round(math.log2(p) / n, 2)),
        ("it should be", lambda p, n: 0),
        ("does not change with the second", lambda p, n: 0),
        ("does not change with the second", lambda p, n: math.log2(p) / 4.59),  # the length of WikiText-2's tokens
        ("does not change with the perplexity", lambda p, n: 8 / n),  # right for the first example
        ("look at what you do with the length", lambda p, n: math.log2(p) / n**2),
        ("look at the logarithm", lambda p, n: math.sqrt(p) / n),
        ("only a constant factor", lambda p, n: math.log2(p) / n * 100),
        ("one number", lambda p, n: (math.log2(p), n)),
        ("TypeError", lambda p: math.log2(p)),
        ("without nan and infinity", lambda p, n: math.nan),
        ("without nan and infinity", lambda p, n: -math.inf),
    ],
)
def test_bits_rejects(capsys, words, answer):
    right, text = said(capsys, check_bits, answer)
    assert not right and words in text
