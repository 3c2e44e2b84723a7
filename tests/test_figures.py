"""Figures are PNG with words, the same every time, and touch nothing outside themselves."""

import json, re
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from test_attention import refuses

from coupled_qk import figures
from coupled_qk.figures import animate, arrows, curves, heatmaps, palette, panels, png, save, show


@pytest.fixture
def shown(monkeypatch):
    "What was displayed, and the figures behind it."
    displayed, drawn = [], []
    monkeypatch.setattr(figures, "display", displayed.append)
    monkeypatch.setattr(figures, "png", lambda fig: drawn.append(fig) or png(fig))
    return displayed, drawn


@pytest.fixture(autouse=True)
def leaves_matplotlib_alone():
    before = dict(mpl.rcParams), mpl.get_backend()
    yield
    assert (dict(mpl.rcParams), mpl.get_backend()) == before and plt.get_fignums() == []


@pytest.mark.parametrize(
    "n,rows,shape", [(1, 1, (1, 1)), (3, 1, (1, 3)), (4, 2, (2, 2)), (3, 2, (2, 2)), (2, 3, (3, 1))]
)
def test_panels(n, rows, shape):
    fig, axes = panels(n, (3.0, 2.0), ["a", "b"], rows)
    assert len(axes) == n and tuple(fig.get_size_inches()) == (3.0 * shape[1], 2.0 * shape[0])
    assert [ax.get_title() for ax in axes] == ["a", "b", "", ""][:n]
    assert [(ax.get_subplotspec().rowspan.start, ax.get_subplotspec().colspan.start) for ax in axes] == [
        divmod(i, shape[1]) for i in range(n)
    ]


def test_colours():
    "Distinct, and dark enough that a line shows on white (a contrast of 2 for every colour)."
    linear = lambda c: c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
    for colour in palette.values():
        r, g, b = map(linear, mpl.colors.to_rgb(colour))
        assert 1.05 / (0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05) > 2, colour
    assert len(set(palette.values())) == len(palette)
    (ax,) = panels()[1]
    assert [ax.plot([0, 1])[0].get_color() for _ in palette] == list(palette.values())


def test_png_is_the_same_every_time():
    pictures = []
    for _ in range(2):
        fig, (ax,) = panels(size=(2.0, 1.5))
        ax.plot([0, 1, 4])
        pictures.append(png(fig))
    assert len(set(pictures)) == 1 and pictures[0].startswith(b"\x89PNG")
    assert plt.imread(BytesIO(pictures[0])).shape[:2] == (300, 400)  # 200 dots an inch


def test_show_carries_its_words(shown):
    show(panels(size=(3.0, 2.0))[0], alt="Nothing yet.")
    data, metadata = shown[0][0]._repr_mimebundle_()
    assert "image/png" in data and metadata["image/png"] == {"width": 300, "alt": "Nothing yet."}


def test_save(tmp_path):
    fig, _ = panels()
    for path in (tmp_path / "a.png", str(tmp_path / "b.png"), tmp_path / "a.png"):
        assert save(fig, path) == Path(path) and Path(path).read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "b.png"]  # no temporary file stays


@pytest.mark.parametrize("n,layout", [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (4, (2, 2))])
def test_heatmaps_share_a_scale_centred_on_zero(shown, n, layout):
    m = torch.arange(6.0, requires_grad=True).reshape(2, 3)
    heatmaps({f"m{i}": m - i for i in range(n)}, alt="Numbers.")
    (fig,) = shown[1]
    axes = fig.axes
    assert [ax.get_title() for ax in axes] == [f"m{i}" for i in range(n)]
    assert {ax.images[0].get_clim() for ax in axes} == {(-5.0, 5.0)}
    assert [text.get_text() for text in axes[0].texts] == [f"{x:.2f}" for x in range(6)]
    assert [ax.get_ylabel() for ax in axes] == ["query i" if i % layout[1] == 0 else "" for i in range(n)]
    assert axes[0].get_subplotspec().get_gridspec().get_geometry() == layout


def test_heatmaps_of_any_numbers(shown):
    heatmaps(
        {"zero": torch.zeros(2, 2), "yes or no": torch.eye(2).bool(), "wide": torch.ones(1, 9).bfloat16()}, alt="x"
    )
    axes = shown[1][0].axes
    assert [len(ax.texts) for ax in axes] == [4, 4, 0]  # numbers only where they are readable
    heatmaps({"zero": torch.zeros(2, 2)}, alt="x")
    assert shown[1][1].axes[0].images[0].get_clim() == (-1.0, 1.0)


