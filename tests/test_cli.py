"The command as a user runs it: a real process, its exit code, its words and its files."

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from coupled_qk import __version__, figures
from coupled_qk import compare as comparing
from coupled_qk.cli import main
from coupled_qk.compare import column_legend
from coupled_qk.gpt import presets, variants

COMMAND = [sys.executable, "-m", "coupled_qk"]
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
    assert "With one seed" in done.stdout and str(out / "curves.png") in done.stdout
    assert all(f"\n{name:<17} {meaning}\n" in done.stdout for name, meaning in column_legend.items())
    assert "A stored result" in done.stdout and str(out / "result.json") in done.stdout
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
    assert "reading" in done.stderr  # what is told on the way


def one_run(text, out, *more):
    return main(["compare", "--corpus", str(text), "--steps", "1", "--batch-size", "1", "--out", str(out), *more])


def test_a_stored_result_is_shown_only_beside_its_like(text, tmp_path, capsys):
    assert one_run(text, tmp_path, "--variants", "standard") == 0
    out = capsys.readouterr().out
    assert "A stored result" not in out and "difference cannot be told" not in out and "dt by layer" not in out


def test_help():
    done = run("compare", "--help")
    assert done.returncode == 0 and "examples:" in done.stdout and "--max-seconds" in done.stdout
    assert run("--help").returncode == 0 and run().returncode == 2
    assert all(name in done.stdout for name in variants)
    assert f"{' or '.join(n for n, c in presets.items() if c.vocab_size == 256)} (default" in done.stdout


def test_version():
    assert run("--version").stdout == f"coupled-qk {__version__}\n"


@pytest.mark.parametrize(
    "args, words",
    [
        (["--variants", "standard", "verlet"], "unknown variant 'verlet': choose one of standard, euler"),
        (["--corpus", "shakespear"], "shakespear"),
        (["--corpus", "no/such/file.txt"], "no/such/file.txt"),
        (["--variants", "standard", "leapfrg"], "(did you mean 'leapfrog'?)"),
        (["--corpus", "~nosuchuser/a.txt"], "there is no user ~nosuchuser"),
        (["--corpus", ""], "must not be empty"),
        (["--size", "huge"], "unknown size for bytes 'huge': choose one of tiny, small\n"),
        (["--batch-size", "100000000"], "batch_size must be smaller here"),
        (["--steps", "0"], "steps must be a positive integer, got 0"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--batch-size", "-1"], "batch_size must be"),
        (["--lr", "nan"], "lr must be"),
        (["--seeds", "1", "1"], "seeds must be"),
        (["--device", "tpu"], "device must be"),
        (["--max-seconds", "-5"], "must be positive, got -5"),
        (["--out", "/proc/no/folder"], "output folder"),
        (["--out", ""], "must not be empty"),
        (["--out", "~nosuchuser"], "there is no user ~nosuchuser"),
        (["--colour"], "unrecognized arguments"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_bad_input(args, words, tmp_path, capsys):
    "In this process, as starting one takes seconds; the next two tests start real ones."
    out = tmp_path / "new" / "folder"
    try:
        code = main(["compare", *args, *([] if "--out" in args else ["--out", str(out)])])
    except SystemExit as stop:  # argparse's own
        code = stop.code
    err = capsys.readouterr().err
    assert code == 2 and words in err, err
    assert err.startswith("usage") or err.count("\n") == 1  # one sentence
    assert not (tmp_path / "new").exists()  # nothing is left behind


def test_a_text_shorter_than_one_context(tmp_path):
    (tmp_path / "short.txt").write_text("too short\n")
    done = run("compare", "--corpus", str(tmp_path / "short.txt"), "--out", str(tmp_path / "new"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert not (tmp_path / "new").exists()


def test_an_output_folder_that_is_a_file(text, tmp_path):
    (tmp_path / "taken").write_text("")
    done = run("compare", "--corpus", str(text), "--out", str(tmp_path / "taken"))
    assert done.returncode == 2 and "output folder" in done.stderr and done.stderr.count("\n") == 1


def test_a_full_disk_is_told_and_is_no_bad_input(text, tmp_path, capsys, monkeypatch):
    "The disk is full once the settings and the first run are written."
    write, calls = comparing.write_whole, []

    def full(*args):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args)

    monkeypatch.setattr(comparing, "write_whole", full)
    monkeypatch.setattr(figures, "write_whole", full)
    assert one_run(text, tmp_path) == 1
    out, err = capsys.readouterr()
    assert f"result.json could not be written ({os.strerror(errno.ENOSPC)})" in err and "keeps 1 of 4 runs" in err
    assert "curves.png could not be written" in err and "All numbers" not in out and "\nstandard " in out


def start(text, out, *more):
    args = ["--corpus", str(text), "--batch-size", "1", "--out", str(out), *more]
    return subprocess.Popen(
        [*COMMAND, "compare", *args],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background may ignore it
    )  # fmt: skip


def wait_for(path: Path, runs: int, process, seconds=120):
    "Until the result has so many runs."
    end = time.monotonic() + seconds
    count = lambda: len(json.loads(path.read_text(encoding="utf-8"))["runs"]) if path.exists() else -1
    while count() < runs and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert count() >= runs, process.communicate()


def test_ctrl_c_keeps_what_was_finished(text, tmp_path):
    "The first runs are short enough to finish and the whole long enough to be interrupted."
    process = start(text, tmp_path, "--steps", "3", "--seeds", *map(str, range(200)))
    wait_for(tmp_path / "result.json", 1, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert process.returncode == 130 and "Traceback" not in err
    assert f"interrupted; {tmp_path / 'result.json'} keeps {len(result['runs'])} of 800 runs" in err
    assert not result["finished"] and len(result["runs"]) >= 1
    assert "\nstandard " in out and (tmp_path / "curves.png").exists()


def test_ctrl_c_in_the_first_run_and_a_second_one_in_its_folder(text, tmp_path, capsys):
    "What lies there is of the run that was interrupted, not of an older one, and a run at work is left alone."
    for name in ("result.json", "curves.png"):
        (tmp_path / name).write_text('{"runs": []}')
    process = start(text, tmp_path, "--steps", "100000")
    while (tmp_path / "curves.png").exists() and process.poll() is None:
        time.sleep(0.05)
    wait_for(tmp_path / "result.json", 0, process)
    assert one_run(text, tmp_path) == 2 and "no other run is writing to" in capsys.readouterr().err
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert process.returncode == 130 and "keeps 0 of 4 runs" in err
    assert result["stopped"] == "interrupted" and not (tmp_path / "curves.png").exists()
