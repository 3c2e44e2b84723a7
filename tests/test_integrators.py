"""Each integrator has the order, the cost, the volume and the way back that chapter 02 promises, for any force."""

import math

import pytest
import torch
from test_attention import close, rand, refuses
from torch.autograd.functional import jacobian

from coupled_qk.coupling import ForceField
from coupled_qk.integrators import PotentialForce, euler, leapfrog, leapfrog_dkd, rk4, symplectic_euler

ORDER = {euler: 1, symplectic_euler: 1, leapfrog: 2, leapfrog_dkd: 2, rk4: 4}
SHEARS = [symplectic_euler, leapfrog, leapfrog_dkd]  # each moves q or k by an amount that the other decides
name = lambda x: getattr(x, "__name__", str(x))
every_step = pytest.mark.parametrize("step", ORDER, ids=name)
every_n = pytest.mark.parametrize("n", range(1, 5))


@pytest.fixture(scope="module")
def learned():
    "A force as training might leave it: far from linear, and not the slope of any landscape."
    force = ForceField(3).double().requires_grad_(False)
    for i, weight in enumerate(force.parameters()):
        weight.copy_(rand(*weight.shape, seed=i))
    return force


def through(step, force, dt, n=1):
    "The map of z = (q, k), laid end to end."
    return lambda z: torch.cat(step(*z.chunk(2), force, dt, n))


# -- order and cost


@every_step
def test_order_on_a_learned_force(step, learned):
    "The error at t = 1 falls like dt to the power of the order: halving the step shows the slope."
    q, k = rand(5, 3, seed=1), rand(5, 3, seed=2)
    true = torch.cat(rk4(q, k, learned, 1 / 1024, 1024))  # its own error is about 1e-14
    errors = [(torch.cat(step(q, k, learned, 1 / n, n)) - true).norm().item() for n in (64, 128)]
    assert errors[1] > 1e-11  # far above rounding, so the slope means something
    assert abs(math.log2(errors[0] / errors[1]) - ORDER[step]) < 0.1  # the next power of dt still adds some per cent


def test_one_step_by_hand(learned):
    "What moves first, and with which force, as chapter 02 writes it."
    q, k, f, dt = rand(5, 3, seed=1), rand(5, 3, seed=2), learned, 0.3
    kicked, drifted = k + dt * f(q), q + dt / 2 * k
    half = k + dt / 2 * f(q)
    moved = k + dt * f(drifted)
    close(euler(q, k, f, dt), (q + dt * k, kicked))
    close(symplectic_euler(q, k, f, dt), (q + dt * kicked, kicked))
    close(leapfrog(q, k, f, dt), (q + dt * half, half + dt / 2 * f(q + dt * half)))
    close(leapfrog_dkd(q, k, f, dt), (drifted + dt / 2 * moved, moved))


@every_step
@every_n
def test_force_evaluations(step, n):
    calls = []
    step(torch.ones(2), torch.ones(2), lambda q: calls.append(q) or -q, 0.1, n)
    assert len(calls) == {leapfrog: n + 1, rk4: 4 * n}.get(step, n)


@every_step
@every_n
def test_n_steps_are_single_steps_in_a_row(step, n, learned):
    "To the bit: leapfrog's kept force is the one that it would compute again."
    q, k = rand(4, 3, seed=1), rand(4, 3, seed=2)
    a, b = q, k
    for _ in range(n):
        a, b = step(a, b, learned, 0.3)
    close(step(q, k, learned, 0.3, n), (a, b), 0)


@every_step
@every_n
def test_a_constant_force(step, n):
    "Second order and above follow a parabola exactly, whatever the step; all of them a straight line."
    q, k, a, dt = rand(3, seed=1), rand(3, seed=2), rand(3, seed=3), 0.5
    t = n * dt
    close(step(q, k, torch.zeros_like, dt, n), (q + t * k, k))
    q1, k1 = step(q, k, lambda q: a, dt, n)
    close(k1, k + t * a)
    assert ORDER[step] == 1 or torch.allclose(q1, q + t * k + t**2 / 2 * a, rtol=0, atol=1e-12)


