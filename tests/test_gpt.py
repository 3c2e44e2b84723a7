"""The GPT hides the future, reads the same with a cache and without, shares weights between variants, and refuses in words."""

import copy
import io
import json
import math
import os
import pickle
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save as safetensors_bytes
from test_attention import close, rand, refuses, slow_layer
from torch import nn
from torch.nn import functional as F

from coupled_qk import integrators
from coupled_qk.attention import split_heads
from coupled_qk.coupling import Coupling, QueryMLP
from coupled_qk.gpt import (
    GPT,
    GPTConfig,
    KVCache,
    config_from_dict,
    config_to_dict,
    count_parameters,
    load_model,
    n_parameters,
    next_probabilities,
    presets,
    sample,
    save_model,
    variants,
)
from coupled_qk.integrators import PotentialForce, leapfrog, leapfrog_dkd, symplectic_euler

VARIANTS = list(variants)
COUPLED = ["euler", "symplectic_euler", "leapfrog", "leapfrog_dkd", "rk4"]  # those that take a number of steps
every_variant = pytest.mark.parametrize("pre", VARIANTS)
config = partial(GPTConfig, vocab_size=17, context=12, n_layers=2, n_heads=4, n_kv_heads=2, d_model=16, d_ff=24)
IDS = torch.randint(17, (2, 12), generator=torch.Generator().manual_seed(0))


def awake(pre="standard", dtype=torch.float64, **options):
    "A small model with weights ten times as large as at the start, so that attention is far from even and dt matters."
    model = GPT(config(pre=pre, **options)).to(dtype).requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and ".pre." not in name:
            weight.mul_(10)
        elif "norm" in name:
            weight.add_(rand(len(weight)), alpha=0.3)
        elif name.endswith("dt"):
            weight.fill_(0.5)
        elif not weight.any():  # the last layers of affine coupling
            weight.copy_(rand(*weight.shape)).mul_(0.3)
    return model


def by_hand(model, ids):
    "The whole model from its weights: pre-norm blocks, attention by loops, SwiGLU, tied read-out."
    norm = lambda x, weight: weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    x = model.embed.weight[ids]
    for block in model.blocks:
        x = x + slow_layer(block.attn, norm(x, block.norm1.weight))
        h, ff = norm(x, block.norm2.weight), block.ff
        gate = h @ ff.gate.weight.T
        x = x + (gate * gate.sigmoid() * (h @ ff.up.weight.T)) @ ff.down.weight.T
    return norm(x, model.norm.weight) @ model.embed.weight.T


# -- reading


@every_variant
@torch.no_grad()
def test_the_model_by_hand(pre):
    model = awake(pre)
    close(model(IDS), by_hand(model, IDS), 1e-10)  # two layers of sums in another order


@torch.no_grad()
def test_score_modules_see_the_layer_s_input():
    model, seen = awake(), []
    block = model.blocks[0]
    block.attn.score.register_forward_hook(lambda module, args, kwargs, out: seen.append(kwargs["x"]), with_kwargs=True)
    model(IDS)
    close(seen, [block.norm1(model.embed(IDS))])


@every_variant
@torch.no_grad()
def test_the_future_is_hidden(pre):
    "Change token j: scores before it stay as they were, and that at j moves."
    model = awake(pre)
    before = model(IDS)
    for j in range(12):
        changed = IDS.clone()
        changed[:, j] = (changed[:, j] + 1) % 17
        moved = (model(changed) - before).abs().amax(-1)
        assert moved[:, :j].amax() < 1e-12 if j else True  # a matrix product may round rows otherwise in another batch
        assert (moved[:, j] > 1e-3).all()


