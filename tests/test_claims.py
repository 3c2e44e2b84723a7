"The ledger says what the stored results say, and its verdicts follow their rules."

import json
import math

import numpy as np
import pytest
from conftest import ROOT

from coupled_qk import claims as module
from coupled_qk.claims import (
    claims,
    counted,
    gap,
    holds,
    judge,
    judge_alike,
    ledger,
    margin,
    opposite,
    ratio_of_deviations,
)
from coupled_qk.claims import spread, tokens_needed, unclear, unseen
from coupled_qk.study import budgets, studies

MARGINS = (margin, module.quarter(23.81, 22.55), module.quarter(24.22, 23.81), module.text_margin, module.score_margin)
alike = module.alike()
SMALL = {f"on the paper's side, by less than {m:.3f}" for m in MARGINS}
OPEN = {"not measured yet", "needs a GPU", module.flat}
VERDICTS = {holds, counted, opposite, *map(module.alike, MARGINS), *SMALL, unclear, unseen, *OPEN}
ANSWERS = {module.less, module.more, module.untold, alike, *OPEN}


def page():
    "The ledger and the questions as the notebook shows them."
    nb = json.loads((ROOT / "nbs" / "claims.ipynb").read_text(encoding="utf-8"))
    shown = [
        o["data"]["text/markdown"]
        for c in nb["cells"]
        for o in c.get("outputs", [])
        if "text/markdown" in o.get("data", {})
    ]
    return ["".join(text) for text in shown]


def test_page_agrees_with_the_results():
    assert page() == [ledger(), ledger(module.questions)]


def test_page_explains_every_verdict():
    text = (ROOT / "nbs" / "claims.ipynb").read_text(encoding="utf-8")
    words = text.replace("less, more", "less | more")
    assert all(f"| {v.split('0.')[0].split(':')[-1].strip()}" in words for v in VERDICTS | ANSWERS)


def test_every_claim_is_judged():
    for claim in claims:
        found = claim.find()
        assert found.verdict in VERDICTS and claim.text and claim.paper
        assert not claim.study or claim.study in studies
        assert (found.pairs > 0) == (found.hours > 0)


def test_every_question_is_answered():
    for question in module.questions:
        assert question.find().verdict in ANSWERS and question.text.endswith("?") and question.study in studies


def test_margin_is_a_quarter_of_the_papers_gap():
    assert math.isclose(math.exp(4 * margin), 24.22 / 22.55)


def row(arm, seed, nats):
    return {"arm": arm, "seed": seed, "nats": nats, "perplexity": math.exp(nats), "seconds": 360.0}


@pytest.fixture
def stored(monkeypatch):
    "Rows in place of the stored ones: stored(rows)."

    def use(rows):
        monkeypatch.setattr(module, "collect", lambda name: {"runs": rows, "wanted": 50})

    return use


@pytest.mark.parametrize(
    "shift, verdict",
    [
        ((-0.03, -0.04, -0.05), holds),
        ((-0.003, -0.004, -0.0035), "on the paper's side, by less than 0.018"),
        ((0.03, 0.04, 0.05), opposite),
        ((-0.001, 0.001, 0.0), alike),
        ((-0.1, 0.05, -0.1), unclear),
        ((-0.1, 0.1, 0.1), unseen),
    ],
)
def test_gap_is_paired(stored, shift, verdict):
    base = (4.0, 5.0, 6.0)  # far apart: only pairs can tell
    stored(
        [row("standard", s, x) for s, x in enumerate(base)]
        + [row("euler", s, x + g) for s, (x, g) in enumerate(zip(base, shift, strict=True))]
        + [row("euler", 9, 1.0)]
    )
    found = gap("ablation", "euler", "standard")
    assert found.verdict == verdict and found.pairs == 3
    assert math.isclose(found.hours, 0.7) and f"{np.mean(shift):+.4f}" in found.ours


def test_one_pair_is_no_result(stored):
    stored([row("standard", 0, 4.0), row("euler", 0, 3.0)])
    assert gap("ablation", "euler", "standard").verdict == "not measured yet"
    assert spread("ablation", "euler", "standard").verdict == "not measured yet"


def test_no_study_is_no_result(monkeypatch):
    monkeypatch.setattr(module, "collect", lambda name: {"runs": [], "wanted": 60})
    assert gap("steps", "euler-7", "euler-1").verdict == tokens_needed().verdict == "not measured yet"


@pytest.mark.parametrize("judged", [judge, judge_alike])
def test_pairs_without_spread_are_not_judged(judged):
    assert judged([-0.1] * 3) == judged([0.2, 0.2]) == module.flat


def test_judge_alike():
    assert judge_alike([0.001, -0.001, 0.0]) == alike
    assert judge_alike([0.1, 0.11, 0.12]) == opposite
    assert judge_alike([0.1, -0.1, 0.05]) == unseen
    assert judge([0.001, 0.002, 0.0015], None) == opposite  # nothing counts as no difference


