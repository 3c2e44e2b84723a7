"""Draw nbs/images/idea.svg, the moving picture of the first page, from the library: queries and keys of the four tokens
move together, and the attention weights with them. It stands still for who prefers that. --check only compares."""

import sys
from pathlib import Path

import torch
from torch import Tensor

from coupled_qk.attention import attention_weights, four_tokens
from coupled_qk.figures import palette
from coupled_qk.files import write_whole
from coupled_qk.integrators import leapfrog

FILE = Path(__file__).parents[1] / "nbs/images/idea.svg"
STEPS, DT, SECONDS = 12, 0.1, 3
SCALE, MIDDLE = 52, (120, 132)  # pixels per unit; where the plane's origin lies
CELL, MAP = 44, (284, 44)  # the side of a cell; where the map begins

PAGE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 246" role="img" aria-labelledby="t">
<title id="t">Queries and keys of four tokens move together in the plane; the map of attention weights changes with them.</title>
<style>
text {{ font: 14px system-ui, sans-serif; fill: #374151; text-anchor: middle; }}
.qt {{ stroke: {blue}; }} .kt {{ stroke: {orange}; }} .q {{ fill: {blue}; }} .k {{ fill: {orange}; }}
.q, .k {{ stroke: #fff; stroke-width: 1; }} g text {{ font-size: 11px; fill: #fff; stroke: none; }}
.qt, .kt {{ fill: none; stroke-width: 2; opacity: .35; }} .axis {{ stroke: #d1d5db; }} .w {{ fill: {blue}; }} .cell {{ fill: none; stroke: #d1d5db; }}
.q, .k, .w {{ animation: {seconds}s ease-in-out infinite alternate; }}
@media (prefers-reduced-motion: reduce) {{ .q, .k, .w {{ animation: none; }} }}
{motion}
</style>
<rect width="480" height="246" rx="8" fill="#fff"/>
<path class="axis" d="M12 {y}H228M{x} 24V240"/>
<text x="{x}" y="18">query and key move together</text>
<text x="372" y="18">then tokens meet</text>
{marks}
<text x="372" y="228">key</text><text x="0" y="0" transform="translate(272 118) rotate(-90)">query</text>
</svg>
"""


def path() -> tuple[list[Tensor], list[Tensor]]:
    "Queries and keys after 0 to STEPS small steps under the force -q."
    q, k, _ = four_tokens()
    force = lambda q: -q
    moments = [leapfrog(q, k, force, DT, n=n) for n in range(1, STEPS + 1)]
    return [q, *(m[0] for m in moments)], [k, *(m[1] for m in moments)]


def place(point: Tensor) -> str:
    "Where a point of the plane lies in the picture."
    x, y = point.tolist()
    return f"{MIDDLE[0] + SCALE * x:.1f}px, {MIDDLE[1] - SCALE * y:.1f}px"


def keyframes(name: str, states: list[str]) -> str:
    "A CSS animation through these states, at even times."
    frames = "".join(f"{100 * i / (len(states) - 1):.0f}%{{{state}}}" for i, state in enumerate(states))
    return f"@keyframes {name} {{{frames}}}\n#{name} {{ animation-name: {name}; {states[-1]} }}"


def draw() -> str:
    qs, ks = path()
    motion, marks = [], []
    for letter, points, shape in (
        ("q", qs, '<circle r="9"/>'),
        ("k", ks, '<rect x="-8" y="-8" width="16" height="16"/>'),
    ):
        for i in range(4):
            places = [place(p[i]) for p in points]
            line = " ".join(p.replace("px", "") for p in places)
            marks += [
                f'<polyline class="{letter}t" points="{line}"/>',
                f'<g id="{letter}{i}" class="{letter}">{shape}<text y="4">{i}</text></g>',
            ]
            motion.append(keyframes(f"{letter}{i}", [f"transform:translate({p})" for p in places]))
    weights = torch.stack([attention_weights(q[None, None], k[None, None])[0, 0] for q, k in zip(qs, ks, strict=True)])
    for i in range(4):
        for j in range(4):
            box = f'x="{MAP[0] + CELL * j}" y="{MAP[1] - 14 + CELL * i}" width="{CELL}" height="{CELL}"'
            marks.append(f'<rect class="cell" {box}/>')
            if j <= i:
                marks.append(f'<rect id="w{i}{j}" class="w" {box}/>')
                motion.append(keyframes(f"w{i}{j}", [f"opacity:{w:.2f}" for w in weights[:, i, j].tolist()]))
    return PAGE.format(
        **palette, seconds=SECONDS, x=MIDDLE[0], y=MIDDLE[1], motion="\n".join(motion), marks="\n".join(marks)
    )


def main() -> int | str:
    picture = draw()
    if "--check" in sys.argv:
        same = FILE.is_file() and FILE.read_text(encoding="utf-8") == picture
        return 0 if same else f"{FILE.name} is stale; run: python tools/draw.py"
    write_whole(FILE, picture.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