@every_step
@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 4, 5, 3), (0, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_shapes_dtypes_and_tokens_alone(step, shape, dtype):
    "Any shape, any floating dtype, each row by itself; the inputs stay as they were."
    q, k, dt = rand(*shape, seed=1, dtype=dtype), rand(*shape, seed=2, dtype=dtype), torch.tensor(0.25).double()
    kept = q.clone(), k.clone()
    out = step(q, k, torch.tanh, dt, 2)
    assert [(t.shape, t.dtype) for t in out] == [(q.shape, dtype)] * 2
    close((q, k), kept, 0)
    rounding = 2**-6 if dtype == torch.bfloat16 else 0  # dt / 6 itself has 8 bits there
    close(step(q, k, torch.tanh, 0.25, 2), out, rounding)  # a number is as good as a tensor
    if q.ndim > 1 and len(q):
        close(step(q[:1], k[:1], torch.tanh, dt, 2), tuple(t[:1] for t in out), 0)


@every_step
def test_a_step_of_zero(step, learned):
    q, k = rand(4, 3, seed=1), rand(4, 3, seed=2)
    close(step(q, k, learned, 0.0, 3), (q, k), 0)


@every_step
def test_gradients(step):
    "By q, k, dt and the force's own weights, against finite differences."
    w = rand(2, 2, seed=3, grad=True)
    q, k, dt = rand(3, 2, seed=1, grad=True), rand(3, 2, seed=2, grad=True), torch.tensor(0.3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k, dt, w: step(q, k, lambda q: torch.tanh(q @ w), dt, 2), (q, k, dt, w))


# -- the way back

FORWARD_AND_BACK = {
    # 24 roundings of numbers near 3, each 2e-16 or 1e-7 relative, which the force spreads by its slope of about 3
    torch.float64: 1e-12,
    torch.float32: 1e-4,
}


@pytest.mark.parametrize("step", [leapfrog, leapfrog_dkd], ids=name)
@every_n
@pytest.mark.parametrize("dtype", FORWARD_AND_BACK, ids=str)
@pytest.mark.parametrize("dt", [0.1, 0.5])
def test_leapfrog_runs_backwards(step, n, dtype, dt, learned):
    q, k = rand(5, 3, seed=1, dtype=dtype), rand(5, 3, seed=2, dtype=dtype)
    force = lambda q: learned(q.double()).to(dtype)
    there = step(q, k, force, dt, n)
    assert (there[0] - q).abs().max() > 0.05
    close(step(*there, force, -dt, n), (q, k), FORWARD_AND_BACK[dtype])


@pytest.mark.parametrize("step", [euler, symplectic_euler, rk4], ids=name)
def test_the_others_do_not(step, learned):
    q, k = rand(5, 3, seed=1), rand(5, 3, seed=2)
    back = step(*step(q, k, learned, 0.5), learned, -0.5)
    assert (torch.cat(back) - torch.cat([q, k])).abs().max() > 1e-5


# -- volume and symplecticity


@every_step
@every_n
def test_volume(step, n, learned):
    "Shears keep it for any force; Euler multiplies it by det(I - dt^2 f'(q)) at every step."
    z, dt, volume = rand(6), 0.4, 1.0
    J = jacobian(through(step, learned, dt, n), z)
    if step is euler:
        for _ in range(n):
            slope = jacobian(learned, z[:3])
            volume *= torch.linalg.det(torch.eye(3).double() - dt**2 * slope).item()
            z = through(euler, learned, dt)(z)
    kept = abs(torch.linalg.det(J).item() / volume - 1) < 1e-12  # a determinant of 6 x 6 numbers near one
    assert kept or step is rk4


@pytest.mark.parametrize("step", SHEARS, ids=name)
@every_n
@pytest.mark.parametrize("kind", [PotentialForce, ForceField], ids=name)
def test_symplectic_only_for_a_landscape(step, n, kind):
    force = kind(3).double().requires_grad_(False)
    for i, weight in enumerate(force.parameters()):
        weight.copy_(rand(*weight.shape, seed=i))
    J, eye, zero = jacobian(through(step, force, 0.4, n), rand(6)), torch.eye(3).double(), torch.zeros(3, 3).double()
    omega = torch.cat([torch.cat([zero, eye], 1), torch.cat([-eye, zero], 1)])
    broken = (J.T @ omega @ J - omega).abs().max().item() / J.norm().item() ** 2
    assert broken < 1e-14 if kind is PotentialForce else broken > 1e-3  # rounding of J^T Omega J is eps |J|^2


# -- a force with a potential


@pytest.mark.parametrize("d", [1, 2, 5])
def test_potential_force_is_a_slope(d):
    "f = -grad U with U(q) = sum S(W q + b) and S' = silu; here S is integrated by Gauss and Legendre's rule."
    force, q = PotentialForce(d).double().requires_grad_(False), rand(4, d, grad=True)
    force.hidden.weight.copy_(rand(2 * d, d, seed=1))
    # 40 points are exact for polynomials up to degree 79, and silu is smooth: the rest is below 1e-13 for |z| < 10
    nodes, weights = _gauss(40)
    z = force.hidden(q)
    U = (z[..., None] * torch.nn.functional.silu(z[..., None] * nodes) * weights).sum()
    close(force(q), -torch.autograd.grad(U, q)[0])
    slope = jacobian(force, q[0].detach())
    close(slope, slope.T, 1e-14)


def _gauss(n):
    "Points and weights of the Gauss-Legendre rule on (0, 1): eigenvalues of its Jacobi matrix (Golub and Welsch)."
    i = torch.arange(1, n, dtype=torch.float64)
    off = torch.diag(i / (4 * i**2 - 1).sqrt(), 1)
    x, v = torch.linalg.eigh(off + off.T)
    return (x + 1) / 2, v[0] ** 2


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 4, 5, 3), (0, 3)], ids=str)
def test_potential_force_shapes(shape):
    force = PotentialForce(3)
    assert force(torch.ones(shape)).shape == shape
    assert sum(p.numel() for p in force.parameters()) == sum(p.numel() for p in ForceField(3).parameters())


