"""Coupling in models that exist: every kind of model, attention implementation and integrator that a CPU can run.

The models are tiny and randomly initialised; their libraries are the real ones. Where nothing else is said, equal means
equal to the last bit. The ViT block is written after timm's `Attention`: timm needs torchvision, and the torchvision of the
package registry does not load beside a CPU build of torch. Where timm can be imported, its own block is tested too."""

import copy
import inspect
import shutil
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from coupled_qk.attention import MultiHeadAttention
from coupled_qk.coupling import Coupling
from coupled_qk.gpt import GPT, GPTConfig, KVCache, load_model, save_model
from coupled_qk.retrofit import (
    Retrofit,
    displacements,
    couple,
    coupled_layers,
    freeze_rest,
    save_coupling,
    steps,
    uncouple,
    unit_ratio,
)
from coupled_qk.sockets import Projections, sockets

IDS = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(1))
X = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(2))


class Block(nn.Module):
    "A ViT block's attention after timm 1.0 (Apache 2.0): packed qkv, optional norms of q and k, fused or not."

    def __init__(self, dim=32, num_heads=4, fused=True, norm=False):
        super().__init__()
        self.num_heads, self.head_dim, self.fused = num_heads, dim // num_heads, fused
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = (nn.LayerNorm(self.head_dim) if norm else nn.Identity() for _ in range(2))

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            x = (q * self.head_dim**-0.5 @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Stranger(nn.Module):
    "An attention module with names of its own."

    def __init__(self, packed=False):
        super().__init__()
        self.packed = packed
        self.wq, self.wk, self.wv = (nn.Linear(32, n) for n in (32, 16, 16))
        self.wqkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.wqkv(x).chunk(3, -1) if self.packed else (self.wq(x), self.wk(x), self.wv(x))
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)


def hugging(name, attention, **options):
    "A tiny model of transformers."
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 61}
    if name == "GPT2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **special, **options)
        kind = "LMHeadModel"
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        shared = {} if name == "Bert" else {"num_key_value_heads": 2, "head_dim": 8}
        config = getattr(transformers, f"{name}Config")(**sizes, **shared, **special, **options)
        kind = "ForMaskedLM" if name == "Bert" else "ForCausalLM"
    config._attn_implementation = attention
    return wider(getattr(transformers, f"{name}{kind}")(config).eval())


def wider(model):
    "Larger weights than a fresh model's, so that what is asked about attention shows in the outputs."
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.mul_(5)
            elif name.endswith("bias"):
                p.normal_(std=0.3)
    return model


def ours(**options):
    config = GPTConfig(vocab_size=61, context=64, n_layers=2, n_heads=4, d_model=32, n_kv_heads=2, **options)
    return GPT(config, seed=0).eval()


def torch_layer(kind, **options):
    torch.manual_seed(0)
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, **options)
        model = nn.TransformerEncoder(layer, 2)
    elif kind == "layer":
        model = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, **options)
    else:
        model = nn.MultiheadAttention(32, 4, batch_first=True, **options)
    for p in model.parameters():  # biases start at zero, and would hide what is done to them
        nn.init.normal_(p, std=0.3)
    return model.eval()


def vit(**options):
    torch.manual_seed(0)
    return nn.Sequential(Block(**options), nn.LayerNorm(32), Block(**options)).eval()


def names_of_their_own(packed=False):
    torch.manual_seed(0)
    return nn.Sequential(Stranger(packed), nn.LayerNorm(32)).eval()


def call_torch(model, X=X):
    "On the slow path, as coupled layers run."
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        out = model(X, X, X) if isinstance(model, nn.MultiheadAttention) else (model(X),)
        return out[0]
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


