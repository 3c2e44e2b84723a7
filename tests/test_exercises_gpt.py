"""The checkers of chapter 04 accept what is right, however it is written, and tell what is wrong in a learner's words."""

import itertools, math
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import said
from coupled_qk.coupling import euler
from coupled_qk.exercises.gpt import check_count, check_looking_back, check_nucleus
from coupled_qk.gpt import GPTConfig, count_parameters

CHECKERS = [check_looking_back, check_nucleus, check_count]


def fail(*args):
    raise RuntimeError("oh no")


NONSENSE = {
    "nothing yet": lambda *args: None,
    "needs your function": torch.ones(4, 2),
    "NoneType": None,
    "oh no": fail,
    "TypeError": lambda: 1,
}


@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("words", NONSENSE)
def test_nonsense(capsys, checker, words):
    right, text = said(capsys, checker, NONSENSE[words])
    assert not right and words in text


class Odd:
    "An object that makes trouble wherever it is touched."

    def __getattr__(self, name):
        raise RuntimeError("do not touch")

    def __iter__(self):
        raise RuntimeError("do not touch")

    def __float__(self):
        raise RuntimeError("do not touch")


ODD = [
    Odd(),
    "text",
    {"q": 1},
    3 + 4j,
    math.nan,
    [],
    (),
    [[1.0], [1.0, 2.0]],
    itertools.count(),
    object,
    torch.ones(4, 2, dtype=torch.complex64),
    torch.full((4, 2), math.nan),
    torch.ones(0),
    torch.ones(2, 4, 2).to_sparse(),
    (Odd(), Odd()),
    (None, None),
    ("a", "b"),
    (torch.ones(4, 2), None),
    (torch.full((4, 2), math.inf), torch.ones(4, 2)),
    np.array(["a", "b"]),
]


@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_odd_values(capsys, checker, value):
    "Whatever an answer returns, a checker says in words what is wrong with it."
    assert not said(capsys, checker, lambda *args: value)[0]


# -- looking back


def previous(t):
    return torch.cat([t[:1], t[:-1]])


def by_loop(q, k):
    "Each query moves by half of the key before it."
    rows = [q[0]]
    for i in range(1, len(q)):
        rows.append(q[i] + k[i - 1] / 2)
    return torch.stack(rows), k


def running_mean(q, k):
    n = torch.arange(1, len(q) + 1)[:, None]
    return euler(q, k, lambda q: q.cumsum(0) / n, 0.3)


@pytest.mark.parametrize(
    "dynamics",
    [
        lambda q, k: (q, k + 0.1 * q.cumsum(0)),
        lambda q, k: (q + previous(k), k),
        lambda q, k: [q.tolist(), (k + previous(q)).tolist()],  # lists will do
        lambda q, k: torch.stack([q, k + previous(q)]),  # and one tensor of two
        lambda q, k: (q.numpy(), k.cumsum(0).numpy()),
        lambda q, k: (q, k + q[0]),  # the first token alone
        by_loop,
        running_mean,
    ],
)
def test_looking_back_accepts(capsys, dynamics):
    assert said(capsys, check_looking_back, dynamics)[0]


def in_place(q, k):
    k += previous(q)
    return q, k


@pytest.mark.parametrize(
    "words, dynamics",
    [
        ("by itself", lambda q, k: (q, k)),
        ("by itself", lambda q, k: euler(q, k, torch.tanh, 0.3)),
        ("by itself", lambda q, k: (q, k * torch.arange(1, len(k) + 1)[:, None])),  # by place, not by what came before
        ("by itself", lambda q, k: (k, q)),
        ("LATER", lambda q, k: (q, k + q.mean(0))),
        ("LATER", lambda q, k: (q, k + q.roll(-1, 0))),
        ("LATER", lambda q, k: (q.flip(0), k)),
        ("LATER", lambda q, k: (q, k - k.mean(0))),
        ("fewer tokens", lambda q, k: (q, k + q.cumsum(0) / len(q))),
        ("fewer tokens", lambda q, k: (q, k * len(k))),
        ("copy", in_place),
        ("IndexError", lambda q, k: (q, torch.stack([k[0], k[1], k[2], k[3]]))),
        ("again", lambda q, k: (q, k + torch.randn(len(k), 1))),
        ("the pair of q and k", lambda q, k: k + q.cumsum(0)),  # one of them only
        ("(2, 4, 2)", lambda q, k: (q, q @ k.T)),
        ("(2, 4, 2)", lambda q, k: (q.T, k.T)),
        ("nan", lambda q, k: (q, k / 0 * 0)),
        ("complex", lambda q, k: (q.to(torch.complex128), k.to(torch.complex128))),
    ],
)
def test_looking_back_rejects(capsys, words, dynamics):
    right, text = said(capsys, check_looking_back, dynamics)
    assert not right and words in text


