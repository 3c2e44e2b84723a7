"The checkers of chapter 12 accept right answers, however written, and reject plausible wrong ones in useful words."

from statistics import mean, median

import numpy as np
import pytest
import torch
from conftest import said
from coupled_qk.exercises.bench import check_back, check_forces, check_ratio
from coupled_qk.integrators import euler, leapfrog, leapfrog_dkd


@pytest.mark.parametrize(
    "answer",
    [
        lambda a, b: median(x / y for x, y in zip(a, b, strict=True)),
        lambda a, b: np.median(np.divide(a, b)),
        lambda a, b: (torch.tensor(a) / torch.tensor(b)).quantile(0.5),
    ],
)
def test_ratio_accepts(capsys, answer):
    assert said(capsys, check_ratio, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("upside down", lambda a, b: median(y / x for x, y in zip(a, b, strict=True))),
        ("take the median", lambda a, b: mean(x / y for x, y in zip(a, b, strict=True))),
        ("two medians", lambda a, b: median(a) / median(b)),
        ("slow rounds count most", lambda a, b: sum(a) / sum(b)),
        ("slow rounds count most", lambda a, b: mean(a) / mean(b)),
        ("fastest seconds", lambda a, b: min(a) / min(b)),
        ("luckiest", lambda a, b: min(x / y for x, y in zip(a, b, strict=True))),
        ("before you sort", lambda a, b: median(x / y for x, y in zip(sorted(a), sorted(b), strict=True))),
        ("should be", lambda a, b: 1.0),
        ("one number", lambda a, b: [x / y for x, y in zip(a, b, strict=True)]),
        ("nothing yet", lambda a, b: None),
    ],
)
def test_ratio_rejects(capsys, words, answer):
    right, out = said(capsys, check_ratio, answer)
    assert not right and words in out, out


def forces(D, d, n, lean):
    return (3 + lean) * (n + 1) * 4 * D * d


@pytest.mark.parametrize("answer", [forces, lambda *a: torch.tensor(forces(*a)), lambda *a: float(forces(*a))])
def test_forces_accepts(capsys, answer):
    assert said(capsys, check_forces, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("2n forces", lambda D, d, n, lean: (3 + lean) * 2 * n * 4 * D * d),
        ("one force more", lambda D, d, n, lean: (3 + lean) * n * 4 * D * d),
        ("forward pass alone", lambda D, d, n, lean: (n + 1) * 4 * D * d),
        ("backward pass alone", lambda D, d, n, lean: 2 * (n + 1) * 4 * D * d),
        ("once more in the backward", lambda D, d, n, lean: 3 * (n + 1) * 4 * D * d),
        ("only lean", lambda D, d, n, lean: 4 * (n + 1) * 4 * D * d),
        ("one head", lambda D, d, n, lean: (3 + lean) * (n + 1) * 4 * d * d),
        ("two FLOPs", lambda D, d, n, lean: (3 + lean) * (n + 1) * 2 * D * d),
        ("should be", lambda D, d, n, lean: 1e6),
        ("nothing yet", lambda *a: None),
    ],
)
def test_forces_rejects(capsys, words, answer):
    right, out = said(capsys, check_forces, answer)
    assert not right and words in out, out


def by_hand(q, k, force, dt, n):
    f = force(q)
    for _ in range(n):
        k = k - dt / 2 * f
        q = q - dt * k
        f = force(q)
        k = k - dt / 2 * f
    return q, k


def twice(q, k, force, dt, n):
    for _ in range(n):
        k = k - dt / 2 * force(q)
        q = q - dt * k
        k = k - dt / 2 * force(q)
    return q, k


def half(q_sign, k_sign):
    def way(q, k, force, dt, n):
        for _ in range(n):
            k = k + k_sign * dt / 2 * force(q)
            q = q + q_sign * dt * k
            k = k + k_sign * dt / 2 * force(q)
        return q, k

    return way


@pytest.mark.parametrize(
    "answer", [by_hand, lambda q, k, f, dt, n: leapfrog(q, k, f, -dt, n), lambda *a: torch.stack(by_hand(*a))]
)
def test_back_accepts(capsys, answer):
    assert said(capsys, check_back, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("6 forces in 3 steps", twice),
        ("not back", leapfrog),
        ("one step back", lambda q, k, f, dt, n: leapfrog(q, k, f, -dt, 1)),
        ("Euler", lambda q, k, f, dt, n: euler(q, k, f, -dt, n)),
        ("in the drift, too", half(1, -1)),
        ("in the kicks, too", half(-1, 1)),
        ("wrong places", lambda *a: by_hand(*a)[::-1]),
        ("were given", lambda q, k, f, dt, n: (q, k)),
        ("does not lead back", lambda q, k, f, dt, n: leapfrog_dkd(q, k, f, -dt, n)),
        ("nothing yet", lambda *a: None),
    ],
)
def test_back_rejects(capsys, words, answer):
    right, out = said(capsys, check_back, answer)
    assert not right and words in out, out
