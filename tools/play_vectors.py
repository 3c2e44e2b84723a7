"""Write what the playground's JavaScript shares with the library: the toy and the forces' weights (nbs/play/toy.json, which
the page loads), and cases with the library's answers (tests/play_vectors.json, for the test). --check only compares."""

import json, sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from coupled_qk.attention import attention_weights, four_tokens
from coupled_qk.coupling import ForceField, displacement, euler, score_terms
from coupled_qk.files import write_whole
from coupled_qk.integrators import PotentialForce, leapfrog, leapfrog_dkd, rk4, symplectic_euler

ROOT = Path(__file__).parents[1]
STEPS = {f.__name__: f for f in (euler, symplectic_euler, leapfrog, leapfrog_dkd, rk4)}
SIZES = [(0.3, 1), (0.1, 5), (1.0, 2), (-0.2, 3)]  # dt and n; each force and integrator meets one of them


def seeded(make: type) -> torch.nn.Module:
    "A force of width 2 with the weights that seed 0 gives it; `network` is chapter 02's."
    torch.manual_seed(0)
    return make(2).double().requires_grad_(False)


network, landscape = seeded(ForceField), seeded(PotentialForce)
FORCES = {
    "none": torch.zeros_like,
    "spring": lambda q: -q,
    "pendulum": lambda q: -torch.sin(q),
    "bent": lambda q: torch.tanh(2 * q.flip(-1)),
    "swirl": lambda q: torch.stack([-q[..., 1], q[..., 0]], dim=-1),
    "network": network,
    "landscape": landscape,
}


def toy() -> dict[str, Any]:
    "Queries and keys of the four tokens, and the weights of the two forces that have some."
    q, k, _ = four_tokens()
    weights = {name: dict(module.state_dict()) for name, module in (("network", network), ("landscape", landscape))}
    return {"q": q, "k": k, **weights}


def moved(step: str, force: str, dt: float, n: int, q: Tensor, k: Tensor) -> dict[str, Any]:
    "One case of the dynamics: where all tokens end, how far that is, and by how much each token's volume grows."
    run = lambda q, k: STEPS[step](q, k, FORCES[force], dt, n)
    a, b = run(q, k)
    map_one = lambda z: torch.cat(run(z[:2], z[2:]))
    volume = [torch.linalg.det(jacobian(map_one, z)) for z in torch.cat([q, k], -1)]
    ends = {"moved_q": a, "moved_k": b, "displacement": [displacement(q, a), displacement(k, b)], "volume": volume}
    return {"step": step, "force": force, "dt": dt, "n": n, **ends}


def vectors() -> dict[str, Any]:
    "Random tokens, and for them: every force under every integrator, the four terms of every force, the two maps."
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 2, dtype=torch.float64)
    pairs = enumerate(product(STEPS, FORCES))
    return {
        "q": q,
        "k": k,
        "moved": [moved(step, force, *SIZES[i % len(SIZES)], q, k) for i, (step, force) in pairs],
        "terms": {force: score_terms(q, k, f, 0.3) for force, f in FORCES.items()},
        "weights": {
            str(c).lower(): attention_weights(q[None, None], k[None, None], causal=c)[0, 0] for c in (True, False)
        },
    }


def plain(x: Any) -> Any:
    "Tensors as lists of numbers, all the way down."
    if isinstance(x, dict):
        return {name: plain(part) for name, part in x.items()}
    if isinstance(x, list):
        return [plain(part) for part in x]
    return x.tolist() if isinstance(x, Tensor) else x


def agree(a: Any, b: Any) -> bool:
    "Whether two such trees have one form and the same numbers; another torch may round the last digit otherwise."
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(agree(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(agree, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-12 * max(1, abs(b))
    return bool(a == b)


def main() -> int | str:
    wanted = {ROOT / "nbs/play/toy.json": plain(toy()), ROOT / "tests/play_vectors.json": plain(vectors())}
    stale = [p for p, data in wanted.items() if not (p.exists() and agree(json.loads(p.read_text("utf-8")), data))]
    if "--check" in sys.argv:
        return f"stale: {', '.join(p.name for p in stale)}; run: python tools/play_vectors.py" if stale else 0
    for p in stale:
        write_whole(p, (json.dumps(wanted[p], indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
