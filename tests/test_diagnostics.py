"""The measures of chapter 03 equal slow references and known values, hear any network, and say in words what they cannot use."""

import math

import numpy as np
import pytest
import torch
from test_attention import DTYPES, EPS, close, rand, refuses
from torch import nn

from coupled_qk.attention import MultiHeadAttention, attention_weights
from coupled_qk.diagnostics import (
    Profile,
    attention_entropy,
    entropy_ceiling,
    entropy_floor,
    head_measures,
    profile,
    rank_profile,
    residual,
    self_mass,
    sink_mass,
    spectral_gap,
    stable_rank,
    trace,
)
from coupled_qk.gpt import GPT, GPTConfig


def some_weights(B=2, H=3, T=5, S=None, causal=False, seed=0, dtype=torch.float64):
    scores = rand(B, H, T, S or T, seed=seed, dtype=dtype)
    if causal:
        scores = scores.masked_fill(~torch.ones(T, S or T, dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1)


def running_mean(T, dtype=torch.float64):
    "What a causal head does whose scores are all equal."
    return (torch.ones(1, 1, T, T).tril() / torch.arange(1, T + 1)[:, None]).to(dtype)


# -- rank


def slow_residual(x, norm, relative):
    out = []
    for row in x.double().numpy():
        rest = row - row.mean(0)
        size = {
            "frobenius": lambda m: np.sqrt((m**2).sum()),
            "composite": lambda m: math.sqrt(np.linalg.norm(m, 1) * np.linalg.norm(m, np.inf)),
        }[norm]
        out.append(size(rest) / (size(row) if relative else 1))
    return torch.tensor(out, dtype=x.dtype)


@DTYPES
@pytest.mark.parametrize("norm", ["frobenius", "composite"])
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 4), (1, 2, 7), (2, 6, 1), (2, 1, 3)], ids=str)
def test_residual(dtype, norm, relative, shape):
    x = rand(*shape, dtype=dtype)
    close(residual(x, norm, relative), slow_residual(x, norm, relative), EPS[dtype])


@DTYPES
@pytest.mark.parametrize("norm", ["frobenius", "composite"])
def test_residual_of_tokens_that_are_alike(dtype, norm):
    assert (residual(rand(3, 1, 4, dtype=dtype).repeat(1, 6, 1), norm) <= EPS[dtype]).all()
    assert not residual(torch.zeros(2, 3, 4, dtype=dtype), norm).any()  # nothing differs in nothing


def test_residual_ignores_what_it_should():
    "The scale of everything if relative, a shift of all tokens if not, and the other rows of the batch."
    x = rand(3, 5, 4)
    close(residual(7 * x), residual(x))
    close(residual(x + rand(1, 1, 4, seed=1), relative=False), residual(x, relative=False))
    close(residual(x)[1:2], residual(x[1:2]))


def test_mean_is_nearly_the_best_common_token():
    "It is the best in Frobenius' norm, and within a factor 2 - 2/T of it in the composite one."
    x, others = rand(1, 6, 3), rand(200, 1, 3, seed=1)
    for norm, factor in (("frobenius", 1), ("composite", 2 - 2 / 6)):
        apart = torch.stack([slow_norm(x[0] - y, norm) for y in others])
        assert residual(x, norm, relative=False) <= factor * apart.min() + 1e-12


def slow_norm(m, norm):
    m = m.numpy()
    size = np.linalg.norm(m) if norm == "frobenius" else math.sqrt(np.linalg.norm(m, 1) * np.linalg.norm(m, np.inf))
    return torch.tensor(size)


def test_residual_in_half_precision_is_computed_in_single():
    x = rand(2, 5, 4, dtype=torch.bfloat16)
    assert residual(x).dtype == torch.float32
    close(residual(x), residual(x.float()))


BEYOND = {torch.float32: (3e38, 1e30, 1e-30, 1e-44), torch.float64: (1e308, 1e200, 1e-200, 1e-320)}


@DTYPES
@pytest.mark.parametrize("place", range(4))
def test_ranks_of_numbers_whose_squares_leave_the_range(dtype, place):
    "The measures do not change with the scale, however large or small; 1, 0 and -1 times the smallest are still exact."
    x = torch.tensor([[[1.0, 0], [0, -1], [1, 1]], [[-1, 1], [1, 1], [0, 1]]], dtype=dtype)
    scale, eps = BEYOND[dtype][place], 10 * EPS[dtype]
    for norm in ("frobenius", "composite"):
        close(residual(x * scale, norm), residual(x, norm), eps)
        if place in (1, 2):  # the others' own norm is out of range, or has few digits
            close(residual(x * scale, norm, relative=False) / scale, residual(x, norm, relative=False), eps)
    close(stable_rank(x * scale), stable_rank(x), eps)