# Reading in parts multiplies other shapes, which add in another order; two layers spread that a little.
@every_variant
@pytest.mark.parametrize("dtype,eps", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("parts", [[1] * 12, [12], [3, 1, 4, 4], [7, 5]], ids=str)
@pytest.mark.parametrize("n_kv_heads", [2, None, 1])
@torch.no_grad()
def test_cache_equals_no_cache(pre, dtype, eps, parts, n_kv_heads):
    model, cache = awake(pre, dtype, n_kv_heads=n_kv_heads), KVCache(12)
    scores = torch.cat([model(part, cache) for part in IDS.split(parts, 1)], 1)
    close(scores, model(IDS), eps)
    assert cache.length == 12 and {t.shape for kv in cache.layers.values() for t in kv} == {(2, n_kv_heads or 4, 12, 4)}


@torch.no_grad()
def test_rows_of_a_batch_are_alone():
    model = awake("leapfrog")
    close(model(IDS), torch.cat([model(row[None]) for row in IDS]))


@torch.no_grad()
def test_the_end_of_the_context():
    "It is an error, also half-way through a cache, and the cache is none the worse."
    model, cache = awake("euler"), KVCache(12)
    refuses(lambda: model(torch.zeros(1, 13, dtype=torch.long)), "context", "12", "13")
    model(IDS[:, :10], cache)
    refuses(lambda: model(IDS[:, :3], cache), "context", "12", "13")
    close(model(IDS[:, 10:], cache), model(IDS)[:, 10:], 1e-10)
    refuses(lambda: model(IDS[:, :1], cache), "context", "12", "13")


@pytest.mark.parametrize(
    "ids", [IDS[:0], IDS[:, :1], IDS.int(), IDS.mT.contiguous().mT], ids=["B=0", "T=1", "int32", "strided"]
)
@torch.no_grad()
def test_unusual_input(ids):
    model = awake("leapfrog")
    close(model(ids), model(IDS)[: ids.shape[0], : ids.shape[1]])


def test_gradients_reach_every_weight():
    for pre in VARIANTS:
        model = GPT(config(pre=pre))
        F.cross_entropy(model(IDS[:, :-1]).flatten(0, 1), IDS[:, 1:].flatten()).backward()
        still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        if pre == "affine":  # what stands before its layers of zeros waits for the first step
            still = [name for name in still if not re.search(r"\.pre\.0\.on_\w+\.0\.hidden\.", name)]
        assert still == [], pre


# -- writing


@every_variant
def test_greedy_writing_is_the_best_token_each_time(pre):
    model = awake(pre)
    text = model.generate(IDS[:, :3], 9, temperature=0)
    close(text[:, :3], IDS[:, :3], 0)
    for t in range(3, 12):
        assert torch.equal(text[:, t], model(text[:, :t])[:, -1].argmax(-1))


@pytest.mark.parametrize("length", [3, 12, 15])
def test_sliding_reads_the_last_tokens_again(length):
    model, prompt = awake("leapfrog"), IDS.repeat(1, 2)[:, :length]
    text = model.generate(prompt, 15, temperature=0, slide=True)
    assert text.shape == (2, length + 15)
    for t in range(length, length + 15):
        assert torch.equal(text[:, t], model(text[:, max(0, t - 12) : t])[:, -1].argmax(-1))


def test_writing_past_the_context():
    model = awake()
    refuses(lambda: model.generate(IDS[:, :4], 9), "context", "12", "13", "slide")
    assert model.generate(IDS[:, :4], 8).shape == (2, 12)


def test_draws_depend_on_the_seed_alone():
    model, state = awake("euler"), torch.get_rng_state()
    texts = [model.generate(IDS[:, :2], 10, 5.0, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(model.generate(IDS[:, :2], 10, top_k=17), model.generate(IDS[:, :2], 10, top_k=99))
    greedy = model.generate(IDS[:, :2], 10, temperature=0)
    for few in (dict(top_k=1), dict(temperature=1e-3)):
        assert torch.equal(greedy, model.generate(IDS[:, :2], 10, **few))


def test_writing_does_not_train():
    model = GPT(config(pre="leapfrog")).train()
    text = model.generate(IDS[:, :2].int(), 3)
    assert model.training and text.dtype == torch.int64 and not text.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert model.generate(IDS[:0, :2], 3).shape == (0, 5)


def by_the_book(logits, temperature, top_k, top_p):
    "The distribution of one row, token by token: temperature, then the k best, then the nucleus."
    chances = {i: math.exp(z / temperature) for i, z in enumerate(logits)}
    best = sorted(chances, key=lambda i: -chances[i])[:top_k]
    total, kept, seen = sum(chances[i] for i in best), [], 0.0
    for i in best:
        if seen >= (top_p or 1.0):
            break
        kept.append(i)
        seen += chances[i] / total
    total = sum(chances[i] for i in kept)
    return torch.tensor([chances[i] / total if i in kept else 0.0 for i in range(len(logits))])


CHOICES = [
    (1.0, None, None),
    (0.5, None, None),
    (2.0, 3, None),
    (100.0, 2, None),
    (1.0, None, 0.5),
    (1.0, None, 0.9),
    (3.0, None, 0.7),
    (1.0, 3, 0.8),
    (1.0, 1, 0.9),
    (1.0, 99, 1.0),
    (1.0, None, 1e-9),
]


@pytest.mark.parametrize("temperature,top_k,top_p", CHOICES)
def test_probabilities_by_the_book(temperature, top_k, top_p):
    logits = 3 * rand(6, 9, dtype=torch.float32)
    found = next_probabilities(logits, temperature, top_k, top_p)
    for row, p in zip(logits, found, strict=True):
        expected = by_the_book(row.tolist(), temperature, top_k, top_p)
        close(p, expected, 1e-5)  # a softmax in single precision
        assert torch.equal(p > 0, expected > 0)


@pytest.mark.parametrize("temperature,top_k,top_p", CHOICES[:-1])
def test_sample_follows_its_probabilities(temperature, top_k, top_p):
    "Of 40,000 draws each token's share lies within four standard errors."
    logits, n, g = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), 40_000, torch.Generator().manual_seed(0)
    p = next_probabilities(logits, temperature, top_k, top_p)[0]
    share = sample(logits.expand(n, 4), temperature, top_k, top_p, g).flatten().bincount(minlength=4) / n
    assert ((share - p).abs() <= 4 * (p * (1 - p) / n).sqrt()).all()


def test_a_nucleus_is_never_empty_and_never_more_than_needed():
    "Also of a thousand equal tokens, and in half precision."
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for p, kept in ((1e-6, 1), (0.25, 250), (0.5, 500), (1.0, 1000)):
            found = (next_probabilities(torch.zeros(2, 1000, dtype=dtype), top_p=p) > 0).sum(-1)
            assert ((found - kept).abs() <= (p < 1)).all(), (dtype, p)  # sums of a thousand shares round


@pytest.mark.parametrize("logits", [[0.0, -math.inf, 1.0], [-1e4, 0.0, 1e4], [3e38, 0.0, -3e38]])
@pytest.mark.parametrize("temperature", [1e-12, 1e-8, 1.0, 1e8])
def test_extreme_scores_give_probabilities(logits, temperature):
    p = next_probabilities(torch.tensor([logits]), temperature, 3, 0.999)
    assert p.isfinite().all()
    close(p.sum(), torch.tensor(1.0), 1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45])
def test_nearly_no_temperature_is_none(temperature):
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    close(sample(logits, temperature), sample(logits, 0), 0)


@pytest.mark.parametrize("top_p", [1e-50, 1e-320, Fraction(1, 10**9)])
def test_the_best_token_is_never_dropped(top_p):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        p = next_probabilities(torch.tensor([[0.0, 2.0, 1.0]], dtype=dtype), top_p=top_p)
        close(p, torch.tensor([[0.0, 1.0, 0.0]]), 0)


def test_the_hottest_temperature_is_even_and_hides_what_is_impossible():
    p = next_probabilities(torch.tensor([[3.0, -math.inf, -2.0]]), 3e38)
    close(p, torch.tensor([[0.5, 0.0, 0.5]]), 0)


@pytest.mark.parametrize("large", [1e9, 1e300])
def test_large_scores_in_double_precision(large):
    "Differences are taken before anything is rounded: neighbours that single precision cannot tell apart."
    step = 2.0 if large < 1e10 else large / 4
    logits = torch.tensor([[large + step, large, -math.inf]], dtype=torch.float64)
    p = next_probabilities(logits, temperature=min(step, 3e38))
    ratio = math.exp(-1) if step == 2.0 else 0.0
    close(p, torch.tensor([[1 / (1 + ratio), ratio / (1 + ratio), 0.0]]), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k_keeps_the_first_of_equal_tokens(dtype):
    "Of two thousand scores with only three values."
    logits = torch.randint(3, (4, 2000), generator=torch.Generator().manual_seed(0)).to(dtype)
    for k in (1, 5, 500, 1000, 2000, 10**30):
        for row, p in zip(logits.tolist(), next_probabilities(logits, top_k=k), strict=True):
            kept = sorted(range(2000), key=lambda i, row=row: -row[i])[:k]  # a stable sort
            assert p.nonzero().flatten().tolist() == sorted(kept)


def test_top_k_is_never_more_than_k():
    "Also where scores are equal, which in half precision they often are."
    draws = sample(torch.zeros(500, 5), top_k=2, generator=torch.Generator().manual_seed(0))
    assert len(draws.unique()) == 2


@pytest.mark.parametrize("slide", [False, True])
def test_a_stream_is_what_generate_writes(slide):
    model, how = awake("euler", torch.float32), dict(temperature=2.0, top_k=9, top_p=0.9, seed=4, slide=slide)
    tokens = list(model.stream(IDS[:, :3], 9, **how))
    assert {t.shape for t in tokens} == {(2, 1)} and {t.dtype for t in tokens} == {torch.int64}
    assert torch.equal(torch.cat([IDS[:, :3], *tokens], 1), model.generate(IDS[:, :3], 9, **how))


def test_a_stream_writes_as_it_is_asked():
    "Nothing is read before the first token is wanted, and one token more for each of the others."
    model, read = awake(), []
    model.embed.register_forward_hook(lambda module, args, out: read.append(args[0].shape[1]))
    stream = model.stream(IDS[:, :3], 5)
    assert read == []
    next(stream), next(stream)
    assert read == [3, 1]


def test_a_stream_leaves_the_world_alone():
    "Between tokens gradients are on, and what is done to a token, or drawn elsewhere, does not change the next."
    model = awake("euler")
    model.requires_grad_(True)
    tokens, others = [], model.stream(IDS[:, :3], 6, seed=8)
    for token in model.stream(IDS[:, :3], 6, 2.0, seed=5):
        tokens.append(token.clone())
        assert torch.is_grad_enabled() and not token.requires_grad
        torch.rand(3), next(others)
        token.fill_(0)
    assert torch.equal(torch.cat([IDS[:, :3], *tokens], 1), model.generate(IDS[:, :3], 6, 2.0, seed=5))


@pytest.mark.parametrize("slide", [False, True])
def test_stop(slide):
    "Each row ends with its first stop token, is filled with it, and all end when the last has."
    model, prompt = awake("leapfrog"), IDS[:, :2]
    free = model.generate(prompt, 10, 3.0, seed=1, slide=slide)
    ends = {}
    for stop in range(17):
        text = model.generate(prompt, 10, 3.0, stop=stop, seed=1, slide=slide)
        assert torch.equal(text[:, :2], prompt)
        for row in text[:, 2:].tolist():
            if stop in row:
                assert set(row[row.index(stop) :]) == {stop}
        unstopped = (text[:, 2:] != stop).all(1)
        last = max(row.index(stop) if stop in row else 9 for row in text[:, 2:].tolist())
        assert text.shape[1] == 2 + last + 1 and (text.shape[1] == 12 or not unstopped.any())
        ends[stop] = text.shape[1]
        first = min(row.index(stop) if stop in row else 9 for row in text[:, 2:].tolist())
        assert torch.equal(text[:, : 3 + first], free[:, : 3 + first])  # until then it is the text without a stop
    assert len(set(ends.values())) > 1  # some ended early, some did not


def test_a_stop_in_the_prompt_does_not_count():
    model = awake()
    assert model.generate(IDS[:, :4], 5, stop=IDS[0, 3].item()).shape[1] > 4


# -- weights


def test_variants_share_weights():
    "To the bit, whatever is built before, and whatever the state of the global generator."
    torch.manual_seed(1)
    first = {pre: GPT(config(pre=pre), seed=3).state_dict() for pre in VARIANTS}
    torch.manual_seed(2)
    second = {pre: GPT(config(pre=pre), seed=3).state_dict() for pre in reversed(VARIANTS)}
    force = {name: w for name, w in first["euler"].items() if ".pre." in name}
    assert len(force) == 2 * 5
    for pre, weights in first.items():
        close(dict(weights), dict(second[pre]), 0)
        own = weights if pre == "affine" else force if pre != "standard" else {}
        shared = {**own, **first["standard"]}
        close(dict(weights), {name: shared[name] for name in weights}, 0)


@every_variant
def test_construction_leaves_the_global_generator_alone(pre):
    before = torch.get_rng_state()
    GPT(config(pre=pre))
    assert torch.equal(before, torch.get_rng_state())


def test_models_built_in_several_threads():
    "Torch's generator is one for all threads; who builds waits for the other, and each model is that of its seed."
    seeds, before, pause = range(8), torch.get_rng_state(), sys.getswitchinterval()
    build = lambda seed: dict(GPT(config(), lambda d: [Scale(d), Coupling(d)], seed).state_dict())
    alone = [build(seed) for seed in seeds]
    try:
        sys.setswitchinterval(1e-6)  # the threads take turns as often as they can
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(build, seeds))
    finally:
        sys.setswitchinterval(pause)
    close(together, alone, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_a_factory_may_build_a_model_itself():
    model = GPT(config(), pre=lambda d: Coupling(d, force=Force(GPT(config()))))
    assert model(IDS).shape == (2, 12, 17)


class Force(nn.Module):
    "A force that was taken from somewhere in another model."

    def __init__(self, model):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.other = model

    def forward(self, q):
        return self.linear(q)


@every_variant
def test_double_precision_by_default(pre):
    "A model that is built in double precision runs in it, coupled or not."
    torch.set_default_dtype(torch.float64)
    try:
        model = GPT(config(pre=pre))
        assert {p.dtype for p in model.parameters()} == {model(IDS).dtype} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in GPT(config(pre=pre)).parameters()} == {torch.float32}


class Scale(nn.Module):
    "A pre-score module that draws a bare parameter, as modules of one's own often do."

    def __init__(self, d):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(d))

    def forward(self, q, k):
        return q * self.scale, k


