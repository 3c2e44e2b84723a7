"""The checkers of chapter 03 accept what is right, however it is written, and tell what is wrong in a learner's words."""

import math

import pytest
import torch

from coupled_qk.exercises.collapse import check_ceiling, check_certainty, check_paths


def paths_by_listing(L, H, n):
    import itertools

    layers = min(L, 5)  # listing all paths of twelve layers takes too long; those cases are binomial
    if layers < L:
        return math.factorial(L) // math.factorial(n) // math.factorial(L - n) * H**n
    return sum(sum(step > 0 for step in path) == n for path in itertools.product(range(H + 1), repeat=L))


def harmonic(T):
    return torch.arange(1, T + 1, dtype=torch.float64).log().mean()


def first_column(T):
    return torch.nn.functional.one_hot(torch.zeros(T, dtype=torch.int64), T)


def written_in(T):
    a = torch.zeros(T, T)
    for i in range(T):
        a[i, 0] = 1.0
    return a


def by_scores(T):
    return torch.full((T, T), -1e4).index_fill(1, torch.tensor([0]), 1e4).softmax(-1)


RIGHT = [
    (check_paths, lambda L, H, n: math.comb(L, n) * H**n),
    (check_paths, paths_by_listing),
    (check_paths, lambda L, H, n: torch.tensor(float(math.comb(L, n) * H**n), dtype=torch.float64)),
    (check_ceiling, lambda T: math.lgamma(T + 1) / T),
    (check_ceiling, lambda T: sum(math.log(i + 1) for i in range(T)) / T),
    (check_ceiling, harmonic),
    (check_certainty, first_column),
    (check_certainty, written_in),
    (check_certainty, by_scores),
    (check_certainty, lambda T: first_column(T).tolist()),
    (check_certainty, lambda T: first_column(T).numpy()),
]
WRONG = [
    (check_paths, lambda L, H, n: H**n, "n of the L layers"),
    (check_paths, lambda L, H, n: math.comb(L, n), "one of the H heads"),
    (check_paths, lambda L, H, n: (H + 1) ** L, "every length"),
    (check_paths, lambda L, H, n: H**L, "without skips"),
    (check_paths, lambda L, H, n: math.comb(L, n) * (H + 1) ** n, "is right"),
    (check_paths, lambda L, H, n: math.nan, "yours is nan"),
    (check_paths, lambda L, H, n: "many", "one number"),
    (check_paths, lambda L, H, n: torch.ones(3), "one number"),
    (check_ceiling, math.log, "without a mask"),
    (check_ceiling, lambda T: math.lgamma(T + 2) / T, "i + 1 keys"),
    (check_ceiling, lambda T: sum(math.log(i) for i in range(1, T)) / T, "i + 1 keys"),
    (check_ceiling, lambda T: math.lgamma(T + 1), "mean"),
    (check_ceiling, lambda T: sum(math.log2(i) for i in range(1, T + 1)) / T, "bits"),
    (check_ceiling, lambda T: math.log(T) - 1, "exact"),
    (check_ceiling, lambda T: math.log(T) / 2, "is right"),
    (check_ceiling, lambda T: sum(math.log(i) for i in range(T)) / T, "math domain error"),
    (check_ceiling, lambda T: math.inf, "yours is inf"),
    (check_certainty, torch.eye, "SAME key"),
    (check_certainty, lambda T: torch.full((T, T), 1 / T), "above the diagonal"),
    (check_certainty, lambda T: torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None], "several keys"),
    (check_certainty, lambda T: first_column(T).T, "rows and columns"),
    (check_certainty, lambda T: first_column(T).roll(1, 1), "above the diagonal"),
    (check_certainty, lambda T: first_column(T)[0], "shape"),
    (check_certainty, lambda T: first_column(4), "shape"),
    (check_certainty, lambda T: first_column(T).double() * torch.nan, "nan or infinity"),
    (check_certainty, lambda T: "first", "tensor"),
    (check_certainty, lambda T: torch.eye(T).tolist(), "SAME key"),
    (check_certainty, lambda T: [[1.0], [1.0, 0.0]], "tensor"),
    (check_paths, lambda L, H, n: 2 * math.comb(L, n) * H**n, "for L = 4, H = 2, n = 0 your function"),
    (check_ceiling, lambda T: 1.0, "for T = 1 your function"),
    (check_certainty, lambda T: 2 * first_column(T), "shares"),
]


@pytest.mark.parametrize("check,answer", RIGHT)
def test_right_answers(check, answer, capsys):
    assert check(answer) is True
    assert capsys.readouterr().out.startswith("Right: ")


@pytest.mark.parametrize("check,answer,words", WRONG)
def test_wrong_answers(check, answer, words, capsys):
    assert check(answer) is False
    said = capsys.readouterr().out
    assert said.startswith("Not yet: ") and words in said, said
