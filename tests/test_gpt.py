"""The GPT hides the future, reads the same with a cache and without, shares weights between variants, and refuses in words."""

import copy, io, math, pickle, shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from test_attention import close, rand, refuses, slow_layer
from torch import nn
from torch.nn import functional as F

from coupled_qk import integrators
from coupled_qk.attention import split_heads
from coupled_qk.coupling import Coupling, QueryMLP
from coupled_qk.gpt import GPT, GPTConfig, KVCache, n_parameters, presets, sample, variants
from coupled_qk.integrators import PotentialForce, leapfrog

VARIANTS = list(variants)
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


def test_sample_follows_the_softmax():
    "Of 40,000 draws each token's share lies within four standard errors, for each temperature and top_k."
    logits, n, g = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), 40_000, torch.Generator().manual_seed(0)
    for temperature, top_k in ((1.0, None), (0.5, None), (2.0, 3), (100.0, 2)):
        p = (logits / temperature).masked_fill(torch.arange(4) >= (top_k or 4), -math.inf).softmax(-1)[0]
        share = sample(logits.expand(n, 4), temperature, top_k, g).flatten().bincount(minlength=4) / n
        assert ((share - p).abs() <= 4 * (p * (1 - p) / n).sqrt()).all(), (temperature, top_k)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45])
def test_nearly_no_temperature_is_none(temperature):
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    close(sample(logits, temperature), sample(logits, 0), 0)


def test_top_k_is_never_more_than_k():
    "Also where scores are equal, which in half precision they often are."
    draws = sample(torch.zeros(500, 5), top_k=2, generator=torch.Generator().manual_seed(0))
    assert len(draws.unique()) == 2


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
        shared = first["standard"] | (force if pre != "standard" else {})
        close(dict(weights), {name: shared[name] for name in weights}, 0)


@every_variant
def test_construction_leaves_the_global_generator_alone(pre):
    before = torch.get_rng_state()
    GPT(config(pre=pre))
    assert torch.equal(before, torch.get_rng_state())


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
    options = {} if pre == "standard" else {"dt": 0.0} if pre == "query_mlp" else {"dt": 0.0, "n": 2}
    model = GPT(config(pre=pre, pre_options=options, n_kv_heads=n_kv_heads))
    close(model(IDS), GPT(config(n_kv_heads=n_kv_heads))(IDS), 0)


def test_the_paper_s_overhead():
    with torch.device("meta"):  # shapes without memory
        plain, coupled, control = (
            n_parameters(GPT(replace(presets["60M"], pre=pre))) for pre in ("standard", "leapfrog", "query_mlp")
        )
    assert round(plain / 1e6, 1) == 59.3 and coupled - plain == control - plain == 66_568
    assert round(100 * (coupled - plain) / plain, 2) == 0.11


def test_presets_fit_the_config():
    assert list(presets) == ["tiny", "small", "60M", "150M", "350M", "455M"]
    assert all(c.d_model // c.n_heads == 64 and c.pre == "standard" for c in presets.values())


# -- variants, and those of one's own


@every_variant
def test_a_name_is_the_integrator_of_that_name(pre):
    modules = [module for block in GPT(config(pre=pre)).blocks for module in block.attn.pre]
    steps = [getattr(module, "step", type(module)) for module in modules]
    assert steps == {"standard": [], "query_mlp": [QueryMLP] * 2}.get(pre, [getattr(integrators, pre, None)] * 2)


def test_options_reach_every_layer():
    model = GPT(config(pre="rk4", pre_options={"n": 3, "dt": 0.25}))
    assert [(block.attn.pre[0].n, block.attn.pre[0].dt.item()) for block in model.blocks] == [(3, 0.25)] * 2


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
    model = GPT(config(pre=pre, pre_options={} if pre in ("standard", "query_mlp") else {"n": 2}))
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
    "n of tokens = 0": (lambda: MODEL.generate(IDS[:, :3], 0), "n, the number of tokens", "at least 1", "0"),
    "n of tokens < 0": (lambda: MODEL.generate(IDS[:, :3], -2), "n, the number of tokens", "at least 1", "-2"),
    "n of tokens = 1.5": (lambda: MODEL.generate(IDS[:, :3], 1.5), "n, the number of tokens", "integer", "float"),
    "temperature < 0": (lambda: MODEL.generate(IDS[:, :3], 2, -1.0), "temperature", "negative", "-1"),
    "temperature nan": (lambda: MODEL.generate(IDS[:, :3], 2, math.nan), "temperature", "nan"),
    "temperature infinite": (lambda: MODEL.generate(IDS[:, :3], 2, math.inf, 2), "temperature", "inf"),
    "temperature as text": (lambda: sample(LOGITS, "1"), "temperature", "number", "str"),
    "top_k = 0": (lambda: MODEL.generate(IDS[:, :3], 2, top_k=0), "top_k", "at least 1", "0"),
    "top_k = 1.5": (lambda: sample(LOGITS, top_k=1.5), "top_k", "integer", "float"),
    "seed of draws": (lambda: MODEL.generate(IDS[:, :3], 2, seed=None), "seed", "integer", "NoneType"),
    "logits rank": (lambda: sample(LOGITS[0], top_k=2), "logits", "(B, V)", "(5,)"),
    "logits of all positions": (lambda: sample(LOGITS[None]), "logits", "(B, V)", "(1, 2, 5)"),
    "logits nan": (lambda: sample(LOGITS * math.nan), "logits", "nan"),
    "cache too small": (lambda: read(IDS[:, :4], KVCache(3)), "context", "3", "4"),
    "cache of nothing": (lambda: KVCache(0), "context", "positive integer", "0"),
    "cache of another batch": (lambda: after(IDS[:1, :2], IDS[:, :2]), "cache", "1", "2"),
    "cache of another batch, smaller": (lambda: after(IDS[:, :2], IDS[:1, :2]), "cache", "2", "1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    refuses(*BAD[case])