def test_the_seed_decides_modules_of_ones_own_too():
    torch.manual_seed(1)
    one = GPT(config(), pre=Scale).state_dict()
    torch.manual_seed(2)
    close(dict(one), dict(GPT(config(), pre=Scale).state_dict()), 0)


def test_seeds_differ_and_layers_too():
    a, b = (GPT(config(pre="euler"), seed=seed).state_dict() for seed in (0, 1))
    drawn = [name for name, w in a.items() if w.ndim == 2]
    assert [name for name in drawn if torch.equal(a[name], b[name])] == []
    assert [name for name in drawn if "blocks.0" in name and torch.equal(a[name], a[name.replace("s.0", "s.1")])] == []


def test_sizes_of_fresh_weights():
    "N(0, 0.02), into the residual stream smaller by the root of 2L; the force keeps PyTorch's own, far larger."
    model = GPT(config(pre="euler", d_model=64, d_ff=128, vocab_size=256))
    for name, w in model.named_parameters():
        if ".pre." in name or w.ndim < 2:
            continue
        std = 0.02 / (2 if name.endswith(("o_proj.weight", "down.weight")) else 1)
        assert abs(w.std().item() / std - 1) < 5 / (2 * w.numel()) ** 0.5, name  # five standard errors
    for pre in (block.attn.pre[0] for block in model.blocks):
        assert 0.9 / 4 < pre.force.hidden.weight.abs().max() <= 1 / 4  # uniform up to 1 / sqrt(d) with d = 16
        assert pre.force.hidden.bias.any() and pre.dt == 0.1


@every_variant
@pytest.mark.parametrize("n_kv_heads", [2, None])
@torch.no_grad()
def test_a_step_of_zero_is_the_standard_model(pre, n_kv_heads):
    options = {} if pre in ("standard", "affine") else {"dt": 0.0, "n": 2} if pre in COUPLED else {"dt": 0.0}
    model = GPT(config(pre=pre, pre_options=options, n_kv_heads=n_kv_heads))
    close(model(IDS), GPT(config(n_kv_heads=n_kv_heads))(IDS), 0)


@pytest.mark.parametrize("name", presets)
def test_parameters_of_the_presets(name):
    "By a formula: embedding, four matrices of attention, three of the feed-forward network, norms; and the coupling."
    c = presets[name]
    V, D, L, F_, d = c.vocab_size, c.d_model, c.n_layers, c.width, c.d_model // c.n_heads
    plain = V * D + L * (4 * D * D + 3 * D * F_ + 2 * D) + D
    assert count_parameters(c) == plain
    for pre in ("leapfrog", "query_mlp"):
        assert count_parameters(replace(c, pre=pre)) == plain + L * (2 * (d * d + d) + 1)


