"Adapting a model in four ways: equal batches, an honest search, rows that are made once, and tables of what is there."

import json
from dataclasses import replace

import pytest
import torch

from coupled_qk import retrofit_study
from coupled_qk.data import ByteTokenizer
from coupled_qk.gpt import GPT, GPTConfig, n_parameters
from coupled_qk.retrofit_study import Job, Plan, Texts, chosen_rate, counted, gap_table, jobs, main, n_trained, run
from coupled_qk.retrofit_study import way_table, ways
from coupled_qk.study import regime
from coupled_qk.training import TrainConfig

tiny = Plan(
    model=GPTConfig(vocab_size=256, context=16, n_layers=1, n_heads=2, d_model=16),
    pre_train=TrainConfig(steps=3, batch_size=2),
    tune=TrainConfig(steps=2, batch_size=2),
    rates=(1e-3, 1e-2),
    seeds=(0, 1),
)


@pytest.fixture
def small_world(monkeypatch):
    "Bytes instead of what would be fetched."
    pytest.importorskip("peft")
    encode = ByteTokenizer().encode_all
    old, new = encode(["a small text, again and again. " * 20]), encode(["THE NEW ONE: 1 2 3 4 5. " * 20])
    monkeypatch.setattr(retrofit_study, "texts", lambda plan: Texts(old, old[:60], new, new[:60]))
    monkeypatch.setattr(retrofit_study, "corpus", lambda name: type("C", (), {"source": name, "licence": "none"}))


def test_jobs_of_the_plan():
    made = list(jobs(Plan()))
    assert len(made) == len(set(made)) == 1 + 4 * 5 + 5 * 5
    assert made[0] == Job("before", 100) and all(job.seed == 100 for job in made[:21])
    assert made.index(Job("before", 3)) < made.index(Job("LoRA", 3))


def test_equal_cost():
    "Coupling alone and LoRA train as many weights to within 10 %; everything with coupling, hardly more than without."
    pytest.importorskip("peft")
    counts = {}
    for way in ways:
        model = GPT(regime, seed=0)
        ways[way](model)
        counts[way] = n_trained(model)
    assert abs(counts["LoRA"] / counts["coupling alone"] - 1) < 0.1
    assert counts["everything"] == n_parameters(GPT(regime, seed=0))
    assert counts["everything, coupled"] == counts["everything"] + counts["coupling alone"]


def test_every_way_starts_as_the_model():
    pytest.importorskip("peft")
    ids = torch.arange(32).view(2, 16)
    for way in ways:
        model = GPT(tiny.model, seed=0)
        before = model(ids)
        ways[way](model)
        assert torch.equal(model(ids), before), way


def test_a_study_goes_on_where_it_was(small_world, tmp_path, monkeypatch):
    said = []
    result = run(tiny, tmp_path, said.append)
    assert len(result["rows"]) == len(said) == 1 + 4 * 2 + 2 * 5
    assert json.loads((tmp_path / "retrofit.json").read_text()) == result
    assert all(row["environment"]["threads"] == 1 for row in result["rows"])
    (tmp_path / "rows" / "LoRA-1-chosen.json").unlink()
    made, before = [], retrofit_study.make_row
    monkeypatch.setattr(retrofit_study, "make_row", lambda *args: (made.append(args[0]), before(*args))[1])
    again = run(tiny, tmp_path, said.append)
    assert made == [Job("LoRA", 1)]
    losses = lambda result: [(row["new"], row["old"]) for row in result["rows"]]
    assert losses(again) == losses(result)  # LoRA's first weights, too, are those of the seed
    with pytest.raises(ValueError, match="out must be a folder of this plan"):
        run(replace(tiny, old_tokens=7), tmp_path)
    assert [row[:2] for row in way_table(result)[1:]] == [
        [way, "-" if way == "before" else f"{rows[0]['trained']:,}"] for way, rows in counted(result).items()
    ]


def test_a_run_that_diverges_has_a_row(small_world, tmp_path):
    wild = replace(tiny, rates=(1e-3, 1e30), seeds=(0,))
    result = run(wild, tmp_path, lambda line: None)
    lost = [row for row in result["rows"] if "diverged" in row]
    assert lost and all(row["rate"] == 1e30 and "new" not in row for row in lost)
    assert all(row["lr"] == 1e-3 for row in result["rows"] if row["seed"] == 0 and row["way"] == "everything")


def made_up(n):
    "The first n rows of a result in which coupling is better by 0.1 on the new text."
    rows = []
    for seed, luck in enumerate((0.0, 0.2, 0.1)):
        for way, new in (("before", 5.0), ("coupling alone", 4.0 + 0.01 * seed), ("LoRA", 4.1)):
            extra = {} if way == "before" else {"lr": 1e-2}
            rows.append({"way": way, "seed": seed, "new": new + luck, "old": 3.0 + luck, "trained": 9, **extra})
    plan = {"seeds": [0, 1, 2], "old": "then", "new": "now"}
    return {"plan": plan, "rows": [{"way": "LoRA", "seed": 100, "rate": 1e-3, "new": 0.0, "old": 0.0}, *rows[:n]]}


def test_tables():
    table = way_table(made_up(9))
    assert table[0][-2:] == ["now", "then"] and table[1] == ["before", "-", "-", "3", "5.100 ± 0.100", "3.100 ± 0.100"]
    gaps = {tuple(row[:3]): row for row in gap_table(made_up(9))[1:]}
    assert gaps["coupling alone", "LoRA", "now"][3:5] == ["3", "-0.0900"]
    assert gaps["coupling alone", "LoRA", "then"][4] == "+0.0000"


@pytest.mark.parametrize("n", range(9))
def test_tables_of_what_is_there(n):
    "With any number of rows, none included."
    assert len(way_table(made_up(n))) == 1 + min(n, 3)
    assert len(gap_table(made_up(n))) == 1 + (0 if n < 5 else 2 if n < 6 else 4)


def test_the_search_must_have_led_somewhere():
    rows = [{"way": "LoRA", "seed": 100, "rate": r, "new": x} for r, x in ((1e-3, 4.0), (1e-2, 3.9), (1e-1, 9.0))]
    assert chosen_rate(rows, "LoRA", Plan()) == 1e-2
    with pytest.raises(ValueError, match="no rate of the search"):
        chosen_rate(rows, "everything", Plan())


def test_lora_names_its_library(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RuntimeError, match=r"coupled_qk\[retrofit\]"):
        ways["LoRA"](GPT(tiny.model))


def test_command(monkeypatch, tmp_path, capsys):
    asked = []
    monkeypatch.setattr(retrofit_study, "run", lambda plan, out, say: (asked.append((plan.seeds, out)), made_up(9))[1])
    assert main([str(tmp_path), "--seeds", "0", "1"]) == 0
    assert asked == [((0, 1), str(tmp_path))] and "coupling alone" in capsys.readouterr().out