logits = lambda model: model(IDS).logits
FAMILIES = {  # name -> how it is made, and how it is run
    "our GPT": (ours, lambda m: m(IDS)),
    "our GPT, QK-norm": (partial(ours, qk_norm=True), lambda m: m(IDS)),
    "nn.MultiheadAttention": (partial(torch_layer, "alone"), call_torch),
    "nn.MultiheadAttention, no bias": (partial(torch_layer, "alone", bias=False), call_torch),
    "nn.TransformerEncoderLayer": (partial(torch_layer, "layer"), call_torch),
    "nn.TransformerEncoder": (partial(torch_layer, "encoder", norm_first=True), call_torch),
    **{
        f"ViT, {k}": (partial(vit, **o), lambda m: m(X))
        for k, o in {"fused": {}, "not fused": {"fused": False}, "norms": {"norm": True}}.items()
    },
    **{
        f"{name}, {attention}": (partial(hugging, name, attention), logits)
        for name in ("GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", "Bert")
        for attention in ("eager", "sdpa")
    },
}
WRITERS = [name for name in FAMILIES if name.startswith(("our", "GPT2", "Llama", "Mistral", "Qwen"))]
family = pytest.mark.parametrize("name", FAMILIES)
writer = pytest.mark.parametrize("name", WRITERS)


def make(name):
    build, run = FAMILIES[name]
    return build(), run


def move(model, dt=0.3):
    "Let the coupling act."
    for coupling in coupled_layers(model).values():
        with torch.no_grad():
            coupling.dt.fill_(dt)
    return model


def write(model, **options):
    if isinstance(model, GPT):
        return model.generate(IDS, 6, temperature=0)
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False, **options)


@torch.no_grad()
def quiet(run, model):
    return run(model)


# What couple promises


@pytest.mark.parametrize("step", steps)
@family
def test_nothing_changes_at_the_start_and_something_after(name, step):
    model, run = make(name)
    before, keys = quiet(run, model), set(model.state_dict())
    assert couple(model, step, 2) is model
    assert torch.equal(quiet(run, model), before)
    new = set(model.state_dict()) - keys
    assert keys < set(model.state_dict()) and all(".coupling." in f".{k}" for k in new)
    moved = quiet(run, move(model))
    assert moved.isfinite().all() and (moved - before).abs().max() > 1e-4 * before.abs().max()
    assert uncouple(model) is model and set(model.state_dict()) == keys
    assert torch.equal(quiet(run, model), before) and coupled_layers(model) == {}


@writer
def test_writing_is_the_same_at_the_start(name):
    model, _ = make(name)
    before = write(model)
    assert torch.equal(write(couple(model)), before)


@pytest.mark.parametrize("step", ["euler", "leapfrog"])
@writer
def test_a_cache_holds_evolved_keys(name, step):
    "Reading in parts with a cache equals reading at once: float32, whose sums come in another order."
    model, run = make(name)
    move(couple(model, step))
    whole = quiet(run, model)
    if isinstance(model, GPT):
        cache = KVCache(64)
        parts = [quiet(lambda m, p=part: m(p, cache), model) for part in IDS.split([5, 1, 6], 1)]
    else:
        called = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        cache, parts = None, []
        for part in IDS.split([5, 1, 6], 1):
            out = quiet(lambda m, p=part, c=cache: m(p, use_cache=True, **{called: c}), model)
            cache, parts = out[called], [*parts, out.logits]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-4 * whole.abs().max().item(), rtol=0)
    if not isinstance(model, GPT):
        assert torch.equal(write(model), write(model, use_cache=False))


@writer
def test_the_future_stays_hidden(name):
    model, run = make(name)
    move(couple(model))
    changed = IDS.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 61
    with torch.no_grad():
        a, b = (m[0] if isinstance(m, tuple) else getattr(m, "logits", m) for m in (model(IDS), model(changed)))
    assert torch.equal(a[:, :-1], b[:, :-1]) and not torch.equal(a[:, -1], b[:, -1])


