"The wheel, built as a release is: through the sdist; then installed and used in an environment of its own."

import shutil, subprocess, sys, sysconfig, tarfile, venv, zipfile

import pytest
from conftest import ROOT

FILES = ["settings.ini", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"]


def run(*command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    "A folder with the sdist and the wheel made from it; built from a copy, so that nothing of an older build gets in."
    work = tmp_path_factory.mktemp("dist")
    for name in FILES:
        shutil.copy(ROOT / name, work)
    shutil.copytree(ROOT / "coupled_qk", work / "coupled_qk", ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "build", "--outdir", work / "out", work)
    return work / "out"


@pytest.fixture(scope="module")
def python(dist, tmp_path_factory):
    "The Python of a new environment that holds the wheel alone, and borrows torch and the others from this one."
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=False)
    python = home / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", *dist.glob("*.whl")
    )
    # Installing torch again would take minutes and test nothing of ours. A .pth file makes this environment's packages
    # importable but not its editable install of coupled_qk, as .pth files found by way of a .pth file are not read.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    with open(f"{site}/borrowed.pth", "w") as f:
        f.write(sysconfig.get_path("purelib"))
    return python


def test_contents(dist):
    "Both archives hold the modules, the measured results, the type marker and the licence; no notebook, no test."
    wheel = zipfile.ZipFile(next(dist.glob("*.whl"))).namelist()
    sdist = tarfile.open(next(dist.glob("*.tar.gz"))).getnames()
    package = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "coupled_qk").rglob("*")
        if p.suffix in (".py", ".json", ".typed")
    }
    assert package | {"coupled_qk/results/README.md"} == {n for n in wheel if "dist-info" not in n}
    assert any(n.endswith("licenses/LICENSE") for n in wheel)
    assert package | {"settings.ini", "LICENSE"} <= {n.partition("/")[2] for n in sdist}


def test_metadata(dist):
    wheel = zipfile.ZipFile(next(dist.glob("*.whl")))
    read = {n.rpartition("/")[2]: wheel.read(n).decode() for n in wheel.namelist() if "dist-info" in n}
    assert "coupled-qk = coupled_qk.cli:main" in read["entry_points.txt"]
    assert "coupled_qk = coupled_qk._modidx:d" in read["entry_points.txt"]
    for line in (
        "Requires-Python: >=3.10",
        "License-Expression: Apache-2.0",
        "Requires-Dist: torch>=2.5",
        "Provides-Extra: dev",
    ):
        assert line in read["METADATA"].splitlines()


CORE = ["attention", "coupling", "integrators", "gpt", "data", "training"]
USE = f"""
import importlib, sys, coupled_qk
from importlib import metadata, resources
assert coupled_qk.__file__.startswith(sys.prefix), coupled_qk.__file__
for name in {CORE}: importlib.import_module("coupled_qk." + name)
late = {{"matplotlib", "ipywidgets", "IPython"}} & set(sys.modules)
assert not late, f"loaded before they are used: {{late}}"
assert metadata.version("coupled_qk") == coupled_qk.__version__
assert (resources.files("coupled_qk") / "results" / "README.md").is_file()
"""


def test_import(python):
    "The installed package is the one imported; the core loads no plotting, and the stored results can be read."
    run(python, "-I", "-c", USE)


def test_command(python):
    assert "compare" in run(python.with_name("coupled-qk"), "--help")