@pytest.mark.parametrize("norm", ["frobenius", "composite"])
@pytest.mark.parametrize("relative", [True, False])
def test_gradients_of_the_ranks(norm, relative):
    "The scale is taken out and put back without a trace in the gradient."
    x = rand(2, 4, 3, grad=True)
    assert torch.autograd.gradcheck(lambda x: residual(x, norm, relative), x)
    assert torch.autograd.gradcheck(stable_rank, x)


@DTYPES
def test_stable_rank(dtype):
    basis = torch.linalg.qr(rand(2, 6, 4))[0].to(dtype)
    close(stable_rank(basis), torch.full((2,), 4.0, dtype=dtype), 10 * EPS[dtype])
    close(stable_rank(basis[..., :1] * rand(1, 1, 5, dtype=dtype)), torch.ones(2, dtype=dtype), 10 * EPS[dtype])
    s = torch.linalg.svdvals(x := rand(3, 5, 4, dtype=dtype))
    close(stable_rank(x), s.square().sum(-1) / s[:, 0].square(), 10 * EPS[dtype])


def test_stable_rank_of_nothing():
    assert not stable_rank(torch.zeros(2, 3, 4)).any()


@pytest.mark.parametrize("wrap", [list, tuple, torch.stack], ids=lambda f: f.__name__)
def test_rank_profile(wrap):
    states = [rand(2, 5, 3, seed=i) for i in range(4)]
    found = rank_profile(wrap(states))
    assert set(found) == {"residual", "stable_rank"} and all(m.shape == (4, 2) for m in found.values())
    close(found["residual"][2], residual(states[2]))
    close(found["stable_rank"][3], stable_rank(states[3]))