# -- nucleus


def by_sort(probabilities, p):
    best, order = probabilities.sort(descending=True)
    return torch.zeros(len(best), dtype=torch.bool).scatter(0, order, best.cumsum(0) - best < p)


def by_taking(probabilities, p):
    "A list of whole numbers."
    kept, row = [0] * len(probabilities), probabilities.tolist()
    while sum(x for x, k in zip(row, kept, strict=True) if k) < p:
        kept[max((i for i in range(len(row)) if not kept[i]), key=row.__getitem__)] = 1
    return kept


def by_rank(probabilities, p):
    "A token stays when those that are better do not reach p."
    better = probabilities[None] > probabilities[:, None]
    tied = (probabilities[None] == probabilities[:, None]).tril(-1)
    return ((better | tied) * probabilities).sum(1) < p


@pytest.mark.parametrize("nucleus", [by_sort, by_taking, by_rank, lambda x, p: by_sort(x, p).numpy().astype(float)])
def test_nucleus_accepts(capsys, nucleus):
    assert said(capsys, check_nucleus, nucleus)[0]


def test_which_of_equal_tokens_stays_is_free(capsys):
    last_first = lambda x, p: by_sort(x.flip(0), p).flip(0)
    assert said(capsys, check_nucleus, last_first)[0]


def crossing_left_out(probabilities, p):
    best, order = probabilities.sort(descending=True)
    return torch.zeros(len(best), dtype=torch.bool).scatter(0, order, best.cumsum(0) <= p)


@pytest.mark.parametrize(
    "words, nucleus",
    [
        ("belongs to the nucleus too", crossing_left_out),
        ("already add up to exactly p", lambda x, p: by_sort(x, p + 1e-9)),
        ("is right", lambda x, p: torch.stack([x[x > y].sum() < p for y in x])),  # all that are equal stay
        ("order of the vocabulary", lambda x, p: x.cumsum(0) - x < p),
        ("sorted order", lambda x, p: x.sort(descending=True).values.cumsum(0) - x.sort(descending=True).values < p),
        ("single probabilities with p", lambda x, p: x >= p),
        ("with 1 - p", lambda x, p: x >= 1 - p),
        ("opposite", lambda x, p: ~by_sort(x, p)),
        ("not a probability", lambda x, p: x * by_sort(x, p) / (x * by_sort(x, p)).sum()),
        ("shape (5,)", lambda x, p: by_sort(x, p).nonzero()[:, 0]),  # the places of those that stay
        ("shape (5,)", lambda x, p: by_sort(x, p)[None]),
        ("is right", lambda x, p: [True] * len(x)),
        ("is right", lambda x, p: torch.zeros(len(x))),
        ("is right", lambda x, p: x == x.max()),
        ("is right", lambda x, p: by_sort(x, p) & (x > 0.2)),
    ],
)
def test_nucleus_rejects(capsys, words, nucleus):
    right, text = said(capsys, check_nucleus, nucleus)
    assert not right and words in text


# -- count


def formula(V, D, L, H, F):
    d = D // H
    return V * D + L * (4 * D * D + 3 * D * F + 2 * D + 2 * (d * d + d) + 1) + D


