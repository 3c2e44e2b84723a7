"Rows of recall are exact, reproducible and cheap; models of both shapes learn them, stop and go on."

import math
from dataclasses import replace

import pytest
import torch

from coupled_qk.coupling import Coupling
from coupled_qk.gpt import GPT, GPTConfig, scores, variants
from coupled_qk.recall import RecallHistory, RecallTask, Zoology, best_rates, draw_distinct, draw_slots, measure_recall
from coupled_qk.recall import mqar, recall_accuracy, recall_batch, recall_loss, recall_table, slot_weights, train_recall
from coupled_qk.training import TrainConfig, next_token_loss

SIZES = [(64, 4, 256), (64, 16, 65), (128, 8, 8192), (16, 2, 21), (4, 1, 5)]


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def asked_places(labels, n_pairs):
    return (labels != -100).nonzero()[:, 1].reshape(-1, n_pairs)


# -- rows


def test_fixed_row():
    "The first worked example: its row meets every rule, and a row that is drawn has the same form."
    row = torch.tensor([[8, 15, 3, 12, 0, 0, 8, 0, 0, 0, 3, 0, 0, 0, 0, 0]])
    labels = torch.full((1, 16), -100)
    labels[0, 6], labels[0, 10] = 15, 12
    check_rows(row, labels, 2, 20)
    assert ((asked_places(labels, 2) - 4) // 2).tolist() == [[1, 3]] and row[0, 15] == 0
    drawn = mqar(5000, 16, 2, 20)
    check_rows(*drawn, 2, 20)
    same_form = (drawn[1] != -100) == (labels != -100)
    assert same_form.all(1).any()  # these very places are among those that are drawn


def check_rows(inputs, labels, n_pairs, vocab):
    "What holds of any row without random filler."
    n, T = inputs.shape
    assert inputs.dtype == labels.dtype == torch.int64 and labels.shape == (n, T)
    keys, values = inputs[:, : 2 * n_pairs : 2], inputs[:, 1 : 2 * n_pairs : 2]
    assert keys.min() >= 1 and keys.max() < vocab // 2 <= values.min() and values.max() < vocab
    asked = labels != -100
    assert (asked.sum(1) == n_pairs).all() and not asked[:, : 2 * n_pairs].any()
    assert not asked[:, 1::2].any()  # even places only, so never the last
    for x, y, q in zip(inputs, labels, asked, strict=True):
        pairs = dict(zip(x[: 2 * n_pairs : 2].tolist(), x[1 : 2 * n_pairs : 2].tolist(), strict=True))
        assert len(pairs) == len(set(pairs.values())) == n_pairs  # different keys, different values
        assert dict(zip(x[q].tolist(), y[q].tolist(), strict=True)) == pairs
        assert not x[2 * n_pairs :][~q[2 * n_pairs :]].any()  # the rest is zero


@pytest.mark.parametrize("seq_len, n_pairs, vocab", SIZES)
def test_every_row_keeps_the_rules(seq_len, n_pairs, vocab):
    check_rows(*mqar(300, seq_len, n_pairs, vocab, seed=1), n_pairs, vocab)


def test_every_token_is_used():
    "Keys 1 to V/2 - 1 and values V/2 to V - 1, also where V is odd."
    for vocab in (20, 21):
        inputs, _ = mqar(2000, 16, 2, vocab)
        assert inputs[:, 0:4:2].unique().tolist() == list(range(1, vocab // 2))
        assert inputs[:, 1:4:2].unique().tolist() == list(range(vocab // 2, vocab))


def test_saturated_row():
    "The second worked example: every slot is used, whatever the law, and only the order is left to chance."
    for power in (0.01, 1.0, -50.0):
        inputs, labels = mqar(200, 64, 16, 256, power)
        assert (asked_places(labels, 16) == torch.arange(32, 64, 2)).all()
        assert ((inputs == 0).sum(1) == 16).all() and not inputs[:, 33::2].any()
        assert len(inputs[:, 32::2].argsort(1).unique(dim=0)) > 190


def test_gap_law():
    "The third worked example. Tolerances are five standard errors; where the known number was itself counted, of both counts."
    w = slot_weights(28)
    assert w[[0, 1, 2, 27]].tolist() == pytest.approx([0.25106, 0.12640, 0.08461, 0.00927], abs=5e-6)
    n = 20_000
    inputs, labels = mqar(n, 64, 4, 8192)
    slots = (asked_places(labels, 4) - 8) // 2
    used = slots.flatten().bincount(minlength=28) / n
    for g, known in {0: 0.718, 1: 0.475, 2: 0.346, 27: 0.042}.items():
        assert used[g].item() == pytest.approx(known, abs=5 * (2 * known * (1 - known) / n) ** 0.5)
    by_key = torch.stack(
        [slots[inputs[torch.arange(n)[:, None], 8 + 2 * slots] == inputs[:, j, None]] for j in (0, 2, 4, 6)]
    )
    gaps = by_key.double()
    for mean, sd, known in zip(gaps.mean(1), gaps.std(1), (6.09, 6.90, 7.45, 8.01), strict=True):
        assert mean.item() == pytest.approx(known, abs=5 * sd.item() * (2 / n) ** 0.5)
    assert (by_key[0] < by_key[3]).double().mean().item() == pytest.approx(0.598, abs=5 * (2 * 0.24 / n) ** 0.5)


def test_gap_law_of_longer_rows():
    n = 20_000
    _, labels = mqar(n, 128, 8, 8192)
    assert (labels[:, 16] != -100).double().mean().item() == pytest.approx(0.893, abs=5 * (2 * 0.096 / n) ** 0.5)


def test_uniform_gaps():
    "With power 1 each of 28 slots is used by 4 / 28 of the rows."
    n = 20_000
    slots = (asked_places(mqar(n, 64, 4, 256, power=1.0)[1], 4) - 8) // 2
    used = slots.flatten().bincount(minlength=28) / n
    assert (used - 1 / 7).abs().max() < 5 * (1 / 7 * 6 / 7 / n) ** 0.5


def test_slots_follow_the_urn():
    "The chance of every ordered pair of slots: w_a times w_b / (1 - w_a)."
    n, w = 100_000, slot_weights(4, 0.3)
    drawn = draw_slots(n, 2, w, stream())
    for a in range(4):
        for b in range(4):
            p = 0.0 if a == b else (w[a] * w[b] / (1 - w[a])).item()
            share = ((drawn[:, 0] == a) & (drawn[:, 1] == b)).double().mean().item()
            assert share == pytest.approx(p, abs=5 * (p * (1 - p) / n) ** 0.5)


def test_distinct_is_uniform():
    "Every ordered triple of five numbers, of which there are 60, within five standard errors."
    n = 60_000
    triples, counts = draw_distinct(n, 3, 5, stream()).unique(dim=0, return_counts=True)
    assert len(triples) == 60 and (counts - n / 60).abs().max() < 5 * (n / 60 * 59 / 60) ** 0.5
    assert (draw_distinct(50, 7, 7, stream()).sort(1).values == torch.arange(7)).all()  # a permutation, at worst


@pytest.mark.parametrize("filler", [False, True])
def test_the_seed_is_all_that_counts(filler):
    torch.manual_seed(1)
    first = mqar(50, 64, 4, 256, filler=filler, seed=7)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    again, other = mqar(50, 64, 4, 256, filler=filler, seed=7), mqar(50, 64, 4, 256, filler=filler, seed=8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    torch.manual_seed(1)
    mqar(5, 64, 4, 256, filler=filler)
    assert torch.equal(torch.get_rng_state(), state)  # and nothing outside is disturbed


def test_filler_changes_nothing_but_zeros():
    plain, labels = mqar(2000, 64, 4, 256, seed=3)
    filled, same = mqar(2000, 64, 4, 256, filler=True, seed=3)
    assert torch.equal(labels, same) and torch.equal(filled[plain != 0], plain[plain != 0])
    drawn = filled[plain == 0]
    counts = drawn.bincount(minlength=256).double()  # uniform over all tokens, 0 and keys too
    expected = len(drawn) / 256
    assert (counts - expected).abs().max() < 5.5 * expected**0.5


def test_a_hundred_thousand_rows_take_little_memory():
    "No tensor that is made on the way is larger than the rows themselves; a pool of tokens for each row would be 64 times that."
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                t.numel() * t.element_size() for t in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(t)
            )
            return out

    with Watch():
        inputs, _ = mqar(100_000, 64, 4, 8192)
    assert max(sizes) <= inputs.numel() * 8 == 51_200_000
    assert len(sizes) < 400  # vectorised: no step for each row


# -- scores


def test_scores_count_rows_alike():
    labels = torch.tensor([[-100, 3, -100], [2, 4, -100]])
    logits = torch.nn.functional.one_hot(torch.tensor([[0, 3, 0], [2, 0, 0]]), 5) * 100.0
    assert recall_accuracy(logits, labels).item() == 0.75  # 1 of 1, and 1 of 2
    assert recall_loss(logits, labels).item() == pytest.approx(25)  # 0, and the mean of 0 and 100
    with pytest.raises(ValueError, match="labels must ask something in every row, got 1 rows without"):
        recall_loss(logits, torch.tensor([[-100, -100, -100], [2, 4, -100]]))
    with pytest.raises(ValueError, match="labels must ask"):
        recall_accuracy(logits[:0], labels[:0])


def test_training_has_the_same_loss():
    model, (x, y) = GPT(SMALL), mqar(20, 12, 2, 16)
    assert next_token_loss(model, x, y).item() == pytest.approx(recall_loss(model(x), y).item(), rel=1e-5)


def test_measuring_in_parts_is_measuring_at_once():
    model, (x, y) = GPT(SMALL), mqar(50, 12, 2, 16)
    parts, whole = (measure_recall(model, x, y, size) for size in (7, 50))
    assert parts == pytest.approx(whole, rel=1e-5) and whole[0] == pytest.approx(recall_loss(model(x), y).item())


# -- models

SMALL = GPTConfig(vocab_size=16, context=12, n_layers=2, n_heads=1, d_model=16, d_ff=32)


def test_zoology_is_theirs():
    "The published number of weights; positions are learned, and the second half of a block adds what it normalises."
    model = Zoology(GPTConfig(vocab_size=8192, context=64, n_layers=2, n_heads=1, d_model=64))
    assert sum(p.numel() for p in model.parameters()) == 562_304
    weights = dict(model.named_parameters())
    assert weights["embed.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert weights["blocks.0.attn.q_proj.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["blocks.1.attn.o_proj.weight"].std().item() == pytest.approx(0.02 / 2, rel=0.05)
    assert all(not p.any() for name, p in weights.items() if name.endswith("proj.bias"))
    block, x = model.blocks[0], torch.randn(2, 9, 64)
    middle = x + block.attn(block.norm1(x))
    assert torch.equal(block(x), middle + block.norm2(middle)) and block.attn.base is None


@pytest.mark.parametrize("pre", list(variants))
def test_zoology_takes_every_variant(pre):
    "Causal, with a gradient for every weight; shared weights are those of the standard model."
    model, plain = Zoology(replace(SMALL, pre=pre)), Zoology(SMALL)
    theirs = dict(model.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in plain.named_parameters())
    x, y = mqar(8, 12, 2, 16)
    recall_loss(model(x), y).backward()
    assert all(p.grad is not None for p in model.parameters())
    other = x.clone()
    other[:, 8:] = 1
    assert torch.equal(model(x)[:, :8], model(other)[:, :8])


@pytest.mark.parametrize("score", list(scores))
def test_zoology_takes_every_score(score):
    x, y = mqar(8, 12, 2, 16)
    model = Zoology(replace(SMALL, n_heads=2, d_model=32, score=score))
    recall_loss(model(x), y).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_zoology_takes_your_own():
    own = Zoology(SMALL, pre=Coupling, seed=3)
    assert torch.equal(own(mqar(2, 12, 2, 16)[0]), Zoology(replace(SMALL, pre="euler"), seed=3)(mqar(2, 12, 2, 16)[0]))
    with pytest.raises(ValueError, match="given twice"):
        Zoology(replace(SMALL, pre="euler"), pre=Coupling)
    with pytest.raises(ValueError, match="the context holds 12 tokens, got 13"):
        own(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(ValueError, match="ids must lie in 0 ... 15"):
        own(torch.full((1, 12), 16))


# -- training

TASK = RecallTask(12, 2, 16)
HOW = TrainConfig(steps=6, batch_size=8, lr=1e-3, eval_every=2)


def test_batches_depend_on_seed_and_step_alone():
    for task in (TASK, replace(TASK, rows=20)):
        a, b = recall_batch(task, 8, 0, 3), recall_batch(task, 8, 0, 3)
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        others = recall_batch(task, 8, 0, 4)[0], recall_batch(task, 8, 1, 3)[0]
        assert not any(torch.equal(a[0], x) for x in others)


def test_finite_rows_come_again():
    "Thirty batches of a task with twenty rows hold twenty rows, and those of another seed are others."
    seen = [torch.cat([recall_batch(replace(TASK, rows=20), 8, s, i)[0] for i in range(30)]) for s in (0, 1)]
    own = [{tuple(row) for row in x.tolist()} for x in seen]
    assert len(own[0]) <= 20 and len(own[0] | own[1]) > 25
    assert len({tuple(row) for i in range(30) for row in recall_batch(TASK, 8, 0, i)[0].tolist()}) > 200


def test_a_run_repeats_and_pairs_share_their_rows():
    first, again = (train_recall(GPT(SMALL), TASK, HOW) for _ in range(2))
    assert first == again and [e[0] for e in first.evaluations] == [2, 4, 6] and len(first.losses) == 6
    assert train_recall(GPT(SMALL), TASK, replace(HOW, seed=1)).losses != first.losses
    assert train_recall(Zoology(SMALL), TASK, HOW).losses != first.losses


def test_a_stopped_run_goes_on_to_the_same_numbers(tmp_path):
    whole, asked = train_recall(GPT(SMALL), TASK, HOW), iter([False, False, True])
    half = train_recall(GPT(SMALL), TASK, HOW, tmp_path, lambda: next(asked))
    assert len(half.losses) == 3 and not half.finished(TASK, HOW)
    assert train_recall(GPT(SMALL), TASK, HOW, tmp_path) == whole
    assert train_recall(GPT(SMALL), TASK, HOW, tmp_path) == whole  # a finished one does nothing
    with pytest.raises(ValueError, match="belongs to another run"):
        train_recall(GPT(SMALL), replace(TASK, filler=True), HOW, tmp_path)


def test_training_ends_when_it_is_enough():
    how = replace(HOW, steps=50)
    early = train_recall(GPT(SMALL), replace(TASK, enough=0.0), how)
    assert early.accuracy > 0 and len(early.losses) == early.evaluations[-1][0] < 50
    assert len(train_recall(GPT(SMALL), replace(TASK, enough=1.0), HOW).losses) == 6


def test_steps_to():
    history = RecallHistory([], [[50, 1.0, 0.3], [100, 0.1, 0.99], [150, 0.1, 0.995], [200, 0.1, 0.98]])
    assert history.steps_to(0.99) == 150 and history.steps_to(0.2) == 50 and history.steps_to(0.999) is None
    assert history.accuracy == 0.98 and RecallHistory().accuracy == 0


# -- what a study says


def row(pre, lr, seed, accuracy, reached=None):
    facts = {"arm": f"64/4 gpt, {pre}, {lr:g}", "train": {"lr": lr}, "seed": seed}
    return {**facts, "accuracy": accuracy, "steps_to_99": reached}


def test_best_rate_reaches_first_or_comes_closest():
    rows = [
        row("standard", 1e-3, 0, 0.995, 900),
        row("standard", 3e-3, 0, 0.992, 500),
        row("standard", 1e-2, 0, 0.989),
        row("standard", 1e-3, 1, 1.0, 100),  # another seed does not decide
        row("euler", 1e-3, 0, 0.3),
        row("euler", 3e-3, 0, 0.4),
    ]
    assert best_rates(rows) == {("64/4 gpt", "standard"): 3e-3, ("64/4 gpt", "euler"): 3e-3}
    table = recall_table([*rows, row("euler", 3e-3, 1, 0.992, 700)])
    assert table[1] == ["64/4 gpt", "standard", "0.003", "1", "0.992", "1 of 1", "500"]
    assert table[2] == ["64/4 gpt", "euler", "0.003", "2", "0.696", "1 of 2", "700"]
    assert len(recall_table([])) == 1


# -- bad input


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"seq_len": 15}, ValueError, "seq_len must be even, got 15"),
        ({"seq_len": 0}, ValueError, "seq_len must be a positive integer, got 0"),
        ({"seq_len": 16.0}, ValueError, "seq_len must be a positive integer, got 16.0"),
        ({"n_pairs": 5}, ValueError, "n_pairs must be at most seq_len / 4 = 4, got 5"),
        ({"n_pairs": 0}, ValueError, "n_pairs must be a positive integer"),
        ({"vocab": 16}, ValueError, "vocab must be larger than seq_len = 16, got 16"),
        ({"vocab": True}, ValueError, "vocab must be a positive integer, got True"),
        ({"power": math.nan}, ValueError, "power must be a finite number, got nan"),
        ({"power": math.inf}, ValueError, "power must be a finite number"),
        ({"power": "flat"}, ValueError, "power must be a finite number, got 'flat'"),
        ({"filler": 1}, TypeError, "filler must be True or False, got 1"),
    ],
)
def test_bad_rows(change, error, words):
    arguments = {"seq_len": 16, "n_pairs": 2, "vocab": 20} | change
    for make in (lambda **a: mqar(3, **a), RecallTask):
        with pytest.raises(error) as caught:
            make(**arguments)
        assert words in str(caught.value)


def test_bad_numbers():
    for n in (0, -1, 2.5):
        with pytest.raises(ValueError, match="n must be a positive integer"):
            mqar(n, 16, 2, 20)
    with pytest.raises(TypeError, match="seed must be an integer"):
        mqar(3, 16, 2, 20, seed=0.5)
    with pytest.raises(ValueError, match="rows must be a positive integer"):
        RecallTask(rows=0)
    for enough in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="enough must be an accuracy, from 0 to 1"):
            RecallTask(enough=enough)
    with pytest.raises(
        ValueError, match="a vocabulary of 256 and a context of 64 or more for this task, got 16 and 12"
    ):
        train_recall(GPT(SMALL), RecallTask(), HOW)