@pytest.mark.parametrize("causal,power", [(False, 3), (True, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_laws_of_rank_collapse(causal, power, seed):
    "Near collapse one layer of attention shrinks the residual by the third power, under a causal mask by a factor."
    alike, noise = rand(1, 1, 8, seed=seed), rand(1, 12, 8, seed=seed + 10)
    w = [rand(8, 8, seed=seed + 20 + i) / 8**0.5 for i in range(2)]
    ratios = []
    for eps in (1e-2, 1e-3):
        x = alike + eps * noise
        a = attention_weights((x @ w[0])[:, None], (x @ w[1])[:, None], causal=causal)
        before, after = residual(x, relative=False), residual((a @ x[:, None])[:, 0], relative=False)
        ratios.append((after / before**power).item())
    assert abs(ratios[0] / ratios[1] - 1) < 0.03  # the next power of eps adds about one per cent


# -- the spectral gap


@DTYPES
@pytest.mark.parametrize("shape", [(2, 3, 5, 5), (1, 1, 2, 2), (2, 2, 3, 7), (1, 2, 7, 3)], ids=str)
def test_spectral_gap(dtype, shape):
    a = some_weights(*shape, dtype=dtype)
    s1, s2, gap = spectral_gap(a)
    s = np.linalg.svd(a.double().numpy(), compute_uv=False)
    eps = 10 * EPS[dtype]
    close(s1.double(), torch.tensor(s[..., 0]), eps)
    close(s2.double(), torch.tensor(s[..., 1]), eps)
    close(gap, s1 - s2, eps)
    assert s1.shape == shape[:2] and s1.dtype == dtype


def test_spectral_gap_of_known_maps():
    T = 6
    uniform, identity = torch.full((1, 1, T, T), 1 / T, dtype=torch.float64), torch.eye(T).double()[None, None]
    close(torch.stack(spectral_gap(uniform)).flatten(), torch.tensor([1.0, 0, 1]).double())
    close(torch.stack(spectral_gap(identity[..., torch.randperm(T)])).flatten(), torch.tensor([1.0, 1, 0]).double())
    signed = uniform - 0.5 * identity  # as differential attention makes them
    close(spectral_gap(signed).s1.flatten(), torch.tensor([0.5]).double())


@pytest.mark.parametrize("T,s1,s2", [(16, 1.468, 0.820), (64, 1.598, 1.014), (256, 1.686, 1.168)])
def test_spectral_gap_of_the_running_mean(T, s1, s2):
    gap = spectral_gap(running_mean(T))
    assert abs(gap.s1.item() - s1) < 6e-4 and abs(gap.s2.item() - s2) < 6e-4
    close(running_mean(T).square().sum().item(), sum(1 / i for i in range(1, T + 1)), 1e-6)


@pytest.mark.parametrize("s", [0.25, 0.5, 0.7])
def test_spectral_gap_of_independent_scores(s):
    "The closed forms, in their valid range and to the accuracy that T = 256 allows."
    a, sigma = (s * rand(3, 1, 256, 256)).softmax(-1), math.sqrt(math.exp(s * s) - 1)
    gap = spectral_gap(a)
    assert abs(gap.s2.mean().item() / (2 * sigma / 16) - 1) < 0.05
    assert abs(gap.s1.mean().item() - 1 - sigma**2 / 512) < 1e-3 and (gap.s1 >= 1).all()
    assert abs(a.square().sum((-2, -1)).mean().item() / (1 + sigma**2) - 1) < 0.01


# -- entropy


@DTYPES
@pytest.mark.parametrize("causal", [True, False])
def test_entropy(dtype, causal):
    a = some_weights(causal=causal, dtype=dtype)
    slow = [[-sum(p * math.log(p) for p in row if p > 0) for row in head] for head in a.flatten(0, 1).tolist()]
    close(attention_entropy(a), torch.tensor(slow, dtype=dtype).view(2, 3, 5), 10 * EPS[dtype])
    assert (attention_entropy(a) <= entropy_ceiling(5, causal) + EPS[dtype]).all()


def test_entropy_of_known_rows():
    a = torch.tensor([[0.25] * 4, [0, 1.0, 0, 0], [0.5, 0.5, 0, 0], [0] * 4], dtype=torch.float64)
    known = torch.tensor([math.log(4), 0, math.log(2), 0], dtype=torch.float64)
    close(attention_entropy(a[None, None])[0, 0], known)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [200, 1000])
def test_measures_in_half_precision(dtype, T):
    "Rounded weights sum to one only nearly, and that must do."
    a = some_weights(B=1, H=2, T=T, causal=True, dtype=torch.float32)
    for measure in (attention_entropy, sink_mass, self_mass):
        close(measure(a.to(dtype)), measure(a), 0.02)
    uniform = torch.full((1, 1, 2, T), 1 / T)  # all rounded the same way
    close(attention_entropy(uniform.to(dtype)), attention_entropy(uniform), 0.02)


def test_gradient_of_the_entropy():
    "By the scores: as by finite differences, also where a mask makes weights of zero, and finite where one key has all."
    mask, scores = torch.ones(4, 4, dtype=torch.bool).tril(), rand(1, 2, 4, 4, grad=True)
    entropy = lambda s: attention_entropy(s.masked_fill(~mask, -torch.inf).softmax(-1))
    assert torch.autograd.gradcheck(entropy, scores)
    hard = (1e4 * scores.detach()).requires_grad_()
    assert torch.autograd.grad(entropy(hard).sum(), hard)[0].isfinite().all()


def test_any_layout_of_memory():
    "Transposed, expanded and differentiable weights and states give what their copies give."
    a, x = some_weights(), rand(3, 5, 4)
    for measure in (attention_entropy, sink_mass, self_mass, lambda a: torch.stack(spectral_gap(a))):
        close(measure(a.mT.contiguous().mT), measure(a))
        close(measure(a[:, :1].expand(2, 4, 5, 5)), measure(a[:, :1].repeat(1, 4, 1, 1)))
        close(measure(a.clone().requires_grad_()).detach(), measure(a))
    for measure in (residual, stable_rank):
        close(measure(x.mT.contiguous().mT), measure(x))
        close(measure(x.clone().requires_grad_()).detach(), measure(x))


@pytest.mark.parametrize(
    "T,mean", [(1, 0.0), (2, math.log(2) / 2), (16, 1.917), (64, 3.206), (256, 4.560), (1024, 5.936)]
)
def test_entropy_ceiling(T, mean):
    close(entropy_ceiling(T), attention_entropy(running_mean(T))[0, 0], 1e-5)
    assert abs(entropy_ceiling(T).mean().item() - mean) < 6e-4
    close(entropy_ceiling(T, causal=False), torch.full((T,), math.log(T)).double(), 1e-7)


@pytest.mark.parametrize(
    "n,sigma,floor",
    [(64, 0, 4.1589), (64, 1, 4.143699), (64, 5, 1.802616), (64, 20, 2e-6), (8, 5, 0.205592), (1, 3, 0), (5, 1e308, 0)],
)
def test_entropy_floor(n, sigma, floor):
    assert abs(entropy_floor(sigma, n) - floor) < 5e-5 if sigma == 0 else abs(entropy_floor(sigma, n) - floor) < 6e-7


@pytest.mark.parametrize("n", [2, 5, 40])
@pytest.mark.parametrize("sigma", [0.3, 2.0, 9.0, 500.0])
def test_no_row_is_below_the_floor(n, sigma):
    rows = sigma * torch.nn.functional.normalize(rand(500, n), dim=-1)
    spike = torch.full((1, n), -sigma / math.sqrt(n * (n - 1))).double()
    spike[0, 0] = sigma * math.sqrt((n - 1) / n)
    close(spike.norm().item(), sigma, 1e-6)
    entropies = attention_entropy(torch.cat([rows, spike]).softmax(-1)[None, None])[0, 0]
    assert (entropies >= entropy_floor(sigma, n) - 1e-6 * (1 + sigma)).all()
    assert abs(entropies[-1].item() - entropy_floor(sigma, n)) < 1e-6 * (1 + sigma)


# -- sinks


@DTYPES
@pytest.mark.parametrize("token", [0, 1, 3])
def test_sink_and_self_mass(dtype, token):
    a = some_weights(causal=True, dtype=dtype)
    later = range(token + 1, 5)
    close(sink_mass(a, token), sum(a[:, :, i, token] for i in later) / len(later), EPS[dtype])
    close(self_mass(a), sum(a[:, :, i, i] for i in range(1, 5)) / 4, EPS[dtype])


@pytest.mark.parametrize("T", [2, 7, 64])
def test_masses_of_the_running_mean(T):
    share = (sum(1 / i for i in range(1, T + 1)) - 1) / (T - 1)
    assert abs(sink_mass(running_mean(T)).item() - share) < 1e-6
    assert abs(self_mass(running_mean(T)).item() - share) < 1e-6


def test_sink_mass_of_more_keys_than_queries():
    a = some_weights(T=4, S=6)
    close(sink_mass(a, 2), a[:, :, 3, 2])


# -- hearing a network


def small(pre="standard", **options):
    return GPT(GPTConfig(16, 16, n_layers=3, n_heads=4, d_model=32, pre=pre, **options), seed=1)


IDS = torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(0))


@DTYPES
@pytest.mark.parametrize("options", [{}, {"n_kv_heads": 2}, {"pre": "leapfrog", "pre_options": {"dt": 0.7}}], ids=str)
@torch.no_grad()
def test_trace_of_a_gpt(dtype, options):
    "What is heard equals what one computes block by block."
    model = small(**options).to(dtype)
    heard, x = trace(model, IDS), model.embed(IDS)
    assert heard.after == [1, 2, 3] and len(heard.states) == 4
    for block, a, before, after in zip(model.blocks, heard.weights, heard.states, heard.states[1:], strict=False):
        close(before, x, EPS[dtype])
        close(a, block.attn.weights(block.norm1(x)), EPS[dtype])
        x = block(x)
        close(after, x, EPS[dtype])


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_trace_leaves_no_trace():
    model = small()
    before = model(IDS)
    trace(model, IDS)
    assert hooks(model) == 0 and torch.equal(model(IDS), before)
    with pytest.raises(ValueError):
        trace(model, IDS.repeat(1, 9))  # longer than the context
    assert hooks(model) == 0


class Falls(nn.Module):
    "A layer whose weights cannot be had."

    def forward(self, x):
        return x

    def weights(self, x):
        raise ArithmeticError("no weights today")


def test_hooks_go_when_a_layer_fails():
    model = nn.Sequential(nn.Dropout(), Falls()).train()
    with pytest.raises(ArithmeticError, match="no weights today"):
        trace(model, X)
    assert hooks(model) == 0 and all(part.training for part in model.modules())


class Plain(nn.Module):
    "Somebody else's attention: another name for its input, no score module inside."

    def forward(self, hidden, mask=None):
        return self.weights(hidden)[:, 0] @ hidden

    def weights(self, x):
        return (x @ x.mT).softmax(-1)[:, None]


class Masked(Plain):
    "One that needs more than the hidden states, and returns several things."

    def forward(self, x, mask):
        return self.weights(x, mask)[:, 0] @ x, None

    def weights(self, x, mask):
        return (x @ x.mT).masked_fill(~mask, -torch.inf).softmax(-1)[:, None]


class Attributes(nn.Module):
    "Layers as attributes and not in a list, one of them used twice."

    def __init__(self):
        super().__init__()
        self.one, self.two = Plain(), Masked()

    def forward(self, x, mask):
        return self.one(self.two(self.one(x), mask=mask)[0]).sum()


X = rand(2, 5, 4)


class InPlace(nn.Module):
    "A block that adds to its input in place, and an attention that keeps its weights in one place."

    def __init__(self):
        super().__init__()
        self.attn, self.kept = Plain(), torch.zeros(2, 1, 5, 5).double()
        self.attn.weights = lambda hidden: self.kept.copy_((hidden @ hidden.mT).softmax(-1)[:, None])

    def forward(self, x):
        x += self.attn(x)
        return x


@torch.no_grad()
def test_trace_of_blocks_that_write_in_place():
    "What is heard is what was there at that moment, and not what became of it."
    model, states, weights = nn.Sequential(InPlace(), InPlace(), InPlace()), [X], []
    for _ in model:
        weights.append((states[-1] @ states[-1].mT).softmax(-1)[:, None])
        states.append(states[-1] + weights[-1][:, 0] @ states[-1])
    heard = trace(model, X.clone())
    close(heard.states, states)
    close(heard.weights, weights)


class Noisy(nn.Module):
    "A block with dropout."

    def __init__(self):
        super().__init__()
        self.attn, self.drop = Plain(), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.drop(self.attn(x))


def test_trace_switches_dropout_off_and_back_on():
    "Each part gets its own mode back, whatever that was, and no random number is drawn."
    model = nn.Sequential(Noisy(), Noisy()).train()
    model[1].drop.eval()
    before, state = [part.training for part in model.modules()], torch.get_rng_state()
    heard = trace(model, X)
    assert [part.training for part in model.modules()] == before and not all(before)
    assert torch.equal(torch.get_rng_state(), state)
    model.eval()
    close(heard.states, [X, model[0](X), model(X)])
    trace(model, X)
    assert not any(part.training for part in model.modules())


def test_trace_hears_compiled_code():
    "Code compiled before there were hooks would not see them; it is compiled still when they are gone."
    model = nn.Sequential(Noisy(), Noisy()).eval()
    expected = trace(model, X).states
    model[0].compile(backend="eager")
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    close(trace(compiled, X).states, expected)
    assert model[0]._compiled_call_impl and not model[1]._compiled_call_impl and hooks(model) == 0


class Renamed(nn.Module):
    "One that takes keywords only, and whose `weights` has another name for the hidden states."

    def forward(self, *, hidden, mask):
        return self.weights(hidden, mask)[:, 0] @ hidden

    def weights(self, x, mask):
        return (x @ x.mT).masked_fill(~mask, -torch.inf).softmax(-1)[:, None]


def test_trace_of_keywords():
    layer, mask = Renamed(), torch.ones(5, 5, dtype=torch.bool).tril()
    heard = trace(layer, hidden=X, mask=mask)
    close(heard.weights, [layer.weights(X, mask)])
    close(heard.states, [X, layer(hidden=X, mask=mask)])
    assert profile(layer, hidden=X, mask=mask).ceiling == pytest.approx(entropy_ceiling(5).mean().item())


class Flat(Plain):
    "One that forgets the axis of the heads."

    def weights(self, x):
        return (x @ x.mT).softmax(-1)

    def forward(self, x):
        return x


class Stored(Flat):
    "One that takes nothing and returns what it may have stored."

    def weights(self):
        return None


@pytest.mark.parametrize("layer", [Plain, lambda: MultiHeadAttention(4, 2).double()], ids=["plain", "ours"])
@torch.no_grad()
def test_trace_of_other_modules(layer):
    "A layer by itself, in a Sequential, and in a list inside blocks."
    single, pair = layer(), nn.Sequential(layer(), layer())
    heard = trace(pair, X)
    close(heard.states, [X, pair[0](X), pair(X)])
    close(heard.weights, [pair[0].weights(X), pair[1].weights(pair[0](X))])
    if isinstance(single, Plain):
        close(trace(single, X).states, [X, single(X)])
    close(trace(single, X).weights, [single.weights(X)])
    deep = nn.Sequential(nn.Sequential(nn.Identity(), layer()), nn.Linear(4, 4).double())
    assert len(trace(deep, X).weights) == 1


@torch.no_grad()
def test_trace_passes_on_what_the_layer_was_given():
    model, mask = Attributes(), torch.ones(5, 5, dtype=torch.bool).tril()
    heard = trace(model, X, mask)
    assert len(heard.weights) == 3 and heard.after == [1, 2, 3]
    y = model.one(X)
    close(heard.weights[1], model.two.weights(y, mask))
    assert not heard.weights[1].triu(1).any() and heard.weights[0].triu(1).any()
    close(heard.states[2], model.two(y, mask)[0])


def test_profile():
    model = small().double()
    found, heard = profile(model, IDS), trace(model, IDS)
    assert [(row["layer"], row["head"]) for row in found.rows] == [(layer, h) for layer in (1, 2, 3) for h in range(4)]
    for row in found.rows:
        a = heard.weights[row["layer"] - 1][:, row["head"]][:, None]
        expected = {name: m.item() for name, m in head_measures(a).items()}
        assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-12)
        assert row["residual"] == pytest.approx(residual(heard.states[row["layer"]]).mean().item())
    assert found.ceiling == pytest.approx(entropy_ceiling(9).mean().item())
    assert found.mean()["sink"] == pytest.approx(sum(row["sink"] for row in found.rows) / 12)
    assert found.mean()["residual"] == found.rows[-1]["residual"]


