"A study's runs are found again by what decides them, survive a kill, share out, and repeat to the bit."

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT

from coupled_qk import corpora
from coupled_qk import study as module
from coupled_qk.cli import main
from coupled_qk.data import split
from coupled_qk.gpt import GPTConfig, count_parameters
from coupled_qk.recall import RecallTask
from coupled_qk.study import (
    RecallRun,
    Run,
    Study,
    arm_table,
    check,
    collect,
    comparison_table,
    comparisons,
    format_study,
    gaps,
)
from coupled_qk.study import loss_spikes, perform, regime, stability_table, studies, study, trained
from coupled_qk.training import TrainConfig

MODEL = GPTConfig(vocab_size=300, context=16, n_layers=1, n_heads=1, d_model=16, d_ff=32)
TRAIN = TrainConfig(steps=6, batch_size=2, lr=1e-2, eval_every=3)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n".join(f"the {i} th line says that {i * i} is the square of {i}" for i in range(300)))
    return str(file)


def runs(text, arms=("standard", "euler"), seeds=2, **train):
    how = replace(TRAIN, **train)
    return tuple(Run(a, s, replace(MODEL, pre=a), replace(how, seed=s), text) for s in range(seeds) for a in arms)


@pytest.fixture
def tiny(text, monkeypatch):
    "A study of four short runs, and nothing stored."
    monkeypatch.setitem(studies, "tiny", lambda: Study("?", runs(text), (("euler", "standard"),)))
    monkeypatch.setattr(module, "_stored_rows", lambda name: [])
    return "tiny"


# -- what a run is


def test_key_is_what_decides_a_run(text):
    run = runs(text)[0]
    others = [
        replace(run, seed=5),
        replace(run, corpus="x"),
        replace(run, start="near"),
        replace(run, model=replace(MODEL, d_ff=40)),
        replace(run, train=replace(run.train, lr=1e-3)),
        replace(run, train=replace(run.train, seed=5)),
    ]
    assert len({r.key for r in (run, *others)}) == 7
    assert replace(run, arm="another name").key == run.key


def test_key_does_not_heed_options_at_their_default(text):
    "Else an option that is added later would make every stored run a stranger."
    run = runs(text)[0]
    facts = module._chosen(run)
    assert "qk_lr" not in facts["train"] and "score" not in facts["model"] and facts["train"]["steps"] == 6


@pytest.mark.parametrize("name", list(studies))
def test_studies_are_paired_and_without_doubles(name):
    made = studies[name]()
    assert len({r.key for r in made.runs}) == len(made.runs)
    seeds = {arm: {r.seed for r in made.runs if r.arm == arm} for arm in {r.arm for r in made.runs}}
    assert all(s <= seeds[module.base_of(arm, made.base)] for arm, s in seeds.items())
    assert all(a in seeds and (b in seeds or b == "best control") for a, b in made.primary)


def test_ways_of_scoring_are_compared_at_one_size():
    "Version 2's wider queries are taken from its feed-forward layers: within 0.1 % of each other, whatever stands before."
    sizes = {r.arm: count_parameters(r.model) for r in studies["compose"]().runs}
    for pre in ("standard", "euler", "affine"):
        plain = sizes[f"{pre}+softmax"]
        assert all(abs(sizes[f"{pre}+{score}"] / plain - 1) < 1e-3 for score in ("differential", "differential_v2"))


def test_shared_runs_are_made_once():
    keys = lambda name: {r.key for r in studies[name]().runs}
    assert len(keys("scarce") & keys("ablation")) == 10  # standard and euler on the whole text, five seeds
    assert len(keys("noise") & keys("ablation")) == 6
    assert len(keys("terms") & keys("controls")) == 20  # standard, euler, the drift and the kick, five seeds
    assert len(keys("rotary") & keys("controls")) == 15 and len(keys("tokens") & keys("controls")) == 10
    assert len(keys("force") & keys("steps")) == 15  # standard, euler and leapfrog
    assert keys("collapse") < keys("ablation") and len(keys("stability") & keys("controls")) == 9
    assert len(keys("little") & keys("controls")) == 4


