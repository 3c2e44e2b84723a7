"""Coupling moves each token by itself, as its formula says, back again where it should, and not at all for dt = 0."""

import copy, itertools, math, pickle

import numpy as np
import pytest
import torch
from test_attention import DTYPES, EPS, close, rand, refuses
from torch.autograd.functional import jacobian
from torch.profiler import profile

from coupled_qk.attention import rotary
from coupled_qk.coupling import Coupling, ForceField, QueryMLP, displacement, euler, score_terms
from coupled_qk.gpt import GPT, GPTConfig
from coupled_qk.integrators import PotentialForce, leapfrog, leapfrog_dkd, rk4, symplectic_euler

STEPS = [euler, symplectic_euler, leapfrog, leapfrog_dkd, rk4]
every_step = pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
every_group = pytest.mark.parametrize("H_kv", [4, 2, 1])
count = lambda module: sum(p.numel() for p in module.parameters())


def heads(H_kv=4, d=3, T=5, B=2, **options):
    return rand(B, 4, T, d, seed=1, **options), rand(B, H_kv, T, d, seed=2, **options)


def coupling(d=3, step=euler, dtype=torch.float64, **options):
    "A coupling whose force is strong, with weights that depend on nothing but d."
    module = Coupling(d, step, **options).to(dtype)
    with torch.no_grad():
        for i, weight in enumerate(module.force.parameters()):
            weight.copy_(rand(*weight.shape, seed=10 + i))
    return module


def group_mean(q, H_kv):
    return q.unflatten(1, (H_kv, -1)).mean(2)