@pytest.mark.parametrize("name", ["60M", "150M", "350M", "455M"])
def test_inferred_presets_have_the_paper_s_totals(name):
    assert abs(count_parameters(presets[name]) / 1e6 / float(name[:-1]) - 1) < 0.02


def test_the_paper_s_overhead():
    plain, coupled = (count_parameters(replace(presets["60M"], pre=pre)) for pre in ("standard", "leapfrog"))
    assert coupled - plain == 66_568 and round(100 * (coupled - plain) / plain, 2) == 0.11


@every_variant
@pytest.mark.parametrize("n_kv_heads", [1, None])
def test_counting_makes_no_weights(pre, n_kv_heads):
    shape, state = config(pre=pre, n_kv_heads=n_kv_heads), torch.get_rng_state()
    assert count_parameters(shape) == n_parameters(GPT(shape))
    assert torch.equal(state, torch.get_rng_state())


def test_presets_fit_the_config():
    assert list(presets) == ["tiny", "small", "60M", "150M", "350M", "455M"]
    assert all(c.d_model // c.n_heads == 64 and c.pre == "standard" for c in presets.values())


# -- variants, and those of one's own


@every_variant
def test_a_name_is_the_integrator_of_that_name(pre):
    modules = [module for block in GPT(config(pre=pre)).blocks for module in block.attn.pre]
    steps = [module.step for module in modules if type(module) is Coupling]
    assert steps == ([getattr(integrators, pre)] * 2 if pre in COUPLED else [])
    assert len(modules) == (0 if pre == "standard" else 2)


def test_options_reach_every_layer():
    model = GPT(config(pre="rk4", pre_options={"n": 3, "dt": 0.25}))
    assert [(block.attn.pre[0].n, block.attn.pre[0].dt.item()) for block in model.blocks] == [(3, 0.25)] * 2


def test_options_are_the_configuration_s_own():
    "What was given, shared or handed out may change; a configuration, a preset and a model do not."
    options = {"n": 2}
    one = config(pre="euler", pre_options=options)
    options["n"] = 3
    other = replace(one)
    other.pre_options["n"] = 4
    model = GPT(one)
    config_to_dict(one)["pre_options"]["n"] = 5
    as_dict = config_to_dict(one)
    config_from_dict(as_dict).pre_options["n"] = 6
    assert one.pre_options == as_dict["pre_options"] == {"n": 2}
    one.pre_options["n"] = 7
    assert model.config.pre_options == {"n": 2} and model.blocks[0].attn.pre[0].n == 2
    replace(presets["tiny"]).pre_options["n"] = 2
    assert presets["tiny"].pre_options == {}


@every_variant
def test_options_that_a_variant_has_not(pre):
    "Already the configuration refuses them: unknown ones, the head width, and what makes the variant this variant."
    fixed = getattr(variants[pre], "keywords", {})
    for options in ({"steps": 2}, {"d": 2}, *({name: "k"} for name in fixed)):
        refuses(lambda options=options: config(pre=pre, pre_options=options), "pre_options", repr(pre), *options)
    if pre not in (*COUPLED, "affine"):
        refuses(lambda: config(pre=pre, pre_options={"n": 2}), "pre_options", "'n'")


def test_a_factory_is_called_with_the_head_width_once_a_layer():
    widths = []
    model = GPT(config(), pre=lambda d: widths.append(d) or Coupling(d, leapfrog, force=PotentialForce(d)))
    assert widths == [4, 4]
    assert all(isinstance(block.attn.pre[0].force, PotentialForce) for block in model.blocks)
    with torch.no_grad():
        cache = KVCache(12)
        close(torch.cat([model(t, cache) for t in IDS.split(1, 1)], 1), model(IDS), 1e-4)


def test_a_factory_gives_the_same_weights_as_a_name():
    named, made = (
        GPT(config(pre="leapfrog", pre_options={"n": 2})),
        GPT(config(), pre=partial(Coupling, step=leapfrog, n=2)),
    )
    close(dict(named.state_dict()), dict(made.state_dict()), 0)
    close(named(IDS), made(IDS), 0)


def test_a_factory_may_give_several():
    model = GPT(config(), pre=lambda d: [Coupling(d), QueryMLP(d)])
    assert model(IDS).shape == (2, 12, 17) and [len(block.attn.pre) for block in model.blocks] == [2, 2]


# -- displacements


@pytest.mark.parametrize("n_kv_heads", [None, 2])
@torch.no_grad()
def test_displacements_of_euler(n_kv_heads):
    "dt|k|/|q| and dt|f|/|k|, here for the first layer, whose input we know."
    model = awake("euler", n_kv_heads=n_kv_heads)
    rows, attn = model.displacements(IDS), model.blocks[0].attn
    x = model.blocks[0].norm1(model.embed(IDS))
    q, k = split_heads(attn.q_proj(x), 4), split_heads(attn.k_proj(x), n_kv_heads or 4)
    mean = q.unflatten(1, (k.shape[1], -1)).mean(2)
    moved = (
        0.5 * k.repeat_interleave(4 // k.shape[1], 1).norm() / q.norm(),
        0.5 * attn.pre[0].force(mean).norm() / k.norm(),
    )
    assert [set(row) for row in rows] == [{"dt", "q", "k"}] * 2 and rows[0]["dt"] == 0.5
    assert (rows[0]["q"], rows[0]["k"]) == pytest.approx(tuple(map(float, moved)))


def test_displacements_of_the_others():
    assert GPT(config()).displacements(IDS) == []
    assert all(row["q"] > 0 and row["k"] == 0 for row in GPT(config(pre="query_mlp")).displacements(IDS))
    still = GPT(config(pre="rk4", pre_options={"dt": 0.0}))
    assert still.displacements(IDS) == [{"dt": 0.0, "q": 0.0, "k": 0.0}] * 2
    assert not any(module._forward_hooks for module in still.modules())


def test_displacements_of_shared_dynamics():
    "One module in every layer still gives one row a layer."
    one = Coupling(4)
    assert len(GPT(config(), pre=lambda d: one).displacements(IDS)) == 2


@pytest.mark.parametrize("parts", [lambda model: [model], lambda model: model.blocks], ids=["model", "blocks"])
def test_displacements_of_a_compiled_model(parts):
    "Compiled code does not see hooks that come later; the answer must not be an empty list."
    model = GPT(config(pre="leapfrog"))
    expected = model.displacements(IDS)
    for part in parts(model):
        part.compile(backend="eager")
    with torch.no_grad():
        model(IDS)
    assert model.displacements(IDS) == expected


# -- shared keys


def grouped(n_kv_heads, **options):
    "A coupling with a strong step, and q and k for four query heads."
    torch.manual_seed(0)
    q, k = rand(2, 4, 5, 6, seed=1), rand(2, n_kv_heads, 5, 6, seed=2)
    return Coupling(6, dt=0.7, **options).double().requires_grad_(False), q, k


def backwards(coupling):
    back = copy.deepcopy(coupling)
    back.dt.neg_()
    return back


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("step", [leapfrog, leapfrog_dkd])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_reversible_with_shared_keys(n_kv_heads, step, n):
    coupling, q, k = grouped(n_kv_heads, step=step, n=n)
    moved = coupling(q, k)
    assert (moved[0] - q).abs().max() > 0.1 and (moved[1] - k).abs().max() > 0.1
    close(backwards(coupling)(*moved), (q, k), 1e-12)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_euler_is_not_reversible(n_kv_heads):
    coupling, q, k = grouped(n_kv_heads)
    assert (backwards(coupling)(*coupling(q, k))[1] - k).abs().max() > 1e-3


@pytest.mark.parametrize("step", [symplectic_euler, leapfrog, leapfrog_dkd])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_volume_with_shared_keys(n_kv_heads, step):
    "det J = 1: of all queries and keys of a token, and of the means of the queries with their keys."
    coupling, q, k = grouped(n_kv_heads, step=step)
    q, k = q[:1, :, :1], k[:1, :, :1]  # one token: each moves by itself
    spread = q.unflatten(1, (n_kv_heads, -1)) - q.unflatten(1, (n_kv_heads, -1)).mean(2, keepdim=True)

    def whole(flat):
        moved = coupling(flat[: q.numel()].view_as(q), flat[q.numel() :].view_as(k))
        return torch.cat([t.flatten() for t in moved])

    def means(flat):
        mean, key = flat.view(2, *k.shape)
        moved, key = coupling((mean.unsqueeze(2) + spread).flatten(1, 2), key)
        return torch.cat([moved.unflatten(1, (n_kv_heads, -1)).mean(2).flatten(), key.flatten()])

    one = torch.tensor(1.0, dtype=torch.float64)
    mean = q.unflatten(1, (n_kv_heads, -1)).mean(2)
    for system, point in (
        (whole, torch.cat([q.flatten(), k.flatten()])),
        (means, torch.cat([mean.flatten(), k.flatten()])),
    ):
        close(torch.linalg.det(torch.func.jacrev(system)(point)), one, 1e-10)  # a product of some ten factors


def test_euler_does_not_keep_volume():
    coupling, q, k = grouped(2)
    whole = lambda flat: torch.cat(
        [t.flatten() for t in coupling(flat[:24].view(1, 4, 1, 6), flat[24:].view(1, 2, 1, 6))]
    )
    det = torch.linalg.det(torch.func.jacrev(whole)(torch.cat([q[:1, :, :1].flatten(), k[:1, :, :1].flatten()])))
    assert abs(det - 1) > 1e-3


@every_variant
@torch.no_grad()
def test_one_query_a_key_is_the_ordinary_model(pre):
    close(awake(pre, n_kv_heads=4)(IDS), awake(pre, n_kv_heads=None)(IDS), 0)


@every_variant
@torch.no_grad()
def test_equal_queries_share_a_key_as_if_each_had_its_own(pre):
    "Two heads with one query move as their mean does, so sharing their key and value changes nothing."
    shared, own = awake(pre, n_kv_heads=2), awake(pre, n_kv_heads=4)
    few, many = shared.state_dict(), own.state_dict()
    for name, w in few.items():
        if "q_proj" in name:  # the queries of heads 0 and 2, each twice
            w.copy_(w.unflatten(0, (2, 2, 4))[:, :1].expand(2, 2, 4, 16).flatten(0, 2))
        many[name] = w.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1) if w.shape == (8, 16) else w
    own.load_state_dict(many)
    close(shared(IDS), own(IDS), 1e-12)
    assert (awake(pre, n_kv_heads=2)(IDS) - shared(IDS)).abs().max() > 0.1  # and not for other queries


# -- saved models


def saved(tmp_path, model=None, **options):
    return save_model(tmp_path / "runs" / "best", model or awake(**options))


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_saved_and_loaded(tmp_path, pre, dtype):
    model = awake(pre, dtype)
    folder, state = saved(tmp_path, model), torch.get_rng_state()
    twin = load_model(folder).requires_grad_(False)  # the same kernel, and so the same rounding, as the model
    assert torch.equal(state, torch.get_rng_state())
    assert twin.config == model.config
    close(dict(twin.state_dict()), dict(model.state_dict()), 0)
    close(twin(IDS), model(IDS), 0)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]  # nothing is left over