def force(D, H):
    return 2 * ((D // H) ** 2 + D // H)


def by_building(V, D, L, H, F):
    return count_parameters(GPTConfig(vocab_size=V, d_model=D, n_layers=L, n_heads=H, d_ff=F, pre="leapfrog"))


def of_each_token(V, D, L, H, F):
    "In another order, as a tensor."
    coupling = torch.tensor(2.0 * (D / H) * (D / H + 1) + 1, dtype=torch.float64)
    return D * (V + 1) + L * coupling + L * D * (4 * D + 3 * F + 2)


@pytest.mark.parametrize("count", [formula, by_building, of_each_token])
def test_count_accepts(capsys, count):
    assert said(capsys, check_count, count)[0]


@pytest.mark.parametrize(
    "words, count",
    [
        ("read-out of its own", lambda V, D, L, H, F: formula(V, D, L, H, F) + V * D),
        ("gains of the norms", lambda V, D, L, H, F: formula(V, D, L, H, F) - (2 * L + 1) * D),
        ("last norm", lambda V, D, L, H, F: formula(V, D, L, H, F) - D),
        ("without coupling", lambda V, D, L, H, F: V * D + L * (4 * D * D + 3 * D * F + 2 * D) + D),
        ("step size", lambda V, D, L, H, F: formula(V, D, L, H, F) - L),
        ("has biases", lambda V, D, L, H, F: formula(V, D, L, H, F) - L * 2 * D // H),
        ("share one force", lambda V, D, L, H, F: formula(V, D, L, H, F) + L * (H - 1) * 2 * ((D // H) ** 2 + D // H)),
        ("three matrices", lambda V, D, L, H, F: formula(V, D, L, H, F) - L * D * F),
        ("four matrices", lambda V, D, L, H, F: formula(V, D, L, H, F) - L * D * D),
        ("d = D/H", lambda V, D, L, H, F: formula(V, D, L, 1, F)),
        ("embedding is missing", lambda V, D, L, H, F: formula(V, D, L, H, F) - V * D),
        ("embedding is counted in every block", lambda V, D, L, H, F: formula(V, D, L, H, F) + (L - 1) * V * D),
        ("there are L blocks", lambda V, D, L, H, F: formula(V, D, 1, H, F)),
        ("norms in the blocks are missing", lambda V, D, L, H, F: formula(V, D, L, H, F) - 2 * L * D),
        ("each block has two norms", lambda V, D, L, H, F: formula(V, D, L, H, F) - L * D),
        ("last norm is counted in every block", lambda V, D, L, H, F: formula(V, D, L, H, F) + (L - 1) * D),
        ("gains only", lambda V, D, L, H, F: formula(V, D, L, H, F) + (2 * L + 1) * D),
        ("force of the coupling is missing", lambda V, D, L, H, F: formula(V, D, L, H, F) - L * force(D, H)),
        ("step size is counted once", lambda V, D, L, H, F: formula(V, D, L, H, F) - L + 1),
        ("heads of a layer share one", lambda V, D, L, H, F: formula(V, D, L, H, F) - L + L * H),
        ("and you counted one", lambda V, D, L, H, F: formula(V, D, L, H, F) - L * D // H),
        ("force has two layers", lambda V, D, L, H, F: formula(V, D, L, H, F) - L * force(D, H) // 2),
        ("you counted two", lambda V, D, L, H, F: formula(V, D, L, H, F) + L * force(D, H)),
        ("feed-forward network is missing", lambda V, D, L, H, F: formula(V, D, L, H, 0)),
        ("feed-forward network has no biases", lambda V, D, L, H, F: formula(V, D, L, H, F) + L * (2 * F + D)),
        ("attention is missing", lambda V, D, L, H, F: formula(V, D, L, H, F) - 4 * L * D * D),
        ("attention have no biases", lambda V, D, L, H, F: formula(V, D, L, H, F) + 4 * L * D),
        ("not for each head", lambda V, D, L, H, F: formula(V, D, L, H, F) + 4 * L * D * D * (H - 1)),
        ("D wide, not d", lambda V, D, L, H, F: formula(V, D, L, H, F) + 4 * L * D * (D // H - D)),
        ("two things: the gains", lambda V, D, L, H, F: V * D + L * (4 * D * D + 3 * D * F)),
        ("without coupling", lambda V, D, L, H, F: V * D + L * (4 * D * D + 3 * D * F)),
        ("for V = 17", lambda V, D, L, H, F: formula(V, D, L, H, F) + 1),
        ("outside the blocks", lambda V, D, L, H, F: formula(V, D, L, H, F) + D // 2),
        ("at the embedding", lambda V, D, L, H, F: formula(V, D, L, H, F) + V),
        ("D and F are swapped", lambda V, D, L, H, F: formula(V, F, L, H, D)),
        ("at the feed-forward", lambda V, D, L, H, F: formula(V, D, L, H, F) + L * F * F),
        ("at the force", lambda V, D, L, H, F: formula(V, D, L, H, F) + L * H),
        ("neither F nor H", lambda V, D, L, H, F: formula(V, D, L, H, F) + L * 3 * D * D),
        ("the same for all sizes", lambda V, D, L, H, F: 4786),  # right for the first example
        ("neither F nor H", lambda V, D, L, H, F: formula(V, D, L, H, F) + (L > 2)),  # and right for that one, too
        ("one number", lambda V, D, L, H, F: [formula(V, D, L, H, F), 0]),
        ("infinity", lambda V, D, L, H, F: math.inf),
    ],
)
def test_count_rejects(capsys, words, count):
    right, text = said(capsys, check_count, count)
    assert not right and words in text


def test_right_for_the_first_example_only(capsys):
    "Whole numbers are written in full, so that the difference can be seen."
    assert formula(17, 16, 2, 4, 24) == 4786
    assert "256" in said(capsys, check_count, lambda V, D, L, H, F: 4786)[1]


def test_the_formula_is_the_model_s():
    "Also of the shapes that the checker uses, and of each variant that has a coupling."
    for shape in ((17, 16, 2, 4, 24), (256, 128, 4, 2, 344), (50_257, 512, 8, 8, 2048)):
        assert by_building(*shape) == formula(*shape)
    config = GPTConfig(vocab_size=17, d_model=16, n_layers=2, n_heads=4, d_ff=24)
    assert {count_parameters(replace(config, pre=pre)) for pre in ("euler", "rk4", "query_mlp")} == {
        formula(17, 16, 2, 4, 24)
    }
