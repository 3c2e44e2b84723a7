"The checkers of chapter 08 accept right answers, however written, and reject plausible wrong ones in useful words."

import math
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import said
from coupled_qk.coherence import word_entropy
from coupled_qk.exercises.corpora import check_burst, check_floor, check_parts


def entropy(words, log=math.log2):
    n = len(words)
    return -sum(c / n * log(c / n) for c in Counter(words).values())


def windows(order, n):
    return [order[i : i + n] for i in range(0, len(order) // n * n, n)]


def burst(text, shuffled, n, log=math.log2):
    mean = lambda order: np.mean([entropy(w, log) for w in windows(order, n)])
    return mean(shuffled) - mean(text)


def by_information(text, shuffled, n):
    "With the entropy of the whole in both terms."
    told = lambda order: word_entropy(text) - np.mean([word_entropy(w) for w in windows(order, n)])
    return told(text) - told(shuffled)


@pytest.mark.parametrize("answer", [burst, by_information, lambda *a: torch.tensor(burst(*a))])
def test_burst_accepts(capsys, answer):
    assert said(capsys, check_burst, answer)[0]


def with_rest(text, shuffled, n):
    mean = lambda order: np.mean([entropy(order[i : i + n]) for i in range(0, len(order), n)])
    return mean(shuffled) - mean(text)


def sliding(text, shuffled, n):
    mean = lambda order: np.mean([entropy(order[i : i + n]) for i in range(len(order) - n + 1)])
    return mean(shuffled) - mean(text)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("sign is turned around", lambda *a: -burst(*a)),
        ("chance is not subtracted", lambda t, s, n: entropy(t) - np.mean([entropy(w) for w in windows(t, n)])),
        ("the entropy of the windows", lambda t, s, n: np.mean([entropy(w) for w in windows(t, n)])),
        ("base 2", lambda t, s, n: burst(t, s, n, math.log)),
        ("leave them out", with_rest),
        ("overlap", sliding),
        ("take the mean", lambda t, s, n: burst(t, s, n) * (len(t) // n)),
        ("in windows of 6", lambda t, s, n: burst(t, s, 4)),
        ("your last window is missing", lambda t, s, n: burst(t[:-1], s[:-1], n)),
        ("sign is turned around", lambda *a: abs(burst(*a))),
        ("should be", lambda *a: 0.0),
        ("one number", lambda t, s, n: [0.0, 1.0]),
        ("nothing yet", lambda *a: None),
    ],
)
def test_burst_rejects(capsys, words, answer):
    right, out = said(capsys, check_burst, answer)
    assert not right and words in out, out


def parts(alone, share, mixture):
    return np.mean(share) - np.mean(alone), np.mean(mixture) - np.mean(share)


@pytest.mark.parametrize(
    "answer",
    [
        parts,
        lambda a, s, m: np.mean(np.diff([a, s, m], axis=0), axis=1),
        lambda a, s, m: torch.tensor([s, m]).mean(1) - torch.tensor([a, s]).mean(1),
    ],
)
def test_parts_accepts(capsys, answer):
    assert said(capsys, check_parts, answer)[0]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("wrong order", lambda *x: parts(*x)[::-1]),
        ("signs", lambda *x: [-p for p in parts(*x)]),
        ("take off what dilution", lambda a, s, m: (np.mean(s) - np.mean(a), np.mean(m) - np.mean(a))),
        ("sums", lambda a, s, m: (sum(s) - sum(a), sum(m) - sum(s))),
        ("less the share", lambda a, s, m: (np.mean(s) - np.mean(a), np.mean(s) - np.mean(m))),
        ("answer in bits", lambda *x: np.array(parts(*x)) / sum(parts(*x))),
        ("should be", lambda *x: (0.0, 0.0)),
        ("shape (2,)", lambda a, s, m: np.mean(m) - np.mean(a)),
        ("nothing yet", lambda *x: None),
    ],
)
def test_parts_rejects(capsys, words, answer):
    right, out = said(capsys, check_parts, answer)
    assert not right and words in out, out


def floor(k, r, h, decide=True, others=1, new=1.0, forms=3, words=4):
    moves = -sum(p * math.log2(p) for p in (r, 1 - r) if p > 0) if decide else 0
    return moves + r * (math.log2(k - others) + new * h) + math.log2(forms) + words * h


@pytest.mark.parametrize("answer", [floor, lambda k, r, h: torch.tensor(floor(k, r, h), dtype=torch.float64)])
def test_floor_accepts(capsys, answer):
    assert said(capsys, check_floor, answer)[0]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("K - 1 others", lambda *x: floor(*x, others=0)),
        ("new topic", lambda *x: floor(*x, new=0)),
        ("left to chance, too", lambda *x: floor(*x, decide=False)),
        ("three forms", lambda *x: floor(*x, forms=1)),
        ("not five", lambda *x: floor(*x, words=5)),
        ("bits per byte", lambda *x: floor(*x) / 26),
        ("stopped with ValueError", lambda k, r, h: floor(k, r, h) + 0 * math.log2(1 - r)),
        ("should be", lambda *x: 1.0),
        ("nothing yet", lambda *x: None),
    ],
)
def test_floor_rejects(capsys, words, answer):
    right, out = said(capsys, check_floor, answer)
    assert not right and words in out, out