def test_a_saved_configuration_is_readable_and_whole(tmp_path):
    model = GPT(config(pre="rk4", pre_options={"n": 2, "dt": 0.05}))
    text = (saved(tmp_path, model) / "config.json").read_text()
    assert text.endswith("}\n") and '"pre": "rk4"' in text
    assert config_from_dict(json.loads(text)) == model.config == config_from_dict(config_to_dict(model.config))


@pytest.mark.parametrize("name", presets)
def test_presets_survive_json(name):
    assert config_from_dict(json.loads(json.dumps(config_to_dict(presets[name])))) == presets[name]


def test_what_a_configuration_leaves_out_keeps_its_default():
    assert config_from_dict({"pre": "euler"}) == GPTConfig(pre="euler") and config_from_dict({}) == GPTConfig()


class Still(nn.Module):
    "A pre-score module without weights."

    def __init__(self, d):
        super().__init__()

    def forward(self, q, k):
        return q, k


class Counting(Scale):
    "A pre-score module with a buffer of whole numbers."

    def __init__(self, d):
        super().__init__(d)
        self.register_buffer("calls", torch.tensor(3))


@pytest.mark.parametrize("pre", [Scale, Still, Counting, lambda d: [Still(d), Coupling(d, leapfrog)]])
def test_saved_and_loaded_with_modules_of_ones_own(tmp_path, pre):
    model = GPT(config(), pre).to(torch.float64)
    folder = saved(tmp_path, model)
    twin = load_model(folder, pre)
    close(dict(twin.state_dict()), dict(model.state_dict()), 0)
    close(twin(IDS), model(IDS), 0)
    refuses(lambda: load_model(folder), type(model.blocks[0].attn.pre[0]).__name__, "`pre`")
    refuses(lambda: load_model(folder, QueryMLP), "QueryMLP", "`pre`")


@pytest.mark.parametrize(
    "other",
    [
        partial(Coupling, step=leapfrog),
        partial(Coupling, n=2),
        lambda d: [Coupling(d), Still(d)],
        partial(Coupling, step=partial(integrators.euler, n=1)),
    ],
)
def test_another_function_of_the_same_weights_is_refused(tmp_path, other):
    folder = saved(tmp_path, GPT(config(), Coupling))
    refuses(
        lambda: load_model(folder, other),
        "block 0",
        "step=euler, n=1",
        "`pre`",
        GPT(config(), other).blocks[0].attn.pre[0].extra_repr()[:12],
    )


