"""Attention equals slow references for every shape, cannot see what it must not see, and says in words what it cannot use."""

import itertools, math, re

import numpy as np
import pytest
import torch
from torch import nn

from coupled_qk.attention import (
    Heads,
    MultiHeadAttention,
    Softmax,
    allowed_pairs,
    attend,
    attention_weights,
    rotary,
)
from coupled_qk.coupling import Coupling

# Both sides add the same few products, in another order: some units in the last place (1e-7 and 2e-16) of numbers near one.
EPS = {torch.float32: 1e-6, torch.float64: 1e-12}
DTYPES = pytest.mark.parametrize("dtype", EPS, ids=lambda t: str(t).removeprefix("torch."))


def rand(*shape, seed=0, dtype=torch.float64, grad=False):
    "Standard normal numbers that depend on the seed alone."
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_(grad)


def close(a, b, eps=1e-12):
    "The tensors, or sequences of tensors, agree in shape, dtype and value."
    torch.testing.assert_close(a, b, rtol=eps, atol=eps)


def refuses(call, *words):
    "`call` raises TypeError or ValueError: one sentence that contains all the words."
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    said = str(caught.value)
    assert not re.search(r"\n|[.!?] [A-Z]", said), f"more than one sentence: {said}"
    assert [word for word in words if word not in said] == [], f"missing in: {said}"


def qkv(H=4, H_kv=2, T=5, S=5, B=2, d=4, d_v=3, **options):
    shapes = (B, H, T, d), (B, H_kv, S, d), (B, H_kv, S, d_v)
    return [rand(*shape, seed=i, **options) for i, shape in enumerate(shapes)]


def some_mask(kind, B, H, T, S):
    "A random mask of one of the shapes that broadcast; the query 0 of some rows may attend to nothing."
    if kind == "none":
        return None
    shape = {"pairs": (T, S), "keys": (1, S), "batch": (B, 1, 1, S), "heads": (H, T, S), "full": (B, H, T, S)}[kind]
    mask = rand(*shape, seed=9) > -0.3
    mask[(0,) * (len(shape) - 1)] = False
    return mask


# -- attend


