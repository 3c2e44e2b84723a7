"The parts of the project agree: notebooks and library, index and README, links and files, code and its rules."

import re, shutil, subprocess, sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from fastcore.nbio import nb2str, read_nb
from nbdev.clean import clean_nb
from nbdev.config import get_config
from nbdev.doclinks import nbglob
from smalldocs.config import KNOWN
from smalldocs.quarto_keys import QUARTO_PAGE_OPTIONS

BIN = Path(sys.executable).parent
CFG = get_config(ROOT)
NOTEBOOKS = sorted(nbglob(CFG.nbs_path, as_path=True))
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|(?:src|href)=\"([^\"]+)\"")


def tool(*command, cwd=ROOT):
    done = subprocess.run([BIN / command[0], *command[1:]], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"


def test_library_is_the_export(tmp_path):
    "coupled_qk/ is exactly what nbdev-export makes of the notebooks, with nothing left over."
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "nbs", tmp_path / "nbs")
    for init in (ROOT / "coupled_qk").rglob("__init__.py"):
        copy = tmp_path / init.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(init, copy)
    tool("nbdev-export", cwd=tmp_path)
    here, fresh = (
        {p.relative_to(d).as_posix(): p.read_bytes() for p in d.glob("coupled_qk/**/*.py")} for d in (ROOT, tmp_path)
    )
    assert sorted(here) == sorted(fresh)
    assert [n for n in here if here[n] != fresh[n]] == [], "run: make export"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.relative_to(CFG.nbs_path).as_posix())
def test_notebook_is_clean(path):
    "As nbdev-clean leaves it, so that a diff shows only what somebody wrote."
    nb = read_nb(path)
    clean_nb(nb, allowed_out_metadata_keys=CFG.allowed_out_metadata_keys)
    assert nb2str(nb) == path.read_text(encoding="utf-8"), "run: nbdev-clean"


def test_readme():
    tool("python", "-W", "ignore", "tools/build_readme.py", "--check")


def broken(text, folder):
    "The local links of a text whose target does not exist."
    hrefs = (a or b for a, b in LINK.findall(re.sub(r"`[^`\n]*`|^```.*?^```", "", text, flags=re.S | re.M)))
    local = (h.split("#")[0] for h in hrefs if not re.match(r"[a-z][a-z0-9+.-]*:|#", h))
    return [h for h in local if h and not (folder / h).exists()]


def test_links():
    "Every relative link of the README, CONTRIBUTING and the notebooks leads to a file."
    texts = [(p, p.read_text(encoding="utf-8")) for p in ROOT.glob("*.md")]
    texts += [(p, "\n\n".join(c.source for c in read_nb(p).cells if c.cell_type == "markdown")) for p in NOTEBOOKS]
    assert {p.name: b for p, text in texts if (b := broken(text, p.parent))} == {}


def test_sidebar_lists_every_notebook():
    named = set(re.findall(r"[\w/]+\.ipynb", (ROOT / "_quarto.yml").read_text(encoding="utf-8")))
    named.remove("api/index.ipynb")  # made when the site is built
    assert named == {p.relative_to(CFG.nbs_path).as_posix() for p in NOTEBOOKS}


@pytest.mark.parametrize("command", ["ruff check", "ruff format --check", "mypy"])
def test_code(command):
    tool(*command.split())


def unknown(given, known, at=""):
    "The keys of a configuration that a table of known keys lacks, with their places."
    if isinstance(given, list):
        return [u for x in given for u in unknown(x, known, at)]
    if not isinstance(given, dict) or not isinstance(known, dict):
        return []
    return [u for k, x in given.items() for u in (unknown(x, known[k], f"{at}{k}/") if k in known else [at + k])]


def test_quarto_yml():
    "Quarto knows every key of the site's configuration (the page options are those of its schema)."
    config = yaml.safe_load((ROOT / "_quarto.yml").read_text(encoding="utf-8"))
    assert unknown(config, KNOWN) == []
    assert set(config["format"]) == {"html", "commonmark"}
    assert set(config["format"]["html"]) <= QUARTO_PAGE_OPTIONS
    assert unknown({"website": {"sidbar": {}}}, KNOWN) == ["website/sidbar"]  # the test can see


def test_citation():
    "CITATION.cff, the page on citing and the package name one version."
    version = re.search(
        r'"(.+)"', (ROOT / "coupled_qk/__init__.py").read_text(encoding="utf-8").partition("__version__")[2]
    )[1]
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cff["version"] == version and cff["repository-code"] == CFG.git_url
    page = read_nb(CFG.nbs_path / "cite.ipynb")
    assert f"version = {{{version}}}" in "\n".join(c.source for c in page.cells)


def test_moving_picture():
    "The first page's picture is what the library draws."
    tool("python", "tools/draw.py", "--check")
