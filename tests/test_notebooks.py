"""Each notebook runs from top to bottom, and its saved outputs are the ones that a fresh run gives. The run is as in
Colab: in an empty folder, with the built wheel. The solutions of its exercises run in it, and are accepted.

Text is compared exactly and its numbers to a relative 1e-6 (`#| tolerance: 1e-3` in a cell sets another); pictures, and
the cells marked `#| trained` or `#| timed`, by kind only. Under other versions than those of constraints.txt the
notebooks only have to run."""

import ast, json, math, os, re, shutil, sys, tomllib
from itertools import product
from types import ModuleType, SimpleNamespace

import pytest
from conftest import ROOT, deviations, run
from fastcore.nbio import dict2nb, read_nb
from IPython.core.inputtransformer2 import TransformerManager
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from nbdev.test import nb_test_cells

CFG = get_config(ROOT)
NOTEBOOKS = sorted(nbglob(CFG.nbs_path, as_path=True))
SKIP = set(CFG.tst_flags.split()) - set(os.environ.get("NB_FLAGS", "").split())
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
VOLATILE = re.compile(r" at 0x[0-9a-f]+|[0-9a-f]{32}|#L\d+|(?<=base64,)[A-Za-z0-9+/=\\\n]+")  # addresses, ids, frames


def contents(out, by_kind):
    "An output as pairs of kind and text; the text is empty where only the kind counts."
    if out.output_type == "stream":
        return [(out.name, "" if by_kind else "".join(out.text))]
    if out.output_type == "error":
        return [("error", out.ename)]
    meta = out.get("metadata", {}).get("image/png", {})
    widget = any("widget-view" in kind for kind in out.data)
    pairs = [
        (k, "".join(v) if k.startswith("text/") and not (by_kind or widget) else "")
        for k, v in sorted(out.data.items())
    ]
    return [*pairs, *((k, str(meta[k])) for k in ("alt", "width") if k in meta and not by_kind)]


def close(a, b, tolerance):
    "Whether two printed numbers agree: whole numbers exactly, others to a relative tolerance."
    return (
        a == b
        or not (a.isdigit() and b.isdigit())
        and math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=1e-12)
    )


def same(a, b, tolerance):
    "Whether two texts agree: their words exactly, but for spaces, and their numbers closely."
    a, b = VOLATILE.sub("", a), VOLATILE.sub("", b)
    words = ["".join(NUMBER.sub("#", text).split()) for text in (a, b)]
    if words[0] != words[1]:
        return False
    return all(close(x, y, tolerance) for x, y in zip(NUMBER.findall(a), NUMBER.findall(b), strict=True))


def solutions(nb):
    "The folded solutions of a lesson, as code."
    text = "\n\n".join(c.source for c in nb.cells if c.cell_type == "markdown")
    return re.findall(r"<summary>Solution</summary>\s*```python\n(.*?)```", text, re.S)


def stale(saved, fresh, directives):
    "Why a cell's saved outputs are not those of the fresh run; nothing where they are."
    by_kind = bool(directives.keys() & {"trained", "timed"})
    tolerance = float(directives.get("tolerance", 1e-6))
    old, new = ([pair for out in cell.outputs for pair in contents(out, by_kind)] for cell in (saved, fresh))
    if [kind for kind, _ in old] != [kind for kind, _ in new]:
        return f"kinds {[k for k, _ in old]} were saved, a fresh run gives {[k for k, _ in new]}"
    for (kind, a), (_, b) in zip(old, new, strict=True):
        if not same(a, b, tolerance):
            return f"{kind} saved as {a[:300]!r}, a fresh run gives {b[:300]!r}"


