"""Run notebooks as Colab would: in an empty folder, with what the wheel holds and no file of the project beside it.

    python tests/run_notebooks.py JOBS RESULT

JOBS is JSON: for each notebook its path, the ids of the cells to run, and code to run afterwards in its namespace.
RESULT gets the notebook with fresh outputs, what the code after it printed, and the error that ended it, if any."""

import json, os, sys, tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import matplotlib.pyplot as plt
import torch
from execnb.shell import CaptureShell
from fastcore.nbio import nb2str, read_nb
from fastcore.xtras import working_directory


def run(path, cells, after):
    plt.rcdefaults()  # the notebooks share this process: each starts from the defaults
    torch.set_default_dtype(torch.float32)
    torch.set_printoptions(profile="default")
    nb, shell, said, error = read_nb(path), CaptureShell(path, profile=False), [], None
    with tempfile.TemporaryDirectory() as empty, working_directory(empty):
        try:
            shell.run_all(nb, exc_stop=True, preproc=lambda c: c.id not in cells, cell_timeout=600)
            for code in after:
                said.append("".join("".join(o.get("text", "")) for o in shell.run(code)))
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
    shell.close()
    plt.close("all")
    return {"notebook": nb2str(nb), "said": said, "error": error}


if __name__ == "__main__":
    os.environ["IN_TEST"] = "1"  # as nbdev-test does
    colab = sys.modules["google.colab"] = ModuleType("google.colab")  # a notebook can tell by it that it is in Colab
    colab.__spec__ = ModuleSpec("google.colab", None)  # libraries ask for it
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    result = {path: run(path, set(job["cells"]), job["after"]) for path, job in jobs.items()}
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
