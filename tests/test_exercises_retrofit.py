"The checkers of chapter 13 accept right answers, however written, and reject plausible wrong ones in useful words."

import math

import numpy as np
import pytest
import torch
from conftest import said
from coupled_qk.exercises.retrofit import check_packed, check_rank, check_unit


def by_chunks(out, n_heads, evolve):
    q, k, v = out.chunk(3, dim=-1)
    split = lambda t: t.unflatten(-1, (n_heads, -1)).transpose(1, 2)
    q, k = evolve(split(q), split(k))
    return torch.cat([q.transpose(1, 2).flatten(2), k.transpose(1, 2).flatten(2), v], dim=-1)


def by_view(out, n_heads, evolve):
    B, T, width = out.shape
    q, k, v = out.view(B, T, 3, n_heads, -1).permute(2, 0, 3, 1, 4)
    q, k = evolve(q, k)
    return torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).reshape(B, T, width)


def in_place(out, n_heads, evolve):
    out = out.clone()
    d = out.shape[-1] // 3
    split = lambda t: t.unflatten(-1, (n_heads, -1)).transpose(1, 2)
    q, k = evolve(split(out[..., :d]), split(out[..., d : 2 * d]))
    out[..., :d], out[..., d : 2 * d] = q.transpose(1, 2).flatten(2), k.transpose(1, 2).flatten(2)
    return out


@pytest.mark.parametrize("answer", [by_chunks, by_view, in_place, lambda *a: by_view(*a).numpy()])
def test_packed_accepts(capsys, answer):
    assert said(capsys, check_packed, answer)[0]


def each_head_in_three(out, n_heads, evolve):
    B, T, width = out.shape
    q, k, v = out.view(B, T, n_heads, 3, -1).permute(3, 0, 2, 1, 4)
    q, k = evolve(q, k)
    return torch.stack([q, k, v]).permute(1, 3, 2, 0, 4).reshape(B, T, width)


def not_turned(out, n_heads, evolve):
    B, T, width = out.shape
    q, k, v = (t.reshape(B, n_heads, T, -1) for t in out.chunk(3, dim=-1))
    q, k = evolve(q, k)
    return torch.cat([t.reshape(B, T, -1) for t in (q, k, v)], dim=-1)


@pytest.mark.parametrize(
    "words, answer",
    [
        ("nothing has moved", lambda out, n, evolve: out),
        ("each head into three", each_head_in_three),
        ("mixed up", not_turned),
        ("exchanged", lambda out, n, evolve: by_chunks(out, n, lambda q, k: evolve(k, q))),
        ("wrong order", lambda out, n, evolve: by_chunks(out, n, lambda q, k: evolve(q, k)[::-1])),
        ("values", lambda out, n, evolve: by_chunks(out, n, evolve) * (torch.arange(out.shape[-1]) < out.shape[-1] * 2 // 3)),
        ("shape", lambda out, n, evolve: by_chunks(out, n, evolve).chunk(3, -1)[0]),
        ("evolve wants", lambda out, n, evolve: torch.cat([*evolve(*out.chunk(3, -1)[:2]), out.chunk(3, -1)[2]], -1)),
        ("it is not", lambda out, n, evolve: by_chunks(out, n, evolve) + 1),
        ("nothing yet", lambda *a: None),
    ],
)  # fmt: skip
def test_packed_rejects(capsys, words, answer):
    right, out = said(capsys, check_packed, answer)
    assert not right and words in out, out


@pytest.mark.parametrize(
    "answer",
    [
        lambda q, k: 2.0 ** round(math.log2(k / q) / 2),
        lambda q, k: np.exp2(np.rint(np.log2(np.sqrt(k / q)))),
        lambda q, k: min((2.0**i for i in range(-40, 40)), key=lambda c: abs(math.log(c * c * q / k))),
    ],
)
def test_unit_accepts(capsys, answer):
    assert said(capsys, check_unit, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("no power of two", lambda q, k: math.sqrt(k / q)),
        ("the other way around", lambda q, k: 2.0 ** round(math.log2(q / k) / 2)),
        ("take the root", lambda q, k: 2.0 ** round(math.log2(k / q))),
        ("nearest", lambda q, k: 2.0 ** math.floor(math.log2(k / q) / 2)),
        ("nearest", lambda q, k: 2.0 ** math.ceil(math.log2(k / q) / 2)),
        ("no power of two", lambda q, k: -1.0),
        ("the exponent", lambda q, k: round(math.log2(k / q) / 2)),
        ("nothing yet", lambda q, k: None),
    ],
)
def test_unit_rejects(capsys, words, answer):
    right, out = said(capsys, check_unit, answer)
    assert not right and words in out, out


def rank(shapes, n):
    return max(1, round(n / sum(a + b for a, b in shapes)))


@pytest.mark.parametrize(
    "answer",
    [
        rank,
        lambda shapes, n: min(range(1, 200), key=lambda r: abs(r * sum(map(sum, shapes)) - n)),
        lambda shapes, n: float(rank(shapes, n)),
    ],
)
def test_rank_accepts(capsys, answer):
    assert said(capsys, check_rank, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("not as entries", lambda shapes, n: max(1, round(n / sum(a * b for a, b in shapes)))),
        ("several matrices", lambda shapes, n: max(1, round(n / sum(shapes[0])))),
        ("rows and columns", lambda shapes, n: max(1, round(n / sum(a for a, b in shapes)))),
        ("nearest", lambda shapes, n: max(1, n // sum(a + b for a, b in shapes))),
        ("at least one", lambda shapes, n: round(n / sum(a + b for a, b in shapes))),
        ("whole number", lambda shapes, n: n / sum(a + b for a, b in shapes)),
        ("nothing yet", lambda shapes, n: None),
    ],
)
def test_rank_rejects(capsys, words, answer):
    right, out = said(capsys, check_rank, answer)
    assert not right and words in out, out
