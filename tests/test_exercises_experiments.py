"The checkers of chapter 07 accept right answers, however written, and reject plausible wrong ones in useful words."

import math

import numpy as np
import pytest
import torch
from conftest import said
from coupled_qk.exercises.experiments import check_gaps, check_interval, check_reach


def half(g, t, ddof=1, root=True):
    return t * np.std(g, ddof=ddof) / (len(g) ** 0.5 if root else 1)


def around(g, h):
    return np.mean(g) - h, np.mean(g) + h


@pytest.mark.parametrize(
    "interval",
    [
        lambda g, t: around(g, half(g, t)),
        lambda g, t: torch.tensor(g).mean() + torch.tensor([-1.0, 1.0]) * half(g, t),
        lambda g, t: np.array(around(g, t * (g.var(ddof=1) / len(g)) ** 0.5)),
    ],
)
def test_interval_accepts(capsys, interval):
    assert said(capsys, check_interval, interval)[0]


@pytest.mark.parametrize(
    "words, interval",
    [
        ("wrong way round", lambda g, t: around(g, half(g, t))[::-1]),
        ("around zero", lambda g, t: (-half(g, t), half(g, t))),
        ("so far may a single pair lie", lambda g, t: around(g, half(g, t, root=False))),
        ("by the root of n", lambda g, t: around(g, half(g, t, root=False) / len(g))),
        ("ddof=1", lambda g, t: around(g, half(g, t, ddof=0))),
        ("1.96", lambda g, t: around(g, half(g, 1.96))),
        ("t is missing", lambda g, t: around(g, half(g, 1))),
        ("the variance", lambda g, t: around(g, t * np.var(g, ddof=1) / len(g) ** 0.5)),
        ("should be", lambda g, t: (0, 1)),
        ("shape", lambda g, t: half(g, t)),
        ("nothing yet", lambda g, t: None),
    ],
)
def test_interval_rejects(capsys, words, interval):
    right, out = said(capsys, check_interval, interval)
    assert not right and words in out, out


def pairs(rows, keep=lambda s: True):
    loss = {(arm, s): x for arm, s, x in rows}
    seeds = sorted({s for _, s, _ in rows if keep(s)})
    return [loss["euler", s] - loss["standard", s] for s in seeds if ("euler", s) in loss and ("standard", s) in loss]


def by_place(rows):
    take = lambda arm: [x for name, _, x in rows if name == arm]
    return np.subtract(take("euler"), take("standard"))


as_tensor = lambda rows: torch.tensor(pairs(rows), dtype=torch.float64)


@pytest.mark.parametrize("answer", [pairs, lambda rows: np.array(pairs(rows)), as_tensor])
def test_gaps_accepts(capsys, answer):
    assert said(capsys, check_gaps, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("sign", lambda rows: [-x for x in pairs(rows)]),
        ("order of their seeds", lambda rows: pairs(rows)[::-1]),
        ("two seeds lack", by_place),
        ("some pair is missing", lambda rows: pairs(rows, lambda s: s < 3)),
        ("one seed", lambda rows: [0.0, 0.0, 0.0]),
        ("list of numbers", lambda rows: 0.3),
        ("list of numbers", lambda rows: ["a"]),
        ("nothing yet", lambda rows: None),
    ],
)
def test_gaps_rejects(capsys, words, answer):
    right, out = said(capsys, check_gaps, answer)
    assert not right and words in out, out


def reach(tokens, losses, target, line=np.log, back=np.exp):
    for i in range(len(tokens) - 1):
        if losses[i] >= target >= losses[i + 1]:
            share = (losses[i] - target) / (losses[i] - losses[i + 1])
            return back(line(tokens[i]) + share * (line(tokens[i + 1]) - line(tokens[i])))
    return math.nan


def lowest_first(tokens, losses, target):
    "By np.interp, on the part that falls."
    n = int(np.argmin(losses)) + 1
    return np.exp(np.interp(target, losses[:n][::-1], np.log(tokens[:n])[::-1], left=np.nan, right=np.nan))


@pytest.mark.parametrize("answer", [reach, lowest_first, lambda *a: torch.tensor(reach(*a), dtype=torch.float64)])
def test_reach_accepts(capsys, answer):
    assert said(capsys, check_reach, answer)[0]


def guessed(tokens, losses, target):
    found = reach(tokens, losses, target)
    return tokens[-1] if math.isnan(found) else found


@pytest.mark.parametrize(
    "words, answer",
    [
        ("the logarithm of the tokens", lambda *a: reach(*a, line=lambda x: x, back=lambda x: x)),
        (
            "between two of them",
            lambda tokens, losses, target: tokens[int(np.argmin(np.abs(np.subtract(losses, target))))],
        ),
        ("nobody knows", guessed),
        ("you answer nan", lambda *a: math.nan),
        ("should be", lambda *a: 2 * reach(*a)),
        ("one number", lambda tokens, losses, target: tokens),
        ("nothing yet", lambda *a: None),
    ],
)
def test_reach_rejects(capsys, words, answer):
    right, out = said(capsys, check_reach, answer)
    assert not right and words in out, out
