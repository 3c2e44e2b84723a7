"The checkers of chapter 14 accept right answers, however written, and reject plausible wrong ones in useful words."

import numpy as np
import pytest
import torch
from conftest import said
from coupled_qk.advise import couple, leave, no_gain, unsure
from coupled_qk.exercises.when_to_couple import check_most_alike, check_threshold, check_word
from coupled_qk.stats import difference, equivalence_p


def word(values, m):
    found = difference(values)
    if equivalence_p(values, m) < 0.05:
        return no_gain
    return couple if found.high < 0 else leave if found.low > 0 else unsure


def by_hand(values, m):
    "With SciPy's intervals: 90 % inside the margin is what two one-sided tests at 5 % say."
    from scipy.stats import ttest_1samp

    test = ttest_1samp(values, 0)
    narrow, wide = (test.confidence_interval(level) for level in (0.90, 0.95))
    if -m < narrow.low and narrow.high < m:
        return "no difference worth its cost"
    if wide.low < 0 < wide.high:
        return "unsure"
    return "couple" if wide.high < 0 else "do not couple"


@pytest.mark.parametrize("answer", [word, by_hand])
def test_word_accepts(capsys, answer):
    assert said(capsys, check_word, answer)[0]


def without_margin(values, m):
    found = difference(values)
    return couple if found.high < 0 else leave if found.low > 0 else unsure


def nothing_where_zero(values, m):
    found = difference(values)
    return couple if found.high < 0 else leave if found.low > 0 else no_gain


def turned(values, m):
    return {couple: leave, leave: couple}.get(word(values, m), word(values, m))


@pytest.mark.parametrize(
    "words, answer",
    [
        ("its mean is not enough", lambda values, m: couple if np.mean(values) < 0 else leave),
        ("ask the margin first", without_margin),
        ("does not show that there is no difference", nothing_where_zero),
        ("turned around", turned),
        ("whole interval is on one side", lambda values, m: unsure),
        ("return couple, leave", lambda values, m: "yes"),
        ("return couple, leave", lambda values, m: True),
        ("nothing yet", lambda values, m: None),
    ],
)
def test_word_rejects(capsys, words, answer):
    right, out = said(capsys, check_word, answer)
    assert not right and words in out, out


@pytest.mark.parametrize(
    "answer",
    [
        lambda a, b, c: (a + c) / (a + b),
        lambda a, b, c: torch.tensor((a + c) / (a + b)),
        lambda a, b, c: 1 - (b - c) / (a + b),
    ],
)
def test_threshold_accepts(capsys, answer):
    assert said(capsys, check_threshold, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("cost of trying is missing", lambda a, b, c: a / (a + b)),
        ("odds", lambda a, b, c: (a + c) / b),
        ("turn it around", lambda a, b, c: 1 - (a + c) / (a + b)),
        ("do not belong below", lambda a, b, c: (a + c) / (a + b + c)),
        ("mind its sign", lambda a, b, c: (a - c) / (a + b)),
        ("nothing is cut", lambda a, b, c: min(1, (a + c) / (a + b))),
        ("should be", lambda a, b, c: 0.95),
        ("nothing yet", lambda a, b, c: None),
    ],
)
def test_threshold_rejects(capsys, words, answer):
    right, out = said(capsys, check_threshold, answer)
    assert not right and words in out, out


def nearest(mine, ours, by=lambda table: table.std(axis=0)):
    table = np.array(list(ours.values()))
    return list(ours)[(((table - mine) / by(table)) ** 2).sum(axis=1).argmin()]


def farthest(mine, ours):
    table = np.array(list(ours.values()))
    return list(ours)[(((table - mine) / table.std(axis=0)) ** 2).sum(axis=1).argmax()]


def sample_deviation(mine, ours):
    return nearest(mine, ours, lambda table: table.std(axis=0, ddof=1))


def by_loops(mine, ours):
    from statistics import stdev

    spread = [stdev(x[i] for x in ours.values()) for i in range(len(mine))]
    return min(ours, key=lambda n: sum(((a - b) / s) ** 2 for a, b, s in zip(ours[n], mine, spread, strict=True)))


@pytest.mark.parametrize("answer", [nearest, sample_deviation, by_loops])
def test_most_alike_accepts(capsys, answer):
    assert said(capsys, check_most_alike, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("divide by the spread", lambda mine, ours: nearest(mine, ours, lambda t: np.ones(3))),
        ("you say", lambda mine, ours: nearest(mine, ours, lambda t: 1 / t.std(axis=0))),
        ("you say", lambda mine, ours: min(ours, key=lambda n: abs(ours[n][0] - mine[0]))),
        ("farthest", farthest),
        ("how much it varies", lambda mine, ours: nearest(mine, ours, lambda t: t.mean(axis=0))),
        ("you say", lambda mine, ours: next(iter(ours))),
        ("return one of the names", lambda mine, ours: 0),
        ("return one of the names", lambda mine, ours: "novels"),
        ("nothing yet", lambda mine, ours: None),
    ],
)
def test_most_alike_rejects(capsys, words, answer):
    right, out = said(capsys, check_most_alike, answer)
    assert not right and words in out, out
