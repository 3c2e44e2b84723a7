"`coupled-qk train` and `coupled-qk generate`: files, settings, tokenizers, a stop and its continuation, several processes."

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from coupled_qk import corpora, data
from coupled_qk.cli import main, make_parser
from coupled_qk.cli_train import defaults, make_tokenizer, read_settings, spell, until, wish_to_stop
from coupled_qk.data import load_tokenizer
from coupled_qk.gpt import load_model
from coupled_qk.training import evaluate
from safetensors.torch import load_file

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
SMALL = "--context 32 --d-model 16 --n-layers 1 --n-heads 2 --batch-size 4 --device cpu".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    "A user's own file."
    path = tmp_path_factory.mktemp("text") / "mine.txt"
    lines = (f"{i} bottles of beer on the wall, {i} bottles of béer. Take one down.\n" for i in range(300, 0, -1))
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def train(text, out, *more, steps=6):
    return main(["train", "--corpus", text, *SMALL, "--steps", str(steps), "--out", str(out), *map(str, more)])


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    "A finished run, of tokens of a trained tokenizer."
    out = tmp_path_factory.mktemp("out") / "new" / "folder"
    assert train(text, out, "--tokenizer", "bpe", 300, "--variant", "leapfrog", "--eval-every", 2) == 0
    return out


def result_of(folder):
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def test_the_folder_holds_what_was_trained(trained):
    names = {p.name for p in trained.iterdir()}
    weights = {"model.safetensors", "config.json", "best.safetensors", "last.safetensors"}
    assert names == weights | {
        "tokenizer.json",
        "train.tokens",
        "valid.tokens",
        "log.jsonl",
        "train.json",
        "result.json",
    }
    model, tokenizer, result = load_model(trained), load_tokenizer(trained), result_of(trained)
    assert model.config.pre == "leapfrog" and model.config.vocab_size == tokenizer.vocab_size == 300
    assert len((trained / "log.jsonl").read_text().splitlines()) == 6 == result["steps"] and result["finished"]
    best = load_file(trained / "best.safetensors")
    assert all(torch.equal(p, best[f"model.{name}"]) for name, p in model.state_dict().items())


def test_bits_per_byte_are_those_of_the_text(trained):
    "The held-out tokens' whole surprise, in bits, by the bytes of the held-out text: separators count as one."
    result, tokens = result_of(trained), load_file(trained / "valid.tokens")["tokens"]
    spelled = load_tokenizer(trained).decode(tokens)
    n_bytes = len(spelled.encode())
    assert result["held_out"]["bytes"] == n_bytes and result["bytes_per_token"] == n_bytes / len(tokens) > 1.2
    nats = evaluate(load_model(trained), tokens, 32)
    assert result["best"]["nats_per_token"] == pytest.approx(nats, rel=1e-6)
    assert result["best"]["bits_per_byte"] == pytest.approx(nats * len(tokens) / math.log(2) / n_bytes, rel=1e-6)
    logged = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert min(line["bits_per_byte"] for line in logged if "valid" in line) == result["best"]["bits_per_byte"]


def test_evaluations_may_read_a_part_and_the_last_word_reads_all(text, tmp_path):
    assert train(text, tmp_path, "--eval-tokens", 100) == 0
    tokens = load_file(tmp_path / "valid.tokens")["tokens"]
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    model = load_model(tmp_path)
    assert last["valid"] == pytest.approx(evaluate(model, tokens[:100], 32), rel=1e-5)
    assert result_of(tmp_path)["best"]["nats_per_token"] == pytest.approx(evaluate(model, tokens, 32), rel=1e-5)


def test_json_is_all_that_is_printed(text, tmp_path, capsys):
    assert train(text, tmp_path, "--json") == 0
    out = capsys.readouterr()
    assert json.loads(out.out) == result_of(tmp_path) and "held out" in out.err


def test_settings_from_a_file_and_typed_ones(text, tmp_path):
    settings = {
        "lr": 0.01,
        "d-model": 16,
        "n_layers": 1,
        "context": 32,
        "tokens": 500,
        "batch_size": 4,
        "compile": False,
    }
    file, out = tmp_path / "settings.json", tmp_path / "out"
    file.write_text(json.dumps({**settings, "corpus": text, "seed": 3}))
    assert main(["train", "--config", str(file), "--out", str(out), "--seed", "4", "--device", "cpu"]) == 0
    used = json.loads((out / "train.json").read_text())
    assert (used["lr"], used["seed"], used["steps"]) == (0.01, 4, 4)  # 500 tokens are four steps of 4 x 32
    assert used.keys() == defaults.keys() - {"out"} and len((out / "log.jsonl").read_text().splitlines()) == 4
    again = tmp_path / "again"
    assert main(["train", "--config", str(out / "train.json"), "--out", str(again)]) == 0  # what was used can be used
    ends = [load_file(folder / "last.safetensors") for folder in (out, again)]
    assert all(torch.equal(t, ends[1][name]) for name, t in ends[0].items())


