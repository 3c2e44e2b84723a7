"Each control has one part of coupling more or less, for shared key heads too, and draws coupling's own weights."

import pytest
import torch
from test_attention import close, rand
from test_coupling import every_group, group_mean, heads

from coupled_qk.attention import MultiHeadAttention
from coupled_qk.controls import Drift, Nudge
from coupled_qk.coupling import Coupling, QueryMLP
from coupled_qk.gpt import GPT, GPTConfig, variants

SOURCES = [("q", None), (None, "k"), (None, "q"), ("q", "k"), ("k", "q"), ("k", None), ("k", "k"), ("q", "q")]
every_source = pytest.mark.parametrize("query, key", SOURCES, ids=str)


@every_group
@every_source
def test_nudge_is_its_formula(query, key, H_kv):
    "A query finds its group's key; a key finds the mean of its queries. To the bit but for the mean."
    module, (q, k) = Nudge(3, query, key, dt=0.3).double(), heads(H_kv)
    q1, k1 = module(q, k)
    wide = k.repeat_interleave(4 // H_kv, dim=1)
    for moved, old, source, at in (
        (q1, q, query, {"q": q, "k": wide}),
        (k1, k, key, {"q": group_mean(q, H_kv), "k": k}),
    ):
        close(moved, old if source is None else old + module.dt * module.force(at[source]))


@every_group
def test_drift_is_euler_without_a_force(H_kv):
    module, (q, k) = Drift(3, dt=0.3).double(), heads(H_kv)
    q1, k1 = module(q, k)
    close(q1, q + module.dt * k.repeat_interleave(4 // H_kv, dim=1))
    assert k1 is k


@every_source
def test_a_token_moves_by_itself_and_not_at_all_for_dt_0(query, key):
    module, (q, k) = Nudge(3, query, key, dt=0.3).double(), heads()
    parts = [module(q[:, :, t : t + 1], k[:, :, t : t + 1]) for t in range(q.shape[2])]
    for whole, bits in zip(module(q, k), zip(*parts, strict=True), strict=True):
        close(whole, torch.cat(bits, dim=2))
    with torch.no_grad():
        module.dt.zero_()
    for moved, old in zip(module(q, k), (q, k), strict=True):
        close(moved, old, 0)


def test_parameters_are_equal_and_shared_by_name():
    "With one seed every control has the very weights that coupling has."
    shape = dict(vocab_size=16, context=8, n_layers=2, n_heads=2, d_model=8, d_ff=16)
    coupled = GPT(GPTConfig(**shape, pre="euler"), seed=3).state_dict()
    for name in ("query_mlp", "key_mlp", "kick", "both_mlp", "cross_mlp"):
        control = GPT(GPTConfig(**shape, pre=name), seed=3).state_dict()
        assert control.keys() == coupled.keys()
        assert all(torch.equal(control[key], coupled[key]) for key in control)
    drift = GPT(GPTConfig(**shape, pre="drift"), seed=3).state_dict()
    assert all(torch.equal(drift[key], coupled[key]) for key in drift)


@pytest.mark.parametrize("name", ["key_mlp", "kick", "drift", "both_mlp", "cross_mlp"])
def test_gradients_against_finite_differences(name):
    module = variants[name](3).double()
    q, k = (rand(1, 1, 2, 3, seed=i).requires_grad_() for i in (1, 2))
    assert torch.autograd.gradcheck(lambda q, k, *_: module(q, k), (q, k, *module.parameters()))


def test_bad_input():
    for bad in ({"query": "x"}, {"key": 3}, {"query": True}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Nudge(3, **bad)
    with pytest.raises(ValueError, match="both are None"):
        Nudge(3)
    for make in (lambda d, **o: Nudge(d, "q", **o), Drift):
        with pytest.raises(ValueError, match="dt"):
            make(3, dt=float("nan"))
        for wrong in (
            (rand(1, 1, 2, 4), rand(1, 1, 2, 4)),
            (rand(1, 2, 2, 3), rand(1, 1, 4, 3)),
            (rand(1, 1, 3), rand(1, 1, 3)),
        ):
            with pytest.raises(ValueError, match="q"):
                make(3).double()(*wrong)
    with pytest.raises(ValueError, match="width"):
        Drift(0)


def test_query_mlp_is_a_nudge_where_each_query_has_its_key():
    control, paper, (q, k) = Nudge(3, "q").double(), QueryMLP(3).double(), heads()
    paper.load_state_dict(control.state_dict())
    for a, b in zip(control(q, k), paper(q, k), strict=True):
        close(a, b, 0)
    assert sum(p.numel() for p in control.parameters()) == sum(p.numel() for p in Coupling(3).parameters())


def test_inside_attention_the_past_stays_the_past():
    layer = MultiHeadAttention(8, 2, pre=[Nudge(4, "k", "q"), Drift(4)]).double()
    x = rand(1, 5, 8)
    changed = torch.cat([x[:, :3], rand(1, 2, 8, seed=9)], dim=1)
    close(layer(x)[:, :3], layer(changed)[:, :3])
