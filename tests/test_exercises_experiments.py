"The checkers of chapter 07 accept right answers, however written, and reject plausible wrong ones in useful words."

import json
import math
import re

import numpy as np
import pytest
import torch
from conftest import ROOT, said

import coupled_qk.experiments as library
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
        ("two numbers (low, high)", lambda g, t: half(g, t)),
        ("two numbers (low, high)", lambda g, t: [1, 2, 3]),
        ("mean and half the width", lambda g, t: (np.mean(g), half(g, t))),
        ("two things", lambda g, t: around(g, half(g, t, ddof=0, root=False))),
        ("root of n - 1", lambda g, t: around(g, half(g, t, root=False) / (len(g) - 1) ** 0.5)),
        ("sign of the mean", lambda g, t: around(-g, half(g, t))),
        ("n is fixed at 5; take len(g), which is 8", lambda g, t: around(g, half(g, t, root=False) / 5**0.5)),
        ("your t is fixed; use", lambda g, t: around(g, half(g, 2.7764))),
        ("your t is fixed, and n at 5", lambda g, t: around(g, half(g, 2.7764, root=False) / 5**0.5)),
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


def stops(rows):
    yield 0.3
    raise KeyError("euler")


def left(rows):
    "With None where a seed lacks its partner."
    return [*pairs(rows), None]


as_dict = lambda rows: dict(enumerate(pairs(rows)))
by_its_values = lambda rows: {x: None for x in pairs(rows)}  # whose keys are the right answer


@pytest.mark.parametrize(
    "answer",
    [
        pairs,
        lambda rows: np.array(pairs(rows)),
        as_tensor,
        lambda rows: iter(pairs(rows)),
        lambda rows: tuple(pairs(rows)),
        lambda rows: list(as_tensor(rows)),
        lambda rows: as_dict(rows).values(),
    ],
)
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
        ("list of numbers", lambda rows: np.array(0.3)),
        ("something of type str", lambda rows: ["a"]),
        ("something of type str", lambda rows: list(map(str, pairs(rows)))),
        ("something of type complex", lambda rows: [1j]),
        ("of type str", lambda rows: "123"),
        ("of type bytes", lambda rows: b"123"),
        ("no order", lambda rows: set(pairs(rows))),
        ("its values", as_dict),
        ("its values", by_its_values),
        ("leave out a seed", left),
        ("more than one number in one place", lambda rows: list(enumerate(pairs(rows)))),
        ("more than one number in one place", lambda rows: [pairs(rows)]),
        ("more than one number in one place", lambda rows: np.array([[x] for x in pairs(rows)])),
        ("KeyError ('euler')", stops),
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


def solution():
    "The folded solution of the chapter."
    nb = json.loads((ROOT / "nbs" / "07_language_modelling.ipynb").read_text(encoding="utf-8"))
    text = next("".join(cell["source"]) for cell in nb["cells"] if cell["id"] == "lm-ex3-sol")
    code, found = re.search(r"```python\n(.*?)\ncheck_reach", text, re.S)[1], {}
    exec(code, found)
    return found["my_reach"]


def test_the_solution_agrees_with_the_library():
    "On plateaus, too, where a share would be zero over zero, and for one length."
    curves = [([1, 2, 3], [4, 4, 3]), ([1], [4.0]), ([1, 2, 3, 4], [5, 4, 4, 3]), ([1, 2, 3], [4.2, 4.6, 4.1])]
    for tokens, losses in curves:
        for target in (2.9, 3, 3.5, 4, 4.1, 4.2, 4.4, 4.6, 5, 6):
            mine, right = solution()(tokens, losses, target), library.reach(tokens, losses, target)
            assert mine == pytest.approx(right, nan_ok=True), (tokens, losses, target)


@pytest.mark.parametrize(
    "answer", [reach, lowest_first, solution(), lambda *a: torch.tensor(reach(*a), dtype=torch.float64)]
)
def test_reach_accepts(capsys, answer):
    assert said(capsys, check_reach, answer)[0]


def guessed(tokens, losses, target):
    found = reach(tokens, losses, target)
    return tokens[-1] if math.isnan(found) else found


def shorter(tokens, losses, target):
    return tokens[0] / 2 if target > losses[0] else reach(tokens, losses, target)


def ends(tokens, losses, target, inside):
    "The same line, with another rule for which neighbours hold the target."
    for a, b, la, lb in zip(tokens, tokens[1:], losses, losses[1:], strict=False):
        if inside(la, target, lb):
            return a * (b / a) ** ((la - target) / (la - lb))
    return math.nan


def unsorted(tokens, losses, target):
    "np.interp on losses that do not only fall."
    return np.exp(np.interp(target, losses[::-1], np.log(tokens)[::-1], left=np.nan, right=np.nan))


def unreturned(tokens, losses, target):
    found = reach(tokens, losses, target)
    return None if math.isnan(found) else found


def stopped(tokens, losses, target):
    return tokens[[t for t in range(4) if losses[t] <= target][0]] and reach(tokens, losses, target)


def turned(tokens, losses, target):
    for a, b, la, lb in zip(tokens, tokens[1:], losses, losses[1:], strict=False):
        if la >= target >= lb:
            return a * (b / a) ** ((target - lb) / (la - lb))
    return math.nan


@pytest.mark.parametrize(
    "words, answer",
    [
        ("for a target of 4.0: your function returns nothing yet; where nobody knows, return float", unreturned),
        ("for a target of 4.0: your function stopped with IndexError", stopped),
        ("for a target of 4.35: you answer nan", unsorted),
        ("for a target of 4.3: you answer nan", lambda *a: ends(*a, lambda la, t, lb: la >= t > lb)),
        ("for a target of 5.0: you answer nan", lambda *a: ends(*a, lambda la, t, lb: la > t >= lb)),
        ("for a target of 5.2: it is above the first loss", shorter),
        ("for a target of 4.7: your share is turned around", turned),
        ("for a target of 4.6: you answer 0.5, and", lambda *a: 0.5 if a[2] == 4.6 else reach(*a)),
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
