"Statistics: right by simulation and by hand, monotone where they must be, clear about bad input."

import math

import numpy as np
import pytest
import torch

from coupled_qk.stats import deviation, difference, equivalence_p, holm, pairs_needed, power, smallest_effect
from coupled_qk.study import comparison_table


def test_interval_covers_the_truth_as_often_as_it_says():
    "800 studies of eight pairs: the share of intervals that hold the true mean is 95 % within four standard errors."
    rng = np.random.default_rng(0)
    found = [difference(rng.normal(0.3, 2.0, 8)) for _ in range(800)]
    share = np.mean([d.low <= 0.3 <= d.high for d in found])
    assert abs(share - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 800)
    share = np.mean([d.p < 0.05 for d in (difference(rng.normal(0.0, 2.0, 8)) for _ in range(800))])
    assert abs(share - 0.05) < 4 * math.sqrt(0.95 * 0.05 / 800)


def test_power_is_the_share_of_studies_that_find_the_effect():
    rng = np.random.default_rng(1)
    found = np.mean([difference(rng.normal(0.9, 1.0, 9)).p < 0.05 for _ in range(800)])
    assert abs(found - power(0.9, 1.0, 9)) < 4 * math.sqrt(found * (1 - found) / 800)


def test_power_and_its_inverses_agree():
    for n in (2, 3, 8, 40):
        assert power(smallest_effect(0.7, n), 0.7, n) == pytest.approx(0.8, abs=1e-9)
        assert pairs_needed(smallest_effect(0.7, n) * 1.0001, 0.7) == n
    grid = [power(x, 1.0, 8) for x in np.linspace(0, 3, 20)]
    assert grid == sorted(grid) and grid[0] == pytest.approx(0.05)
    assert power(-1, 1, 8) == power(1, 1, 8)


def test_interval_of_a_deviation_covers():
    rng = np.random.default_rng(2)
    found = [deviation(rng.normal(0, 3.0, 6)) for _ in range(800)]
    share = np.mean([low <= 3.0 <= high for _, low, high in found])
    assert abs(share - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 800)


def test_holm_keeps_order_and_bounds():
    rng = np.random.default_rng(3)
    for _ in range(100):
        p = list(rng.uniform(size=6))
        adjusted = holm(p)
        assert all(a <= b <= min(1, 6 * a) for a, b in zip(p, adjusted, strict=True))
        assert np.array_equal(np.argsort(p), np.argsort(adjusted, kind="stable")) or len(set(adjusted)) < 6
    assert holm([]) == [] and holm([0.5]) == [0.5]


def test_equivalence_keeps_its_level():
    "At a true difference of exactly the margin, 5 % of the studies may call it equivalent."
    rng = np.random.default_rng(4)
    share = np.mean([equivalence_p(rng.normal(1.0, 1.0, 12), 1.0) < 0.05 for _ in range(800)])
    assert abs(share - 0.05) < 4 * math.sqrt(0.95 * 0.05 / 800)


@pytest.mark.parametrize("gaps", [[-0.1, -0.1], [1, 1, 1], [0.1 + 0.2, 0.3, 0.3], [4.1 - 4.0, 5.1 - 5.0]], ids=str)
def test_equal_differences_prove_nothing(gaps):
    "The interval shrinks to the mean, and there is no p: neither certainty nor its opposite."
    found = difference(gaps)
    assert found.low == found.mean == found.high == gaps[0] and found.p is None
    assert math.isnan(equivalence_p(gaps, 2.0)) and equivalence_p(gaps, 0.05) == 1
    assert deviation(gaps)[0] == pytest.approx(0, abs=1e-12)


def test_no_difference_at_all():
    "As between runs whose step size is frozen at zero."
    assert difference([0.0, 0.0]) == (2, 0.0, 0.0, 0.0, 1.0, None)
    assert difference([0.0] * 6).sign_p is None
    assert math.isnan(equivalence_p([0.0, 0.0], 0.1))


