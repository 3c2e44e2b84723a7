"The checkers of chapter 10 accept right answers, however written, and reject plausible wrong ones in useful words."

import math

import numpy as np
import pytest
import torch
from conftest import said
from coupled_qk.exercises.scoring import check_lengths, check_pairs, check_undo


def bound(T, p):
    return math.log((T - 1) * p / (1 - p)) / 2


@pytest.mark.parametrize(
    "answer",
    [bound, lambda T, p: torch.tensor(bound(T, p)), lambda T, p: np.arctanh(1 - 2 / ((T - 1) * p / (1 - p) + 1))],
)
def test_bound_accepts(capsys, answer):
    assert said(capsys, check_lengths, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("halve it", lambda T, p: 2 * bound(T, p)),
        ("not T", lambda T, p: math.log(T * p / (1 - p)) / 2),
        ("other keys are missing", lambda T, p: math.log(p / (1 - p)) / 2),
        ("take the logarithm", lambda T, p: math.exp(bound(T, p))),
        ("should be", lambda T, p: 4.37),
        ("nothing yet", lambda T, p: None),
    ],
)
def test_bound_rejects(capsys, words, answer):
    right, out = said(capsys, check_lengths, answer)
    assert not right and words in out, out


def undo(q, k, of_q, of_k):
    s, t = of_k(k)
    q = (q - t) * torch.exp(-s)
    s, t = of_q(q)
    return q, (k - t) / torch.exp(s)


def in_the_other_order(q, k, of_q, of_k):
    s, t = of_q(q)
    k = (k - t) * torch.exp(-s)
    s, t = of_k(k)
    return (q - t) * torch.exp(-s), k


def with_the_new_query(q, k, of_q, of_k):
    (s, t), (s2, t2) = of_k(k), of_q(q)
    return (q - t) * torch.exp(-s), (k - t2) * torch.exp(-s2)


def scaled_first(q, k, of_q, of_k):
    s, t = of_k(k)
    q = q * torch.exp(-s) - t
    s, t = of_q(q)
    return q, k * torch.exp(-s) - t


def shifts_only(q, k, of_q, of_k):
    q = q - of_k(k)[1]
    return q, k - of_q(q)[1]


@pytest.mark.parametrize("answer", [undo, lambda *a: torch.stack(undo(*a)), lambda *a: list(undo(*a))])
def test_undo_accepts(capsys, answer):
    assert said(capsys, check_undo, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("undone first", in_the_other_order),
        ("the old query", with_the_new_query),
        ("goes first", scaled_first),
        ("divide by exp(s)", shifts_only),
        ("wrong places", lambda *a: undo(*a)[::-1]),
        ("were given", lambda q, k, of_q, of_k: (q, k)),
        ("does not lead back", lambda q, k, of_q, of_k: (-q, k)),
        ("nothing yet", lambda *a: None),
    ],
)
def test_undo_rejects(capsys, words, answer):
    right, out = said(capsys, check_undo, answer)
    assert not right and words in out, out


def pairs(n_heads, n_kv_heads):
    r = n_heads // n_kv_heads
    return [(2 * g * r + i, (2 * g + 1) * r + i) for g in range(n_kv_heads // 2) for i in range(r)]


def by_reshape(n_heads, n_kv_heads):
    return np.arange(n_heads).reshape(n_kv_heads // 2, 2, -1).swapaxes(1, 2).reshape(-1, 2)


@pytest.mark.parametrize("answer", [pairs, by_reshape, lambda *a: torch.tensor(pairs(*a)), lambda *a: pairs(*a)[::-1]])
def test_pairs_accepts(capsys, answer):
    assert said(capsys, check_pairs, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("share it", lambda H, K: [(i, i + 1) for i in range(0, H, 2)]),
        ("turned around", lambda H, K: [pair[::-1] for pair in pairs(H, K)]),
        ("pairs, and you return", lambda H, K: pairs(H, K)[:-1]),
        ("only once", lambda H, K: [(0, 1)] * (H // 2)),
        ("and should", lambda H, K: [(i, i + H // 2) for i in range(H // 2)]),
        ("list of pairs", lambda H, K: 3),
        ("list of pairs", lambda H, K: [(1, 2, 3)]),
        ("nothing yet", lambda H, K: None),
    ],
)
def test_pairs_rejects(capsys, words, answer):
    right, out = said(capsys, check_pairs, answer)
    assert not right and words in out, out