@family
def test_gradients(name):
    "At dt = 0 one reaches dt, and none the force, whose share in the output is dt times f; then both."
    model, run = make(name)
    learn = freeze_rest(couple(model))
    assert {id(p) for p in learn} == {id(p) for p in model.parameters() if p.requires_grad}
    (run(model) * torch.randn(run(model).shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    for coupling in coupled_layers(model).values():
        assert coupling.dt.grad.abs() > 0 and coupling.force.out.weight.grad.abs().max() == 0
    move(model, 0.1).zero_grad()
    run(model).square().sum().backward()
    for coupling in coupled_layers(model).values():
        assert all(p.grad.abs().max() > 0 for p in coupling.parameters())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@family
def test_balance_changes_nothing_but_units(name):
    "Powers of two are exact: to the bit."
    model, run = make(name)
    with torch.no_grad():  # longer keys than queries, so that there is something to balance
        for socket in sockets(model).values():
            for part in socket.weights()[1]:
                if part is not None:
                    part.mul_(10)
    before = quiet(run, model)
    couple(model, balance=True)
    assert torch.equal(quiet(run, model), before)
    for coupling in coupled_layers(model).values():
        assert (coupling.units > 1).all() and (coupling.units.log2() % 1 == 0).all()
    assert (quiet(run, move(model)) - before).abs().max() > 1e-5 * before.abs().max()
    assert torch.equal(quiet(run, uncouple(model)), before)


@family
def test_a_file_takes_it_up_again(name, tmp_path):
    model, run = make(name)
    move(couple(model, "leapfrog", 2, balance=True, seed=3))
    file = save_coupling(tmp_path / "coupling.safetensors", model)
    other, _ = make(name)
    assert torch.equal(quiet(run, couple(other, state=file)), quiet(run, model))
    assert [c.step.__name__ for c in coupled_layers(other).values()] == ["leapfrog"] * len(coupled_layers(model))
    file = tmp_path / "whole.safetensors"
    save_file({k: t.contiguous().clone() for k, t in model.state_dict().items()}, file)
    third, _ = make(name)
    assert torch.equal(quiet(run, couple(third, state=file)), quiet(run, model))
    fourth = couple(make(name)[0], "leapfrog", 2, balance=True)
    fourth.load_state_dict(load_file(file))
    assert torch.equal(quiet(run, fourth), quiet(run, model))


@pytest.mark.parametrize("name", [n for n in FAMILIES if n.endswith("sdpa")])
def test_save_pretrained(name, tmp_path):
    model, run = make(name)
    move(couple(model, "rk4"))
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path).eval()
    assert coupled_layers(plain) == {} and not torch.equal(quiet(run, plain), quiet(run, model))
    assert torch.equal(quiet(run, couple(plain, state=tmp_path)), quiet(run, model))
    freeze_rest(plain)
    uncouple(plain).save_pretrained(tmp_path / "plain")
    again = type(model).from_pretrained(tmp_path / "plain").eval()
    assert torch.equal(quiet(run, again), quiet(run, plain))


def test_our_own_files(tmp_path):
    "A coupled GPT is no GPT that its configuration describes: the coupling has a file of its own."
    model = ours(qk_norm=True)
    save_model(tmp_path, model)
    move(couple(model))
    file = save_coupling(tmp_path / "coupling.safetensors", model)
    again = couple(load_model(tmp_path), state=file)
    assert torch.equal(again(IDS), model(IDS))
    save_model(tmp_path / "both", model)
    with pytest.raises(ValueError, match="coupling"):
        load_model(tmp_path / "both")


@family
def test_twice_is_once(name):
    model, run = make(name)
    move(couple(model, "leapfrog"))
    before, weights = quiet(run, model), {k: t.clone() for k, t in model.state_dict().items()}
    assert couple(model, "leapfrog", seed=5) is model
    assert torch.equal(quiet(run, model), before)
    assert all(torch.equal(t, weights[k]) for k, t in model.state_dict().items())
    with pytest.raises(ValueError, match="uncoupled before"):
        couple(model, "euler")
    assert torch.equal(quiet(run, model), before)
    assert uncouple(uncouple(model)) is model


@family
def test_copies_are_independent(name):
    model, run = make(name)
    couple(model, balance=True)
    twin = copy.deepcopy(model)
    before = quiet(run, model)
    move(twin)
    assert torch.equal(quiet(run, model), before) and not torch.equal(quiet(run, twin), before)
    uncouple(model)
    assert coupled_layers(twin) and not torch.equal(quiet(run, twin), before)
    assert torch.equal(quiet(run, uncouple(twin)), before)


@family
def test_seeds_and_names_decide_the_forces(name):
    torch.manual_seed(7)
    state = torch.get_rng_state()
    a, b, c = (couple(make(name)[0], seed=s) for s in (0, 0, 1))
    torch.set_rng_state(state)
    couple(a)
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's draws are disturbed
    forces = [[x.force.out.weight for x in coupled_layers(m).values()] for m in (a, b, c)]
    assert all(torch.equal(x, y) for x, y in zip(forces[0], forces[1], strict=True))
    assert not torch.equal(forces[0][0], forces[2][0]) and len({x.sum().item() for x in forces[0]}) == len(forces[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@family
def test_dtypes(name, dtype):
    "The coupling of a model in half precision learns in float32; converted with the model it works as well."
    model, run = make(name)
    model.to(dtype)
    inputs = X.to(dtype)
    run = (lambda m: call_torch(m, inputs)) if "nn." in name else (lambda m: m(inputs)) if "ViT" in name else run
    before = quiet(run, model)
    couple(model, balance=True)
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(p.dtype == wanted for c in coupled_layers(model).values() for p in c.parameters())
    assert torch.equal(quiet(run, model), before)
    moved = quiet(run, move(model))
    assert moved.dtype == before.dtype and moved.isfinite().all() and not torch.equal(moved, before)
    assert quiet(run, model.to(dtype)).isfinite().all()


@family
def test_autocast(name):
    model, run = make(name)
    couple(model)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(move(model))
        out.float().square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for c in coupled_layers(model).values() for p in c.parameters())


@pytest.mark.parametrize("name", ["GPT2, eager", "Llama, sdpa", "nn.TransformerEncoderLayer"])
def test_dropout_draws_the_same(name):
    "In training mode, too, with one seed."
    model, run = make(name)
    model.train()

    def seeded(model):
        torch.manual_seed(3)
        return quiet(run, model)

    before = seeded(model)
    assert torch.equal(seeded(couple(model)), before)
    assert all(c.training for c in coupled_layers(model).values())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["GPT2, sdpa", "Llama, sdpa", "Qwen3, eager"])
def test_gradient_checkpointing(name, reentrant):
    model, _ = make(name)
    move(couple(model), 0.1).train()
    drop = [m for m in model.modules() if isinstance(m, nn.Dropout)]
    for m in drop:
        m.p = 0.0

    def gradients():
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for a, b in zip(plain, gradients(), strict=True):
        assert torch.allclose(a, b, atol=1e-6 * a.abs().max().item() + 1e-12)
    copy.deepcopy(model)  # nothing is left over that cannot be copied


# Attention as PyTorch has it


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", ["none", "boolean", "numbers", "3d", "padding", "both", "causal"])
@pytest.mark.parametrize("batched", [True, False])
def test_torch_attention_to_the_bit(need_weights, batch_first, masks, batched):
    "Every way of calling it, against the slow path."
    torch.manual_seed(0)
    attn = nn.MultiheadAttention(32, 4, batch_first=batch_first).eval()
    nn.init.normal_(attn.in_proj_bias)
    x = torch.randn(3, 7, 32) if batch_first else torch.randn(7, 3, 32)
    x = x if batched else torch.randn(7, 32)
    B = 3 if batched else 1
    upper = torch.ones(7, 7, dtype=torch.bool).triu(1)
    padding = torch.zeros(B, 7, dtype=torch.bool)
    padding[:, 5:] = True
    padding = padding if batched else padding[0]
    given = {
        "none": {},
        "boolean": {"attn_mask": upper},
        "numbers": {"attn_mask": torch.randn(7, 7)},
        "3d": {"attn_mask": torch.randn(B * 4, 7, 7)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": upper, "key_padding_mask": padding},
        "causal": {"attn_mask": upper, "is_causal": True},
    }[masks]
    for average in (True, False):
        call = partial(attn, x, x, x, need_weights=need_weights, average_attn_weights=average, **given)
        uncouple(attn)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            wanted = call()
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        couple(attn)
        with torch.no_grad():  # where the fast path would be taken
            got = call()
        assert torch.equal(got[0], wanted[0]) and (got[1] is None) == (wanted[1] is None)
        assert got[1] is None or torch.equal(got[1], wanted[1])


def test_torch_values_of_their_own():
    "Queries and keys of one tensor, values of another, as in DETR."
    attn, v = torch_layer("alone"), X.flip(1)
    before = attn(X, X, v)[0]
    assert torch.equal(couple(attn)(X, X, v)[0], before)


@pytest.mark.parametrize("kind", ["layer", "encoder"])
def test_the_fast_path_is_off(kind):
    "It would pass the coupling by. Without coupling both paths agree to 1e-6, relative to the largest output."
    model = torch_layer(kind)
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 8:] = True
    real = ~padding
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        for given in ({}, {"src_key_padding_mask": padding}):
            fast = model(X, **given)
            couple(model)
            slow = model(X, **given)
            if kind == "encoder" and given:
                fast = F.pad(fast, (0, 0, 0, 12 - fast.shape[1]))
            assert torch.allclose(slow[real], fast[real], atol=1e-6 * fast.abs().max().item(), rtol=0)
            assert not torch.allclose(move(model)(X, **given)[real], fast[real], atol=1e-3)
            uncouple(model)
            assert torch.equal(model(X, **given), fast) or kind == "encoder"


def test_an_encoder_packs_rows_again():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 1).eval()
    assert model.use_nested_tensor
    couple(couple(model))
    assert not model.use_nested_tensor
    assert uncouple(model).use_nested_tensor and "_packed_rows" not in model.__dict__
    off = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 48, batch_first=True), 1, enable_nested_tensor=False)
    assert not uncouple(couple(off)).use_nested_tensor