def test_leapfrog_keeps_the_energy_of_a_landscape():
    "Over 2,000 steps the energy error stays as small as over the first 100."
    force = PotentialForce(2).double().requires_grad_(False)
    force.hidden.weight.copy_(rand(4, 2, seed=1))
    nodes, weights = _gauss(20)

    def energy(q, k):
        z = force.hidden(q)[..., None]
        return ((z * torch.nn.functional.silu(z * nodes) * weights).sum() + k.square().sum() / 2).item()

    (q, k), errors = (rand(2, seed=2), rand(2, seed=3)), []
    start = energy(q, k)
    for _ in range(200):
        q, k = leapfrog(q, k, force, 0.1, 10)
        errors.append(abs(energy(q, k) - start))
    assert 0 < max(errors) < 3 * max(errors[:10]) < 0.1


# -- bad input

q, k, f = rand(4, 2, seed=1), rand(4, 2, seed=2), torch.tanh
BAD = {
    "n = 0": (lambda step: step(q, k, f, 0.1, 0), "n", "at least 1", "0"),
    "n < 0": (lambda step: step(q, k, f, 0.1, -1), "n", "at least 1", "-1"),
    "n = 1.5": (lambda step: step(q, k, f, 0.1, 1.5), "n", "integer", "float"),
    "n is a tensor": (lambda step: step(q, k, f, 0.1, torch.tensor(2)), "n", "integer", "Tensor"),
    "n is a bool": (lambda step: step(q, k, f, 0.1, True), "n", "integer", "bool"),
    "shapes": (lambda step: step(q, k[0], f, 0.1), "q and k", "shape", "(4, 2)", "(2,)"),
    "shapes that broadcast": (lambda step: step(q[:1], k, f, 0.1), "q and k", "shape", "(1, 2)", "(4, 2)"),
    "dtypes": (lambda step: step(q, k.float(), f, 0.1), "q and k", "dtype", "float64", "float32"),
    "integers": (lambda step: step(q.long(), k.long(), f, 0.1), "q must", "floating", "int64"),
    "lists": (lambda step: step([1.0, 2.0], [1.0, 2.0], f, 0.1), "q must", "list"),
    "array": (lambda step: step(q, k.numpy(), f, 0.1), "k must", "ndarray"),
    "dt is nan": (lambda step: step(q, k, f, math.nan), "dt", "finite", "nan"),
    "dt is infinite": (lambda step: step(q, k, f, math.inf), "dt", "finite", "inf"),
    "dt per coordinate": (lambda step: step(q, k, f, torch.ones(2)), "dt", "one number", "(2,)"),
    "dt is text": (lambda step: step(q, k, f, "0.1"), "dt", "str"),
    "dt is a bool": (lambda step: step(q, k, f, True), "dt", "number", "bool"),
    "dt is a tensor of a bool": (lambda step: step(q, k, f, torch.tensor(True)), "dt", "real number", "bool"),
    "dt is complex": (lambda step: step(q, k, f, torch.tensor(1j)), "dt", "real number", "complex"),
    "dt is missing": (lambda step: step(q, k, f, None), "dt", "NoneType"),
    "complex queries": (lambda step: step(q + 0j, k + 0j, f, 0.1), "q must", "floating", "complex"),
    "boolean queries": (lambda step: step(q > 0, k > 0, f, 0.1), "q must", "floating", "bool"),
    "keys without numbers": (lambda step: step(q, k.to("meta"), f, 0.1), "q and k", "one device", "cpu", "meta"),
    "no force": (lambda step: step(q, k, None, 0.1), "force must", "function", "NoneType"),
    "a force's value": (lambda step: step(q, k, f(q), 0.1), "force must", "function", "float64"),
    "a force's class": (lambda step: step(q, k, ForceField, 0.1), "force must", "function", "type"),
    "force returns nothing": (lambda step: step(q, k, lambda q: None, 0.1), "force must", "tensor", "NoneType"),
    "force returns one row": (lambda step: step(q, k, lambda q: q[0], 0.1), "force", "shape", "(4, 2)", "(2,)"),
    "force returns a number": (lambda step: step(q, k, torch.sum, 0.1), "force", "shape", "(4, 2)", "()"),
    "force adds an axis": (lambda step: step(q, k, lambda q: q[None], 0.1), "force", "shape", "(1, 4, 2)"),
}


