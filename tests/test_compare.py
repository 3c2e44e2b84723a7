"Comparisons: repeatable, honest about noise, and safe when interrupted."

import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from coupled_qk import compare as module
from coupled_qk.data import Corpus
from coupled_qk.compare import (
    check_memory,
    column_legend,
    compare,
    default_variants,
    environment,
    format_table,
    noise_sentence,
    own_folder,
    paired_difference,
    plot,
    price,
    repeat_command,
    result_table,
    same_settings,
    seed_noise,
    steps_within,
    stored_comparisons,
    stored_result,
    train_first,
)
from coupled_qk.gpt import GPTConfig, presets
from coupled_qk.training import TrainConfig
from scipy.stats import ttest_rel

SMALL = GPTConfig(context=16, n_layers=1, n_heads=2, d_model=16)
TEXT = Corpus("toy", ["the cat sat on the mat. " * 40], ["the rat sat on the cat. " * 4], "a test", "CC0")
QUICK = TrainConfig(steps=3, batch_size=2)


def quick(**changes):
    return compare(**{"corpus": TEXT, "size": SMALL, "how": QUICK, "device": "cpu", **changes})


@pytest.fixture(scope="module")
def result():
    return quick(seeds=[0, 1, 2])


def synthetic(scores):
    "A result with the given bits per byte, variant -> one number a seed."
    n = len(next(iter(scores.values())))
    runs = [{"variant": v, "seed": s, "bits_per_byte": x} for v, xs in scores.items() for s, x in enumerate(xs)]
    return {"variants": list(scores), "seeds": list(range(n)), "runs": runs}


def test_result_is_complete_and_json(result):
    assert result["finished"] and len(result["runs"]) == 12
    assert len(json.loads(json.dumps(result, allow_nan=False))["runs"]) == 12


def test_the_same_seed_gives_the_same_numbers(result):
    again = quick(seeds=[0, 1, 2])
    timed = {"seconds", "tokens_per_second"}
    for a, b in zip(result["runs"], again["runs"], strict=True):
        assert {k: v for k, v in a.items() if k not in timed} == {k: v for k, v in b.items() if k not in timed}


def test_the_order_of_variants_does_not_matter(result):
    other = quick(names=["query_mlp", "euler", "standard", "leapfrog"])
    score = lambda r: {run["variant"]: run["bits_per_byte"] for run in r["runs"] if run["seed"] == 0}
    assert score(other) == score(result)


def test_paired_difference_agrees_with_scipy():
    scores = {"a": [2.0, 2.2, 2.1, 2.4], "b": [1.9, 2.0, 2.1, 2.2]}
    mean, half = paired_difference(synthetic(scores), "b")
    low, high = ttest_rel(scores["b"], scores["a"]).confidence_interval(0.95)
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert paired_difference(synthetic({"a": [2.0], "b": [1.5]}), "b") == (-0.5, None)
    assert math.isnan(paired_difference(synthetic({"a": [2.0]}), "b")[0])


def test_seed_noise_recovers_known_spreads():
    rng = np.random.default_rng(0)
    common, own = rng.normal(0, 0.5, 4000), rng.normal(0, 0.1, (3, 4000))
    one, paired = seed_noise(synthetic({v: list(2 + common + own[i]) for i, v in enumerate("abc")}))
    # 4,000 draws know a standard deviation to about 1 %; a difference has the spread of two own parts
    assert one == pytest.approx(math.hypot(0.5, 0.1), rel=0.05) and paired == pytest.approx(0.1 * 2**0.5, rel=0.05)


def test_reports(result):
    table = result_table(result)
    assert [row[0] for row in table] == ["variant", "standard", "euler", "leapfrog", "query_mlp"]
    assert len(set(map(len, table))) == 1 and "±" in table[2][2] and table[1][2] == "-"
    assert format_table(table, markdown=True).count("\n") == 5
    assert all(
        set(result_table(r, list(column_legend))[0]) == set(column_legend)
        for r in (result, stored_result("compare-code"))
    )
    assert len(plot(result).axes) == 2