def test_torch_decoder_couples_self_attention_only():
    decoder = nn.TransformerDecoderLayer(32, 4, 48, batch_first=True).eval()
    assert list(coupled_layers(couple(decoder))) == ["self_attn"]
    assert decoder(X, X[:, :5]).shape == X.shape


def test_torch_says_what_does_not_fit():
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 8}, {"vdim": 8}):
        with pytest.raises(ValueError, match="add_zero_attn"):
            couple(nn.MultiheadAttention(32, 4, **options))
    attn = couple(torch_layer("alone"))
    with pytest.raises(ValueError, match="key must be the query itself"):
        attn(X, X.clone(), X)
    with pytest.raises(ValueError, match="one shape"):
        attn(X, X, X[:, :5])
    with pytest.raises(ValueError, match="attn_mask"):
        attn(X, X, X, is_causal=True)


# Shared heads, and modules that we do not know


def test_shared_heads_move_by_the_rule():
    "k_g <- k_g + dt f(mean of its group's q); q_h <- q_h + dt k_g, at the projections, before rotary."
    model = hugging("Llama", "eager")
    attn = model.model.layers[0].self_attn
    h = torch.randn(1, 5, 32)
    q, k = (p(h).unflatten(-1, (-1, 8)) for p in (attn.q_proj, attn.k_proj))
    move(couple(model, layers="model.layers.0.*"))
    assert list(coupled_layers(model)) == ["model.layers.0.self_attn"]
    f = coupled_layers(model)["model.layers.0.self_attn"].force
    attn._socket.begin(attn, (), {})
    got = [p(h).unflatten(-1, (-1, 8)) for p in (attn.q_proj, attn.k_proj)]
    wanted_k = k + 0.3 * f(q.unflatten(2, (2, 2)).mean(3))
    wanted_q = q + 0.3 * k.repeat_interleave(2, dim=2)
    assert torch.allclose(got[0], wanted_q, atol=1e-5) and torch.allclose(got[1], wanted_k, atol=1e-5)