@pytest.mark.parametrize("log,scales", [("", ("linear", "linear")), ("x", ("log", "linear")), ("xy", ("log", "log"))])
@pytest.mark.parametrize("legend", [True, False])
def test_curves(log, scales, legend):
    (ax,) = panels()[1]
    curves(ax, {"a": ([1, 2], [3, 4]), "b": (range(1, 3), torch.tensor([5.0, 6.0]))}, "steps", "loss", log, legend)
    assert [list(line.get_ydata()) for line in ax.lines] == [[3, 4], [5, 6]]
    assert (ax.get_xscale(), ax.get_yscale()) == scales and (ax.get_xlabel(), ax.get_ylabel()) == ("steps", "loss")
    assert ([t.get_text() for t in ax.get_legend().get_texts()] == ["a", "b"]) if legend else ax.get_legend() is None


@pytest.mark.parametrize("color", ["blue", "#123456"])
def test_arrows(color):
    (ax,) = panels()[1]
    start = torch.tensor([[0.0, 0.0], [1.0, 2.0]], requires_grad=True)
    arrows(ax, start, start + torch.tensor([3.0, -1.0]), color, "moves")
    tails, heads = (c.get_offsets() for c in ax.collections[:2])
    np.testing.assert_allclose(tails, [[0, 0], [1, 2]])
    np.testing.assert_allclose(heads, [[3, -1], [4, 1]])
    quiver = ax.collections[2]
    assert quiver.U.tolist() == [3, 3] and quiver.V.tolist() == [-1, -1]
    assert [t.get_text() for t in ax.texts] == ["0", "1"]
    assert mpl.colors.same_color(ax.collections[1].get_facecolor()[0], palette.get(color, color))


def frames(n=3, size=(1.5, 1.0), dots=3):
    "Frames on which `dots` dots move."
    out = {}
    for i in range(n):
        fig, (ax,) = panels(size=size)
        ax.scatter(torch.arange(dots) * i % 7, torch.arange(dots))
        out[f"step {i} </script>"] = fig
    return out


def test_animate(shown):
    "All frames and their texts are in the page, and no text can break out of it."
    animate(frames(), alt='Dots "move" <right> {fast}.', label="a & b", pause=250)
    page = shown[0][0].data
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page, re.S)[1])
    assert data["texts"] == list(frames()) and len(data["frames"]) == len(set(data["frames"])) == 3
    sizes = {plt.imread(BytesIO(b64decode(f.removeprefix("data:image/png;base64,")))).shape for f in data["frames"]}
    assert len(sizes) == 1 and page.count("</script>") == page.count("<script") == 2
    assert f'src="{data["frames"][-1]}"' in page  # what shows where no script runs is the last frame
    assert 'alt="Dots &quot;move&quot; &lt;right&gt; {fast}."' in page and 'aria-label="a &amp; b"' in page
    assert 'max="2"' in page and 'width="150"' in page and "step,250)" in page and len(page) < 150_000


FIG, (AX,) = panels()
BAD = {
    "no words": (lambda path: show(FIG, " "), "alt", "' '"),
    "words missing": (lambda path: heatmaps({"a": torch.eye(2)}, alt=None), "alt", "None"),
    "no words for what moves": (lambda path: animate(frames(), alt=" "), "alt", "' '"),
    "words missing for what moves": (lambda path: animate(frames(), alt=None), "alt", "None"),
    "one frame": (lambda path: animate(frames(1), alt="Still."), "two frames", "1"),
    "too much": (lambda path: animate(frames(9, (9, 9), 4000), alt="Much."), "150 KB"),
    "sizes differ": (lambda path: animate(frames(2) | {"c": panels(size=(2, 2))[0]}, alt="Jumps."), "size"),
    "no rows": (lambda path: panels(2, rows=0), "rows", "0"),
    "another format": (lambda path: save(FIG, path / "a.svg"), "path", ".png", "a.svg"),
    "no matrices": (lambda path: heatmaps({}, alt="Nothing."), "matrices", "one"),
    "a list": (lambda path: heatmaps({"a": [[1.0]]}, alt="One."), "matrices", "a", "list"),
    "a vector": (lambda path: heatmaps({"a": torch.ones(3)}, alt="Three."), "matrices", "(rows, columns)", "(3,)"),
    "unknown axis": (lambda path: curves(AX, {"a": ([1], [1])}, "x", "y", log="z"), "log", "'z'"),
    "three dimensions": (lambda path: arrows(AX, torch.ones(2, 3), torch.ones(2, 3), "blue", "a"), "(n, 2)", "(2, 3)"),
    "other ends": (lambda path: arrows(AX, torch.ones(2, 2), torch.ones(1, 2), "blue", "a"), "(n, 2)", "(1, 2)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, tmp_path):
    call, *words = BAD[case]
    refuses(lambda: call(tmp_path), *words)
    assert list(tmp_path.iterdir()) == []