@pytest.mark.parametrize(
    "args, words",
    [
        (["--variant", "verlet"], "unknown variant 'verlet'"),
        (["--size", "huge"], "unknown size 'huge'"),
        (["--corpus", "no/such/file.txt"], "no/such/file.txt"),
        (["--tokenizer", "words"], "tokenizer must be bytes, bpe and a number of tokens, or gpt2, got 'words'"),
        (["--tokenizer", "bpe"], "tokenizer must be"),
        (["--tokenizer", "bpe", "20000"], "enough repeated runs"),
        (["--steps", "0"], "steps must be a positive integer, got 0"),
        (["--tokens", "-5"], "tokens must be a positive integer, got -5"),
        (["--eval-tokens", "0"], "eval_tokens must be"),
        (["--eval-tokens", "9"], "longer than one context of 32, got only 9"),
        (["--tokenizer", "bpe", "200"], "from 257 to 65,536 tokens, got 200"),
        (["--option", "n"], "option must be a name and a value, such as n=3, dt=0.05 or lean=true, got n"),
        (["--option", "n=two"], "option must be a name and a value"),
        (["--option", "n=2", "n=3"], "two for n"),
        (["--option", "n=2"], "variant 'standard' takes no options"),
        (["--variant", "euler", "--option", "m=2"], "pre_options must be options of variant 'euler'"),
        (["--variant", "euler", "--option", "n=0"], "n, the number of steps, must be at least 1, got 0"),
        (["--n-heads", "3"], "n_heads"),
        (["--lr", "nan"], "lr must be"),
        (["--accumulate", "3"], "batch_size must be a multiple of accumulate"),
        (["--precision", "fp8"], "unknown precision 'fp8'"),
        (["--device", "tpu"], "device must be"),
        (["--out", "/proc/no/folder"], "output folder"),
        (["--config", "no-such.json"], "settings must be in a file that can be read, got no-such.json: No such file"),
        (["--config", "~nosuchuser/x"], "there is no user ~nosuchuser"),
        (["--corpus", ""], "must not be empty"),
        (["--resume", ""], "must not be empty"),
        (["--out", ""], "must not be empty"),
        (["--resume", "no-such-folder"], "--out away"),
        (["--colour"], "unrecognized arguments"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_input(text, tmp_path, capsys, args, words):
    "One sentence, exit code 2, and the folder can be used for another try."
    try:
        code = train(text, tmp_path / "out", *args)
    except SystemExit as stop:  # argparse's own
        code = stop.code
    err = capsys.readouterr().err
    assert code == 2 and words in err, err
    assert err.startswith("usage") or err.count("\n") == 1
    assert not (tmp_path / "out" / "log.jsonl").exists()


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "cannot be used"),
        ("[1]", "an object is expected, got list"),
        ('{"colour": 1}', "there is no setting 'colour'"),
        ('{"steps": "many"}', "invalid int value: 'many'"),
        ('{"steps": [1, 2]}', "unrecognized arguments: 2"),
        ('{"compile": 1}', "ignored explicit argument|unrecognized arguments"),
    ],
)
def test_a_bad_file_of_settings(tmp_path, content, words):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        read_settings(tmp_path / "x.json")


def test_an_older_run_is_not_overwritten(trained, text, capsys):
    kept = (trained / "last.safetensors").read_bytes()
    assert train(text, trained) == 2 and "coupled-qk train --resume" in capsys.readouterr().err
    assert (trained / "last.safetensors").read_bytes() == kept
    assert main(["train", "--resume", str(trained)]) == 0  # finished: nothing is left to do
    assert (trained / "last.safetensors").read_bytes() == kept
    assert main(["train", "--resume", str(trained), "--lr", "0.1"]) == 2
    assert "is 0.003, and cannot become 0.1" in capsys.readouterr().err