def test_sizes_have_tokens_in_proportion():
    runs = [run for run in studies["scale"]().runs if run.arm.startswith("standard")]
    each = {run.arm: (count_parameters(run.model), run.train.steps) for run in runs}
    assert [round(n / 1e6, 1) for n, _ in each.values()] == [0.3, 1.1, 3.0]
    for n, steps in each.values():
        assert steps / 1000 == pytest.approx(n / count_parameters(regime), rel=0.01)
    assert {run.model.d_model // run.model.n_heads for run in runs} == {64}


# -- one run


def test_a_run_repeats_to_the_bit_and_says_what_it_is(text, tmp_path):
    run = runs(text)[1]
    first, second = (perform(run, tmp_path / name) for name in "ab")
    assert first["nats"] == second["nats"] and first["training_curve"] == second["training_curve"]
    assert first["key"] == run.key and first["model"]["pre"] == "euler" and first["environment"]["torch"]
    assert [step for step, _ in first["evaluations"]] == [3, 6] and len(first["layers"]) == 1
    assert perform(runs(text)[3], tmp_path / "c")["nats"] != first["nats"]


def test_starts_move_the_weights_a_little(text, tmp_path):
    run = runs(text)[0]
    nats = {s: perform(replace(run, start=s), tmp_path / s)["nats"] for s in module.starts}
    assert len(set(nats.values())) == 3 and max(nats.values()) - min(nats.values()) < 0.5
    with pytest.raises(ValueError, match="unknown start 'x'"):
        perform(replace(run, start="x"), tmp_path / "x")


@pytest.mark.parametrize("fast", [True, False])
def test_a_processor_without_bf16_uses_float32_and_says_so(fast, text, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)
    run = runs(text)[0]
    row = perform(asked := replace(run, train=replace(run.train, precision="bf16")), tmp_path)
    assert row["key"] == asked.key != run.key
    assert row["train"]["precision"] == ("bf16" if fast else "float32")
    assert perform(run, tmp_path / "b")["train"]["precision"] == "float32"


def test_a_stopped_run_goes_on_to_the_same_numbers(text, tmp_path):
    run, asked = runs(text)[1], iter([False, True])
    assert perform(run, tmp_path / "a", lambda: next(asked)) is None
    assert perform(run, tmp_path / "a")["nats"] == perform(run, tmp_path / "b")["nats"]


# -- how a run got there, and what became of its layers


def test_a_run_says_how_calm_it_was_and_what_its_layers_are_like(text, tmp_path):
    run, asked = runs(text)[1], iter([False, True])
    whole = perform(run, tmp_path / "a")
    assert whole["spikes"] == [] and 0 < whole["gradient"]["median"] <= whole["gradient"]["max"]
    for when in ("start", "end"):
        assert [(r["length"], r["layer"]) for r in whole["profile"][when]] == [(4, 1), (16, 1)]
        for row in whole["profile"][when]:
            assert 0 <= row["lowest_entropy"] <= row["entropy"] and row["stable_rank"] >= 1 and 0 < row["residual"] < 1
            assert {"s1", "s2", "gap", "sink", "self"} < set(row)
    assert whole["profile"]["start"] != whole["profile"]["end"]
    assert perform(run, tmp_path / "b", lambda: next(asked)) is None
    parts = perform(run, tmp_path / "b")
    assert all(parts[name] == whole[name] for name in ("spikes", "gradient", "profile"))


def test_spikes_last():
    "One hard batch is none, a slow rise is none, and what stays high is one, however long."
    calm = np.linspace(7, 4, 400) + 0.1 * np.random.default_rng(1).normal(size=400)
    one, lasting, shift = calm.copy(), calm.copy(), calm.copy()
    one[[100, 200, 300]] += 3
    lasting[150:153] += 3
    lasting[350:360] += 1
    shift[250:] += 2
    assert loss_spikes(calm) == loss_spikes(one) == loss_spikes(np.linspace(4, 4.5, 300)) == []
    assert loss_spikes(lasting) == [151, 351] and loss_spikes(shift) == [251]
    assert loss_spikes([]) == loss_spikes([1.0] * 50) == loss_spikes([1.0] * 80) == []


@pytest.fixture
def wild(text, monkeypatch):
    "A study of stability in which one arm diverges."
    calm, hot = runs(text), runs(text, lr=1e38)
    arms = [replace(r, arm=f"{r.arm} x1") for r in calm] + [replace(r, arm=f"{r.arm} x8") for r in hot[:2]]
    monkeypatch.setitem(
        studies, "stability", lambda: Study("?", tuple(arms), (("euler x8", "standard x8"),), "standard x1")
    )
    monkeypatch.setattr(module, "_stored_rows", lambda name: [])
    return "stability"


def test_a_run_that_diverges_is_a_row_and_not_the_end(wild, tmp_path, monkeypatch, capsys):
    result = study(wild, tmp_path)
    assert len(result["runs"]) == 6 and len(trained(result)) == 4
    (first, second) = (r for r in result["runs"] if "diverged" in r)
    assert first["nats"] is None and "non-finite" in first["diverged"] and first["model"]["pre"] == "standard"
    assert "diverged" in capsys.readouterr().err
    assert json.loads((tmp_path / "study-stability.json").read_text())["runs"] == result["runs"]
    assert not list((tmp_path / wild / "parts").glob("*/"))
    monkeypatch.setattr(module, "perform", lambda *_: pytest.fail("made again"))
    assert study(wild, tmp_path)["runs"] == result["runs"]


def test_tables_of_a_study_in_which_runs_diverged(wild, tmp_path):
    result = study(wild, tmp_path)
    assert gaps(result, "euler x8", "standard x8") == [] and [r[0] for r in arm_table(result)[1:]] == [
        "standard x1",
        "euler x1",
    ]
    table = {row[0]: dict(zip(stability_table(result)[0], row, strict=True)) for row in stability_table(result)}
    assert table["standard x1"]["diverged"] == "0" and table["standard x8"]["diverged"] == "1"
    assert float(table["euler x1"]["median norm"]) > 0 and table["euler x8"]["lowest entropy"] == "-"
    assert "largest norm" in format_study(result) and "largest norm" not in format_study({**result, "study": "x"})
    assert "Diverged: standard x8, seed 0; euler x8, seed 0.\n" in format_study(result)
    assert "Diverged" not in format_study({**result, "runs": trained(result)})
    older = [{k: v for k, v in row.items() if k not in ("spikes", "gradient", "profile")} for row in trained(result)]
    assert stability_table({"runs": older})[1] == ["standard x1", "0", "0", "0", "-", "-", "-"]


def test_divergence_is_not_among_the_runs_to_repeat(wild, tmp_path, monkeypatch):
    rows = study(wild, tmp_path)["runs"]
    monkeypatch.setattr(module, "_stored_rows", lambda name: rows if name == wild else [])
    assert all(line["fine"] for line in check(wild, 4))
    with pytest.raises(ValueError, match="from 1 to 4"):
        check(wild, 5)


INSIDE = {run.arm: run for name in ("terms", "force", "rotary") for run in studies[name]().runs}


@pytest.mark.parametrize("arm", INSIDE)
def test_each_arm_of_what_is_inside_can_be_made(arm, text, tmp_path):
    "A model as small as can be, with the arm's own options."
    model = replace(INSIDE[arm].model, vocab_size=300, context=16, n_layers=1, n_heads=2, d_model=16, d_ff=32)
    row = perform(replace(INSIDE[arm], model=model, train=TRAIN, corpus=text), tmp_path)
    assert json.loads(json.dumps(row, allow_nan=False)) and row["nats"] < 6 and row["parameters"]


# -- many runs


def test_a_study_is_made_once(tiny, tmp_path):
    result = study(tiny, tmp_path, jobs=2)
    assert [(r["arm"], r["seed"]) for r in result["runs"]] == [
        ("standard", 0),
        ("euler", 0),
        ("standard", 1),
        ("euler", 1),
    ]
    assert json.loads((tmp_path / "study-tiny.json").read_text())["runs"] == result["runs"]
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.json")}
    assert study(tiny, tmp_path)["runs"] == result["runs"]
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.json")} == files


def test_shares_are_of_whole_seeds_and_make_the_whole(tiny, tmp_path, capsys):
    shares = [study(tiny, tmp_path / str(i), shard=(i, 3))["runs"] for i in (1, 2, 3)]
    assert [[(r["arm"], r["seed"]) for r in rows] for rows in shares] == [
        [("standard", 0), ("euler", 0)],
        [("standard", 1), ("euler", 1)],
        [],
    ]
    assert "share 3 of 3 has no runs: shares are of whole seeds, and there are 2" in capsys.readouterr().err


def test_a_run_in_other_hands_is_left_alone(text, tmp_path):
    from filelock import FileLock

    wanted, said = runs(text)[:2], []
    (tmp_path / "parts").mkdir()
    with FileLock(tmp_path / "parts" / f"{wanted[0].key}.lock"):
        module.work(wanted, tmp_path, say=said.append)
    assert said[-1] == "left to other processes, which are at work on them: 1 of 2 runs"
    assert [p.stem for p in (tmp_path / "rows").iterdir()] == [wanted[1].key]


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_study import runs
from coupled_qk import study as module
module.studies["long"] = lambda: module.Study("?", runs({text!r}, ("euler",), 1, steps=300, eval_every=20), ())
if __name__ == "__main__":
    module.study("long", {out!r})
"""


def test_a_killed_study_goes_on_to_the_same_numbers(text, tmp_path):
    "All its processes die at once, as when a machine does; the second start finds a checkpoint and ends as if nothing had been."
    script = tmp_path / "long.py"
    script.write_text(SCRIPT.format(tests=str(ROOT / "tests"), text=text, out=str(tmp_path / "out")))
    first = subprocess.Popen([sys.executable, script], start_new_session=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out/long/parts/*/last.safetensors")):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not list(tmp_path.glob("out/long/rows/*.json"))
    assert subprocess.run([sys.executable, script]).returncode == 0
    (row,) = (json.loads(p.read_text()) for p in tmp_path.glob("out/long/rows/*.json"))
    run = runs(text, ("euler",), 1, steps=300, eval_every=20)[0]
    assert row["nats"] == perform(run, tmp_path / "again")["nats"]


INTERRUPTED = """
import sys
sys.path.insert(0, {tests!r})
from test_study import runs
from coupled_qk import study as module
from coupled_qk.cli import main
module.studies["long"] = lambda: module.Study("?", runs({text!r}, seeds=1, steps=20_000, eval_every=20), ())
if __name__ == "__main__":
    sys.exit(main(["study", "long", "--out", {out!r}, *sys.argv[1:]]))
"""


@pytest.mark.parametrize("more", [[], ["--json"], ["--jobs", "2"]])
def test_ctrl_c_saves_and_says_so(more, text, tmp_path):
    "Also when it is pressed twice."
    script, out = tmp_path / "long.py", tmp_path / "out"
    script.write_text(INTERRUPTED.format(tests=str(ROOT / "tests"), text=text, out=str(out)))
    command = [sys.executable, script, *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process, deadline = subprocess.Popen(command, start_new_session=True, **pipes), time.monotonic() + 120
    while len(list(out.glob("long/parts/*/last.safetensors"))) < (2 if "--jobs" in more else 1):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.01)
    printed, said = process.communicate(timeout=120)
    assert process.returncode == 130 and printed == "" and "Traceback" not in said
    assert said.endswith("coupled-qk: interrupted: what was done is kept, and the same command goes on\n")


@pytest.mark.parametrize(
    "change",
    [
        "not JSON",
        "[]",
        {"nats": None},
        {"nats": "low"},
        {"nats": float("nan")},
        {"perplexity": None},
        {"accuracy": None},
        {"key": "another"},
        {"seed": 7},
        {"corpus": "wikitext2"},
        {"start": "near"},
        {"model": {"d_model": 32}},
        {"model": {"pre_options": {"force": "potential"}}},
        {"train": {"lr": 1e-3}},
        {"train": None},
    ],
)
def test_a_row_that_no_study_wrote_is_refused_by_its_name(change, tiny, text, tmp_path):
    run = runs(text)[1]
    file = tmp_path / tiny / "rows" / f"{run.key}.json"
    file.parent.mkdir(parents=True)
    row = json.loads(json.dumps(perform(run, tmp_path / "parts")))
    row["train"]["precision"] = "bf16"  # which may be another
    del row["model"]["qk_norm"]  # as in a row that is older than an option
    file.write_text(json.dumps(row))
    assert [r["nats"] for r in collect(tiny, tmp_path / tiny)["runs"]] == [row["nats"]]
    if isinstance(change, dict):
        change = {k: {**row[k], **v} if isinstance(v, dict) else v for k, v in change.items()}
        change = json.dumps({**row, **change})
    file.write_text(change)
    for read in (lambda: collect(tiny, tmp_path / tiny), lambda: study(tiny, tmp_path)):
        with pytest.raises(ValueError, match=f"rows/{run.key}.json does not hold .* move it away"):
            read()


def test_a_strange_file_of_another_study_is_named_too(tiny, tmp_path):
    file = tmp_path / "noise" / "rows" / "notes.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="noise/rows/notes.json does not hold"):
        collect(tiny, tmp_path / tiny)


@pytest.mark.parametrize("words", ["{", "[]", "{}"])
def test_a_strange_result_file_is_named(words, tiny, tmp_path):
    study(tiny, tmp_path)
    (tmp_path / "study-tiny.json").write_text(words)
    with pytest.raises(ValueError, match="study-tiny.json does not hold"):
        study(tiny, tmp_path)
    assert (tmp_path / "study-tiny.json").read_text() == words


def test_a_run_that_two_studies_share_is_made_once(tiny, text, tmp_path, monkeypatch, capsys):
    "The second study finds it in the folder of the first, and has a file of its own all the same."
    shared = tuple(replace(run, arm=f"my {run.arm}") for run in runs(text)[:2])
    monkeypatch.setitem(studies, "part", lambda: Study("?", shared, (), "my standard"))
    rows = study(tiny, tmp_path)["runs"]
    monkeypatch.setattr(module, "perform", lambda *_: pytest.fail("made again"))
    result = study("part", tmp_path)
    assert [(r["arm"], r["nats"]) for r in result["runs"]] == [(f"my {r['arm']}", r["nats"]) for r in rows[:2]]
    assert json.loads((tmp_path / "study-part.json").read_text())["runs"] == result["runs"]
    module.work(shared, tmp_path / "part", say=lambda _: None)  # also where they were made after the list was
    assert not list(tmp_path.glob("part/rows/*.json"))
    assert collect("part", tmp_path / "elsewhere" / "part")["runs"] == []


def test_a_shared_run_in_the_hands_of_another_study_is_left_alone(tiny, text, tmp_path, monkeypatch):
    from filelock import FileLock

    monkeypatch.setitem(studies, "part", lambda: Study("?", runs(text)[:2], ()))
    (tmp_path / tiny / "parts").mkdir(parents=True)
    with FileLock(tmp_path / tiny / "parts" / f"{runs(text)[0].key}.lock"):
        assert [r["arm"] for r in study("part", tmp_path)["runs"]] == ["euler"]
    assert [r["arm"] for r in study("part", tmp_path)["runs"]] == ["standard", "euler"]


# -- texts that belong together


@pytest.fixture
def domains(monkeypatch):
    "A matched design of two small domains, under the names of the real one; a share is still a fourth."

    def make(name):
        noun = {"recipes": "bread", "code": "list"}[name]
        texts = [f"{noun} {i} has {i % 7} {noun}s and {i * i} in all\n" * 3 for i in range(400)]
        return corpora.Corpus(name, *split(texts), "made here", "CC0")

    monkeypatch.setattr(corpora, "fetched", make)
    monkeypatch.setattr(corpora, "_held_out", 2_000)
    names = ("recipes", "code")
    monkeypatch.setitem(corpora.matched_domains, 4, names)
    monkeypatch.setattr(corpora, "matched_arms", arms := corpora._arms(4, 20_000))
    monkeypatch.setattr(module, "matched_arms", arms)
    for cached in (module.tokens, module._tokenizer):
        cached.cache_clear()
    yield names
    for cached in (module.tokens, module._tokenizer):
        cached.cache_clear()


def small(run):
    return replace(run, model=replace(MODEL, pre=run.model.pre), train=replace(TRAIN, seed=run.seed))


def test_the_arms_of_a_design_share_tokens_and_held_out_text(domains):
    arms = {name: module.tokens(name, 300) for name in corpora.matched_arms}
    assert list(arms) == ["matched/4/recipes", "matched/4/code"] + [f"matched/4/{d}/share" for d in domains] + [
        "matched/4/mix"
    ]
    for d in domains:
        assert torch.equal(arms[f"matched/4/{d}"][1], arms[f"matched/4/{d}/share"][1])
        assert len(arms[f"matched/4/{d}"][0]) > 1.8 * len(arms[f"matched/4/{d}/share"][0])
    assert torch.equal(arms["matched/4/mix"][1], torch.cat([arms[f"matched/4/{d}"][1] for d in domains]))
    assert module._tokenizer.cache_info().currsize == 1  # one for all


def test_a_study_of_the_matched_design_is_made_and_read(domains, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_stored_rows", lambda name: [])
    made = module.matched_texts(n_seeds=1)
    runs_ = tuple(small(r) for r in made.runs if r.model.pre != "query_mlp")
    monkeypatch.setitem(studies, "corpora", lambda: replace(made, runs=runs_))
    result = study("corpora", tmp_path)
    assert [r["arm"] for r in result["runs"]][:3] == ["standard on recipes", "euler on recipes", "standard on code"]
    assert len(result["runs"]) == 2 * 5
    for row in result["runs"]:
        assert set(row["held_out"]) == set(domains) and row["epochs"] > 0 and row["best"][1] <= row["nats"]
    epochs = {r["arm"]: r["epochs"] for r in result["runs"]}
    assert epochs["euler on code/share"] == pytest.approx(4 * epochs["euler on code"], rel=0.1)
    alone = next(r for r in result["runs"] if r["arm"] == "euler on code")
    assert alone["held_out"]["code"]["nats"] == pytest.approx(alone["nats"], rel=1e-6)
    gaps_ = module.domain_gaps(result, "euler")
    assert set(gaps_) == {(d, kind) for d in domains for kind in ("alone", "share", "mixture")}
    assert all(list(by_seed) == [0] for by_seed in gaps_.values())
    mean = lambda kind: sum(gaps_[d, kind][0] for d in domains) / 2
    assert module.contrast(result, "euler") == [pytest.approx(mean("alone") - mean("mixture"))]
    assert module.contrast(result, "euler", ("share", "mixture")) == [pytest.approx(mean("share") - mean("mixture"))]
    assert format_study(result).count("euler on mix") == 1  # one seed has no interval


def test_a_text_that_stands_alone_has_no_others_to_be_tested_on(text, tmp_path):
    row = perform(runs(text)[0], tmp_path)
    assert "held_out" not in row and row["best"][1] == pytest.approx(min(x for _, x in row["evaluations"]), abs=1e-6)
    assert row["epochs"] == pytest.approx(6 * 2 * 16 / len(module.tokens(text, 300)[0]), abs=0.0006)


def test_half_a_matched_study_can_be_read():
    row = lambda arm: {"arm": arm, "seed": 0, "held_out": {"code": {"bits_per_byte": 1.0}}}
    assert module.domain_gaps({"runs": []}, "euler") == {} and module.contrast({"runs": []}, "euler") == []
    some = {"runs": [row("standard on code/share"), row("euler on code/share"), row("standard on mix")]}
    assert module.domain_gaps(some, "euler") == {
        ("code", "alone"): {},
        ("code", "share"): {0: 0.0},
        ("code", "mixture"): {},
    }
    assert module.contrast(some, "euler") == []


@pytest.mark.parametrize("name", ["knob", "scarce"])
def test_a_study_of_other_texts_is_made(name, text, tmp_path, monkeypatch):
    "With short texts in the place of the real ones; each study's arms stand beside the base on the same text."
    made = studies[name](n_seeds=2)
    monkeypatch.setattr(module, "_stored_rows", lambda name: [])
    files = {c: tmp_path / f"{i}.txt" for i, c in enumerate({r.corpus for r in made.runs})}
    lines = open(text).read().splitlines()
    for i, file in enumerate(files.values()):
        file.write_text("\n".join(lines[i * 7 :]))
    runs_ = tuple(replace(small(r), corpus=str(files[r.corpus])) for r in made.runs)
    monkeypatch.setitem(studies, name, lambda: replace(made, runs=runs_))
    result = study(name, tmp_path / "out")
    assert len(result["runs"]) == len(made.runs)
    bases = {line["arm"]: line["base"] for line in comparisons(result)}
    assert len(bases) == len({r.corpus for r in made.runs})
    assert all(arm.replace("euler", "standard") == base for arm, base in bases.items())


def test_existing_runs_keep_their_names():
    "A key that changes would make every stored run a stranger."
    assert module._run("standard", 0).key == module._stored_rows("ablation")[0]["key"]


# -- runs of another kind

TASK = RecallTask(12, 2, 16)
RECALL = GPTConfig(vocab_size=16, context=12, n_layers=2, n_heads=1, d_model=16, d_ff=32)


def recall_runs(arms=("standard", "euler"), shape="gpt", **task):
    how, task = TrainConfig(steps=6, batch_size=8, lr=1e-3, eval_every=2), replace(TASK, **task)
    return tuple(
        RecallRun(f"12/2 {shape}, {a}, 0.001", 0, replace(RECALL, pre=a), how, task=task, shape=shape) for a in arms
    )


def test_a_run_of_recall_has_a_key_of_its_own_and_others_keep_theirs(text):
    run = recall_runs()[0]
    others = [replace(run, shape="zoology"), replace(run, task=replace(TASK, rows=9)), replace(run, seed=1)]
    assert len({r.key for r in (run, *others)}) == 4
    assert {"task", "shape"} <= module._chosen(run).keys() and not {"task", "shape"} & module._chosen(
        runs(text)[0]
    ).keys()
    assert module._chosen(run)["task"] == {
        "seq_len": 12,
        "n_pairs": 2,
        "vocab": 16,
    }  # what is at its default is not heeded


@pytest.mark.parametrize("shape", ["gpt", "zoology"])
def test_a_run_of_recall_repeats_to_the_bit_and_goes_on(shape, tmp_path):
    run, asked = recall_runs(shape=shape)[1], iter([False, True])
    assert perform(run, tmp_path / "a", lambda: next(asked)) is None
    first, second = (perform(run, tmp_path / name) for name in "ab")
    timed = {"seconds"}
    assert {k: v for k, v in first.items() if k not in timed} == {k: v for k, v in second.items() if k not in timed}
    assert first["key"] == run.key and first["shape"] == shape and len(first["dt"]) == 2 and first["steps"] == 6
    assert [e[0] for e in first["evaluations"]] == [2, 4, 6] and first["steps_to_99"] is None
    json.dumps(first, allow_nan=False)


def test_a_study_of_recall_is_made_shown_and_checked(tmp_path, monkeypatch, capsys):
    made = Study("Does it recall?", recall_runs(), ())
    monkeypatch.setitem(studies, "lookup", lambda: made)
    monkeypatch.setattr(module, "_stored_rows", lambda name: [])
    assert main(["study", "lookup", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "12/2 gpt" in said.out and "euler" in said.out and "accuracy 0." in said.err and "6 steps" in said.err
    rows = collect("lookup", tmp_path / "lookup")["runs"]
    monkeypatch.setattr(module, "_stored_rows", lambda name: rows if name == "lookup" else [])
    assert all(line["fine"] and line["allowed"] == 0 for line in check("lookup", 2))
    for row in rows:
        row["environment"]["torch"] = "another"
    assert main(["study", "lookup", "--check", "1"]) == 0
    assert "nobody has measured" in capsys.readouterr().out
    assert main(["study", "lookup", "--check", "1", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # Infinity is no JSON
    assert line["allowed"] is None and line["fine"]


def rates_of_recall(best):
    "Stored rows in which the rate of this place reached 99 % first."
    wanted = studies["recall-rates"]().runs
    lrs = sorted({r.train.lr for r in wanted})
    return [
        {
            "key": r.key,
            "arm": r.arm,
            "seed": r.seed,
            "train": {"lr": r.train.lr},
            "accuracy": 0.995 if r.train.lr == lrs[best] else 0.3,
            "steps_to_99": 500 if r.train.lr == lrs[best] else None,
        }
        for r in wanted
    ]


def test_the_study_of_recall_takes_the_best_rates_when_all_are_there(monkeypatch):
    "Every variant has tried the same rates with one seed; that run counts as the first of three."
    rates = studies["recall-rates"]().runs
    cells = {(r.shape, r.task, r.model.pre) for r in rates}
    tried = {c: {r.train.lr for r in rates if (r.shape, r.task, r.model.pre) == c} for c in cells}
    assert len(rates) == 4 * len(cells) and len({frozenset(t) for t in tried.values()}) == 1
    stored = rates_of_recall(2)
    monkeypatch.setattr(module, "_stored_rows", lambda name: stored if name == "recall-rates" else [])
    made = studies["recall"]().runs
    assert len(made) == 3 * len(cells) and {r.train.lr for r in made} == {3e-3}
    assert {r.key for r in made if r.seed == 0} <= {r.key for r in rates}
    assert all({r.seed for r in made if r.arm == arm} == {0, 1, 2} for arm in {r.arm for r in made})
    assert {r.key for r in studies["recall-causes"]().runs if "gpt," in r.arm} <= {r.key for r in rates}
    stored.pop()  # one is missing: then no rate is chosen
    assert len(studies["recall"]().runs) == 3 * len(rates)


# -- what it says


def result_of(values, primary=(("b", "a"),)):
    rows = [
        {"arm": a, "seed": s, "nats": x, "perplexity": 2.0, "bits_per_byte": 1.0}
        for a, xs in values.items()
        for s, x in enumerate(xs)
    ]
    return {"question": "?", "base": "a", "primary": primary, "runs": rows, "wanted": 9}


def test_comparisons_are_paired_and_the_named_ones_first():
    result = result_of({"a": [1.0, 2.0, 3.0], "c": [1.5, 2.5, 3.6], "b": [0.9, 1.8, 2.9], "d": [1.0, 2.1, 3.0]})
    assert gaps(result, "b", "a") == pytest.approx([-0.1, -0.2, -0.1])
    lines = comparisons(result)
    assert [line["arm"] for line in lines] == ["b", "c", "d"] and lines[0]["primary"] and "holm_p" not in lines[0]
    assert lines[1]["holm_p"] == pytest.approx(min(1, 2 * lines[1]["p"]))
    assert "before" in format_study(result)


def test_pairs_are_of_one_precision_and_those_of_two_machines_are_counted():
    result = result_of({"a": [1.0, 2.0, 3.0, 4.0], "b": [0.9, 1.8, 2.9, 3.7]})
    assert "different processors" not in format_study(result)  # rows that do not say count as alike
    row = {(r["arm"], r["seed"]): r for r in result["runs"]}
    row["a", 0]["train"], row["b", 0]["train"] = {"precision": "bf16"}, {"precision": "float32"}
    row["a", 1]["train"] = {"precision": "bf16"}
    for name, s, cpu, version in (("a", 2, "x", "1"), ("b", 2, "y", "1"), ("a", 3, "x", "1"), ("b", 3, "x", "2")):
        row[name, s]["environment"] = {"cpu": cpu, "torch": version}
    assert gaps(result, "b", "a") == pytest.approx([-0.2, -0.1, -0.3])
    (line,) = comparisons(result)
    assert line["n"] == 3 and line["elsewhere"] == 2
    said = "Pairs made on different processors or with different versions of PyTorch: 2 of 3 of b against a."
    assert said in format_study(result)


def test_an_arm_that_is_not_there_is_not_taken_for_one_without_runs(tiny):
    result = result_of({"a": [1.0, 1.2], "b": [0.9, 1.0]})
    with pytest.raises(ValueError, match="unknown arm 'c': choose one of a, b"):
        gaps(result, "c", "a")
    with pytest.raises(ValueError, match="unknown arm 'c'"):
        gaps(result, "a", "c")
    planned = {**result, "study": tiny}
    assert gaps(planned, "euler", "standard") == gaps(planned, "a", "standard") == []
    with pytest.raises(ValueError, match="unknown arm 'eular'.*did you mean 'euler'"):
        gaps(planned, "eular", "standard")


def test_best_control_is_found_among_the_controls():
    result = result_of(
        {"a": [1.0, 1.0], "b": [0.5, 0.6], "kick": [0.9, 0.8], "drift": [1.1, 1.0]}, (("b", "best control"),)
    )
    assert comparisons(result)[0]["base"] == "kick"


def test_tables_hold_deviation_and_both_p():
    result = result_of({"a": [1.0, 1.2, 1.4, 1.1, 1.3, 1.2], "b": [0.9, 1.1, 1.3, 1.0, 1.2, 1.0001]})
    arms, comparison = (dict(zip(*table[:2], strict=True)) for table in (arm_table(result), comparison_table(result)))
    assert arms["seeds"] == "6" and arms["deviation"] == f"{0.02**0.5:.4f}"
    assert comparison["sign p"] == f"{2 / 2**6:.3f}" and comparison["p"] == "<0.001" and comparison["pairs"] == "6"
    assert arm_table(result_of({"a": [1.0]}))[1][3] == "-"  # one seed has no spread


def test_half_a_study_can_be_read():
    assert comparisons(result_of({"a": [1.0, 2.0], "b": [0.9]})) == []
    assert "No run" in format_study({**result_of({}), "runs": []})


# -- made again


def test_check_repeats_to_the_bit_and_finds_another_number(tiny, text, tmp_path, monkeypatch):
    rows = study(tiny, tmp_path)["runs"]
    monkeypatch.setattr(module, "_stored_rows", lambda name: rows if name == "tiny" else [])
    assert all(line["fine"] and line["allowed"] == 0 for line in check(tiny, 2, seed=1))
    for row in rows:
        row["nats"] += 1e-7
    assert not any(line["fine"] for line in check(tiny, 2, seed=1))
    with pytest.raises(ValueError, match="from 1 to 4"):
        check(tiny, 5)


def test_check_elsewhere_allows_what_training_itself_does(tiny, tmp_path, monkeypatch, capsys):
    rows = study(tiny, tmp_path)["runs"]
    for row in rows:
        row["environment"]["torch"] = "another"
    noise = [{"arm": a, "seed": s, "nats": x} for s in range(2) for a, x in (("standard", 1.0), ("perturbed", 1.01))]
    monkeypatch.setattr(module, "_stored_rows", lambda name: {"tiny": rows, "noise": noise}.get(name, []))
    (line,) = check(tiny, 1)
    assert line["fine"] and line["allowed"] == pytest.approx(3 * 0.01)  # of a difference of two runs
    assert line["differs"] == ["version of PyTorch"]
    for row in rows:
        row["nats"] += 0.1
        row["train"]["precision"], row["environment"]["cpu"] = "bf16", "another"
    assert main(["study", tiny, "--check", "1"]) == 1
    said = capsys.readouterr().out
    assert "NOT the same (within 0.0300; another precision and processor and version of PyTorch)\n" in said
    assert not check(tiny, 1)[0]["fine"]


STORED = sorted(p.stem.removeprefix("study-") for p in (ROOT / "coupled_qk" / "results").glob("study-*.json"))


@pytest.mark.parametrize("name", STORED)
def test_stored_studies_are_those_described(name, tmp_path):
    "Each stored row is a run of its study, with its commit and machine; none was made from changed files."
    stored = module._stored_rows(name)
    keys = {r.key: r.arm for r in studies[name]().runs}
    assert stored and all(keys[row["key"]] == row["arm"] for row in stored)
    assert all(row["environment"]["commit"] and "dirty" not in row["environment"]["commit"] for row in stored)
    assert collect(name, tmp_path)["runs"] == stored


# -- bad input


def test_bad_input(tiny, tmp_path, capsys):
    with pytest.raises(ValueError, match="unknown study 'ablatoin'"):
        study("ablatoin", tmp_path)
    with pytest.raises(ValueError, match="jobs"):
        study(tiny, tmp_path, jobs=0)
    for bad in ((0, 2), (3, 2)):
        with pytest.raises(ValueError, match="shard"):
            study(tiny, tmp_path, shard=bad)
    for more in (["--show", "--out", str(tmp_path)], ["--check", "1"], ["--out", str(tmp_path)]):
        assert main(["study", "ablatoin", *more]) == 2
        assert (
            f"unknown study 'ablatoin': choose one of {', '.join(studies)} (did you mean 'ablation'?)\n"
            in capsys.readouterr().err
        )
    assert main(["study", tiny, "--check", "1"]) == 2
    assert "no run of the study tiny ships with this package" in capsys.readouterr().err
    for path, words in (("", "must not be empty"), ("~nosuchuser", "there is no user")):
        with pytest.raises(SystemExit):
            main(["study", tiny, "--out", path])
        assert words in capsys.readouterr().err
    assert main(["study", tiny, "--out", "/proc/no/folder"]) == 2 and "output folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["study", tiny, "--show", "--check", "1"])
    with pytest.raises(SystemExit):
        main(["study", "noise", "--shard", "x"])
    assert main(["study", tiny, "--show", "--json", "--out", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given, said",
    [
        (["--check", "1", "--shard", "1/2"], "--check takes no --shard"),
        (["--check", "1", "--jobs", "1", "--out", "x"], "--check takes no --jobs and no --out"),
        (["--show", "--shard", "1/2"], "--show takes no --shard"),
        (["--show", "--jobs", "2"], "--show takes no --jobs"),
        (["--show", "--out", __file__], f"--out must be a folder, got the file {__file__}"),
    ],
)
def test_options_that_would_change_nothing_are_refused(given, said, tiny, capsys):
    assert main(["study", tiny, *given]) == 2
    assert capsys.readouterr().err == f"coupled-qk: {said}\n"


def test_help_names_the_studies(capsys):
    with pytest.raises(SystemExit):
        main(["study", "--help"])
    *names, last = studies
    letters = lambda text: "".join(text.split())  # argparse breaks lines after hyphens, too
    assert letters(f"{', '.join(names)} or {last}") in letters(capsys.readouterr().out)


@pytest.mark.parametrize("n", [0, -1, 5])
def test_how_many_runs_can_be_repeated(tiny, text, monkeypatch, capsys, n):
    monkeypatch.setattr(module, "_stored_rows", lambda name: [{"key": r.key} for r in runs(text)])
    assert main(["study", tiny, "--check", str(n)]) == 2
    assert f"must be from 1 to 4, as many as are stored, got {n}\n" in capsys.readouterr().err


def test_show_says_which_command_makes_what_is_missing(tiny, text, tmp_path, capsys):
    out = tmp_path / "my runs"
    show = ["study", tiny, "--show", "--out", str(out)]
    assert main(show) == 0
    said = capsys.readouterr()
    assert "No run is done" in said.out
    assert said.err == f"0 of 4 runs are done. To make the others: coupled-qk study tiny --out '{out}'\n"
    assert main(["study", tiny, "--out", str(out), "--shard", "1/2"]) == 0
    assert "2 of 4 runs are done. To make the others" in capsys.readouterr().err
    study(tiny, out)
    capsys.readouterr()
    assert main(show) == 0 and capsys.readouterr().err == ""