def test_spread(stored):
    g = np.random.default_rng(0)
    luck = g.normal(0, 0.02, 40)
    rows = [row("query_mlp", s, 4 + x) for s, x in enumerate(luck)]
    stored(
        rows
        + [row("euler", s, 4 + x / 4 + y) for s, (x, y) in enumerate(zip(luck, g.normal(0, 0.002, 40), strict=True))]
    )
    assert spread("ablation", "euler", "query_mlp").verdict == holds
    assert spread("ablation", "query_mlp", "euler").verdict == opposite
    stored(rows + [row("euler", 7, 4.0), row("euler", 8, 4.1), row("euler", 99, 4.2)])  # two pairs
    assert spread("ablation", "euler", "query_mlp").verdict == "not measured yet"


@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_interval_of_a_ratio_covers(shared):
    "The interval of two deviations misses their ratio in one time of twenty, however much the pairs have in common."
    g, missed = np.random.default_rng(1), 0
    for _ in range(2000):
        luck = g.normal(size=6)
        a, b = (shared * luck + (1 - shared**2) ** 0.5 * g.normal(size=6) for _ in range(2))
        _, low, high = ratio_of_deviations(3 * a, b)
        missed += not low < 3 < high
    assert abs(missed / 2000 - 0.05) < 0.02  # four standard deviations of the count


def test_unfinished_studies_say_so(stored):
    rows = [row(a, s, 4 + s / 10 + (a == "euler") * 0.001 * s) for a in ("standard", "euler") for s in range(10)]
    stored(rows[:5] + rows[10:15])
    assert (found := gap("ablation", "euler", "standard")).wanted == 10
    assert module._so_far(found) == " so far (5 of 10 pairs)"
    stored(rows)
    assert module._so_far(gap("ablation", "euler", "standard")) == ""


def test_seeds_outside_the_lengths_are_not_left_out(stored):
    "Three of five need more than 2.4 times: the mean of the other two would say 1.2."
    line = lambda b, s: 4.0 - 0.5 * math.log(b) + s * 0.01
    rows = [row(f"standard x{b:g}", s, line(b, s)) for b in budgets for s in range(5)]
    stored(rows + [row("euler x1", s, line(1, s) - (0.1 if s < 2 else 0.6)) for s in range(5)])
    found = tokens_needed()
    assert found.verdict == unseen and found.ours.startswith("3 of 5 seeds") and found.pairs == 5


def test_what_speaks_for_a_claim():
    smaller, same = claims[0], next(c for c in claims if c.of_no_difference)
    says = lambda claim, verdict: module._for_it(claim, module.Finding("", verdict))
    assert [says(smaller, v) for v in (holds, opposite, alike, unclear, "needs a GPU")] == [
        "yes",
        "no",
        "no",
        "open",
        "open",
    ]
    assert [says(same, v) for v in (alike, opposite, unseen)] == ["yes", "no", "open"]


@pytest.mark.parametrize("gain, times, verdict", [(0.1, math.exp(0.2), holds), (-0.1, math.exp(-0.2), opposite)])
def test_tokens(stored, gain, times, verdict):
    "Losses on a line over the logarithm of the tokens: what is needed can be computed."
    line = lambda b, s: 4.0 - 0.5 * math.log(b) + s * 0.01
    rows = [row(f"standard x{b:g}", s, line(b, s)) for b in budgets for s in range(3)]
    stored(rows + [row("euler x1", s, line(1, s) - gain + 1e-4 * s) for s in range(3)])
    found = tokens_needed()
    assert found.verdict == verdict and found.ours.startswith(f"{times:.2f} times")


def test_entries_name_the_command():
    text = ledger()
    assert text.count("### ") == len(claims) and "`coupled-qk study ablation`" in text


def test_answers():
    assert module.answer([-0.05, -0.06, -0.04]) == module.less and module.answer([0.05, 0.06, 0.04]) == module.more
    assert module.answer([0.001, -0.001, 0.0]) == alike and module.answer([0.1, -0.1, 0.05]) == module.untold
    assert module.answer([0.1, 0.1]) == module.flat


def test_two_gaps_are_compared_by_seed(stored):
    "The second pair has a seed less, and seeds that differ by more than the gaps."
    rows = [row("a", s, 4 + s - 0.05 - 0.001 * s) for s in range(4)] + [row("b", s, 4 + s) for s in range(4)]
    rows += [row("c", s, 3 - s + 0.02) for s in range(3)] + [row("d", s, 3 - s) for s in range(3)]
    stored(rows)
    found = module.gap_of_gaps("ablation", ("a", "b"), ("c", "d"))
    assert found.pairs == 3 and found.verdict == module.less and found.ours.startswith("-0.0710")
    assert module.gap_of_gaps("ablation", ("c", "d"), ("a", "b")).verdict == module.more
    stored([r for r in rows if r["seed"] == 0])
    assert module.gap_of_gaps("ablation", ("a", "b"), ("c", "d")).verdict == "not measured yet"