def test_a_table_shows_no_p_where_differences_are_equal():
    rows = {"a": (4.0, 5.0, 6.0), "b": (3.5, 4.5, 5.5), "c": (3.75, 4.75, 5.75), "d": (4.0, 5.25, 6.5)}
    runs = [{"arm": arm, "seed": s, "nats": x} for arm, losses in rows.items() for s, x in enumerate(losses)]
    table = comparison_table({"base": "a", "primary": [("b", "a")], "runs": runs})
    shown = {row[0]: dict(zip(table[0], row, strict=True)) for row in table[1:]}
    assert shown["b"]["p"] == shown["c"]["p"] == "-" and shown["b"]["95 % interval"] == "-0.5000 to -0.5000"
    assert shown["d"]["p"] == f"{difference([0.0, 0.25, 0.5]).p:.3f}"  # alone: c was not tested


def test_sign_test_needs_six_pairs_that_differ():
    assert difference([-1.0] * 4 + [-2.0]).sign_p is None
    assert difference([-1.0] * 5 + [-2.0]).sign_p == pytest.approx(2 / 64)


asked = {"gaps": difference, "values": deviation, "gaps ": lambda g: equivalence_p(g, 1.0)}


@pytest.mark.parametrize("name", asked)
@pytest.mark.parametrize(
    "gaps",
    [[], [1.0], [[1.0, 2.0]], np.ones((2, 1)), [1.0, math.nan], [1.0, math.inf], [1, 10**400], [1e308, 0.9e308]]
    + [[1e-200, 2e-200]],
    ids=str,
)
def test_bad_gaps(name, gaps):
    with pytest.raises(ValueError, match=name.strip()):
        asked[name](gaps)


@pytest.mark.parametrize("name", asked)
@pytest.mark.parametrize(
    "gaps",
    ["12", b"12", {1.0: 0, 2.0: 0}, {1.0, 2.0}, None, 0.5, np.array(0.5), ["1", "2"], [1.0, None], [1, 1j]],
    ids=str,
)
def test_no_row_of_numbers(name, gaps):
    with pytest.raises(TypeError, match=name.strip()):
        asked[name](gaps)


def test_rows_of_any_kind():
    row = [0.5, 0.25, 1.0]
    kinds = (tuple(row), iter(row), np.array(row, np.float32), torch.tensor(row), list(torch.tensor(row)))
    assert {difference(x) for x in kinds} == {difference(row)}


def test_holm_leaves_out_what_was_not_tested():
    assert holm([None]) == [None] and holm([0.04, None, 0.01]) == [0.04, None, 0.02]


@pytest.mark.parametrize("sd", [1e-12, 1e-6, 1.0, 1e9])
def test_smallest_effect_scales_with_the_deviation(sd):
    assert smallest_effect(sd, 5) / sd == pytest.approx(smallest_effect(1.0, 5), rel=1e-12)


def test_text_is_no_number():
    asks = {
        "margin": lambda: equivalence_p([1.0, 2.0], "1"),
        "effect": lambda: power("1", 1, 5),
        "sd": lambda: smallest_effect("1", 5),
        "n must": lambda: smallest_effect(1.0, "5"),
        "wanted": lambda: pairs_needed(1.0, 1.0, "0.8"),
    }
    for name, ask in asks.items():
        with pytest.raises(TypeError, match=name):
            ask()


def test_bad_numbers():
    for margin in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="margin"):
            equivalence_p([1.0, 2.0], margin)
    for p_values in ([0.01, math.nan], [5, -1], [[0.1]], np.array([[0.1]]), np.array([[0.1, 0.2]])):
        with pytest.raises(ValueError, match="p_values"):
            holm(p_values)
    for p_values in (None, 0.5, ["x"], "1"):
        with pytest.raises(TypeError, match="p_values"):
            holm(p_values)
    for effect, sd, n in ((math.inf, 1, 5), (math.nan, 1, 5), (1, 1, math.nan)):
        with pytest.raises(ValueError, match="effect"):
            power(effect, sd, n)
    assert power(1, 1e-300, 5) == 1
    for wanted in (-1, 0, 0.05, 1, 1.5, math.nan):
        for ask in (pairs_needed, smallest_effect):
            with pytest.raises(ValueError, match="wanted"):
                ask(0.5, 8, wanted)
    for n, sd in ((1, 1.0), (2.5, 1.0), (math.nan, 1.0), (8, 0.0), (8, -1.0), (8, math.nan)):
        for ask in (lambda n, sd: power(1.0, sd, n), lambda n, sd: smallest_effect(sd, n)):
            with pytest.raises(ValueError, match="n must"):
                ask(n, sd)
    with pytest.raises(ValueError, match="1,000"):
        pairs_needed(1e-3, 1.0)