# -- the formula


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (5, 2), (2, 4, 5, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("dt", [0.0, 0.1, -2.0])
def test_score_terms_add_up(dtype, shape, dt):
    "Sums of products of numbers up to about 30 (dt^2 k f), added in another order."
    q, k = rand(*shape, seed=1, dtype=dtype), rand(*shape, seed=2, dtype=dtype)
    terms = score_terms(q, k, torch.sin, dt)
    q1, k1 = euler(q, k, torch.sin, dt)
    assert list(terms) == ["query-key", "key-key", "query-force", "key-force"]
    close(sum(terms.values()), q1 @ k1.mT, 10 * EPS[dtype])
    close(terms["query-key"], q @ k.mT, 0)
    close(terms["key-key"], terms["key-key"].mT, 10 * EPS[dtype])


def test_force_is_the_two_layer_network_of_the_paper():
    force, q = ForceField(3).double(), rand(2, 4, 5, 3)
    z = torch.einsum("ij,...j->...i", force.hidden.weight, q) + force.hidden.bias
    hidden = z / (1 + torch.exp(-z))
    close(force(q), torch.einsum("ij,...j->...i", force.out.weight, hidden) + force.out.bias)
    assert count(force) == 2 * (3 * 3 + 3) and count(Coupling(64)) == count(QueryMLP(64)) == 2 * 64 * 65 + 1


@every_step
@pytest.mark.parametrize("n", [1, 3])
def test_one_query_per_key_is_the_plain_system(step, n):
    "To the bit."
    module, (q, k) = coupling(step=step, n=n, dt=0.3), heads()
    close(module(q, k), step(q, k, module.force, module.dt, n), 0)


@every_step
@every_group
def test_groups_move_as_their_mean(step, H_kv):
    "The mean of a group and its key are the coupled pair; all queries of the group take the same step."
    module, (q, k) = coupling(step=step, n=2, dt=0.3), heads(H_kv)
    q1, k1 = module(q, k)
    close((group_mean(q1, H_kv), k1), step(group_mean(q, H_kv), k, module.force, module.dt, 2))
    moves = (q1 - q).unflatten(1, (H_kv, -1))
    close(moves, moves[:, :, :1].expand_as(moves))


@every_step
@every_group
@pytest.mark.parametrize("n", [1, 3])
@DTYPES
def test_a_step_of_zero_is_plain_attention(step, H_kv, n, dtype):
    "To the bit, so that coupling can be added to a trained model."
    q, k = heads(H_kv, dtype=dtype)
    close(coupling(step=step, n=n, dt=0.0, dtype=dtype)(q, k), (q, k), 0)


@every_group
def test_query_mlp(H_kv):
    module, (q, k) = QueryMLP(3, dt=0.5).double(), heads(H_kv)
    q1, k1 = module(q, k)
    assert k1 is k
    close(q1, q + 0.5 * module.force(q))
    close(QueryMLP(3, dt=0.0).double()(q, k), (q, k), 0)


def test_step_sizes_start_at_a_tenth_shared_out():
    for n in (1, 2, 5):
        close(Coupling(4, n=n).dt.data, torch.tensor(0.1 / n), 0)
    close(QueryMLP(4).dt.data, torch.tensor(0.1), 0)
    assert Coupling(4, dt=-0.3).dt.item() == pytest.approx(-0.3) and Coupling(4).dt.shape == ()


# -- what it keeps


@pytest.mark.parametrize("step", [leapfrog, leapfrog_dkd], ids=lambda f: f.__name__)
@every_group
@pytest.mark.parametrize("dtype,eps", [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_reversible_for_groups_too(step, H_kv, dtype, eps):
    "About 20 roundings of numbers near 5, which the force spreads by its slope of about 3."
    there = coupling(step=step, n=3, dt=0.2, dtype=dtype)
    back = coupling(step=step, n=3, dt=-0.2, dtype=dtype)
    q, k = heads(H_kv, dtype=dtype)
    moved = there(q, k)
    assert (moved[0] - q).abs().max() > 0.1
    close(back(*moved), (q, k), eps)


@pytest.mark.parametrize("step", [symplectic_euler, leapfrog, leapfrog_dkd], ids=lambda f: f.__name__)
@every_group
@torch.no_grad()
def test_volume_for_groups_too(step, H_kv):
    "det J = 1 for the map of (mean q, k), and so for the map of all queries and keys."
    module, (q, k) = coupling(d=2, step=step, n=2, dt=0.4), heads(H_kv, d=2, T=1, B=1)
    offsets = q - group_mean(q, H_kv).repeat_interleave(4 // H_kv, 1)

    def of_means(z):
        mean, key = z.unflatten(0, (2, 1, H_kv, 1, 2))
        a, b = module(offsets + mean.repeat_interleave(4 // H_kv, 1), key)
        return torch.cat([group_mean(a, H_kv).flatten(), b.flatten()])

    def of_all(z):
        a, b = module(z[:8].view_as(q), z[8:].view_as(k))
        return torch.cat([a.flatten(), b.flatten()])

    for f, start in ((of_means, group_mean(q, H_kv)), (of_all, q)):
        J = jacobian(f, torch.cat([start.flatten(), k.flatten()]))
        close(torch.linalg.det(J), torch.tensor(1.0).double())


@every_step
@every_group
def test_tokens_rows_and_heads_stay_alone(step, H_kv):
    "A change of one token in one row and one group leaves everything else as it was."
    module, (q, k) = coupling(step=step, dt=0.3), heads(H_kv)
    before = module(q, k)
    q2, k2 = q.clone(), k.clone()
    q2[1, 0, 3] += 5
    k2[1, 0, 3] -= 5
    for name, a, b, n in zip("qk", before, module(q2, k2), (4 // H_kv, 1), strict=True):
        changed = (a - b).abs().amax(-1) > 1e-12  # the network may round a row otherwise in another batch
        expected = torch.zeros_like(changed)
        expected[1, :n, 3] = True
        assert torch.equal(changed, expected), name


def test_the_drift_commutes_with_rotary_and_the_force_does_not():
    (q, k), f = heads(d=4), ForceField(4).double()
    close(rotary(q + 0.3 * k), rotary(q) + 0.3 * rotary(k))
    assert (f(rotary(q)) - rotary(f(q))).abs().max() > 0.01


@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("H_kv", [2, 1])
@pytest.mark.parametrize("force", [ForceField, PotentialForce])
def test_gradients(step, H_kv, force):
    "By q, k, dt and every weight of the force, against finite differences."
    module = coupling(2, step, n=2, dt=0.3, force=force(2))
    names, weights = zip(*module.named_parameters(), strict=True)
    assert "dt" in names and len(names) == (5 if force is ForceField else 3)
    q, k = rand(1, 2, 2, 2, seed=1, grad=True), rand(1, H_kv, 2, 2, seed=2, grad=True)
    f = lambda q, k, *w: torch.func.functional_call(module, dict(zip(names, w, strict=True)), (q, k))
    assert torch.autograd.gradcheck(f, (q, k, *weights))


def test_half_precision_around_float32_weights():
    "Under autocast the projections give bfloat16; the step keeps that, and dt and its gradient stay float32."
    for module in (Coupling(4, leapfrog), QueryMLP(4)):
        q, k = rand(1, 4, 5, 4, dtype=torch.bfloat16), rand(1, 2, 5, 4, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            out = module(q, k)
            (out[0].float() @ out[1].float().repeat_interleave(2, 1).mT).sum().backward()
        assert [t.dtype for t in out] == [torch.bfloat16] * 2
        assert module.dt.dtype == module.dt.grad.dtype == torch.float32 and module.dt.grad.isfinite()


@pytest.mark.parametrize("shape", [dict(B=0), dict(T=0), dict(T=1)], ids=str)
@every_group
def test_little_input(shape, H_kv):
    q, k = heads(H_kv, **shape)
    for module in (coupling(step=rk4, n=2), QueryMLP(3).double()):
        assert [t.shape for t in module(q, k)] == [q.shape, k.shape]


@every_group
def test_memory_layout_does_not_matter(H_kv):
    (q, k), module = heads(H_kv), coupling(step=leapfrog)
    close(module(q.mT.contiguous().mT, k.transpose(1, 2).contiguous().transpose(1, 2)), module(q, k))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(again):
    q, k = heads(d=4)
    for module in (coupling(4, leapfrog_dkd, n=3), coupling(4, n=2, lean=True), QueryMLP(4).double()):
        twin = again(module)
        close(twin(q, k), module(q, k), 0)
        twin.dt.data += 1
        assert not torch.equal(twin(q, k)[0], module(q, k)[0]) and repr(twin) == repr(module)


def test_repr_tells_the_integrator():
    assert "d=4, step=leapfrog, n=3" in repr(Coupling(4, leapfrog, 3))


# -- the lean setting: the same numbers, with less memory


def both(d=3, **options):
    "The same coupling twice: fast and lean."
    return [coupling(d, lean=lean, **options) for lean in (False, True)]


class Twice(torch.nn.Module):
    "One module in two places."

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, q, k):
        return self.module(*self.module(q, k))


def gradients(module, q, k):
    "What the module gives, and the gradients of a function of it: by q, by k, and by dt and the force's weights."
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    out = module(q, k)
    loss = out[0].square().sum() + out[1].square().sum()
    return [*out, *torch.autograd.grad(loss, [q, k, *module.parameters()])]


# One step repeats the very same operations. Several go in pieces, which add up the weights' gradients in another order.
PIECES = pytest.mark.parametrize("n,eps", [(1, 0), (3, 1e-12), (7, 1e-12)])


@every_step
@every_group
@PIECES
def test_lean_is_the_same(step, H_kv, n, eps):
    "Gradients too, that of dt among them; seven steps are more than there are tokens."
    fast, lean = (gradients(module, *heads(H_kv)) for module in both(step=step, n=n, dt=0.6 / n))
    close(lean, fast, eps)
    assert fast[4].shape == () and fast[4].abs() > 0.1


@PIECES
def test_lean_is_the_same_for_one_module_in_two_places(n, eps):
    fast, lean = both(step=leapfrog_dkd, n=n, dt=0.6 / n)
    close(*(gradients(Twice(module), *heads(2)) for module in (lean, fast)), eps)


@pytest.mark.parametrize("n", [1, 2])
def test_lean_is_the_same_compiled(n):
    "Without a graph break; no compiler is needed for this. A product may be folded otherwise."
    fast, lean = both(step=leapfrog, n=n, dt=0.6 / n)
    traced = torch.compile(lean, backend="aot_eager", fullgraph=True)
    close(gradients(traced, *heads(2)), gradients(fast, *heads(2)), 1e-12)


@pytest.mark.parametrize("n,eps", [(1, 0), (2, 2**-7)])
def test_lean_is_the_same_under_autocast(n, eps):
    "The second pass runs in bfloat16 as the first did; pieces round their sums to its eight bits."
    q, k = (t.bfloat16() for t in heads(2, d=4, T=6))
    with torch.autocast("cpu", torch.bfloat16):
        fast, lean = (gradients(module, q, k) for module in both(4, step=leapfrog, dtype=torch.float32, n=n))
    for a, b in zip(lean, fast, strict=True):
        assert a.dtype == b.dtype and (a - b).norm() <= eps * b.norm()


def test_lean_is_the_same_inside_a_model():
    fast, lean = (
        GPT(GPTConfig(vocab_size=17, context=8, d_model=16, n_heads=4, n_kv_heads=2, pre="euler", pre_options=options))
        for options in ({}, {"lean": True})
    )
    ids = torch.arange(8)[None]
    close(*(torch.autograd.grad(m(ids).square().sum(), [*m.parameters()]) for m in (lean, fast)), 0)
    assert "lean" in repr(lean) and "lean" not in repr(fast)


def test_lean_computes_nothing_twice_without_gradients():
    module, calls = coupling(step=leapfrog, n=2, lean=True), []
    module.force.register_forward_hook(lambda *_: calls.append("force"))
    with torch.no_grad():
        close(module(*heads(2)), coupling(step=leapfrog, n=2)(*heads(2)), 0)
    assert calls == ["force"] * 3


def memory(work, unit):
    "Bytes that `work` leaves behind, and the most that it needs at one time, in units of `unit`."
    with profile(profile_memory=True) as seen:
        kept = work()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = [*itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))]
    del kept
    return held[-1] / unit.nbytes, max(held) / unit.nbytes


@pytest.mark.parametrize("step", [euler, leapfrog], ids=lambda f: f.__name__)
def test_lean_keeps_nothing_but_its_results(step):
    "However many steps; and the second pass needs for many, which go in pieces, what it needs for one, and their sum."
    q, k = heads(d=16, T=256, grad=True)
    lean = {n: coupling(16, step, n=n, lean=True) for n in (1, 7)}
    kept = [memory(lambda n=n: lean[n](q, k), q)[0] for n in lean]
    assert max(kept) < 2.2  # q and k moved, and a few kilobytes: the state of random numbers
    assert memory(lambda: coupling(16, step)(q, k), q)[0] > 4.9
    once, seven_times = (memory(lambda n=n: gradients(lean[n], q, k), q)[1] for n in lean)
    assert seven_times < once + 2


# -- displacement


def test_displacement():
    before = rand(2, 3)
    assert displacement(before, before) == 0.0
    assert displacement(before, 1.5 * before) == pytest.approx(0.5)
    assert displacement(7 * before, 7.7 * before) == pytest.approx(0.1)
    module, (q, k) = coupling(dt=-0.3), heads()
    q1, k1 = module(q, k)
    assert displacement(q, q1) == pytest.approx((0.3 * k.norm() / q.norm()).item())
    assert displacement(k, k1) == pytest.approx((0.3 * module.force(q).norm() / k.norm()).item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-300, 1e-30, 1e-4, 1.0, 1e4, 1e30, 1e300])
def test_displacement_at_every_size(dtype, size):
    "As far as the dtype can hold the numbers: 0.05, up to their own rounding."
    info = torch.finfo(dtype)
    if not 100 * info.smallest_normal < size < info.max / 100:
        return
    before = size * (1 + rand(50).abs())
    before, after = before.to(dtype), (1.05 * before).to(dtype)
    assert displacement(before, after) == pytest.approx(0.05, abs=2 * info.eps)


def test_displacement_of_nothing():
    "Nothing that stays has moved by 0; nothing that moves, infinitely far."
    for nothing in (torch.zeros(3), torch.zeros(0), torch.zeros(3).half()):
        assert displacement(nothing, nothing) == 0.0
    assert displacement(torch.zeros(3), torch.full((3,), 1e-30)) == math.inf


# -- bad input


class Narrow(torch.nn.Module):
    "A force that gives one number where it should give d."

    def forward(self, q):
        return q[..., :1]


(Q, K), C, M = heads(dtype=torch.float32), Coupling(3), QueryMLP(3)
BAD = {
    "n = 0": (lambda: Coupling(4, n=0), "n, the number of steps", "at least 1", "0"),
    "n = 1.5": (lambda: Coupling(4, n=1.5), "n, the number of steps", "integer", "float"),
    "dt is nan": (lambda: Coupling(4, dt=math.nan), "dt", "finite", "nan"),
    "dt is infinite": (lambda: QueryMLP(4, dt=-math.inf), "dt", "finite", "-inf"),
    "dt overflows float32": (lambda: Coupling(4, dt=1e40), "dt", "finite", "1e+40"),
    "dt is text": (lambda: Coupling(4, dt="0.1"), "dt", "number", "str"),
    "dt is a nan tensor": (lambda: Coupling(4, dt=torch.tensor(math.nan)), "dt", "finite", "nan"),
    "dt per head": (lambda: Coupling(4, dt=torch.ones(2)), "dt", "number"),
    "step is a name": (lambda: Coupling(4, step="leapfrog"), "step", "function", "str"),
    "step is a result": (lambda: Coupling(3, step=euler(Q, K, torch.tanh, 0.1)), "step", "function", "tuple"),
    "force is a name": (lambda: Coupling(4, force="mlp"), "force", "str"),
    "force is a class": (lambda: Coupling(4, force=ForceField), "force", "type"),
    "lean is a word": (lambda: Coupling(4, lean="no"), "lean", "True or False", "'no'"),
    "force of other width": (lambda: Coupling(4, force=ForceField(5)), "force", "4", "5"),
    "force that would be spread": (lambda: Coupling(3, force=Narrow())(Q, K), "force", "(2, 4, 5, 3)", "(2, 4, 5, 1)"),
    "q rank": (lambda: C(Q[0], K[0]), "q must", "(B, H, T, d)", "(4, 5, 3)"),
    "q is a list": (lambda: C([1.0], K), "q must", "list"),
    "k is an array": (lambda: M(Q, K.numpy()), "k must", "ndarray"),
    "integers": (lambda: C(Q.long(), K.long()), "q must", "floating", "int64"),
    "dtypes": (lambda: C(Q, K.double()), "q and k", "float32", "float64"),
    "dtype of the module": (lambda: C(Q.double(), K.double()), "q", "float32", "float64"),
    "dtype of the control": (lambda: M(Q.half(), K.half()), "q", "float32", "float16"),
    "batch": (lambda: C(Q[:1], K), "q and k", "batch", "(1, 4, 5, 3)"),
    "width": (lambda: C(Q[..., :2], K[..., :2]), "q must", "width 3", "2"),
    "width of the control": (lambda: M(Q[..., :2], K[..., :2]), "q must", "width 3", "2"),
    "heads swapped": (lambda: C(Q[:, :2], K), "multiple", "(2, 2, 5, 3)", "(2, 4, 5, 3)"),
    "tokens": (lambda: C(Q, K[:, :, :3]), "q and k", "(2, 4, 5, 3)", "(2, 4, 3, 3)"),
    "one key for all tokens": (lambda: C(Q, K[:, :, :1]), "q and k", "(2, 4, 5, 3)", "(2, 4, 1, 3)"),
    "one key, in groups": (lambda: C(Q, K[:, :2, :1]), "q and k", "(2, 2, 1, 3)"),
    "terms shape": (lambda: score_terms(Q, K[:, :2], torch.tanh, 0.1), "q and k", "shape", "(2, 2, 5, 3)"),
    "terms rank": (lambda: score_terms(Q[0, 0, 0], K[0, 0, 0], torch.tanh, 0.1), "q must", "(..., T, d)", "(3,)"),
    "terms dtypes": (lambda: score_terms(Q, K.double(), torch.tanh, 0.1), "q and k", "float32", "float64"),
    "terms dt": (lambda: score_terms(Q, K, torch.tanh, math.nan), "dt", "finite", "nan"),
    "terms list": (lambda: score_terms([[1.0]], [[1.0]], torch.tanh, 0.1), "q must", "list"),
    "moved shape": (lambda: displacement(Q, Q[:1]), "before and after", "shape", "(1, 4, 5, 3)"),
    "moved list": (lambda: displacement([1.0], [2.0]), "before must", "list"),
    "moved array": (lambda: displacement(Q, np.ones(Q.shape)), "after must", "ndarray"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    refuses(*BAD[case])


@pytest.mark.parametrize("make", [ForceField, Coupling, QueryMLP])
@pytest.mark.parametrize("d", [0, -1, 2.0, "4", None])
def test_bad_width(make, d):
    refuses(lambda: make(d), "d, the head width", "positive integer", str(d))


@pytest.mark.parametrize("d", [0, 2.0])
def test_bad_width_with_a_force_of_ones_own(d):
    refuses(lambda: Coupling(d, force=ForceField(2)), "d, the head width", "positive integer", str(d))