def test_a_folder_without_a_run_cannot_go_on(tmp_path, capsys):
    assert main(["train", "--resume", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "holds no run that could go on" in err and "begins again by its first command" in err
    assert main(["train", "--resume", str(tmp_path / "none")]) == 2 and "there is no folder" in capsys.readouterr().err


def test_a_set_of_the_hub(text, tmp_path, monkeypatch):
    "Its tokens stay in the cache. The hub itself is not needed: its documents are made up."
    documents = lambda name, side="train": (f"{name} {side} number {i} of many numbers. " * 3 for i in range(30))
    monkeypatch.setattr(corpora, "hub_documents", documents)
    monkeypatch.setenv("COUPLED_QK_CACHE", str(tmp_path / "cache"))
    assert train("wikitext103", tmp_path / "out", "--tokenizer", "bpe", 280, steps=2) == 0
    assert len(list((tmp_path / "cache").glob("wikitext103-*-bpe280-*.tokens"))) == 2
    assert not list((tmp_path / "out").glob("*.tokens"))
    assert result_of(tmp_path / "out")["held_out"]["documents"] == 30


def test_tokenizers_by_name(monkeypatch):
    assert make_tokenizer(["bytes"], []).vocab_size == 256
    assert make_tokenizer(["bpe", "260"], ["banana " * 9]).vocab_size == 260
    monkeypatch.setattr("coupled_qk.data.gpt2_tokenizer", lambda: "theirs")
    assert make_tokenizer(["gpt2"], []) == "theirs"


# --- stopped and continued


def wait_for_step(log, process, seconds=300):
    end = time.monotonic() + seconds
    while (not log.exists() or log.read_bytes().count(b"\n") < 3) and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on_and_goes_on_to_the_bit(text, tmp_path, how):
    "A real process, as Ctrl-C and a cluster end it."
    out, command = tmp_path / "run", [sys.executable, "-m", "coupled_qk", "train", "--corpus", text, *SMALL]
    process = subprocess.Popen(
        [*command, "--steps", "150", "--eval-every", "149", "--out", out],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background may ignore it
    )  # fmt: skip
    wait_for_step(out / "log.jsonl", process)
    process.send_signal(how)
    said, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert f"go on with: coupled-qk train --resume {out}" in err and "Traceback" not in err
    result = result_of(out)
    assert 3 <= result["steps"] < 150 and not result["finished"] and load_model(out)
    assert main(["train", "--resume", str(out)]) == 0
    assert train(text, tmp_path / "whole", "--eval-every", 149, steps=150) == 0
    ends = [load_file(folder / "last.safetensors") for folder in (out, tmp_path / "whole")]
    assert all(torch.equal(t, ends[1][name]) for name, t in ends[0].items())
    assert result_of(out)["best"] == result_of(tmp_path / "whole")["best"]


def test_the_second_ctrl_c_does_not_wait():
    with wish_to_stop(alone=True) as asked:
        assert not asked()
        signal.raise_signal(signal.SIGINT)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with wish_to_stop(alone=False) as asked:
        for _ in range(3):  # the terminal's, and the launcher's
            signal.raise_signal(signal.SIGINT)
        assert asked()
    with pytest.raises(KeyboardInterrupt):  # outside, all is as it was
        signal.raise_signal(signal.SIGINT)


def test_two_processes(text, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = tmp_path / "two"
    options = ["--corpus", text, *SMALL, "--steps", "6", "--tokenizer", "bpe", "300", "--out", out]
    done = subprocess.run([*launcher, "-m", "coupled_qk", "train", *options], capture_output=True, text=True, env=ENV)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("saved in") == 1 and "on 2 x cpu" in done.stdout
    assert train(text, tmp_path / "one", "--tokenizer", "bpe", 300) == 0
    two, one = result_of(out), result_of(tmp_path / "one")
    assert two["processes"] == 2 and two["held_out"] == one["held_out"]
    assert two["best"]["nats_per_token"] == pytest.approx(one["best"]["nats_per_token"], abs=1e-4)  # float32 rounding


# --- generate


def generate(folder, capsys, *args):
    assert main(["generate", str(folder), "--device", "cpu", *map(str, args)]) == 0
    return capsys.readouterr().out


def test_generate_writes_what_the_model_samples(trained, capsys):
    out = generate(trained, capsys, "--prompt", "1 bottles", "-n", 12, "--temperature", 0)
    model, tokenizer = load_model(trained), load_tokenizer(trained)
    ids = model.generate(tokenizer.encode("1 bottles").long()[None], 12, temperature=0, stop=tokenizer.separator)[0]
    assert out.startswith("1 bottles") and out == tokenizer.decode(ids).replace("\0", "") + "\n"


def test_generate_repeats_with_a_seed(trained, capsys):
    a, b, c = (generate(trained, capsys, "--seed", seed, "--top-k", 50, "--top-p", 0.9, "-n", 40) for seed in (1, 1, 2))
    assert a == b != c


def test_generate_goes_past_the_context_and_streams(trained, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr("coupled_qk.cli.visible", lambda text: seen.append(text) or text)
    generate(trained, capsys, "--prompt", "bottles of beer " * 20, "-n", 50)
    assert len(seen) > 20  # in pieces, not at the end


def test_generate_stops_before_a_text(trained, capsys):
    whole = generate(trained, capsys, "--prompt", "9", "-n", 60, "--temperature", 0.8)
    stop = whole[20:23]
    cut = generate(trained, capsys, "--prompt", "9", "-n", 60, "--temperature", 0.8, "--stop", stop)
    assert cut == whole[: whole.index(stop, 1)] + "\n"


@pytest.mark.parametrize(
    "args, words",
    [
        (["-n", "0"], "must be a positive integer, got 0"),
        (["--temperature", "-1"], "temperature must be"),
        (["--top-k", "0"], "top_k must be"),
        (["--top-p", "2"], "top_p must be"),
        (["--device", "tpu"], "device must be"),
    ],
)
def test_generate_bad_input(trained, capsys, args, words):
    assert main(["generate", str(trained), *args]) == 2
    out = capsys.readouterr()
    assert words in out.err and out.err.count("\n") == 1 and out.out == ""


def test_generate_without_a_model(trained, tmp_path, capsys):
    assert main(["generate", str(tmp_path)]) == 2 and "model.safetensors is not there" in capsys.readouterr().err
    (tmp_path / "train.json").write_bytes((trained / "train.json").read_bytes())
    assert main(["generate", str(tmp_path)]) == 2 and "no model yet; go on with" in capsys.readouterr().err


def test_letters_are_shown_when_they_are_whole():
    decode = lambda ids: bytes(ids).decode(errors="replace")
    assert list(spell("añ€😀".encode(), decode)) == ["a", "ñ", "€", "😀"]
    assert "".join(spell(b"a\xf0\x9f\x98\x80b\xe2\x82", decode)) == "a😀b�"  # cut off in the middle of a letter
    assert "".join(spell(b"\xff\xff\xff\xff\xff\xffa", decode)).endswith("a")  # no letter: goes on all the same


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_the_text_before_the_stop(size):
    text, cut = "one two\n\nthree", lambda text: [text[i : i + size] for i in range(0, len(text), size)]
    assert "".join(until(cut(text), "\n\n")) == "one two"
    assert "".join(until(cut(text), "four")) == "".join(until(cut(text), None)) == text


def test_a_run_goes_on_with_its_own_settings_or_not_at_all(tmp_path, capsys):
    "A refused resume writes nothing, so that the plain one works afterwards."
    text = tmp_path / "mine.txt"
    text.write_text("\n".join(f"line {i} of a text that holds {i * i}" for i in range(400)))
    folder = tmp_path / "run"
    shape = ["--d-model", "16", "--n-heads", "1", "--n-layers", "1", "--context", "16"]
    assert main(["train", "--corpus", str(text), *shape, "--steps", "4", "--out", str(folder)]) == 0
    before = (folder / "train.json").read_bytes()
    for other in (["--d-model", "32"], ["--seed", "9"], ["--corpus", "nosuch.txt"], ["--steps", "8"]):
        assert main(["train", "--resume", str(folder), *other]) == 2
        assert "cannot become" in capsys.readouterr().err and (folder / "train.json").read_bytes() == before
    assert main(["train", "--resume", str(folder)]) == 0


def test_a_bad_text_leaves_no_run_behind(tmp_path, capsys):
    assert main(["train", "--corpus", str(tmp_path / "none.txt"), "--out", str(tmp_path / "x")]) == 2
    assert not (tmp_path / "x" / "train.json").exists()


# --- settings


def test_a_way_of_scoring(text, tmp_path, capsys):
    assert (
        train(text, tmp_path, "--variant", "affine", "--score", "differential", "--qk-norm", "--n-heads", 2, steps=2)
        == 0
    )
    config = load_model(tmp_path).config
    assert (config.pre, config.score, config.qk_norm) == ("affine", "differential", True)
    capsys.readouterr()
    assert train(text, tmp_path / "b", "--score", "differential", "--n-heads", 1) == 2
    assert "even number of key heads" in capsys.readouterr().err


def test_options_of_a_variant(text, tmp_path, capsys):
    "Typed, in a file as an object, and again when the run goes on."
    out, file = tmp_path / "typed", tmp_path / "settings.json"
    assert train(text, out, "--variant", "euler", "--option", "n=3", "--option", "dt=0.05", "lean=true", steps=2) == 0
    options = {"n": 3, "dt": 0.05, "lean": True}
    assert load_model(out).config.pre_options == options
    file.write_text(json.dumps({"variant": "euler", "option": options}))
    assert train(text, tmp_path / "file", "--config", file, steps=2) == 0
    assert load_model(tmp_path / "file").config.pre_options == options
    assert main(["train", "--resume", str(out)]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", str(out), "--option", "n=4"]) == 2
    assert "option of the run" in capsys.readouterr().err


def test_paths_may_begin_at_home(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.txt").write_bytes(Path(text).read_bytes())
    (tmp_path / "x.json").write_text('{"corpus": "~/mine.txt", "out": "~/run"}')
    assert main(["train", "--config=~/x.json", *SMALL, "--steps", "2"]) == 0
    assert main(["train", "--resume=~/run"]) == 0
    assert generate("~/run", capsys, "-n", 2)


@pytest.mark.parametrize(
    "args",
    [["--tokenizer", "bpe", "9"], ["--eval-tokens", "9"], ["--variant", "euler", "--option", "n=-1"], ["--lr", "-1"]],
    ids=lambda x: x[0],
)
def test_settings_are_checked_before_a_text_is_read(args, tmp_path, monkeypatch):
    monkeypatch.setattr("coupled_qk.data.corpus", lambda name: pytest.fail("read"))
    assert train("wikitext2", tmp_path / "out", *args) == 2 and not (tmp_path / "out").exists()


# --- runs that ended badly


def test_a_run_that_diverged_is_not_to_be_resumed(text, tmp_path, capsys):
    bad = ["--lr", "1e30", "--clip", "0", "--warmup", "0"]
    assert train(text, tmp_path, *bad) == 1
    err = capsys.readouterr().err
    assert "non-finite" in err and "a lower --lr or --clip, or another --precision" in err and "--resume" not in err
    assert "diverged" in json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    for again in (lambda: train(text, tmp_path, *bad), lambda: main(["generate", str(tmp_path)])):
        assert again() == 2
        err = capsys.readouterr().err
        assert "a lower --lr or --clip" in err and "--resume" not in err and err.count("\n") == 1
    assert main(["train", "--resume", str(tmp_path)]) == 1  # to the same end
    assert "non-finite" in capsys.readouterr().err
    assert sum("diverged" in line for line in (tmp_path / "log.jsonl").read_text().splitlines()) == 1


def test_a_run_that_was_killed_while_it_read_begins_again(text, tmp_path, monkeypatch, capsys):
    "Its settings are written last, so that a half-written text is never taken for a whole one."
    write, out = data.write_tokens, tmp_path / "out"
    assert train(text, out, steps=1) == 0
    for name in ("log.jsonl", "last.safetensors", "best.safetensors"):
        (out / name).unlink()

    def killed(path, documents, tokenizer):
        if path.name == "valid.tokens":
            (path.parent / ".tokens-left").mkdir()
            raise KeyboardInterrupt
        return write(path, documents, tokenizer)

    monkeypatch.setattr(data, "write_tokens", killed)
    assert train(text, out, steps=1) == 130 and not (out / "train.json").exists()
    assert main(["train", "--resume", str(out)]) == 2 and "begins again" in capsys.readouterr().err
    monkeypatch.setattr(data, "write_tokens", write)
    assert train(text, out, steps=1) == 0 and not (out / ".tokens-left").exists()


@pytest.mark.parametrize(
    "typed, meant",
    [(r"a\nb\tc", "a\nb\tc"), (r"a\\nb", r"a\nb"), (r"\alpha \\", "\\alpha \\"), ("a\nb", "a\nb"), (r"\\\n", "\\\n")],
)
def test_a_new_line_and_a_backslash_can_be_typed(typed, meant):
    assert make_parser().parse_args(["generate", "x", "--prompt", typed]).prompt == meant
    assert make_parser().parse_args(["generate", "x", "--stop", typed]).stop == meant