@pytest.fixture(scope="module")
def fresh(python, tmp_path_factory):
    "Every notebook, run once by the Python that has the wheel, each in an empty folder."
    folder = tmp_path_factory.mktemp("notebooks")
    cells = {path: [c.id for c in nb_test_cells(path, SKIP)] for path in NOTEBOOKS}
    jobs = {str(path): {"cells": ids, "after": solutions(read_nb(path))} for path, ids in cells.items()}
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    shutil.copy(ROOT / "tests/run_notebooks.py", folder)  # a script's own folder is importable: not the project's
    run(python, folder / "run_notebooks.py", folder / "jobs.json", folder / "result.json")
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.relative_to(CFG.nbs_path).as_posix())
def test_notebook(path, fresh):
    done = fresh[str(path)]
    assert done["error"] is None, done["error"]
    for said in done["said"]:
        assert "Right:" in said, f"a solution is not accepted: {said}"
    if deviations():
        return
    cells = {c.id: c.directives for c in nb_test_cells(path, SKIP)}
    pairs = zip(read_nb(path).cells, dict2nb(json.loads(done["notebook"])).cells, strict=True)
    found = [f"cell {c.id}: {why}" for c, f in pairs if c.id in cells and (why := stale(c, f, cells[c.id]))]
    assert not found, "\n".join([*found, f"refresh with: make fresh NB={path.relative_to(ROOT)}"])


LESSONS = [path for path in NOTEBOOKS if re.match(r"\d\d_", path.name)]


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.name)
def test_install_cell(path, monkeypatch):
    "It installs in Colab where the package is missing, with the extra of the order file; else it installs nothing."
    cell = next(c for c in read_nb(path).cells if c.id == "frame-install")
    code, ran = TransformerManager().transform_cell(cell.source), []
    shell = SimpleNamespace(run_line_magic=lambda name, line: ran.append(f"{name} {line}"))
    for colab, there in product((False, True), repeat=2):
        with monkeypatch.context() as m:
            m.setattr("importlib.util.find_spec", lambda name, there=there: there or None)
            if colab:
                m.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
            exec(code, {"get_ipython": lambda: shell})
    lessons = tomllib.loads((CFG.nbs_path / "lessons.toml").read_text(encoding="utf-8"))["lesson"]
    extra = next(x for x in lessons if x["name"] == path.stem).get("extra")
    target = f'"coupled_qk[{extra}] @ git+{CFG.git_url}"' if extra else f"git+{CFG.git_url}"
    assert ran == [f"pip install -q {target}"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.relative_to(CFG.nbs_path).as_posix())
def test_saved_outputs(path):
    "No warning or error is saved, every code cell that shows something has been run, and each picture has alt text."
    for cell in read_nb(path).cells:
        for out in cell.get("outputs", []):
            assert out.output_type != "error" and out.get("name") != "stderr", (
                f"cell {cell.id} saved an error or warning"
            )
            if "image/png" in out.get("data", {}):
                assert out.metadata.get("image/png", {}).get("alt"), f"cell {cell.id}: a picture without alt text"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.relative_to(CFG.nbs_path).as_posix())
def test_imports_stand_alone(path):
    "nbdev runs each cell with an import when the site is built, and none of the cells between."
    for cell in read_nb(path).cells:
        other = str(cell.id).startswith("frame-") or re.match(r"#\| (export|eval: false)", cell.source)
        if cell.cell_type == "code" and not other:
            kinds = {isinstance(part, (ast.Import, ast.ImportFrom)) for part in ast.parse(cell.source).body}
            assert len(kinds) < 2, f"cell {cell.id} has imports and other code: give the imports a cell of their own"


def test_comparison():
    "The comparison itself: it must see what matters and overlook what does not."
    assert same("tensor([ 0.5, -0.25])", "tensor([0.50000001, -0.25])", 1e-6)
    assert not same("loss 0.5", "loss 0.501", 1e-6)
    assert same("loss 0.5", "loss 0.501", 1e-2)
    assert not same("loss 0.5", "cost 0.5", 1e-6)
    assert not same("1 2", "1 2 3", 1e-6)
    assert not same("10000000 steps", "10000001 steps", 1e-6)
    assert same("<f at 0x7f01>", "<f at 0x7f02>", 1e-6)
