"""The checkers of chapter 01 accept right answers, however written, and reject plausible wrong ones in useful words."""

import math

import pytest
import torch
from conftest import said
from coupled_qk.exercises.coupling import check_equal_queries, check_force, check_gauge


KEYS = [[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0]]


@pytest.mark.parametrize(
    "keys",
    [
        lambda: torch.tensor(KEYS),
        lambda: KEYS,  # nested lists
        lambda: torch.tensor([[3, -3], [-3, 3], [5, -5], [-5, 5]]),  # whole numbers, opposite pairs
        lambda: torch.nn.Parameter(torch.tensor([[0.5, -0.1], [-0.2, 0.6], [1.5, -0.2], [-0.2, 1.5]]).double()),
    ],
)
def test_equal_queries_accepts(capsys, keys):
    assert said(capsys, check_equal_queries, keys)[0]


@pytest.mark.parametrize(
    "words, keys",
    [
        ("all keys are equal", torch.ones(4, 2)),
        ("all keys are equal", torch.zeros(4, 2)),
        ("just as much", [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]),  # equal lengths
        ("itself", [[2.0, 0.0], [0.0, 2.0], [1.0, 0.0], [0.0, 1.0]]),  # the partner is the shorter one
        ("swapped", [[1.0, 0.0], [0.0, 1.0], [0.0, 2.0], [2.0, 0.0]]),
        ("transposed", torch.tensor(KEYS).T),
        ("token 1 prefers token 2", [[1.0, 0.0], [0.0, 1.0], [9.0, 0.0], [0.0, 2.0]]),  # one key wins everywhere
        ("token 0 prefers token 1", [[1.0, 0.0], [9.0, 0.0], [2.0, 0.0], [0.0, 2.0]]),
    ],
)
def test_equal_queries_rejects(capsys, words, keys):
    right, text = said(capsys, check_equal_queries, lambda: keys)
    assert not right and words in text


def stack(*columns):
    return torch.stack(columns, dim=-1)


@pytest.mark.parametrize(
    "force",
    [
        lambda q: stack(q[..., 1].abs() - 1, torch.zeros_like(q[..., 1])),
        lambda q: (q[..., 1:] ** 2 - 1) * torch.tensor([1.0, 0.0]),
        lambda q: stack(torch.where(q[..., 1] == 0, -3.0, 3.0), q[..., 1] / 4),  # a second coordinate that does no harm
        lambda q: [[[-1.0, 1.0][abs(b) > 1], 0.0] for _, b in q.tolist()],
        torch.nn.Sequential(  # the force of the lesson: two layers and SiLU
            torch.nn.Linear(2, 2, bias=False, dtype=torch.float64),
            torch.nn.SiLU(),
            torch.nn.Linear(2, 2, dtype=torch.float64),
        ),
    ],
)
def test_force_accepts(capsys, force):
    if isinstance(force, torch.nn.Module):
        with torch.no_grad():
            force[0].weight.copy_(torch.tensor([[0.0, 1.0], [0.0, -1.0]]))
            force[2].weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
            force[2].bias.copy_(torch.tensor([-1.0, 0.0]))
    assert said(capsys, check_force, force)[0]


@pytest.mark.parametrize(
    "words, force",
    [
        ("does not bend", lambda q: -q),  # the spring
        ("does not bend", lambda q: q @ torch.tensor([[0.0, 2.0], [3.0, 1.0]]).double() - 1),
        ("does not bend", torch.ones_like),
        ("is zero", torch.zeros_like),
        ("second coordinate", lambda q: stack(torch.zeros_like(q[..., 1]), q[..., 1].abs() - 1)),
        ("swapped", lambda q: stack(1 - q[..., 1].abs(), torch.zeros_like(q[..., 1]))),
        ("must be below zero", lambda q: stack(q[..., 1].abs(), torch.zeros_like(q[..., 1]))),  # no shift
        ("must be above zero", lambda q: stack(q[..., 1].relu() - 1, torch.zeros_like(q[..., 1]))),  # half a bend
        ("must be", lambda q: (q[..., 1:].abs() - 1).expand(q.shape)),  # in both coordinates
        ("other tokens", lambda q: stack(q[..., 1].abs() - q[..., 1].abs().mean(), torch.zeros_like(q[..., 1]))),
        ("shape (4,)", lambda q: q[..., 1].abs() - 1),
        ("transposed", lambda q: stack(q[..., 1].abs() - 1, torch.zeros_like(q[..., 1])).T),
    ],
)
def test_force_rejects(capsys, words, force):
    right, text = said(capsys, check_force, force)
    assert not right and words in text


def turn(angle):
    return torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])


@pytest.mark.parametrize(
    "matrix",
    [
        turn(0.3),
        turn(math.pi / 2).tolist(),
        torch.tensor([[0, 1], [1, 0]]),  # a reflection, of whole numbers
        torch.tensor([[0.6, -0.8], [0.8, 0.6]]),
        torch.linalg.qr(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).Q.double(),
    ],
)
def test_gauge_accepts(capsys, matrix):
    assert said(capsys, check_gauge, lambda: matrix)[0]


@pytest.mark.parametrize(
    "words, matrix",
    [
        ("identity", torch.eye(2)),
        ("identity", -torch.eye(2)),
        ("stretches", 2 * torch.eye(2)),  # the lesson's own gauge
        ("stretches", torch.tensor([[2.0, 0.0], [0.0, 0.5]])),
        ("stretches", torch.tensor([[0.0, 2.0], [2.0, 0.0]])),
        ("another matrix", torch.tensor([[1.0, 1.0], [0.0, 1.0]])),  # a shear: its determinant is one
        ("another matrix", 2 * turn(0.3)),
        ("no inverse", torch.ones(2, 2)),
        ("no inverse", torch.zeros(2, 2)),
        ("shape (4, 4)", torch.eye(4)),
    ],
)
def test_gauge_rejects(capsys, words, matrix):
    right, text = said(capsys, check_gauge, lambda: matrix)
    assert not right and words in text
