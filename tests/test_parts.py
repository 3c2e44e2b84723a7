"The parts of coupling: any choice of score terms is exact, each force has its name, and rotary may come first."

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from test_attention import close, rand, refuses
from test_coupling import group_mean
from torch import nn

from coupled_qk.attention import MultiHeadAttention, allowed_pairs, attention_weights, join_heads, rotary, split_heads
from coupled_qk.compare import _turned_terms, term_sizes
from coupled_qk.controls import Drift
from coupled_qk.coupling import Coupling, QueryMLP, euler, score_terms
from coupled_qk.gpt import GPT, GPTConfig, KVCache, config_from_dict, config_to_dict, count_parameters, load_model
from coupled_qk.gpt import n_parameters, presets, save_model, variants
from coupled_qk.integrators import leapfrog
from coupled_qk.parts import HeadForce, ScoreTerms, all_terms, forces
from coupled_qk.training import TrainConfig, _about, fit

NAMES = all_terms.split(" + ")
CHOICES = [" + ".join(some) for n in (1, 2, 3, 4) for some in combinations(NAMES, n)]
every_choice = pytest.mark.parametrize("terms", CHOICES)
every_force = pytest.mark.parametrize("force", forces)
D, H, d = 24, 4, 6
IDS = torch.randint(17, (2, 12), generator=torch.Generator().manual_seed(0))


def config(pre="standard", n_kv_heads=None, **options):
    shape = dict(vocab_size=17, context=12, n_layers=2, n_heads=4, d_model=32, d_ff=24)
    return GPTConfig(**shape, n_kv_heads=n_kv_heads, pre=pre, **options)


def strong(module):
    "The same module in float64, with a force and a step that matter."
    for i, weight in enumerate(module.double().parameters()):
        with torch.no_grad():
            weight.copy_(0.5 * rand(weight.numel(), seed=i).view_as(weight) + 0.3)
    return module


def layer(pre, H_kv=H, base=10_000.0, **options):
    return MultiHeadAttention(D, H, H_kv, strong(pre), base=base, **options).double()


def same_weights(a, b):
    "Two layers with the same projections."
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(b, name).load_state_dict(getattr(a, name).state_dict())
    return a, b


# -- score terms


