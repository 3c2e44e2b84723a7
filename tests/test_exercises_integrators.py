"The checkers of chapter 02 accept right answers however they are written, and say what is wrong with plausible others."

import math

import numpy as np
import pytest
import torch

from coupled_qk.exercises.integrators import check_composition, check_limit, check_swirl
from coupled_qk.integrators import PotentialForce, euler, leapfrog, leapfrog_dkd, rk4


def composed(*shares, step=leapfrog):
    "A step made of several, one after another."

    def whole(q, k, force, dt):
        for share in shares:
            q, k = step(q, k, force, share * dt)
        return q, k

    return whole


def yoshida_by_hand(q, k, force, dt):
    "The same in kicks and drifts, without a loop."
    c = 2 ** (1 / 3)
    a, b = dt / (2 - c), -c * dt / (2 - c)
    for kick, drift in ((a / 2, a), ((a + b) / 2, b), ((a + b) / 2, a)):
        k = k + kick * force(q)
        q = q + drift * k
    return [q, k + a / 2 * force(q)]


def forgets(q, k, force, dt):
    "Three leapfrogs that all start at the beginning."
    a = 1 / (2 - 2 ** (1 / 3))
    for share in (a, 1 - 2 * a, a):
        out = leapfrog(q, k, force, share * dt)
    return out


A = 1 / (2 - 2 ** (1 / 3))
S = 1 / (4 - 4 ** (1 / 3))
NAN = math.nan

BAD = {
    check_composition: {
        "equal parts": (composed(1 / 3, 1 / 3, 1 / 3), "order of 2", "misses must also cancel"),
        "quarter, half, quarter": (composed(1 / 4, 1 / 2, 1 / 4), "order of 2", "2 a^3 + b^3 = 0"),
        "plain leapfrog": (leapfrog, "order of 2", "cancel"),
        "Euler": (euler, "order of 1", "each of your parts a leapfrog"),
        "parts of Euler": (composed(A, 1 - 2 * A, A, step=euler), "order of", "each of your parts a leapfrog"),
        "parts that take too long": (composed(1, 1, 1), "smaller steps do not", "2a + b = 1"),
        "parts not chained": (forgets, "result of each to the next"),
        "Runge-Kutta": (rk4, "does not come home"),
        "Runge-Kutta in 64 parts": (lambda q, k, f, dt: rk4(q, k, f, dt / 64, 64), "too exact for one step of three"),
        "nothing but q": (lambda q, k, f, dt: q, "the new q and the new k together", "shape (2,)"),
        "numbers": (lambda q, k, f, dt: (0.0, 1.0), "the new q and the new k together", "shape (2,)"),
        "one shape too few": (lambda q, k, f, dt: (q, k[0]), "the new q and the new k together"),
        "nan": (lambda q, k, f, dt: (q * NAN, k), "nan or infinity"),
        "too large to measure": (lambda q, k, f, dt: (q * 1e3, k * 1e3), "smaller steps do not"),
    },
    check_swirl: {
        "spring": (lambda q: -q, "its own coordinate only"),
        "elementwise": (torch.tanh, "its own coordinate only"),
        "a landscape": (PotentialForce(2).double(), "symmetric"),
        "a symmetric matrix": (lambda q: q @ torch.tensor([[1.0, 2.0], [2.0, -1.0]]).double(), "symmetric"),
        "constant": (torch.ones_like, "the same everywhere"),
        "constant row": (lambda q: torch.ones(2).double().expand_as(q), "the same everywhere"),
        "too weak": (lambda q: 0.01 * torch.stack([-q[..., 1], q[..., 0]], -1), "small", "0.05"),
        "wrong axis": (lambda q: torch.stack([-q[..., 1], q[..., 0]], 0), "shape (8, 2)", "(2, 8)"),
        "first token's": (lambda q: torch.stack([-q[1], q[0]]), "shape"),
        "looks at neighbours": (
            lambda q: torch.stack([-q[..., 1], q[..., 0]], -1) + q.sum() - q[..., :1] - q[..., 1:],
            "that token's q alone",
        ),
        "random": (torch.randn_like, "that token's q alone", "call to call"),
        "signs": (torch.sign, "flat between jumps"),
        "list of the wrong shape": (lambda q: [1.0, 2.0], "shape (8, 2)", "(2,)"),
        "list of words": (lambda q: ["up", "down"], "tensor", "list"),
        "complex": (lambda q: q * 1j, "complex"),
        "nan": (lambda q: q * NAN, "nan or infinity"),
        "nan far out": (lambda q: torch.stack([-q[..., 1], q[..., 0]], -1) / (q.abs() < 2), "nan or infinity"),
    },
    check_limit: {
        "for w = 1 only": (lambda w: 2.0, "w = 1"),
        "the wrong way": (lambda w: 2 * w, "SMALLER"),
        "of the stiffness": (lambda w: 2 / w**2, "1/w"),
        "half": (lambda w: 1 / w, "too careful"),
        "Runge-Kutta's": (lambda w: 8**0.5 / w, "RK4"),
        "something else": (lambda w: 3 / w, "0.5", "6"),
        "a little too large": (lambda w: 2.01 / w, "0.5", "4.02", "a little below"),
        "a little too small": (lambda w: 1.99 / w, "0.5", "3.98"),
        "nan": (lambda w: NAN, "w = 0.5", "nan"),
        "infinite": (lambda w: math.inf, "w = 0.5", "inf"),
        "two numbers": (lambda w: torch.ones(2), "one number"),
    },
}
WRONG = [(check, name, *case) for check, cases in BAD.items() for name, case in cases.items()]


@pytest.mark.parametrize("check, case", [(c, w) for c, _, *w in WRONG], ids=[f"{c.__name__}-{n}" for c, n, *_ in WRONG])
def test_wrong_answers(check, case, capsys):
    answer, *words = case
    assert check(answer) is False
    said = capsys.readouterr().out
    assert said.startswith("Not yet: ") and said.count("\n") == 1
    for word in words:
        assert word in said, said


def bisect(w):
    "The limit by trial: the trace of leapfrog's matrix must stay within 2."
    low, high = 0.0, 100.0
    for _ in range(40):
        dt = (low + high) / 2
        low, high = (dt, high) if abs(2 - dt**2 * w**2) <= 2 else (low, dt)
    return low


def swirl_in_a_bowl(q):
    r = q.square().sum(-1, keepdim=True)
    return q.flip(-1) * torch.tensor([-1.0, 1.0], dtype=q.dtype) * torch.exp(-r / 4) - q


RIGHT = [
    (check_composition, composed(A, 1 - 2 * A, A)),
    (check_composition, yoshida_by_hand),
    (check_composition, composed(A, 1 - 2 * A, A, step=leapfrog_dkd)),
    (check_composition, composed(S, S, 1 - 4 * S, S, S)),  # Suzuki's five
    (check_swirl, lambda q: torch.stack([-q[..., 1], q[..., 0]], -1)),
    (check_swirl, swirl_in_a_bowl),
    (check_swirl, lambda q: (q @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=q.dtype)).tolist()),
    (check_swirl, lambda q: np.stack([-q[..., 1].numpy(), q[..., 0].numpy()], -1)),
    (check_swirl, lambda q: q @ torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=q.dtype)),
    (check_limit, lambda w: 2 / w),
    (check_limit, bisect),
    (check_limit, lambda w: torch.tensor(2.0) * w**-1),
]


@pytest.mark.parametrize("check, answer", RIGHT)
def test_right_answers(check, answer, capsys):
    assert check(answer) is True
    assert capsys.readouterr().out.startswith("Right: ")