def test_every_block_is_compared(tmp_path):
    def last_differs(step):
        steps = iter([integrators.euler, step])
        return lambda d: Coupling(d, next(steps))

    folder = saved(tmp_path, GPT(config(), last_differs(leapfrog)))
    load_model(folder, last_differs(leapfrog))
    refuses(lambda: load_model(folder, last_differs(symplectic_euler)), "block 1", "step=leapfrog", "symplectic_euler")


def test_what_changes_no_function_is_not_compared(tmp_path):
    "The lean setting, and the place in memory of a step that has no name."
    nameless = lambda: partial(Coupling, step=partial(leapfrog_by_another_name()))
    folder = saved(tmp_path, model := GPT(config(), nameless()))
    close(load_model(folder, partial(nameless(), lean=True))(IDS), model(IDS), 0)


def leapfrog_by_another_name():
    "Another function object each time."

    def step(q, k, force, dt, n=1):
        return leapfrog(q, k, force, dt, n)

    return step


def test_saved_and_loaded_with_a_shared_module(tmp_path):
    one, other = Coupling(4), Coupling(4)
    model = GPT(config(), pre=lambda d: one)
    twin = load_model(saved(tmp_path, model), pre=lambda d: other)
    close(twin(IDS), model(IDS), 0)
    assert n_parameters(twin) == n_parameters(model)


def test_saving_again_replaces(tmp_path):
    folder = saved(tmp_path, pre="euler")
    model = awake("leapfrog", n_kv_heads=1)
    save_model(folder, model)
    close(load_model(str(folder))(IDS), model(IDS), 0)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_failed_write_leaves_the_older_model(tmp_path, monkeypatch, file):
    "The disk is full at either file, for another model of the same shape: what was there still loads, or says why not."
    old = awake("euler")
    folder = saved(tmp_path, old)
    real = os.replace
    monkeypatch.setattr(
        os, "replace", lambda a, b: real(a, b) if not str(b).endswith(file) else (_ for _ in ()).throw(OSError("full"))
    )
    new = awake("euler")
    new.norm.weight.mul_(2)
    with pytest.raises(OSError, match="full"):
        save_model(folder, new)
    monkeypatch.undo()
    close(load_model(folder)(IDS), (new if file == "config.json" else old)(IDS), 0)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_failed_write_over_another_configuration(tmp_path, monkeypatch, file):
    "Whichever file could not be written: the weights that are there load, as the model that they are."
    old, new = awake("euler"), awake("leapfrog", n_kv_heads=1)
    folder, real = saved(tmp_path, old), os.replace
    monkeypatch.setattr(
        os, "replace", lambda a, b: real(a, b) if not str(b).endswith(file) else (_ for _ in ()).throw(OSError("full"))
    )
    with pytest.raises(OSError, match="full"):
        save_model(folder, new)
    monkeypatch.undo()
    expected = new if file == "config.json" else old
    twin = load_model(folder)
    assert twin.config == expected.config
    close(twin(IDS), expected(IDS), 0)
    save_model(folder, new)
    close(load_model(folder)(IDS), new(IDS), 0)


def test_a_wrong_configuration_is_repaired_as_its_error_says(tmp_path):
    model = awake("euler")
    folder = saved(tmp_path, model)
    spoil(folder, "edited configuration")
    refuses(lambda: load_model(folder), "config.json", "delete it")
    (folder / "config.json").unlink()
    twin = load_model(folder)
    assert twin.config == model.config
    close(twin(IDS), model(IDS), 0)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def spoil(folder, what):
    "Damage a saved model."
    weights, settings = folder / "model.safetensors", folder / "config.json"
    whole, text = weights.read_bytes(), settings.read_text()
    other = lambda **options: save_model(folder / "other", awake(**options))
    match what:
        case "truncated":
            weights.write_bytes(whole[: len(whole) // 2])
        case "without its last byte":
            weights.write_bytes(whole[:-1])
        case "empty":
            weights.write_bytes(b"")
        case "a pickle":
            weights.write_bytes(pickle.dumps(Bomb()))
        case "a torch file":
            torch.save({"embed.weight": Bomb()}, weights)
        case "foreign":
            weights.write_bytes(safetensors_bytes({"weight": torch.ones(2)}))
        case "a checkpoint":
            weights.write_bytes(
                safetensors_bytes({"a": torch.ones(2)}, {"coupled_qk": "checkpoint", "step": "1", "info": "{}"})
            )
        case "of another shape":
            shutil.copy(other(d_ff=32) / "model.safetensors", weights)
        case "of another variant":
            shutil.copy(other(pre="leapfrog") / "model.safetensors", weights)
        case "edited configuration":
            settings.write_text(text.replace('"euler"', '"leapfrog"'))
        case "unknown key":
            settings.write_text(text.replace('"pre"', '"dropout": 0.1, "pre"'))
        case "option of another variant":
            settings.write_text(text.replace('"pre_options": {}', '"pre_options": {"query": "k"}'))
        case "value of the wrong kind":
            settings.write_text(text.replace('"n_layers": 2', '"n_layers": "2"'))
        case "truncated configuration":
            settings.write_text(text[:-20])
        case "configuration in binary":
            settings.write_bytes(b"\xff\xfe\xfa\x00\x01")
        case "configuration of a list":
            settings.write_text("[1, 2]")
        case "nested configuration":
            settings.write_text("[" * 100_000)


SPOILT = {
    "truncated": ("model.safetensors", "not a whole safetensors file"),
    "without its last byte": ("model.safetensors", "not a whole safetensors file"),
    "empty": ("model.safetensors", "not a whole safetensors file"),
    "a pickle": ("model.safetensors", "not a whole safetensors file"),
    "a torch file": ("model.safetensors", "not a whole safetensors file"),
    "foreign": ("model.safetensors", "save_model"),
    "a checkpoint": ("model.safetensors", "save_model"),
    "of another shape": ("config.json", "saved with"),
    "of another variant": ("config.json", "saved with"),
    "edited configuration": ("config.json", "saved with"),
    "unknown key": ("config.json", "'dropout'", "d_model"),
    "option of another variant": ("config.json", "pre_options", "'query'"),
    "value of the wrong kind": ("config.json", "n_layers", "'2'"),
    "truncated configuration": ("config.json", "does not hold a configuration"),
    "configuration in binary": ("config.json", "does not hold a configuration"),
    "configuration of a list": ("config.json", "dict", "list"),
    "nested configuration": ("config.json", "does not hold a configuration"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_spoilt_models(tmp_path, what):
    folder = saved(tmp_path, pre="euler")
    spoil(folder, what)
    refuses(lambda: load_model(folder), *SPOILT[what])


def rewritten(folder, change):
    "A model's file whose tensors were changed, with the same notes beside them."
    with safe_open(folder / "model.safetensors", framework="pt") as f:
        meta, tensors = f.metadata(), {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    change(tensors)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, meta))


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda t: t.pop("norm.weight"), ("norm.weight is nothing", "(16,)")),
        (lambda t: t.pop("embed.weight"), ("embed.weight is nothing", "(17, 16)")),
        (lambda t: t.update(extra=torch.ones(1)), ("extra is (1,)", "expected nothing")),
        (lambda t: t.update({"norm.weight": torch.ones(15).double()}), ("norm.weight is (15,)", "(16,)")),
        (lambda t: t.update({"norm.weight": torch.ones(1, 16).double()}), ("norm.weight is (1, 16)", "(16,)")),
        (lambda t: t.update({"norm.weight": torch.ones(16)}), ("norm.weight", "float32", "float64")),
        (lambda t: t.update({"norm.weight": torch.ones(16).long()}), ("norm.weight", "int64", "float64")),
        (lambda t: t.update({"embed.weight": torch.ones(17, 16).long()}), ("embed.weight", "int64", "float64")),
    ],
)
def test_weights_that_do_not_fit(tmp_path, change, words):
    folder = saved(tmp_path, pre="euler")
    rewritten(folder, change)
    refuses(lambda: load_model(folder), "model.safetensors", "does not fit", *words)


