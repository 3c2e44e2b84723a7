"Statistics: right by simulation and by hand, monotone where they must be, clear about bad input."

import math

import numpy as np
import pytest

from coupled_qk.stats import deviation, difference, equivalence_p, holm, pairs_needed, power, smallest_effect


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
    assert equivalence_p([0.0, 0.0], 0.1) == 0 and equivalence_p([0.2, 0.2], 0.1) == 1


def test_no_spread():
    assert difference([0.0, 0.0]).p == 1 and difference([-0.1, -0.1]).p == 0
    assert difference([0.0] * 6).sign_p is None


def test_sign_test_needs_six_pairs_that_differ():
    assert difference([-1.0] * 4 + [-2.0]).sign_p is None
    assert difference([-1.0] * 5 + [-2.0]).sign_p == pytest.approx(2 / 64)


@pytest.mark.parametrize("gaps", [[], [1.0], [[1.0, 2.0]], [1.0, math.nan], [1.0, math.inf]], ids=str)
def test_bad_gaps(gaps):
    for ask in (difference, deviation, lambda g: equivalence_p(g, 1.0)):
        with pytest.raises(ValueError, match="gaps"):
            ask(gaps)


def test_bad_numbers():
    for margin in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="margin"):
            equivalence_p([1.0, 2.0], margin)
    for p_values in ([0.01, math.nan], [5, -1], None, 0.5, [[0.1]], ["x"]):
        with pytest.raises(ValueError, match="p_values"):
            holm(p_values)
    for effect, sd, n in ((math.inf, 1, 5), (math.nan, 1, 5), (1, 1, math.nan)):
        with pytest.raises(ValueError, match="effect"):
            power(effect, sd, n)
    assert power(1, 1e-300, 5) == 1
    for wanted in (-1, 0, 0.05, 1, 1.5, math.nan):
        for ask in (pairs_needed, smallest_effect):
            with pytest.raises(ValueError, match="wanted"):
                ask(0.5, 8, wanted)
    for n, sd in ((1, 1.0), (8, 0.0), (8, -1.0), (8, math.nan)):
        with pytest.raises(ValueError, match="n must"):
            power(1.0, sd, n)
    with pytest.raises(ValueError, match="1,000"):
        pairs_needed(1e-3, 1.0)