def test_one_step_can_be_seen():
    "A line through one point is invisible, so the point is marked."
    once = quick(how=TrainConfig(steps=1, batch_size=2), names=["standard", "euler"])
    assert all(line.get_marker() not in ("", "None", None) for ax in plot(once).axes for line in ax.lines)


def part_of(stored, seeds):
    "A stored result as if only these seeds had been run."
    return {**stored, "seeds": seeds, "runs": [r for r in stored["runs"] if r["seed"] in seeds]}


NUMBER = re.compile(r"0\.\d+")


def test_one_seed_says_first_that_nothing_can_be_told():
    said = noise_sentence(quick(names=["standard", "euler"]))
    assert said.startswith("With one seed, a difference cannot be told from chance.")
    assert "unknown" in said and "--seeds 0 1 2 3 4" in said and not NUMBER.search(said)


def test_a_stored_spread_is_quoted_only_for_the_same_settings():
    stored = stored_result("compare-code")
    same = part_of(stored, [3])
    assert f"{seed_noise(stored)[1]:.3f}: less than twice that" in noise_sentence(same)
    others = [{**same, "size": "small"}, {**same, "bytes": {"train": 1, "valid": 1}}]
    others += [{**same, "corpus": {**same["corpus"], "name": "mine"}}]
    others += [{**same, "train": {**same["train"], key: 7}} for key in ("steps", "batch_size", "lr")]
    for other in others:
        assert not same_settings(stored, other)
        assert "unknown" in noise_sentence(other) and not NUMBER.search(noise_sentence(other))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_few_seeds_give_an_interval_and_no_standard_deviation(n):
    said = noise_sentence(part_of(stored_result("compare-code"), list(range(n))))
    assert "95 % interval" in said and "standard deviation" not in said and not NUMBER.search(said)


def test_five_seeds_give_the_spread_and_twice_it_as_threshold():
    stored = stored_result("compare-code")
    said, (one, paired) = noise_sentence(stored), seed_noise(stored)
    assert "Every interval contains zero" in said
    assert [float(x) for x in NUMBER.findall(said)] == [round(one, 3), round(paired, 3), round(2 * paired, 3)]


def test_an_interval_without_zero_is_named_with_its_direction():
    said = noise_sentence(
        synthetic({"a": [2.0, 2.1, 2.2], "b": [1.9, 2.0, 2.11], "c": [2.5, 2.62, 2.7], "d": [2.0, 2.2, 2.1]})
    )
    assert "b (less), c (more)." in said and "d (" not in said and "one interval in twenty" in said


@pytest.mark.parametrize("seeds", [[0], [0, 1], [0, 1, 2, 3, 4]])
def test_one_variant_has_no_differences_to_speak_of(seeds):
    assert noise_sentence({**part_of(stored_result("compare-code"), seeds), "variants": ["euler"]}) == ""


def test_an_interrupt_keeps_what_is_finished(monkeypatch, tmp_path):
    train, calls = module.train_variant, []

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return train(*args, **options)

    monkeypatch.setattr(module, "train_variant", interrupted)
    found = quick(out=tmp_path)
    assert not found["finished"] and [r["variant"] for r in found["runs"]] == ["standard", "euler"]
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(found))
    assert [row[0] for row in result_table(found)] == ["variant", "standard", "euler"] and len(plot(found).axes) == 2


def test_an_interrupt_before_the_first_run_leaves_nothing_of_an_older_one(monkeypatch, tmp_path):
    for name in ("result.json", "curves.png"):
        (tmp_path / name).write_text("of another day")
    monkeypatch.setattr(module, "train_variant", lambda *args, **options: exec("raise KeyboardInterrupt"))
    found = quick(out=tmp_path, max_seconds=60)
    kept = json.loads((tmp_path / "result.json").read_text())
    assert kept == json.loads(json.dumps(found)) and kept["stopped"] == "interrupted" and kept["runs"] == []
    assert not (tmp_path / "curves.png").exists()