@pytest.mark.parametrize("file", ["model.safetensors", "both", "folder"])
def test_missing_files(tmp_path, file):
    folder = saved(tmp_path)
    if file == "both":  # a folder of another library
        (folder / "config.json").unlink(), (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif file == "folder":
        shutil.rmtree(folder)
    else:
        (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match="is not there: a saved model is"):
        load_model(folder)


def test_a_folder_in_a_file_s_place(tmp_path):
    folder = saved(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(FileNotFoundError, match="model.safetensors is not there"):
        load_model(folder)


def mixed():
    model = awake("euler", torch.float32)
    model.norm.double()
    return model


# -- half precision, copies, compilation


@every_variant
def test_bfloat16_autocast(pre):
    "Scores to two digits: bfloat16 has eight bits. Weights and dt stay float32, and so do their gradients."
    model = GPT(config(pre=pre))
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(IDS)
        text = model.generate(IDS[:, :4], 4, temperature=0)
        F.cross_entropy(scores.flatten(0, 1).float(), IDS.flatten()).backward()
    close(scores.float(), model(IDS), 2**-6)
    assert text.shape == (2, 8)
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_throughout(dtype):
    model = GPT(config(pre="leapfrog"))
    expected = model(IDS)
    model.to(dtype)
    close(model(IDS).float(), expected, 2**-6)
    assert model.generate(IDS[:, :4], 4).shape == (2, 8)


def _reloaded(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    twin = GPT(model.config, seed=9)
    twin.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    return twin


@every_variant
@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), _reloaded],
    ids=["deepcopy", "pickle", "state_dict"],
)
def test_copies(pre, again):
    model = GPT(config(pre=pre, pre_options={"n": 2} if pre in COUPLED else {}))
    twin = again(model)
    close(twin(IDS), model(IDS), 0)
    assert twin.config == model.config and str(twin) == str(model)
    with torch.no_grad():
        twin.norm.weight.mul_(2)
    assert not torch.equal(twin(IDS), model(IDS))


quiet = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, from inside torch.compile


@quiet
@pytest.mark.parametrize("pre", ["standard", "rk4"])
def test_traced_whole(pre):
    "No graph break, and the same scores and gradients; no compiler is needed for this."
    model = GPT(config(pre=pre, n_layers=1))
    traced = torch.compile(model, backend="aot_eager", fullgraph=True)
    scores = [f(IDS) for f in (model, traced)]
    close(*scores, 1e-5)  # the same kernels, but products may be folded otherwise
    close(*(torch.autograd.grad(s.square().sum(), model.parameters()) for s in scores), 1e-5)


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler here"
)
@quiet
@torch.no_grad()
def test_compiled():
    model = GPT(config(pre="leapfrog", n_layers=1))
    quick = {"compile_threads": 1, "cpp.simdlen": 0}  # no pool of workers, no probing for vector units
    close(torch.compile(model, fullgraph=True, options=quick)(IDS), model(IDS), 1e-5)  # fused kernels round otherwise


# -- bad input

MODEL = GPT(config(pre="euler"))
LOGITS = torch.zeros(2, 5)


def read(ids, cache):
    with torch.no_grad():
        return MODEL(ids, cache)


def after(first, then):
    "Read rows of one batch, then of another, with one cache."
    cache = KVCache(12)
    read(first, cache)
    return read(then, cache)


