"What all tests share: where the project is, and whether this environment is the one that the saved outputs were made in."

import os, re, sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
CI = os.environ.get("CI", "").lower() in ("1", "true")
os.environ.setdefault("MPLBACKEND", "Agg")  # no test opens a window

# The notebooks' tools need Python 3.11; on 3.10 only the library itself is tested.
TOOLS = ["test_notebooks.py", "test_packaging.py", "test_project.py", "test_site.py"]
collect_ignore = TOOLS if sys.version_info < (3, 11) else []


def deviations() -> list[str]:
    "In what this environment differs from constraints.txt, which saved outputs were made with."
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    made_with = re.search(r"^# python==(\S+)", text, re.M)[1]
    here = ".".join(map(str, sys.version_info[:2]))
    found = [] if here == made_with else [f"Python {here}, not {made_with}"]
    for name, pinned in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.M):
        try:
            installed = version(name).split("+")[0]
        except PackageNotFoundError:
            continue
        if installed != pinned:
            found.append(f"{name} {installed}, not {pinned}")
    return found


def pytest_report_header() -> str:
    other = "; ".join(deviations())
    return f"saved outputs: not compared ({other})" if other else "saved outputs: compared with a fresh run"
