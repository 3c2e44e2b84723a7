"The length at which a loss is reached: exact at known points, silent where nobody knows, clear about bad input."

import math

import numpy as np
import pytest

from coupled_qk.experiments import reach

nan = math.nan


@pytest.mark.parametrize(
    "tokens, losses, target, right",
    [
        ([1, 2, 3], [4, 4, 3], 4, 1),  # a plateau begins there
        ([1, 2, 3, 4], [5, 4, 4, 3], 4, 2),
        ([1], [4.0], 4.0, 1),
        ([1, 4], [5, 4], 4.5, 2),  # half the loss is half the logarithm
        ([1, 2, 4], [5, 4, 4.5], 4, 2),  # the lowest loss itself
        ([1, 2, 4], [5, 4, 4.5], 3.9, nan),  # never
        ([1, 2, 4], [5, 4, 3], 5.1, nan),  # before the first length
        ([1, 2, 4], [4.2, 4.6, 4.1], 4.4, nan),  # before it, too, though the loss comes back
    ],
)
def test_first_time(tokens, losses, target, right):
    for kind in (list, np.array):
        found = reach(kind(tokens), kind(losses), target)
        assert type(found) is float and found == pytest.approx(right, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(
    "losses, target, right",
    [
        ([5, nan, 4, 3], 4.5, nan),  # falls in the gap, nobody knows where
        ([5, nan, 4, 3], 4, nan),  # there at the latest, perhaps before
        ([5, nan, 4, 3], 5, 1),
        ([5, nan, 4, 3], 3.5, 4 * 2**0.5),  # the gap lies above the target
        ([5, nan, 4, 4.6], 4.5, nan),
        ([5, nan, 4, 4.6], 3.9, nan),
        ([nan, 5, 4, 3], 4.5, 2 * 2**0.5),
        ([nan, 5, 4, 3], 5, nan),
        ([5, 4, 3, nan], 3.5, 2 * 2**0.5),
        ([5, 4, 3, nan], 2.5, nan),
        ([nan] * 4, 4, nan),
    ],
)
def test_missing_losses(losses, target, right):
    assert reach([1, 2, 4, 8], losses, target) == pytest.approx(right, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize(
    "name, tokens, losses, target",
    [
        ("losses", [1, 2, 3], [4, 3], 3.5),
        ("losses", [1, 2], [5, 4, 3], 3.5),
        ("losses", [1, 2], [math.inf, 4], 4.5),
        ("losses", [1, 2], [[5, 4]], 4.5),
        ("tokens", [2, 1], [5, 4], 4.5),
        ("tokens", [0, 1], [5, 4], 4.5),
        ("tokens", [-1, 1], [5, 4], 4.5),
        ("tokens", [1, 1], [5, 4], 4.5),
        ("tokens", [1, nan], [5, 4], 4.5),
        ("tokens", [1, math.inf], [5, 4], 4.5),
        ("tokens", [[1, 2]], [[5, 4]], 4.5),
        ("tokens", [], [], 4.5),
        ("target", [1, 2], [5, 4], nan),
        ("target", [1, 2], [5, 4], math.inf),
    ],
)
def test_bad_curves(name, tokens, losses, target):
    with pytest.raises(ValueError, match=f"^{name} must"):
        reach(tokens, losses, target)