@pytest.mark.parametrize("parts", [Projections(8, "wq", "wk"), Projections(8, "wqkv")])
def test_a_described_module(parts):
    model = names_of_their_own(parts.k is None)
    before = model(X)
    couple(model, parts=parts, balance=True)
    assert torch.equal(model(X), before) and list(coupled_layers(model)) == ["0"]
    assert not torch.equal(move(model)(X), before)
    assert torch.equal(uncouple(model)(X), before)


def test_an_unknown_module_is_described_in_the_error():
    class SomeAttention(Stranger):
        pass

    model = nn.Sequential(SomeAttention(), nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"0 \(SomeAttention with wq: Linear, wk: Linear.*parts=Projections"):
        couple(model)
    with pytest.raises(ValueError, match="nothing in it looks like attention"):
        couple(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="name like 'h.7'"):
        couple(ours(), layers="h.7")
    with pytest.raises(ValueError, match="couple knows"):
        couple(model, parts=Projections(7, "wq", "wk"))  # heads do not divide


def test_order_of_asking_does_not_matter():
    "Nor does who is asked twice, or asked for another input in between."
    model = move(couple(names_of_their_own(), parts=Projections(8, "wq", "wk")))
    attn, y = model[0], X + 1
    q, k = attn.wq(X), attn.wk(X)
    assert torch.equal(attn.wk(X), k) and torch.equal(attn.wq(X), q)
    attn.wq(X)
    assert torch.equal(attn.wq(X), q)
    attn.wq(y)
    assert torch.equal(attn.wk(X), k)