@DTYPES
@pytest.mark.parametrize("kind", ["none", "pairs", "keys", "batch", "heads", "full"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("H_kv", [4, 2, 1])
@pytest.mark.parametrize("T,S", [(5, 5), (2, 5), (1, 5), (1, 1), (5, 3)])
def test_attend_is_weights_times_values(dtype, kind, causal, H_kv, T, S):
    "Outputs and gradients, for all masks, groups of heads and lengths."
    q, k, v = qkv(4, H_kv, T, S, dtype=dtype, grad=True)
    mask = some_mask(kind, 2, 4, T, S)
    if causal and T > S:
        return refuses(lambda: attend(q, k, v, mask), "causal", "3 keys", "5 queries")
    weights = attention_weights(q, k, mask, causal)
    outs = [attend(q, k, v, mask, causal), weights @ v.repeat_interleave(4 // H_kv, 1)]
    close(*outs, EPS[dtype])
    close(*(torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in outs), EPS[dtype])
    rows = weights.sum(-1)
    assert (((rows - 1).abs() < EPS[dtype]) | (rows == 0)).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("blind", [slice(0, 1), slice(1, 4, 2), slice(None)], ids=["first", "some", "all"])
def test_a_query_that_may_see_nothing(blind, causal):
    "It gets zeros, and sends back gradients of zero, never NaN."
    q, k, v = qkv(grad=True)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[blind] = False
    out = attend(q, k, v, mask, causal)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert not out[:, :, blind].any() and not grads[0][:, :, blind].any()
    assert not attention_weights(q, k, mask, causal)[:, :, blind].any()
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("kind", ["none", "pairs"])
@pytest.mark.parametrize("T", [5, 3])
@pytest.mark.parametrize("j", range(5))
def test_the_future_changes_nothing(kind, T, j):
    "Whatever key and value j become, earlier outputs stay equal to the bit: the weight of j is exactly zero."
    q, k, v = qkv(T=T)
    mask = some_mask(kind, 2, 4, T, 5)
    before = attend(q, k, v, mask)
    k[:, :, j], v[:, :, j] = 50.0, 1e6
    after = attend(q, k, v, mask)
    first = max(0, j - (5 - T))  # the first query that may see j
    assert torch.equal(before[:, :, :first], after[:, :, :first])
    assert kind == "pairs" or not torch.equal(before[:, :, first:], after[:, :, first:])


def test_heads_and_batch_rows_are_alone():
    "Query head h meets key head h // (H / H_kv) of its own batch row, and no other."
    q, k, v = qkv()
    out = attend(q, k, v)
    for b, h in itertools.product(range(2), range(4)):
        one = attend(q[b, h][None, None], k[b, h // 2][None, None], v[b, h // 2][None, None])
        close(out[b, h], one[0, 0])


@pytest.mark.parametrize("T,S", [(1, 1), (3, 3), (2, 5), (0, 4), (0, 0)])
def test_allowed_pairs(T, S):
    expected = [[j <= i + S - T for j in range(S)] for i in range(T)]
    assert allowed_pairs(T, S).tolist() == expected and allowed_pairs(T, S).shape == (T, S)


@pytest.mark.parametrize("shape", [dict(B=0), dict(T=0, S=0), dict(T=0)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_empty_input(shape, masked):
    q, k, v = qkv(**shape)
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if masked else None
    assert attend(q, k, v, mask).shape == (*q.shape[:3], 3)
    assert attention_weights(q, k, mask).shape == (*q.shape[:3], k.shape[2])


def test_memory_layout_does_not_matter():
    q, k, v = qkv()
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    flipped = [t.mT.contiguous().mT for t in (q, k, v)]
    for other in (strided, flipped):
        close(attend(*other), attend(q, k, v))
    one = rand(1, 1, 1, 4).expand(2, 4, 5, 4)
    close(attend(one, one, one), one.clone())  # equal values, whatever the weights


@pytest.mark.parametrize("dtype,eps", [(torch.bfloat16, 2**-6), (torch.float16, 2**-9)])
def test_half_precision(dtype, eps):
    "Inputs, weights and outputs each round to 8 or 11 bits, so errors stay within four units of those."
    q, k, v = qkv(dtype=dtype)
    exact = attend(q.float(), k.float(), v.float())
    for out in (attend(q, k, v), attention_weights(q, k) @ v.repeat_interleave(2, 1)):
        assert out.dtype == dtype
        close(out.float(), exact, eps)


def test_long_text():
    "4,000 tokens in memory for a few rows: each row equals the slow form. Sums of 4,000 terms cost three more digits."
    q, k, v = qkv(1, 1, 4000, 4000, B=1, dtype=torch.float32)
    rows = slice(-3, None)
    close(attend(q, k, v)[:, :, rows], attention_weights(q[:, :, rows], k) @ v, 1e-5)


# -- rotary


def turned(x, start=0, base=10_000.0):
    "Rotary embedding by complex numbers: the pair (x_c, x_{c + d/2}) is one number, turned by a phase."
    n, half = x.shape[-2], x.shape[-1] // 2
    phases = [[(start + m) * base ** (-c / half) for c in range(half)] for m in range(n)]
    phases = torch.tensor(phases, dtype=torch.float64).reshape(n, half)
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(phases), phases)
    return torch.cat([z.real, z.imag], -1).to(x.dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2), (5, 8), (2, 3, 4, 6), (0, 4)], ids=str)
@pytest.mark.parametrize("start,base", [(0, 10_000.0), (7, 10_000.0), (3, 100), (100_000, 10_000.0)])
def test_rotary_is_a_complex_phase(dtype, shape, start, base):
    "Also far out: angles are float64, so that position 100,000 is as exact in float32 as position 0."
    x = rand(*shape, dtype=dtype)
    eps = EPS[dtype] if start < 100 else max(EPS[dtype], 1e-10)  # an angle near 1e5 carries 1e-11 of rounding
    close(rotary(x, start, base), turned(x, start, base), eps)
    close(rotary(x, start, base).norm(dim=-1), x.norm(dim=-1), EPS[dtype])


def test_rotary_scores_depend_on_distance_only():
    q, k = rand(8, seed=1), rand(8, seed=2)
    at = lambda x, m: rotary(x[None], m)[0]
    for distance in (-3, 0, 1, 10):
        scores = torch.stack([at(q, m + distance) @ at(k, m) for m in (3, 50, 999)])
        close(scores, scores[:1].expand(3), 1e-11)  # angles near 1,000 carry 1e-13 of rounding
    assert (at(q, 3) @ at(k, 0) - at(q, 0) @ at(k, 0)).abs() > 1e-3


@DTYPES
@pytest.mark.parametrize("start", range(6))
def test_rotary_of_a_part(dtype, start):
    "Reading goes on where it stopped: a text turned in two parts is the text turned at once, to the bit."
    x = rand(2, 6, 4, dtype=dtype)
    parts = [rotary(x[:, :start]), rotary(x[:, start:], start)]
    assert torch.equal(torch.cat(parts, 1), rotary(x))


def test_rotary_gradients():
    assert torch.autograd.gradcheck(lambda x: rotary(x, 2), rand(2, 3, 4, grad=True))


# -- the layer


def slow_layer(layer, x, mask=None):
    "The layer by loops over batch, heads and queries, for `mask` of shape (B, T, T)."
    (B, T, D), (H, G, _, d, _) = x.shape, layer.heads
    q, k, v = (
        (x @ p.weight.T).reshape(B, T, -1, d).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    for pre in layer.pre:
        q, k = pre(q, k)
    q, k = (q, k) if layer.base is None else (turned(q, 0, layer.base), turned(k, 0, layer.base))
    out = torch.zeros(B, T, D, dtype=x.dtype)
    for b, h, i in itertools.product(range(B), range(H), range(T)):
        seen = [j for j in range(T) if (j <= i or not layer.causal) and (mask is None or mask[b, i, j])]
        exps = [math.exp(q[b, h, i] @ k[b, h * G // H, j] / math.sqrt(d)) for j in seen]
        for e, j in zip(exps, seen, strict=True):
            out[b, i, h * d : (h + 1) * d] += e / sum(exps) * v[b, h * G // H, j]
    return out @ layer.o_proj.weight.T


@pytest.mark.parametrize("H,H_kv", [(1, None), (4, None), (4, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("base", [10_000.0, 50.0, None])
@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_layer_equals_loops(H, H_kv, causal, base, masked):
    layer = MultiHeadAttention(16, H, H_kv, pre=Coupling(16 // H, dt=0.4), causal=causal, base=base).double()
    x = rand(2, 4, 16)
    mask = rand(2, 4, 4, seed=3) > -0.5 if masked else None
    expected = slow_layer(layer, x, mask)
    mask = None if mask is None else mask[:, None]
    close(layer(x, mask), expected)
    v = x @ layer.v_proj.weight.T
    v = v.unflatten(-1, (layer.heads.n_v, -1)).transpose(1, 2).repeat_interleave(H // layer.heads.n_v, 1)
    close(layer.o_proj((layer.weights(x, mask) @ v).transpose(1, 2).flatten(2)), expected)


class Change(nn.Module):
    "A pre-score module made of a function."

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, q, k):
        return self.f(q, k)


def test_pre_score_modules_act_in_order():
    double, shift = Change(lambda q, k: (2 * q, k)), Change(lambda q, k: (q + 1, k))
    layers = [
        MultiHeadAttention(8, 2, pre=pre, base=None) for pre in (None, [double, shift], (m for m in (shift, double)))
    ]
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    x = rand(1, 3, 8, dtype=torch.float32)
    q, first, second = (layer.project(x)[0] for layer in layers)
    close((first, second), (2 * q + 1, 2 * (q + 1)), 1e-6)


@pytest.mark.parametrize("wrap", [list, tuple, iter, nn.ModuleList], ids=lambda f: f.__name__)
def test_any_collection_of_pre_score_modules(wrap):
    layer = MultiHeadAttention(8, 2, pre=wrap([Coupling(4), Coupling(4)]))
    assert len(layer.pre) == 2 and layer(torch.zeros(1, 3, 8)).shape == (1, 3, 8)
    assert len(MultiHeadAttention(8, 2, pre=wrap([])).pre) == 0


def test_coupled_scores_depend_on_distance_only():
    "Position comes after the dynamics."
    layer = MultiHeadAttention(16, 4, 2, pre=Coupling(4, dt=0.5)).double()
    (q, k, _), (q2, k2, _) = (layer.project(rand(1, 5, 16), start) for start in (0, 40))
    assert not torch.allclose(q, q2)
    close(attention_weights(q, k), attention_weights(q2, k2), 1e-11)


class Doubled(Softmax):
    "A score module that states its own heads, uses `x`, and leaves the rest to softmax."

    def heads(self, d_model, n_heads, n_kv_heads):
        return Heads(2 * n_heads, 2 * n_kv_heads, n_kv_heads, d_model // n_heads // 2, d_model // n_heads)

    def forward(self, q, k, v, *, causal=True, mask=None, x=None):
        assert [t.shape[1:] for t in (q, k, v)] == [(8, 3, 2), (4, 3, 2), (2, 3, 4)] and x.shape == (1, 3, 16)
        return attend(q[:, ::2], k[:, ::2], v, mask, causal) * x.mean()


def test_score_module_gets_the_heads_it_asks_for():
    layer = MultiHeadAttention(16, 4, 2, pre=Coupling(2), score=Doubled())
    assert layer(rand(1, 3, 16, dtype=torch.float32)).shape == (1, 3, 16)


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 1, 8)], ids=str)
def test_layer_with_little_input(shape):
    layer = MultiHeadAttention(8, 2, pre=Coupling(4))
    assert layer(torch.zeros(shape)).shape == shape
    assert layer.weights(torch.zeros(shape)).shape == (shape[0], 2, shape[1], shape[1])


# -- bad input

Q, K, V = qkv()
X, LAYER = torch.zeros(2, 5, 8), MultiHeadAttention(8, 2)
MHA, mask = MultiHeadAttention, lambda *shape: torch.ones(*shape, dtype=torch.bool)
BAD = {
    "q is a list": (lambda: attend([[1.0]], K, V), "q must", "list"),
    "k is an array": (lambda: attend(Q, K.numpy(), V), "k must", "ndarray"),
    "v is an array": (lambda: attend(Q, K, V.numpy()), "v must", "ndarray"),
    "integers": (lambda: attend(Q.long(), K.long(), V.long()), "q must", "floating", "int64"),
    "complex": (lambda: attend(Q.cfloat(), K.cfloat(), V.cfloat()), "q must", "floating", "complex64"),
    "rank of q": (lambda: attend(Q[0], K, V), "q must", "(B, H, T, d)", "(4, 5, 4)"),
    "rank of k": (lambda: attention_weights(Q, K[0]), "k must", "(B, H, T, d)", "(2, 5, 4)"),
    "rank of v": (lambda: attend(Q, K, V[0]), "v must", "(2, 5, 3)"),
    "dtypes of q and k": (lambda: attend(Q.float(), K, V), "q and k", "float32", "float64"),
    "dtypes of k and v": (lambda: attend(Q, K, V.float()), "v must", "float32", "float64"),
    "batch": (lambda: attend(Q[:1], K, V), "q and k", "batch", "(1, 4, 5, 4)", "(2, 2, 5, 4)"),
    "head width": (lambda: attend(Q[..., :2], K, V), "q and k", "width", "(2, 4, 5, 2)"),
    "heads": (lambda: attend(Q[:, :3], K, V), "multiple", "(2, 3, 5, 4)"),
    "no key heads": (lambda: attend(Q, K[:, :0], V[:, :0]), "multiple", "(2, 0, 5, 4)"),
    "values of other tokens": (lambda: attend(Q, K, V[:, :, :3]), "v must", "(2, 2, 3, 3)"),
    "values of other heads": (lambda: attend(Q, K, V.repeat_interleave(2, 1)), "v must", "(2, 4, 5, 3)"),
    "mask of floats": (lambda: attend(Q, K, V, torch.ones(5, 5)), "mask", "boolean", "float32"),
    "mask in place of causal": (lambda: attend(Q, K, V, True), "mask", "boolean tensor", "bool"),
    "mask is an array": (lambda: attend(Q, K, V, np.ones((5, 5), bool)), "mask", "tensor", "ndarray"),
    "mask of one rank": (lambda: attend(Q, K, V, mask(5)), "mask", "5, 5)", "(5,)"),
    "mask for other keys": (lambda: attend(Q, K, V, mask(5, 1)), "mask", "5, 5)", "(5, 1)"),
    "mask for padding": (lambda: attend(Q, K, V, mask(2, 5)), "mask", "5, 5)", "(2, 5)"),
    "mask by batch row": (lambda: attend(Q, K, V, mask(2, 5, 5)), "mask", "5, 5)", "(2, 5, 5)"),
    "mask by key head": (lambda: attend(Q, K, V, mask(2, 2, 5, 5)), "mask", "5, 5)", "(2, 2, 5, 5)"),
    "mask of other batch": (lambda: attend(Q, K, V, mask(3, 1, 5, 5)), "mask", "5, 5)", "(3, 1, 5, 5)"),
    "mask of five ranks": (lambda: attend(Q, K, V, mask(1, 2, 4, 5, 5)), "mask", "(1, 2, 4, 5, 5)"),
    "mask of weights": (lambda: attention_weights(Q[:1], K[:1], mask(2, 1, 5, 5)), "mask", "(2, 1, 5, 5)"),
    "rotary odd": (lambda: rotary(rand(3, 5)), "even", "5"),
    "rotary integers": (lambda: rotary(torch.ones(3, 4, dtype=torch.long)), "x must", "floating", "int64"),
    "rotary list": (lambda: rotary([[1.0, 2.0]]), "x must", "list"),
    "rotary rank": (lambda: rotary(rand(4)), "x must", "(..., T, d)", "(4,)"),
    "rotary base": (lambda: rotary(rand(3, 4), base=0), "base", "positive", "0"),
    "rotary base nan": (lambda: rotary(rand(3, 4), base=math.nan), "base", "positive", "nan"),
    "layer divides": (lambda: MHA(10, 3), "d_model", "n_heads", "10 and 3"),
    "layer groups": (lambda: MHA(8, 4, 3), "n_heads", "n_kv_heads", "4 and 3"),
    "layer more groups than heads": (lambda: MHA(8, 2, 4), "n_heads", "n_kv_heads", "2 and 4"),
    "layer no heads": (lambda: MHA(8, 0), "n_heads", "positive", "0"),
    "layer no groups": (lambda: MHA(8, 2, 0), "n_kv_heads", "positive", "0"),
    "layer odd": (lambda: MHA(6, 2), "head width", "even", "3"),
    "layer of floats": (lambda: MHA(8, 2.0), "n_heads", "integer", "2.0"),
    "layer of text": (lambda: MHA("8", 2), "d_model", "integer", "8"),
    "layer base": (lambda: MHA(8, 2, base=-1.0), "base", "-1.0"),
    "pre is a class": (lambda: MHA(8, 2, pre=Coupling), "pre", "module", "type"),
    "pre is a function": (lambda: MHA(8, 2, pre=lambda q, k: (q, k)), "pre", "module", "function"),
    "pre is a name": (lambda: MHA(8, 2, pre="euler"), "pre", "module", "str"),
    "pre of other width": (lambda: MHA(8, 2, pre=Coupling(8))(X), "q must", "width 8", "4"),
    "score is a class": (lambda: MHA(8, 2, score=Softmax), "score", "module", "type"),
    "score is a name": (lambda: MHA(8, 2, score="softmax"), "score", "module", "str"),
    "score is a pre-score module": (lambda: MHA(8, 2, score=Coupling(4)), "score", "module", "Coupling"),
    "x rank": (lambda: LAYER(X[0]), "x must", "(B, T, 8)", "(5, 8)"),
    "x width": (lambda: LAYER.weights(torch.zeros(2, 5, 9)), "x must", "(B, T, 8)", "(2, 5, 9)"),
    "x is a list": (lambda: LAYER([[1.0]]), "x must", "list"),
    "x is an array": (lambda: LAYER(X.numpy()), "x must", "ndarray"),
    "x of integers": (lambda: LAYER(X.long()), "x must", "floating", "int64"),
    "x of other dtype": (lambda: LAYER(X.double()), "x must", "float32", "float64"),
    "layer's mask": (lambda: LAYER(X, mask(2, 1, 5, 4)), "mask", "5, 5)", "(2, 1, 5, 4)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    refuses(*BAD[case])