def test_bad_input_leaves_an_older_result_alone(tmp_path):
    (tmp_path / "result.json").write_text("of another day")
    with pytest.raises(ValueError):
        quick(out=tmp_path, corpus=Corpus("short", ["abc"], ["de" * 40], "", ""))
    assert (tmp_path / "result.json").read_text() == "of another day"


def test_two_runs_do_not_share_a_folder(tmp_path):
    with own_folder(tmp_path), pytest.raises(ValueError, match="no other run is writing to"):
        quick(out=tmp_path)
    assert quick(out=tmp_path, names=["standard"])["finished"]  # it is free again


def test_a_full_disk_keeps_what_was_written_and_what_was_measured(monkeypatch, tmp_path):
    write, calls = module.write_whole, []

    def full(*args):
        calls.append(1)
        if len(calls) > 2:  # the settings and the first run fit
            raise OSError(28, os.strerror(28))
        return write(*args)

    monkeypatch.setattr(module, "write_whole", full)
    found = quick(out=tmp_path)
    assert not found["finished"] and "result.json could not be written (No space left" in found["stopped"]
    assert len(found["runs"]) == 2 and len(json.loads((tmp_path / "result.json").read_text())["runs"]) == 1


def test_the_text_is_encoded_once(monkeypatch):
    encode, calls = module.encode_corpus, []
    monkeypatch.setattr(module, "encode_corpus", lambda *args: calls.append(1) or encode(*args))
    assert quick(max_seconds=60)["finished"] and len(calls) == 1


def test_fewer_steps_where_time_is_short():
    wanted, said = TrainConfig(steps=500, batch_size=2), []
    with pytest.raises(ValueError, match=r"take about \d+ seconds here, and -?\d+ are left"):
        quick(names=["standard"], how=wanted, max_seconds=1e-3, say=said.append)
    many = TrainConfig(steps=10**6, batch_size=2)
    found = quick(names=["standard"], how=many, max_seconds=2, say=said.append)
    assert found["finished"] and 1 <= found["train"]["steps"] < 10**6
    assert "timing this machine ..." in said and any("of 1000000 steps fit" in line for line in said)
    prices = [price(replace(SMALL, pre=name), module.encode_corpus(TEXT), wanted) for name in default_variants]
    assert all(step > 0 and rest >= 0 for step, rest in prices)
    assert steps_within(1e6, prices, wanted) == wanted
    few = steps_within(30, prices, TrainConfig(steps=10**9)).steps
    assert sum(step * few + rest for step, rest in prices) <= 30


class Machine:
    "A clock, and runs that take their price times `slower` on it."

    def __init__(self, monkeypatch, slower):
        self.now, self.slower, self.trained = 0.0, slower, []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def train(self, how):
        seconds = self.slower * (0.1 * how.steps + 1)
        self.now += seconds
        self.trained.append(how.steps)
        return {"seconds": seconds}


@pytest.mark.parametrize("slower", [0.5, 1.0, 1.2, 1.5, 3.0])
def test_the_time_is_kept_on_a_busy_machine(monkeypatch, slower):
    "Four equal runs in 150 seconds, on a machine that turns out slower than it was when it was timed."
    machine, said = Machine(monkeypatch, slower), []
    how, run = train_first(machine.train, [(0.1, 1.0)] * 4, TrainConfig(steps=800), 150.0, said.append)
    assert how.steps == machine.trained[-1] and run["seconds"] == slower * (0.1 * how.steps + 1)
    assert machine.now + 3 * run["seconds"] <= 150
    assert len(machine.trained) == (1 if slower < 1.25 else 2)  # a fifth is kept back for a little slowness
    assert any("begin again" in line for line in said) == (slower > 1.25)