def test_half_a_call_leaves_nothing_behind():
    "What one call has kept is not given to the next, even for the same tensor."
    model = move(couple(names_of_their_own(), parts=Projections(8, "wq", "wk")))
    attn = model[0]
    attn.wq(X)  # its keys are kept
    with torch.no_grad():
        attn.wk.weight.mul_(2)
    fresh = couple(names_of_their_own(), parts=Projections(8, "wq", "wk"))
    with torch.no_grad():
        fresh[0].wk.weight.mul_(2)
    move(fresh)
    assert torch.equal(model(X), fresh(X))


def test_cross_attention_is_left_alone():
    transformers = pytest.importorskip("transformers")
    config = transformers.BartConfig(
        vocab_size=61, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, pad_token_id=0,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    before = quiet(lambda m: m(IDS).logits, model)
    couple(model)
    assert [n.split(".")[-1] for n in coupled_layers(model)] == ["self_attn", "self_attn"]
    assert torch.equal(quiet(lambda m: m(IDS).logits, model), before)
    attn = model.model.decoder.layers[0].self_attn
    with pytest.raises(ValueError, match="cross-attention"):
        attn(torch.randn(1, 3, 32), key_value_states=torch.randn(1, 4, 32))


def test_a_replaced_projection_is_noticed():
    model = hugging("Llama", "sdpa")
    couple(model)
    attn = model.model.layers[1].self_attn
    attn.k_proj = nn.Linear(32, 16, bias=False)
    with pytest.raises(RuntimeError, match="k_proj .* was replaced"):
        model(IDS)
    assert torch.isfinite(uncouple(model)(IDS).logits).all()


def test_with_lora():
    "Adapters first, then coupling: it moves what the adapted projections hand out."
    peft = pytest.importorskip("peft")
    model = hugging("Llama", "sdpa")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    before = quiet(logits, adapted)
    couple(adapted, balance=True)
    assert torch.equal(quiet(logits, adapted), before) and len(coupled_layers(adapted)) == 2
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.normal_()
    assert not torch.equal(quiet(logits, move(adapted)), before)
    logits(adapted).square().sum().backward()
    assert all(p.grad is not None for c in coupled_layers(adapted).values() for p in c.parameters())


# Compiled


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")


@pytest.mark.parametrize("name", ["Llama, sdpa", "GPT2, sdpa", "nn.MultiheadAttention"])
def test_traced_without_a_break(name):
    "One graph; compared with eager in float32."
    model, run = make(name)
    move(couple(model, "leapfrog"))
    once = (lambda m: m(X, X, X)[0]) if "nn." in name else (lambda m: m(IDS, use_cache=False).logits)
    with torch.no_grad():
        wanted = once(model)
        got = torch.compile(lambda: once(model), backend="aot_eager", fullgraph=True)()
    assert torch.allclose(got, wanted, atol=1e-5 * wanted.abs().max().item())


@needs_compiler
def test_flex_attention():
    "The third implementation of transformers, compiled: about half a minute, so one model stands for all."
    model = hugging("Llama", "flex_attention")
    before = quiet(logits, model)
    assert torch.equal(quiet(logits, couple(model)), before)
    assert not torch.equal(quiet(logits, move(model)), before)


# Bad input


@pytest.mark.parametrize(
    "given, words",
    [
        ({"step": "eulre"}, "did you mean 'euler'"),
        ({"step": print}, "step"),
        ({"step": 3}, "step"),
        ({"n": 0}, "n, the number of steps"),
        ({"n": 1.5}, "n, the number of steps"),
        ({"layers": 3}, "layers"),
        ({"parts": "wq"}, "parts"),
        ({"parts": Projections(0, "q_proj", "k_proj")}, "head width"),
        ({"parts": Projections(8, 3)}, "names of projections"),
        ({"parts": Projections(8, "q_proj", "q_proj")}, "two projections"),
        ({"state": 3}, "state must be a path"),
        ({"balance": 1}, "balance"),
        ({"seed": "a"}, "seed"),
        ({"state": "/nowhere/at.safetensors"}, "state"),
    ],
)
def test_bad_input(given, words):
    model = ours()
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=words):
        couple(model, **given)
    assert coupled_layers(model) == {}


