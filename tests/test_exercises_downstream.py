"The checkers of chapter 11 accept right answers, however written, and reject plausible wrong ones in useful words."

import numpy as np
import pytest
import torch
from conftest import said
from coupled_qk.downstream import cut, pool
from coupled_qk.exercises.downstream import check_cut, check_matthews, check_mean


def matthews(tp, tn, fp, fn):
    below = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return (tp * tn - fp * fn) / below**0.5 if below else 0.0


def as_correlation(tp, tn, fp, fn):
    right, given = np.repeat([[1, 1], [0, 0], [0, 1], [1, 0]], [tp, tn, fp, fn], axis=0).T
    return np.corrcoef(right, given)[0, 1] if right.std() * given.std() else 0


@pytest.mark.parametrize("answer", [matthews, as_correlation, lambda *c: torch.tensor(matthews(*c))])
def test_matthews_accepts(capsys, answer):
    assert said(capsys, check_matthews, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("the accuracy", lambda tp, tn, fp, fn: (tp + tn) / (tp + tn + fp + fn)),
        ("F1", lambda tp, tn, fp, fn: 2 * tp / (2 * tp + fp + fn)),
        ("root", lambda *c: matthews(*c) / ((c[0] + c[2]) * (c[0] + c[3]) * (c[1] + c[2]) * (c[1] + c[3])) ** 0.5),
        ("turned around", lambda *c: -matthews(*c)),
        ("should be", lambda *c: 0.123),
        ("stopped with ZeroDivisionError", lambda tp, tn, fp, fn: matthews(tp, tn, fp, fn) / (tp + fp and 1)),
        ("nothing yet", lambda *c: None),
    ],
)
def test_matthews_rejects(capsys, words, answer):
    right, out = said(capsys, check_matthews, answer)
    assert not right and words in out, out


def without_a_loop(a, b, room):
    second = min(b, max(room // 2, room - a))
    return min(a, room - second), second


@pytest.mark.parametrize(
    "answer", [without_a_loop, lambda a, b, room: cut([a, b], room), lambda *x: np.array(without_a_loop(*x))]
)
def test_cut_accepts(capsys, answer):
    assert said(capsys, check_cut, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("may use", lambda a, b, room: (min(a, room // 2), min(b, room // 2))),
        ("more than there is room for", lambda a, b, room: (a, b)),
        ("one more", lambda a, b, room: without_a_loop(b, a, room)[::-1]),
        ("more than it has", lambda a, b, room: (room // 2, room - room // 2)),
        ("gives first", lambda a, b, room: (min(a, room - 1), min(b, room - min(a, room - 1)))),
        ("nothing yet", lambda *x: None),
    ],
)
def test_cut_rejects(capsys, words, answer):
    right, out = said(capsys, check_cut, answer)
    assert not right and words in out, out


def mean(h, lengths):
    real = torch.arange(h.shape[1]) < lengths[:, None]
    return (h * real[..., None]).sum(1) / lengths[:, None]


def in_a_loop(h, lengths):
    return [row[:n].mean(0) for row, n in zip(h, lengths, strict=True)]


@pytest.mark.parametrize("answer", [mean, in_a_loop, lambda h, n: pool(h, n, "mean").numpy()])
def test_mean_accepts(capsys, answer):
    assert said(capsys, check_mean, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("longest row only", lambda h, n: h.mean(1)),
        ("width of the batch", lambda h, n: mean(h, n) * n[:, None] / h.shape[1]),
        ("in the sum", lambda h, n: h.sum(1) / n[:, None]),
        ("other habit", lambda h, n: pool(h, n)),
        ("last place", lambda h, n: h[:, -1]),
        ("this is the sum", lambda h, n: mean(h, n) * n[:, None]),
        (
            "last real token is missing",
            lambda h, n: [row[: k - 1].sum(0) / max(1, k - 1) for row, k in zip(h, n, strict=True)],
        ),
        ("not the mean", lambda h, n: 2 * mean(h, n)),
        ("nothing yet", lambda h, n: None),
    ],
)
def test_mean_rejects(capsys, words, answer):
    right, out = said(capsys, check_mean, answer)
    assert not right and words in out, out