def test_profile_of_one_layer_and_without_a_mask():
    one = MultiHeadAttention(4, 2, causal=False).double()
    found = profile(one, X)
    assert len(found.rows) == 2 and found.ceiling == pytest.approx(math.log(5))
    assert found.rows[0]["residual"] == pytest.approx(residual(one(X)).mean().item())


def test_profile_is_a_table_and_a_picture(monkeypatch):
    found = Profile([{"layer": 1, "head": 0, "residual": 0.5, "entropy": 1.0, "s2": 0.2, "sink": 0.1}], 1.5)
    lines = repr(found).splitlines()
    assert lines[0].split() == ["l", "h", "res", "entr", "s2", "sink"]
    assert lines[1].split() == ["1", "0", "0.50", "1.00", "0.20", "0.10"]
    shown = []
    monkeypatch.setattr("coupled_qk.figures.show", lambda fig, alt: shown.append(alt))
    found.show("words")
    assert shown == ["words"]
    monkeypatch.undo()
    refuses(lambda: found.show(""), "alt")


# -- bad input

A = some_weights()
NAN = A.clone().index_fill_(2, torch.tensor(1), torch.nan)
BAD = {
    "residual of a list": (lambda: residual([[1.0]]), "x must", "list"),
    "residual of integers": (lambda: residual(torch.ones(1, 2, 3).long()), "x must", "floating", "int64"),
    "residual of a matrix": (lambda: residual(X[0]), "x must", "(B, T, D)", "(5, 4)"),
    "residual of nothing": (lambda: residual(X[:, :0]), "x must", "(2, 0, 4)"),
    "residual of NaN": (lambda: residual(X * torch.nan), "x must", "finite", "NaN"),
    "residual of infinity": (lambda: residual(X / 0), "x must", "finite"),
    "unknown norm": (lambda: residual(X, "max"), "norm must", "frobenius", "'max'"),
    "stable rank of a matrix": (lambda: stable_rank(X[0]), "x must", "(B, T, D)"),
    "norm of several": (lambda: residual(X, ["frobenius"]), "norm must", "['frobenius']"),
    "residual without numbers": (lambda: residual(X.to("meta")), "x must", "numbers", "meta"),
    "residual of a sparse tensor": (lambda: residual(X.to_sparse()), "x must", "dense", "sparse"),
    "residual of complex numbers": (lambda: residual(X + 0j), "x must", "floating", "complex"),
    "no states": (lambda: rank_profile([]), "states must", "none"),
    "a single state": (lambda: rank_profile(X), "states must", "a single one"),
    "states one by one": (lambda: rank_profile(x for x in [X]), "states must", "sequence", "generator"),
    "states of unequal batches": (lambda: rank_profile([X, X[:1]]), "states must", "batch", "2, 1"),
    "a state of NaN": (lambda: rank_profile([X, X * torch.nan]), "states[1] must", "finite"),
    "a state of three numbers": (lambda: rank_profile([X, X[0]]), "states[1] must", "(B, T, D)", "(5, 4)"),
    "gap of an array": (lambda: spectral_gap(A.numpy()), "a must", "ndarray"),
    "gap of three axes": (lambda: spectral_gap(A[0]), "a must", "(B, H, T, S)", "(3, 5, 5)"),
    "gap of one key": (lambda: spectral_gap(A[..., :1]), "a must", "two keys", "(2, 3, 5, 1)"),
    "gap of NaN": (lambda: spectral_gap(NAN), "a must", "finite"),
    "entropy of three axes": (lambda: attention_entropy(A[0]), "a must", "(B, H, T, S)"),
    "entropy of NaN": (lambda: attention_entropy(NAN), "a must", "finite"),
    "entropy of signed weights": (lambda: attention_entropy(A - 0.3), "a must", "negative", "signed"),
    "entropy of scores": (lambda: attention_entropy(3 * A), "a must", "sum to one", "3"),
    "entropy of columns": (lambda: attention_entropy(A.mT), "a must", "sum to one"),
    "entropy without numbers": (lambda: attention_entropy(A.to("meta")), "a must", "numbers", "meta"),
    "sink of scores": (lambda: sink_mass(A.log()), "a must", "negative", "softmax"),
    "sink of large weights": (lambda: sink_mass(3 * A), "a must", "sum to one", "3"),
    "self mass of scores": (lambda: self_mass(A.log()), "a must", "negative", "softmax"),
    "self mass of large weights": (lambda: self_mass(3 * A), "a must", "sum to one", "3"),
    "all measures of scores": (lambda: head_measures(A.log()), "a must", "negative", "softmax"),
    "ceiling of no tokens": (lambda: entropy_ceiling(0), "T must", "0"),
    "ceiling of a fraction": (lambda: entropy_ceiling(2.5), "T must", "2.5"),
    "floor of a negative length": (lambda: entropy_floor(-1.0, 4), "sigma must", "-1"),
    "floor of NaN": (lambda: entropy_floor(math.nan, 4), "sigma must", "nan"),
    "floor of no keys": (lambda: entropy_floor(1.0, 0), "n must", "0"),
    "floor of a bool": (lambda: entropy_floor(True, 4), "sigma must", "number", "bool"),
    "floor of text": (lambda: entropy_floor("1", 4), "sigma must", "number", "str"),
    "floor of many": (lambda: entropy_floor(torch.ones(2), 4), "sigma must", "number", "Tensor"),
    "ceiling of a bool": (lambda: entropy_ceiling(True), "T must", "True"),
    "sink of three axes": (lambda: sink_mass(A[0]), "a must", "(B, H, T, S)"),
    "sink with no query after it": (lambda: sink_mass(A, 4), "token must", "4"),
    "negative sink": (lambda: sink_mass(A, -1), "token must", "-1"),
    "sink at a bool": (lambda: sink_mass(A, True), "token must", "True"),
    "sink at a fraction": (lambda: sink_mass(A, 1.0), "token must", "1.0"),
    "sink of NaN": (lambda: sink_mass(NAN), "a must", "finite"),
    "self mass of unequal sides": (lambda: self_mass(some_weights(T=3, S=5)), "a must", "(2, 3, 3, 5)"),
    "self mass of one token": (lambda: self_mass(torch.ones(1, 1, 1, 1)), "a must", "two"),
    "trace of a function": (lambda: trace(lambda x: x, X), "model must", "function"),
    "trace without attention": (lambda: trace(nn.Linear(4, 4).double(), X), "model must", "weights"),
    "profile without attention": (lambda: profile(nn.Linear(4, 4).double(), X), "model must", "weights"),
    "trace of weights without heads": (lambda: trace(Flat(), X), "model must", "(B, H, T, T)", "(2, 5, 5)"),
    "trace of stored weights": (lambda: trace(Stored(), X), "model must", "(B, H, T, T)", "NoneType"),
    "profile of nothing": (lambda: Profile([], 0.0), "rows must", "none"),
    "profile of one token": (lambda: profile(small(), IDS[:, :1]), "a must", "two"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, *words = BAD[case]
    refuses(call, *words)