@every_step
@pytest.mark.parametrize("case", BAD)
def test_bad_input(step, case):
    call, *words = BAD[case]
    refuses(lambda: call(step), *words)


@every_step
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_token(step, value):
    "A NaN is not looked for, because that would make a GPU wait; no other token can see it."
    spoilt = q.clone().index_fill_(0, torch.tensor(1), value)
    out, others = step(spoilt, k, f, 0.1, 2), torch.tensor([0, 2, 3])
    close(tuple(t[others] for t in out), tuple(t[others] for t in step(q, k, f, 0.1, 2)), 0)
    assert not torch.isfinite(out[0][1]).any()


@every_step
def test_any_layout_of_memory(step):
    "Transposed and expanded tensors, leaves that want a gradient, and tensors without numbers."
    expected = step(q, k, f, 0.1, 2)
    close(step(q.T.contiguous().T, k.T.contiguous().T, f, 0.1, 2), expected, 0)
    close(step(q[:1].expand(4, 2), k, f, 0.1), step(q[:1].repeat(4, 1), k, f, 0.1), 0)
    leaf = q.clone().requires_grad_()
    close(tuple(t.detach() for t in step(leaf, k, f, 0.1, 2)), expected, 0)
    assert all(t.is_meta and t.shape == q.shape for t in step(q.to("meta"), k.to("meta"), f, 0.1, 2))


@pytest.mark.parametrize("d", [0, -1, 2.0, "4", None, True])
def test_bad_width(d):
    refuses(lambda: PotentialForce(d), "d, the head width", "positive integer", str(d))


BAD_POSITIONS = {
    "width": (torch.ones(5, 4), "q must have shape (..., 3)", "(5, 4)"),
    "no axis": (torch.tensor(1.0), "q must have shape (..., 3)", "()"),
    "dtype": (torch.ones(3).double(), "q must have the dtype of the weights", "float32", "float64"),
    "integers": (torch.ones(3).long(), "q must", "floating", "int64"),
    "list": ([1.0, 2.0, 3.0], "q must", "list"),
    "no numbers": (torch.ones(3, device="meta"), "q must be where the weights are", "cpu", "meta"),
}


@pytest.mark.parametrize("case", BAD_POSITIONS)
def test_bad_position(case):
    q, *words = BAD_POSITIONS[case]
    refuses(lambda: PotentialForce(3)(q), *words)
