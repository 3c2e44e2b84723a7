"The wheel, built as a release is: through the sdist; then installed and used in an environment of its own."

import tarfile, zipfile

from conftest import ROOT, run


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
        "Requires-Dist: torch>=2.6",
        "Provides-Extra: dev",
    ):
        assert line in read["METADATA"].splitlines()


CORE = [
    "attention",
    "coupling",
    "integrators",
    "diagnostics",
    "gpt",
    "data",
    "corpora",
    "training",
    "compare",
    "experiments",
    "bench",
    "bench_runs",
    "downstream",
    "downstream_study",
    "sockets",
    "retrofit",
    "retrofit_study",
]
USE = f"""
import importlib, sys, coupled_qk
from importlib import metadata, resources
assert coupled_qk.__file__.startswith(sys.prefix), coupled_qk.__file__
for name in {CORE}: importlib.import_module("coupled_qk." + name)
late = {{"matplotlib", "ipywidgets", "IPython", "scipy", "tokenizers", "datasets", "sklearn", "transformers", "peft", "torch._dynamo"}} & set(sys.modules)
assert not late, f"loaded before they are used: {{late}}"
assert metadata.version("coupled_qk") == coupled_qk.__version__
assert (resources.files("coupled_qk") / "results" / "README.md").is_file()
"""


def test_import(python):
    "The installed package is the one imported; the core loads no plotting, and the stored results can be read."
    run(python, "-I", "-c", USE)


def test_command(python):
    assert "compare" in run(python.with_name("coupled-qk"), "--help")
