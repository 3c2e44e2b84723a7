"The command as a user runs it: a real process, its exit code, its words and its files."

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from coupled_qk.cli import main

COMMAND = [sys.executable, "-m", "coupled_qk.cli"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(*args, cwd=None):
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, env=ENV, cwd=cwd, timeout=300)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    "A user's own file, long enough for a context of 256 on both sides of the split."
    path = tmp_path_factory.mktemp("text") / "mine.txt"
    lines = (f"{i} bottles of beer on the wall, {i} bottles of beer. Take one down.\n" for i in range(900, 0, -1))
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    "The smallest real run of the main job: all four variants, on one's own file."
    out = tmp_path_factory.mktemp("out") / "new" / "folder"
    return run("compare", "--corpus", str(text), "--steps", "2", "--batch-size", "1", "--out", str(out)), out


def test_the_main_job(finished):
    done, out = finished
    assert done.returncode == 0, done.stderr
    for name in ("standard", "euler", "leapfrog", "query_mlp"):
        assert f"\n{name} " in done.stdout and f"--- {name} goes on" in done.stdout
        assert f"{name}, seed 0" in done.stderr  # its progress bar
    assert "chance alone" in done.stdout and str(out / "curves.png") in done.stdout
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert result["finished"] and [r["variant"] for r in result["runs"]] == result["variants"]
    assert all(4 < r["bits_per_byte"] < 9 and len(r["layers"]) in (0, 4) for r in result["runs"])
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG") and not list(out.glob("*.part"))


def test_json_is_all_that_is_printed(text, tmp_path):
    args = [
        "--variants",
        "euler",
        "--seeds",
        "3",
        "--steps",
        "1",
        "--batch-size",
        "1",
        "--out",
        str(tmp_path),
        "--json",
    ]
    done = run("compare", "--corpus", str(text), *args)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))


def test_help():
    done = run("compare", "--help")
    assert done.returncode == 0 and "examples:" in done.stdout and "--max-seconds" in done.stdout
    assert run("--help").returncode == 0 and run().returncode == 2


@pytest.mark.parametrize(
    "args, words",
    [
        (["--variants", "standard", "verlet"], "unknown variant 'verlet': choose one of standard, euler"),
        (["--corpus", "shakespear"], "shakespear"),
        (["--corpus", "no/such/file.txt"], "no/such/file.txt"),
        (["--size", "huge"], "unknown size 'huge'"),
        (["--steps", "0"], "steps must be a positive integer, got 0"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--batch-size", "-1"], "batch_size must be"),
        (["--lr", "nan"], "lr must be"),
        (["--seeds", "1", "1"], "seeds must be"),
        (["--device", "tpu"], "device must be"),
        (["--max-seconds", "-5"], "must be positive, got -5"),
        (["--out", "/proc/no/folder"], "output folder"),
        (["--colour"], "unrecognized arguments"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_bad_input(args, words, tmp_path, capsys):
    "In this process, as starting one takes seconds; the next two tests start real ones."
    try:
        code = main(["compare", *args, *([] if "--out" in args else ["--out", str(tmp_path)])])
    except SystemExit as stop:  # argparse's own
        code = stop.code
    err = capsys.readouterr().err
    assert code == 2 and words in err, err
    assert err.startswith("usage") or err.count("\n") == 1  # one sentence


def test_a_text_shorter_than_one_context(tmp_path):
    (tmp_path / "short.txt").write_text("too short\n")
    done = run("compare", "--corpus", str(tmp_path / "short.txt"), "--out", str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_an_output_folder_that_is_a_file(text, tmp_path):
    (tmp_path / "taken").write_text("")
    done = run("compare", "--corpus", str(text), "--out", str(tmp_path / "taken"))
    assert done.returncode == 2 and "output folder" in done.stderr and done.stderr.count("\n") == 1


def wait_for(path: Path, process, seconds=120):
    end = time.monotonic() + seconds
    while not path.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert path.exists(), process.communicate()


def test_ctrl_c_keeps_what_was_finished(text, tmp_path):
    "The first runs are short enough to finish and the whole long enough to be interrupted."
    args = ["--corpus", str(text), "--steps", "3", "--batch-size", "1", "--seeds", *map(str, range(200))]
    process = subprocess.Popen(
        [*COMMAND, "compare", *args, "--out", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background may ignore it
    )  # fmt: skip
    wait_for(tmp_path / "result.json", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "interrupted; what was finished is kept" in err and "Traceback" not in err
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert not result["finished"] and len(result["runs"]) >= 1
    assert "\nstandard " in out and (tmp_path / "curves.png").exists()