PEAK = """
import re, torch
from coupled_qk.compare import step_memory
from coupled_qk.gpt import GPT, GPTConfig
from coupled_qk.training import TrainConfig, make_optimizer, train_step

config = GPTConfig(context=128, n_layers=2, d_model=64, pre="leapfrog")
model, peak = GPT(config), []
for batch in (16, 128):
    ids = torch.zeros(batch, 128, dtype=torch.int64)
    train_step(model, make_optimizer(model, TrainConfig()), ids, ids)
    status = open("/proc/self/status").read()  # not getrusage, whose peak begins with that of the process that forked
    peak.append(int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024)
print((peak[1] - peak[0]) / (step_memory(config, 128) - step_memory(config, 16)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc/self/status")
def test_the_memory_of_a_step_is_about_what_the_system_counts():
    "By how much a larger batch raises the peak of a fresh process; a third off is near enough to tell 1 GiB from 100."
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert 2 / 3 < float(done.stdout) < 3 / 2


def test_a_batch_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(module, "free_memory", lambda: 2.0**28)
    check_memory([presets["tiny"]], 8, "cpu")
    check_memory([presets["tiny"]], 1000, "cuda")  # a GPU has its own, and says so
    with pytest.raises(ValueError, match=r"batch_size must be smaller here: a step with 1000 needs about 1\d\.\d GiB"):
        check_memory([presets["tiny"]], 1000, "cpu")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"names": []}, "at least one, got"),
        ({"names": ["standard", "standard"]}, "different names"),
        ({"names": ["standard", "verlet"]}, "unknown variant 'verlet'"),
        ({"names": ["standard", "leapfrg"]}, "did you mean 'leapfrog'"),
        ({"size": "huge"}, "unknown size for bytes 'huge': choose one of tiny, small$"),
        ({"size": "60M"}, "unknown size for bytes '60M': choose one of tiny, small$"),
        ({"size": presets["60M"]}, "vocab_size must be 256, got 50257"),
        ({"max_seconds": -1}, "seconds must be positive, got -1"),
        ({"how": TrainConfig(batch_size=10**9)}, "batch_size must be smaller here"),
        ({"seeds": []}, "seeds must be"),
        ({"seeds": [-1]}, "seeds must be"),
        ({"device": "tpu"}, "device must be"),
        ({"corpus": "shakespear"}, "shakespear"),
        ({"corpus": Corpus("short", ["abc"], ["de" * 40], "", "")}, "longer than one context of 16, got only 4"),
        ({"corpus": Corpus("short", ["abc" * 40], ["de"], "", "")}, "longer than one context of 16, got only 3"),
    ],
)
def test_bad_input(changes, words):
    with pytest.raises(ValueError, match=words):
        quick(**changes)


@pytest.mark.parametrize("name", stored_comparisons)
def test_stored_results_can_be_trusted(name):
    "A stored comparison is finished, on a pinned text, with several seeds, from a known and clean commit."
    stored = stored_result(name)
    assert stored["finished"] and len(stored["runs"]) == len(stored["variants"]) * len(stored["seeds"]) >= 12
    since = {"cpu"}  # noted only in later results
    assert stored["corpus"]["name"] != "stdlib" and environment().keys() - since <= stored["environment"].keys()
    assert stored["environment"]["commit"] and "dirty" not in stored["environment"]["commit"]


@pytest.mark.parametrize("name", stored_comparisons)
def test_the_command_of_a_stored_result_gives_its_settings(name):
    "Parsed by the command's own parser, it asks for exactly what was measured, and on as many threads."
    from coupled_qk.cli import make_parser

    stored = stored_result(name)
    threads, program, *words = repeat_command(stored).split()
    options = make_parser().parse_args(words)
    assert (threads, program) == (f"OMP_NUM_THREADS={stored['environment']['threads']}", "coupled-qk")
    asked = (options.variants, options.corpus, options.size, options.seeds, options.device)
    assert asked == (stored["variants"], stored["corpus"]["name"], stored["size"], stored["seeds"], "cpu")
    assert {"steps": options.steps, "batch_size": options.batch_size, "lr": options.lr}.items() <= stored[
        "train"
    ].items()
    others = TrainConfig(steps=options.steps, batch_size=options.batch_size, lr=options.lr)
    assert all(getattr(others, key) == value for key, value in stored["train"].items())
