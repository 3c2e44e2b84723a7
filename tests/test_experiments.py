"Comparisons: repeatable, honest about noise, and safe when interrupted."

import json
import math

import numpy as np
import pytest
from coupled_qk import experiments
from coupled_qk.data import Corpus, corpus
from coupled_qk.experiments import (
    compare,
    environment,
    format_table,
    noise_sentence,
    paired_difference,
    plot,
    result_table,
    seed_noise,
    steps_within,
    stored_comparisons,
    stored_result,
)
from coupled_qk.gpt import GPTConfig
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
    assert "Over these 3 seeds" in noise_sentence(result)
    assert "stored run on code, 300 steps" in noise_sentence(quick(names=["standard", "euler"]))
    assert len(plot(result).axes) == 2


def test_an_interrupt_keeps_what_is_finished(monkeypatch, tmp_path):
    train, calls = experiments.train_variant, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return train(*args)

    monkeypatch.setattr(experiments, "train_variant", interrupted)
    found = quick(out=tmp_path)
    assert not found["finished"] and [r["variant"] for r in found["runs"]] == ["standard", "euler"]
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(found))
    assert [row[0] for row in result_table(found)] == ["variant", "standard", "euler"] and len(plot(found).axes) == 2


def test_fewer_steps_where_time_is_short():
    wanted = TrainConfig(steps=500, batch_size=2)
    text = corpus("stdlib")
    assert steps_within(1e-3, ["standard"], TEXT, SMALL, how=wanted).steps == 1
    assert steps_within(1e6, ["standard"], TEXT, SMALL, how=wanted) == wanted
    assert 1 <= steps_within(30, ["standard", "euler"], text, SMALL, how=TrainConfig(steps=10**9)).steps < 10**6


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"names": []}, "at least one, got"),
        ({"names": ["standard", "standard"]}, "different names"),
        ({"names": ["standard", "verlet"]}, "unknown variant 'verlet'"),
        ({"size": "huge"}, "unknown size 'huge'"),
        ({"size": "60M"}, "vocab_size must be 256, got 50257"),
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
    assert stored["corpus"]["name"] != "stdlib" and stored["environment"].keys() == environment().keys()
    assert stored["environment"]["commit"] and "dirty" not in stored["environment"]["commit"]