@pytest.mark.parametrize("f", [couple, uncouple, freeze_rest, partial(save_coupling, "x.safetensors")])
def test_what_is_no_model(f):
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got int"):
        f(3)


def test_what_must_be_coupled_first(tmp_path):
    for f in (freeze_rest, partial(save_coupling, tmp_path / "x.safetensors")):
        with pytest.raises(ValueError, match="without coupling"):
            f(ours())
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_coupling_of_its_own():
    model = GPT(GPTConfig(vocab_size=61, context=64, n_layers=1, n_heads=4, d_model=32, pre="euler"))
    with pytest.raises(ValueError, match="coupled already in its own way"):
        couple(model)


def test_files_that_do_not_fit(tmp_path):
    file = save_coupling(tmp_path / "a.safetensors", couple(ours(), "leapfrog"))
    cases = {
        "leapfrog": (lambda: couple(ours(), "euler", state=file)),
        "none called": (lambda: couple(torch_layer("alone"), state=file)),
        "must be uncoupled": (lambda: couple(couple(ours()), state=file)),
        "does not fit": (lambda: couple(GPT(GPTConfig(61, 64, 2, 2, 32), seed=0), state=file)),
    }
    for words, f in cases.items():
        with pytest.raises(ValueError, match=words):
            f()
    broken = tmp_path / "b.safetensors"
    broken.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match="whole safetensors"):
        couple(ours(), state=broken)
    save_file({"blocks.0.attn.q_proj.weight": torch.zeros(3)}, tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match="holds none"):
        couple(ours(), state=tmp_path / "c.safetensors")
    save_file({"blocks.0.attn.coupling.settings": torch.zeros(3)}, tmp_path / "d.safetensors")
    with pytest.raises(ValueError, match="did not write"):
        couple(ours(), state=tmp_path / "d.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="safetensors"):
        couple(ours(), state=tmp_path / "empty")


def test_a_saved_coupling_of_other_settings_is_not_loaded():
    "By load_state_dict either."
    a, b = couple(ours(), "euler", 2), couple(ours(), "euler", 3)
    with pytest.raises(RuntimeError, match="settings"):
        a.load_state_dict(b.state_dict())


def test_units():
    "Queries times the unit are as long as keys over it, to within a factor of two of the lengths."
    g = torch.Generator().manual_seed(0)
    q, k = (torch.rand(n, generator=g).double() * 10.0 ** torch.randint(-9, 9, (n,), generator=g) for n in (12, 6))
    u = unit_ratio(q, k)
    mean = q.view(6, 2).mean(1)
    ratio = (mean * u**2 / (k / u**2)).sqrt()
    assert (ratio.log2().abs() <= 1 + 1e-9).all() and (u.log2() % 1 == 0).all()
    assert torch.equal(unit_ratio(torch.zeros(2), torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize(
    "q, k",
    [(torch.ones(5), torch.ones(2)), (torch.ones(0), torch.ones(0)), (torch.ones(2, 2), torch.ones(2)), ([1.0], [1.0])],
)
def test_units_of_what_is_no_head(q, k):
    with pytest.raises((TypeError, ValueError), match="q"):
        unit_ratio(q, k)


def test_a_coupling_says_what_does_not_fit():
    q = torch.ones(1, 4, 3, 8)
    for units in (torch.zeros(2), torch.tensor([1.0, float("inf")]), torch.ones(1, 2), [1.0]):
        with pytest.raises((TypeError, ValueError), match="units"):
            Retrofit(8, units=units)
    with pytest.raises(ValueError, match="k must have 2 heads"):
        Retrofit(8, units=torch.ones(2))(q, q)
    for f in (coupled_layers, displacements):
        with pytest.raises(TypeError, match="model"):
            f(3)
    assert torch.equal(unit_ratio(torch.tensor([float("inf"), 1.0]), torch.tensor([1.0, float("nan")])), torch.ones(2))


def test_displacements_are_those_of_the_dynamics():
    model = ours()
    assert displacements(model, IDS) == {}
    rows = displacements(couple(model), IDS)
    assert list(rows) == ["blocks.0.attn", "blocks.1.attn"] and all(
        r == {"dt": 0, "q": 0, "k": 0} for r in rows.values()
    )
    assert all(r["q"] > 0 and r["k"] > 0 and r["dt"] == 0.5 for r in displacements(move(model, 0.5), IDS).values())
    with pytest.raises(TypeError):
        displacements(model, "no tokens")
    assert not any(c._forward_hooks for c in coupled_layers(model).values())


def test_a_whole_model_in_one_file(tmp_path):
    "As torch.save keeps it: the copy is coupled, and independent."
    model = couple(ours())
    torch.save(model, tmp_path / "m.pt")
    again = torch.load(tmp_path / "m.pt", weights_only=False)
    assert torch.equal(again(IDS), model(IDS)) and not torch.equal(move(again)(IDS), model(IDS))


def test_a_drawn_block_of_timm():
    try:
        from timm.layers import Attention
    except Exception as error:  # torchvision fails in many ways beside another torch
        pytest.skip(f"timm cannot be imported: {error}")
    for options in ({}, {"qk_norm": True, "norm_layer": nn.LayerNorm}):
        attn = Attention(32, 4, qkv_bias=True, **options).eval()
        before = attn(X)
        assert torch.equal(couple(attn)(X), before) and not torch.equal(move(attn)(X), before)
        assert torch.equal(uncouple(attn)(X), before)


def test_our_attention_alone():
    attn = MultiHeadAttention(32, 4, n_kv_heads=1)
    before = attn(X)
    assert torch.equal(couple(attn)(X), before) and list(coupled_layers(attn)) == [""]
    assert isinstance(attn.coupling, Coupling)
