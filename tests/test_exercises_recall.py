"The checkers of chapter 09 accept right answers, however written, and reject plausible wrong ones in useful words."

import numpy as np
import pytest
import torch
from conftest import said
from coupled_qk.exercises.recall import check_accuracy, check_labels, check_weights


def labels(row, n_pairs, start=None, take=1, nothing=-100):
    value = {row[2 * i].item(): row[2 * i + take].item() for i in range(n_pairs)}
    start = 2 * n_pairs if start is None else start
    return [value.get(x, nothing) if i >= start else nothing for i, x in enumerate(row.tolist())]


def by_comparing(row, n_pairs):
    "Without a dictionary, all at once."
    keys, values = row[: 2 * n_pairs : 2], row[1 : 2 * n_pairs : 2]
    same = row[:, None] == keys
    same[: 2 * n_pairs] = False
    return torch.where(same.any(1), (same * values).sum(1), -100)


@pytest.mark.parametrize("answer", [labels, by_comparing, lambda *a: np.array(labels(*a))])
def test_labels_accepts(capsys, answer):
    assert said(capsys, check_labels, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("one place behind", lambda *a: np.roll(labels(*a), 1)),
        ("nothing is asked", lambda row, n: torch.full_like(row, -100)),
        ("labels are the keys", lambda *a: labels(*a, take=0)),
        ("the pairs themselves ask nothing", lambda *a: labels(*a, start=0)),
        ("0 would be an answer", lambda *a: labels(*a, nothing=0)),
        ("among the pairs", lambda row, n: [*labels(row, n, start=0)[: 2 * n], *[-100] * (len(row) - 2 * n)]),
        ("at place 8", lambda row, n: labels(row, n - 1, start=2 * n)),
        ("shape (18,)", lambda row, n: [14, 17, 11]),
        ("at place 5", lambda row, n: labels(row, 3)),
        ("shape (8,)", lambda row, n: (labels(row, n) + [-100] * 18)[:18]),
        ("nothing yet", lambda *a: None),
    ],
)
def test_labels_rejects(capsys, words, answer):
    right, out = said(capsys, check_labels, answer)
    assert not right and words in out, out


def weights(n, power, shift=1, minus=1.0, sign=1, whole=True):
    w = (np.arange(n) + shift) ** float(sign * (power - minus))
    return w / w.sum() if whole else w


def by_logarithms(n, power):
    return torch.softmax((power - 1) * torch.arange(1, n + 1).log(), 0)


@pytest.mark.parametrize("answer", [weights, by_logarithms, lambda *a: list(weights(*a))])
def test_weights_accepts(capsys, answer):
    assert said(capsys, check_weights, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("sum to one", lambda *a: weights(*a, whole=False)),
        ("a - 1, and not a", lambda *a: weights(*a, minus=0.0)),
        ("sign is turned around", lambda *a: weights(*a, sign=-1)),
        ("infinite weight", lambda n, power: torch.arange(n) ** (power - 1)),
        ("slots count from 0", lambda *a: weights(*a, shift=2)),
        ("all slots are alike", lambda n, power: np.full(n, 1 / n)),
        ("softmax", lambda *a: torch.tensor(weights(*a, whole=False)).softmax(0)),
        ("should be", lambda n, power: weights(n, power / 2)),
        ("for a = 0.5", lambda n, power: weights(n, 0.01)),
        ("shape (3,)", lambda n, power: weights(5, power)),
        ("nothing yet", lambda *a: None),
    ],
)
def test_weights_rejects(capsys, words, answer):
    right, out = said(capsys, check_weights, answer)
    assert not right and words in out, out


def accuracy(logits, labels):
    right = logits.argmax(-1) == labels
    return (right.sum(1) / (labels != -100).sum(1)).mean()


def row_by_row(logits, labels):
    shares = []
    for scores, row in zip(logits, labels, strict=True):
        asked = row != -100
        shares.append((scores[asked].argmax(-1) == row[asked]).float().mean().item())
    return sum(shares) / len(shares)


@pytest.mark.parametrize("answer", [accuracy, row_by_row, lambda *a: np.float32(accuracy(*a))])
def test_accuracy_accepts(capsys, answer):
    assert said(capsys, check_accuracy, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("all questions of all rows", lambda z, y: (z.argmax(-1)[y != -100] == y[y != -100]).float().mean()),
        ("all places", lambda z, y: (z.argmax(-1) == y).float().mean()),
        ("take their mean", lambda z, y: 3 * accuracy(z, y)),
        ("do not divide", lambda z, y: (z.argmax(-1) == y).sum(1).float().mean()),
        ("all right answers", lambda z, y: (z.argmax(-1) == y).sum()),
        ("wrong answers", lambda z, y: 1 - accuracy(z, y)),
        (
            "the next place",
            lambda z, y: ((z.argmax(-1)[:, :-1] == y[:, 1:]).sum(1) / (y != -100).sum(1)).mean(),
        ),
        ("it should be", lambda z, y: 0.123),
        ("one number", lambda z, y: z.argmax(-1) == y),
        ("nothing yet", lambda *a: None),
    ],
)
def test_accuracy_rejects(capsys, words, answer):
    right, out = said(capsys, check_accuracy, answer)
    assert not right and words in out, out