def test_the_hardest_control_is_chosen(stored):
    rows = [row("query_mlp", s, 4.0 + 0.1 * s) for s in range(3)] + [row("kick", s, 3.9 + 0.1 * s) for s in range(3)]
    stored(rows + [row("euler", s, 3.95 + 0.1 * s + 0.001 * s) for s in range(3)])
    found = module.against_best_control()
    assert found.ours.startswith("against kick: +0.05") and found.verdict == module.more
    stored([])
    assert module.against_best_control().verdict == "not measured yet"


def calm_row(arm, seed, spikes, lost=False):
    return {
        **row(arm, seed, 4.0),
        "spikes": list(range(spikes)),
        **({"diverged": "loss", "nats": None} if lost else {}),
    }


def test_calm_counts_spikes_of_a_seed(stored):
    rows = [calm_row(f"standard x{t}", s, 5) for s in range(3) for t in (1, 8)]
    rows += [calm_row(f"euler x{t}", s, s % 2, lost=t == 8 and s == 0) for s in range(3) for t in (1, 8)]
    stored(rows)
    found = module.calm()
    assert "1 of 6 Euler, 0 of 6 standard" in found.ours and found.verdict == holds and found.pairs == 3
    stored(rows[:6])
    assert module.calm().verdict == "not measured yet"


def recall_row(arm, seed, steps, rate=1e-3, task=(64, 4)):
    facts = {"task": {"seq_len": task[0], "n_pairs": task[1]}, "shape": "gpt", "train": {"lr": rate}}
    return {
        **facts,
        "arm": f"{task[0]}/{task[1]} gpt, {arm}, {rate:g}",
        "seed": seed,
        "steps_to_99": steps,
        "accuracy": 0.9,
        "seconds": 60.0,
    }


@pytest.mark.parametrize(
    "standard, coupled, verdict",
    [(None, 100, holds), (100, None, opposite), (100, 100, unseen), (None, None, unseen)],
)
def test_recall_is_solved_or_not(stored, standard, coupled, verdict):
    rows = [recall_row("standard", s, standard) for s in (0, 1)]
    rows += [recall_row(arm, s, coupled) for arm in ("euler", "leapfrog") for s in (0, 1)]
    rows += [recall_row("standard", 0, None, task=(256, 32))]  # the hard task does not count
    rows += [recall_row("euler", s, None, rate=1e-2) for s in (0, 1)]  # nor does another rate than the best
    stored(rows)
    found = module.recalls()
    assert found.verdict == verdict and found.pairs == 2 and found.wanted == 15
    stored(rows[:2])
    assert module.recalls().verdict == "not measured yet"


def sentences(shift):
    rows = [
        {
            "task": "trec",
            "arm": f"{variant}, fine-tuned",
            "seed": s,
            "seconds": 1.0,
            "scores": {"accuracy": 0.8 + s / 100 + x},
        }
        for variant, gaps in (("standard", (0, 0, 0)), ("euler", shift))
        for s, x in enumerate(gaps)
    ]
    return {"tasks": {"trec": {}}, "plan": {"variants": ["standard", "euler"], "seeds": [0, 1, 2]}, "rows": rows}


@pytest.mark.parametrize(
    "shift, verdict",
    [
        ((0.05, 0.06, 0.055), opposite),
        ((-0.05, -0.06, -0.055), opposite),
        ((0.001, -0.001, 0.0), "equivalent within 0.010"),
        ((0.05, -0.05, 0.01), unseen),
    ],
)
def test_sentences(monkeypatch, shift, verdict):
    monkeypatch.setattr(module, "stored_result", lambda name: sentences(shift))
    found = module.on_sentences()
    assert found.verdict == verdict and found.pairs == found.wanted == 3


def test_no_sentences_is_no_result(monkeypatch):
    def missing(name):
        raise FileNotFoundError(name)

    monkeypatch.setattr(module, "stored_result", missing)
    assert module.on_sentences().verdict == "not measured yet"
    monkeypatch.setattr(module, "stored_result", lambda name: sentences(()))
    assert module.on_sentences().verdict == "not measured yet"


def test_texts_are_compared_in_bits_per_byte(stored):
    "Euler gains 0.1 bits per byte on whole texts, and loses 0.05 in the mixture."
    rows = []
    for s in range(3):
        for text, change in (("code", -0.1 - s / 1000), ("code/share", 0.0), ("mix", 0.05)):
            for arm, x in (("standard", 2.0), ("euler", 2.0 + change)):
                rows.append({**row(f"{arm} on {text}", s, 3.0), "held_out": {"code": {"bits_per_byte": x}}})
    stored(rows)
    found = module.texts_differ()
    assert found.verdict == holds and found.pairs == 3 and found.ours.startswith("-0.1510 bits per byte")
    stored([])
    assert module.texts_differ().verdict == "not measured yet"