@every_choice
@pytest.mark.parametrize("base", [10_000.0, None])
@pytest.mark.parametrize("H_kv", [4, 2, 1])
@torch.no_grad()
def test_a_choice_of_terms_is_the_sum_of_these_terms(terms, base, H_kv):
    "Each term by itself from `score_terms`, placed after the force was taken, divided by the root of the head width."
    attn, x = layer(ScoreTerms(d, terms), H_kv, base), rand(2, 7, D)
    q, k = split_heads(attn.q_proj(x), H), split_heads(attn.k_proj(x), H_kv)
    place = (lambda t: rotary(t, 0, base)) if base else (lambda t: t)
    wide = lambda t: place(t).repeat_interleave(H // H_kv, dim=1)
    force = wide(attn.pre[0].force(group_mean(q, H_kv)))
    # the key-key and key-force terms take the query's own key, query-force and key-force the force at the group's mean
    parts = score_terms(place(q), wide(k), lambda _: force, attn.pre[0].dt)
    scores = sum(parts[name] for name in terms.split(" + ")) / d**0.5
    weights = scores.masked_fill(~allowed_pairs(7, 7), -torch.inf).softmax(-1)
    close(attn.weights(x), weights, 1e-11)
    v = split_heads(attn.v_proj(x), H_kv).repeat_interleave(H // H_kv, dim=1)
    close(attn(x), attn.o_proj(join_heads(weights @ v)), 1e-11)


@pytest.mark.parametrize("H_kv", [4, 2])
@torch.no_grad()
def test_all_terms_are_euler_and_the_first_is_attention(H_kv):
    x = rand(2, 7, D)
    ours, eulers = same_weights(layer(ScoreTerms(d), H_kv), layer(Coupling(d), H_kv))
    close(ours(x), eulers(x), 0 if H_kv == H else 1e-12)
    ours, plain = same_weights(layer(ScoreTerms(d, "query-key"), H_kv), layer(nn.Identity(), H_kv))
    plain.pre = nn.ModuleList()
    close(ours(x), plain(x), 0)


@torch.no_grad()
def test_two_choices_are_controls():
    "So a study need not make them twice."
    x = rand(2, 7, D)
    ours, drift = same_weights(layer(ScoreTerms(d, "query-key + key-key")), layer(Drift(d)))
    drift.pre[0].dt.copy_(ours.pre[0].dt)
    close(ours(x), drift(x))
    ours, kick = same_weights(layer(ScoreTerms(d, "query-key + query-force")), layer(variants["kick"](d)))
    close(ours(x), kick(x))


@every_choice
def test_gradients_of_terms_against_finite_differences(terms):
    module = strong(ScoreTerms(3, terms))
    q, k = rand(1, 2, 2, 3, seed=1, grad=True), rand(1, 1, 2, 3, seed=2, grad=True)
    inputs = (q, k, *module.parameters())
    assert torch.autograd.gradcheck(lambda q, k, *_: attention_weights(*module(q, k)), inputs)


@every_choice
@torch.no_grad()
def test_terms_hide_the_future_and_depend_on_distance_only(terms):
    attn, x = layer(ScoreTerms(d, terms)), rand(1, 7, D)
    changed = torch.cat([x[:, :3], rand(1, 4, D, seed=9)], dim=1)
    close(attn(x)[:, :3], attn(changed)[:, :3])
    early, late = (q @ k.mT for q, k, _ in (attn.project(x, start) for start in (0, 7)))
    close(early, late, 1e-11)


@every_choice
@pytest.mark.parametrize("n_kv_heads", [None, 2])
@torch.no_grad()
def test_terms_read_with_a_cache_as_without(terms, n_kv_heads):
    model = GPT(config("euler_terms", n_kv_heads, pre_options={"terms": terms, "dt": 1.0})).double()
    cache = KVCache(12)
    close(torch.cat([model(token, cache) for token in IDS.split(1, 1)], 1), model(IDS), 1e-10)


def test_terms_draw_the_weights_of_euler():
    coupled, terms = (GPT(config(pre), seed=3).state_dict() for pre in ("euler", "euler_terms"))
    close(dict(terms), dict(coupled), 0)


def test_sizes_of_terms_are_known_where_some_are_off():
    model = GPT(config("euler_terms", pre_options={"terms": "query-key + key-force"}))
    assert [list(row) for row in term_sizes(model, IDS)] == [NAMES] * 2
    assert [list(row) for row in model.displacements(IDS)] == [["dt"]] * 2  # blocks are not moved points
    assert set(GPT(config("euler_terms")).displacements(IDS)[0]) == {"dt", "q", "k"}


def test_bad_terms():
    refuses(lambda: ScoreTerms(4, "query-query"), "terms", "key-force", "'query-query'")
    refuses(lambda: ScoreTerms(4, "key-key + key-key"), "each once")
    refuses(lambda: ScoreTerms(4, ""), "terms", "''")
    refuses(lambda: ScoreTerms(4, ["key-key"]), "terms", "list")
    refuses(lambda: GPT(config("euler_terms", pre_options={"terms": "kk"})), "terms", "'kk'")
    refuses(lambda: config("euler_terms", pre_options={"n": 2}), "pre_options", "'n'")


def test_blocks_must_have_the_head_width():
    class Wider(nn.Module):
        def forward(self, q, k):
            return (nn.functional.pad(t, (0, 2)) for t in (q, k))

    refuses(lambda: MultiHeadAttention(D, H, pre=Wider())(torch.zeros(1, 2, D)), "pre", "head width 6", "got width 8")


# -- forces


@every_force
@pytest.mark.parametrize("pre", ["euler", "leapfrog", "euler_terms"])
@pytest.mark.parametrize("n_kv_heads", [None, 2])
def test_a_named_force_trains_and_is_saved(force, pre, n_kv_heads, tmp_path):
    model = GPT(config(pre, n_kv_heads, pre_options={"force": force}))
    kind = type(model.blocks[0].attn.pre[0].force)
    assert kind is type(forces[force](8, n_kv_heads or 4)) and count_parameters(model.config) == n_parameters(model)
    tokens = torch.randint(17, (200,))
    before = {name: p.clone() for name, p in model.named_parameters()}
    fit(model, tokens, tokens, TrainConfig(steps=2, batch_size=2))
    assert not [n for n, p in model.named_parameters() if torch.equal(p, before[n]) and not n.endswith("norm.weight")]
    close(load_model(save_model(tmp_path, model))(IDS), model(IDS), 0)


@torch.no_grad()
def test_no_name_is_the_name_of_the_network_of_chapter_01():
    plain, named, none = (GPT(config("euler", pre_options=o)) for o in ({}, {"force": "mlp"}, {"force": None}))
    close(plain(IDS), named(IDS), 0)
    close(plain(IDS), none(IDS), 0)


def test_force_per_head_by_a_loop():
    force, q = HeadForce(16, 3).double(), rand(2, 3, 5, 16)
    assert force.hidden.shape == (3, 16, 2) and force.out.shape == (3, 2, 16)
    for h in range(3):
        z = q[:, h] @ force.hidden[h]
        close(force(q)[:, h], (z / (1 + torch.exp(-z))) @ force.out[h])
    assert HeadForce(4, 2).hidden.shape == (2, 4, 1)  # never without a hidden number


def test_force_per_head_is_drawn_as_linear_layers_are():
    "Uniform within one over the root of what each number is a sum of; from the seed and the name alone."
    force = HeadForce(64, 50)
    for weight, terms in ((force.hidden, 64), (force.out, 8)):
        assert 0.95 < weight.abs().max() * terms**0.5 <= 1 and abs(weight.std() * (3 * terms) ** 0.5 - 1) < 0.05
    one, two = (GPT(config("euler", pre_options={"force": "per_head"}), seed=s) for s in (0, 0))
    close(dict(one.state_dict()), dict(two.state_dict()), 0)
    assert not torch.equal(one.blocks[0].attn.pre[0].force.hidden, one.blocks[1].attn.pre[0].force.hidden)


def test_force_per_head_has_the_paper_s_overhead_too():
    "512/8/8/2048: 0.1105 %, where a network that the heads share has 0.112 %."
    plain = count_parameters(presets["60M"])
    coupled = count_parameters(replace(presets["60M"], pre="euler", pre_options={"force": "per_head"}))
    assert coupled - plain == 8 * (8 * 2 * 64 * 8 + 1) and round(100 * (coupled - plain) / plain, 4) == 0.1105


@torch.no_grad()
def test_a_linear_force_is_another_key_matrix():
    "k' = (W_k + dt A W_q) x and q' = (W_q + dt W_k) x in each head: nothing that plain attention could not be."
    coupled, x = layer(Coupling(d, force=forces["linear"](d, H)), base=None), rand(1, 5, D)
    plain = MultiHeadAttention(D, H, base=None).double()
    plain.load_state_dict({k: v for k, v in coupled.state_dict().items() if not k.startswith("pre")})
    dt, A = coupled.pre[0].dt, coupled.pre[0].force.weight
    plain.q_proj.weight += dt * coupled.k_proj.weight
    plain.k_proj.weight += dt * torch.block_diag(*[A] * H) @ coupled.q_proj.weight
    close(plain(x), coupled(x), 1e-11)


@every_force
def test_lean_forces_give_the_same_gradient(force):
    grads = []
    for lean in (False, True):
        model = GPT(config("leapfrog", 2, pre_options={"force": force, "lean": lean, "n": 2})).double()
        model(IDS).square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    close(*grads, 1e-10)


def test_a_fixed_step_stays(tmp_path):
    model = GPT(config("euler", pre_options={"learn_dt": False, "dt": 0.3}))
    learned = GPT(config("euler", pre_options={"dt": 0.3}))
    close(model(IDS), learned(IDS), 0)
    assert n_parameters(learned) - n_parameters(model) == 2 and model.state_dict().keys() == learned.state_dict().keys()
    tokens = torch.randint(17, (200,))
    for m in (model, learned):
        fit(m, tokens, tokens, TrainConfig(steps=2, batch_size=2, lr=0.1))
    fixed, moved = (m.blocks[0].attn.pre[0].dt for m in (model, learned))
    assert fixed.item() == pytest.approx(0.3) and moved.item() != pytest.approx(0.3)
    again = load_model(save_model(tmp_path, model))
    assert not isinstance(again.blocks[0].attn.pre[0].dt, nn.Parameter)
    close(again(IDS), model(IDS), 0)


def test_bad_forces():
    refuses(lambda: config("euler", pre_options={"force": "gravity"}), "unknown force 'gravity'", "per_head")
    refuses(lambda: config("query_mlp", pre_options={"force": "linear"}), "pre_options", "'query_mlp'")
    refuses(lambda: GPT(config("euler", pre_options={"learn_dt": "no"})), "learn_dt", "'no'")
    refuses(lambda: HeadForce(4, 0), "n_heads")
    refuses(lambda: HeadForce(0, 2), "width")
    for bad in (rand(2, 4), rand(3, 2, 4), rand(2, 2, 3)):
        refuses(lambda bad=bad: HeadForce(4, 2).double()(bad), "q must have shape", "4)")


# -- rotary first


@pytest.mark.parametrize("pre", [Coupling(d), QueryMLP(d), ScoreTerms(d, "query-key + key-force"), Drift(d)], ids=str)
@pytest.mark.parametrize("start", [0, 3])
@torch.no_grad()
def test_rotary_first_is_its_formula_and_else_nothing_changes(pre, start):
    x, module = rand(1, 5, D), strong(pre)
    after, first = same_weights(layer(pre), layer(pre, rotary_first=True))
    turned = [rotary(split_heads(p(x), H), start) for p in (first.q_proj, first.k_proj)]
    close(first.project(x, start)[:2], module(*turned), 0)
    default = layer(pre)
    same_weights(after, default)
    assert not default.rotary_first
    close(default.project(x, start), after.project(x, start), 0)


def scores_at(attn, x, start):
    q, k, _ = attn.project(x, start)
    return q @ k.mT


@pytest.mark.parametrize("pre, relative", [(Drift, True), (Coupling, False), (QueryMLP, False)])
@torch.no_grad()
def test_rotary_first_costs_the_dependence_on_distance_only(pre, relative):
    "The drift commutes with the turn; the force does not."
    x = rand(1, 5, D)
    after, first = same_weights(layer(pre(d)), layer(pre(d), rotary_first=True))
    close(scores_at(after, x, 0), scores_at(after, x, 7), 1e-11)
    moved = (scores_at(first, x, 0) - scores_at(first, x, 7)).abs().max()
    assert (moved < 1e-11) if relative else (moved > 0.1)
    if relative:
        close(first(x), after(x), 1e-11)


@pytest.mark.parametrize("pre", ["standard", "euler", "query_mlp", "euler_terms"])
@torch.no_grad()
def test_rotary_first_in_a_model(pre, tmp_path):
    options = {"dt": 1.0} if pre != "standard" else {}
    model = GPT(config(pre, 2, pre_options=options, rotary_first=True)).double()
    for block in model.blocks:
        block.attn.q_proj.weight.mul_(50)
    cache = KVCache(12)
    close(torch.cat([model(token, cache) for token in IDS.split(1, 1)], 1), model(IDS), 1e-10)
    again = load_model(save_model(tmp_path, model))
    assert again.config.rotary_first
    close(again(IDS), model(IDS), 0)
    late = GPT(replace(model.config, rotary_first=False)).double()
    late.load_state_dict(model.state_dict())
    assert torch.equal(late(IDS), model(IDS)) == (pre == "standard")


@torch.no_grad()
def test_sizes_of_terms_where_rotary_is_first():
    "The four terms add up to the scores of the model."
    for first in (False, True):
        model = GPT(config("euler", pre_options={"dt": 1.0}, rotary_first=first)).double()
        attn, x = model.blocks[0].attn, model.blocks[0].norm1(model.embed(IDS))
        close(sum(_turned_terms(attn, attn.pre[0], x).values()), scores_at(attn, x, 0), 1e-12)


def test_older_configurations_and_checkpoints_know_no_order():
    old = config_to_dict(config("euler"))
    assert old.pop("rotary_first") is False and config_from_dict(old) == config("euler")
    about = lambda first: _about(GPT(config("euler", rotary_first=first)), IDS[0], IDS[1], TrainConfig())["model"]
    assert "rotary" not in about(False) and "qk_norm" not in about(False) and "rotary_first=True" in about(True)
    refuses(lambda: config("euler", rotary_first=1), "rotary_first", "1")
    refuses(lambda: MultiHeadAttention(8, 2, rotary_first=None), "rotary_first", "None")


def test_symplectic_needs_a_potential():
    "What the study of forces compares: leapfrog keeps the symplectic form with one force and not with the other."
    omega = torch.block_diag(torch.zeros(3, 3), torch.zeros(3, 3)).double()
    omega[:3, 3:], omega[3:, :3] = torch.eye(3), -torch.eye(3)
    for name, keeps in (("potential", True), ("mlp", False)):
        force = strong(forces[name](3, 1))
        J = torch.autograd.functional.jacobian(
            lambda z, f=force: torch.cat(leapfrog(z[:3], z[3:], f, 0.5)), rand(6, seed=5)
        )
        assert ((J.T @ omega @ J - omega).abs().max() < 1e-12) == keeps


def test_euler_terms_are_euler_in_a_trained_model():
    tokens = torch.randint(17, (200,), generator=torch.Generator().manual_seed(1))
    models = [GPT(config(pre)) for pre in ("euler", "euler_terms")]
    for model in models:
        fit(model, tokens, tokens, TrainConfig(steps=3, batch_size=2))
    close(models[0](IDS), models[1](IDS), 1e-6)
    assert euler is models[1].blocks[0].attn.pre[0].step