BAD = {
    "unknown variant": (lambda: config(pre="verlet"), "variant", "'verlet'", "leapfrog_dkd"),
    "variant by class": (lambda: config(pre=Coupling), "variant", "Coupling", "euler"),
    "variants in a list": (lambda: config(pre=["euler", "leapfrog"]), "variant", "'leapfrog'", "standard"),
    "unknown score": (lambda: config(score="linear"), "score", "'linear'", "softmax"),
    "no layers": (lambda: config(n_layers=0), "n_layers", "positive integer", "0"),
    "half a layer": (lambda: config(n_layers=1.5), "n_layers", "positive integer", "1.5"),
    "context as text": (lambda: config(context="8"), "context", "positive integer", "'8'"),
    "no vocabulary": (lambda: config(vocab_size=None), "vocab_size", "positive integer", "None"),
    "heads do not divide": (lambda: config(d_model=10), "d_model", "n_heads", "10 and 4"),
    "groups do not divide": (lambda: config(n_kv_heads=3), "n_heads", "n_kv_heads", "4 and 3"),
    "odd head width": (lambda: config(d_model=12), "head width", "even", "3"),
    "options of the standard": (lambda: config(pre_options={"n": 2}), "'standard'", "no options", "'n': 2"),
    "unknown option": (lambda: GPT(config(pre="euler", pre_options={"steps": 2})), "steps"),
    "option of another": (lambda: GPT(config(pre="query_mlp", pre_options={"n": 2})), "'n'"),
    "option that is alive": (
        lambda: config(pre="euler", pre_options={"force": PotentialForce(4)}),
        "pre_options",
        "force",
    ),
    "option that is another variant": (
        lambda: config(pre="euler", pre_options={"step": leapfrog}),
        "pre_options",
        "step",
    ),
    "options missing": (lambda: config(pre="euler", pre_options=None), "pre_options", "dict", "NoneType"),
    "n = 0": (lambda: GPT(config(pre="euler", pre_options={"n": 0})), "n, the number of steps", "0"),
    "dt is nan": (lambda: GPT(config(pre="euler", pre_options={"dt": math.nan})), "dt", "finite", "nan"),
    "name for a config": (lambda: GPT("tiny"), "config", "GPTConfig", "str"),
    "dict for a config": (lambda: GPT({"n_layers": 2}), "config", "GPTConfig", "dict"),
    "module for a factory": (lambda: GPT(config(), pre=Coupling(4)), "pre", "Coupling"),
    "factory that returns nothing": (lambda: GPT(config(), pre=lambda d: None), "pre must", "head width", "None"),
    "ids elsewhere": (lambda: MODEL(IDS.to("meta")), "ids", "cpu", "meta"),
    "prompt elsewhere": (lambda: MODEL.stream(IDS[:, :3].to("meta"), 2), "prompt", "cpu", "meta"),
    "displacements elsewhere": (lambda: MODEL.displacements(IDS.to("meta")), "ids", "cpu", "meta"),
    "cache as dict": (lambda: read(IDS, {}), "cache", "KVCache", "dict"),
    "cache as list": (lambda: read(IDS, [1]), "cache", "KVCache", "list"),
    "temperature above float32": (lambda: sample(LOGITS, 1e300), "temperature", "finite", "1e+300"),
    "name for a factory": (lambda: GPT(config(), pre="euler"), "pre", "str"),
    "pre given twice": (lambda: GPT(config(pre="euler"), pre=Coupling), "pre", "'euler'"),
    "factory of another width": (lambda: GPT(config(), pre=lambda d: Coupling(8))(IDS), "q must", "width 8", "4"),
    "seed": (lambda: GPT(config(), seed=1.0), "seed", "integer", "float"),
    "ids as list": (lambda: MODEL([[1, 2]]), "ids", "int64", "list"),
    "ids as array": (lambda: MODEL(np.ones((1, 2), int)), "ids", "tensor", "ndarray"),
    "ids as bytes": (lambda: MODEL(IDS.byte()), "ids", "int64", "uint8"),
    "ids as floats": (lambda: MODEL(IDS.float()), "ids", "int64", "float32"),
    "ids rank": (lambda: MODEL(IDS[0]), "ids", "(B, T)", "(12,)"),
    "ids above": (lambda: MODEL(IDS + 10), "ids", "16", "26"),
    "ids below": (lambda: MODEL(IDS - 17), "ids", "16", "-17"),
    "no ids": (lambda: MODEL(IDS[:, :0]), "ids", "(B, T)", "(2, 0)"),
    "displacements of nothing": (lambda: MODEL.displacements(IDS[:, :0]), "ids", "(2, 0)"),
    "empty prompt": (lambda: MODEL.generate(IDS[:, :0], 2), "(B, T)", "(2, 0)"),
    "prompt rank": (lambda: MODEL.generate(IDS[0], 2), "prompt", "(B, T)", "(12,)"),
    "prompt as text": (lambda: MODEL.generate("abc", 2), "prompt", "int64", "str"),
    "prompt above": (lambda: MODEL.generate(IDS[:, :3] + 17, 2), "prompt", "16", "30"),
    "n of tokens = 0": (lambda: MODEL.generate(IDS[:, :3], 0), "n, the number of tokens", "positive integer", "0"),
    "n of tokens < 0": (lambda: MODEL.generate(IDS[:, :3], -2), "n, the number of tokens", "positive integer", "-2"),
    "n of tokens = 1.5": (
        lambda: MODEL.generate(IDS[:, :3], 1.5),
        "n, the number of tokens",
        "positive integer",
        "1.5",
    ),
    "temperature < 0": (lambda: MODEL.generate(IDS[:, :3], 2, -1.0), "temperature", "negative", "-1"),
    "temperature nan": (lambda: MODEL.generate(IDS[:, :3], 2, math.nan), "temperature", "nan"),
    "temperature infinite": (lambda: MODEL.generate(IDS[:, :3], 2, math.inf, 2), "temperature", "inf"),
    "temperature as text": (lambda: sample(LOGITS, "1"), "temperature", "number", "str"),
    "top_k = 0": (lambda: MODEL.generate(IDS[:, :3], 2, top_k=0), "top_k", "at least 1", "0"),
    "top_k = 1.5": (lambda: sample(LOGITS, top_k=1.5), "top_k", "integer", "float"),
    "seed of draws": (lambda: MODEL.generate(IDS[:, :3], 2, seed=None), "seed", "integer", "NoneType"),
    "unknown name in a configuration": (lambda: config_from_dict({"layers": 2}), "'layers'", "n_layers"),
    "configuration as text": (lambda: config_from_dict("tiny"), "configuration", "dict", "str"),
    "saving another module": (lambda: save_model("never", nn.Linear(2, 2)), "model", "GPT", "Linear"),
    "saving mixed precision": (lambda: save_model("never", mixed()), "one dtype", "float32", "float64"),
    "logits rank": (lambda: sample(LOGITS[0], top_k=2), "logits", "(B, V)", "(5,)"),
    "logits of all positions": (lambda: sample(LOGITS[None]), "logits", "(B, V)", "(1, 2, 5)"),
    "logits nan": (lambda: sample(LOGITS * math.nan), "logits", "finite", "nan"),
    "one nan": (lambda: sample(LOGITS.index_fill(1, torch.tensor(2), math.nan)), "logits", "finite", "nan"),
    "logits infinite": (lambda: sample(LOGITS.index_fill(1, torch.tensor(2), math.inf)), "logits", "finite", "inf"),
    "no token possible": (lambda: sample(LOGITS - math.inf, top_p=0.5), "logits", "finite", "-inf"),
    "logits of nothing": (lambda: sample(LOGITS[:, :0]), "logits", "V >= 1", "(2, 0)"),
    "logits of integers": (lambda: sample(LOGITS.long()), "logits", "floating", "int64"),
    "logits as list": (lambda: next_probabilities([[0.0]]), "logits", "floating", "list"),
    "top_p = 0": (lambda: sample(LOGITS, top_p=0), "top_p", "above 0", "0"),
    "top_p > 1": (lambda: MODEL.stream(IDS[:, :3], 2, top_p=1.1), "top_p", "at most 1", "1.1"),
    "top_p in per cent": (lambda: MODEL.stream(IDS[:, :3], 2, top_p=90), "top_p", "at most 1", "90"),
    "top_p nan": (lambda: sample(LOGITS, top_p=math.nan), "top_p", "nan"),
    "top_p as text": (lambda: sample(LOGITS, top_p="0.9"), "top_p", "number", "str"),
    "stop above": (lambda: MODEL.stream(IDS[:, :3], 2, stop=17), "stop", "0 ... 16", "17"),
    "stop below": (lambda: MODEL.stream(IDS[:, :3], 2, stop=-1), "stop", "0 ... 16", "-1"),
    "stop as text": (lambda: MODEL.generate(IDS[:, :3], 2, stop="."), "stop", "integer", "str"),
    "stream too long": (lambda: MODEL.stream(IDS, 1), "context", "12", "13", "slide"),
    "stream of no prompt": (lambda: MODEL.stream(None, 1), "prompt", "int64", "NoneType"),
    "seed of a stream": (lambda: MODEL.stream(IDS[:, :3], 1, seed="a"), "seed", "integer", "str"),
    "cache too small": (lambda: read(IDS[:, :4], KVCache(3)), "context", "3", "4"),
    "cache of nothing": (lambda: KVCache(0), "context", "positive integer", "0"),
    "cache of another batch": (lambda: after(IDS[:1, :2], IDS[:, :2]), "cache", "1", "2"),
    "cache of another batch, smaller": (lambda: after(IDS[:, :2], IDS[:1, :2]), "cache", "2", "1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    refuses(*BAD[case])
