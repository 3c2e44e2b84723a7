"""The checkers of chapter 06 accept right answers, however written, and reject plausible wrong ones in useful words."""

import numpy as np
import pytest
import torch
from conftest import said
from coupled_qk.exercises.training import Walk, check_gradient, check_rate, check_saved


def by_cases(step, steps, lr):
    if step < steps // 10:
        return lr * (step + 1) / (steps // 10)
    if step <= steps - steps // 5:
        return lr
    return lr * (steps - step) / (steps // 5)


@pytest.mark.parametrize(
    "rate",
    [
        by_cases,
        lambda step, steps, lr: lr * min(1, 10 * (step + 1) / steps, 5 * (steps - step) / steps),
        lambda step, steps, lr: torch.tensor(by_cases(step, steps, lr), dtype=torch.float64),
        lambda step, steps, lr: np.interp(step, [-1, steps / 10 - 1, 0.8 * steps, steps], [0, lr, lr, 0]),
    ],
)
def test_rate_accepts(capsys, rate):
    assert said(capsys, check_rate, rate)[0]


@pytest.mark.parametrize(
    "words, rate",
    [
        ("same in every step", lambda step, steps, lr: lr),
        ("rate zero", lambda step, steps, lr: lr * min(1, step / (steps // 10), (steps - step) / (steps // 5))),
        ("where it falls: step 81", lambda step, steps, lr: lr * min(1, (step + 1) / (steps // 10))),  # never falls
        ("where it falls: step 99", lambda s, n, lr: by_cases(s, n, lr) if s < n - 1 else 0.0),
        (
            "where it waits: step 80",
            lambda s, n, lr: lr * min(1, (s + 1) / (n // 10), (n - 1 - s) / (n // 5)),
        ),  # a step early
        ("where it climbs", lambda s, n, lr: lr * min(1, (s + 1) / (n // 5), (n - s) / (n // 5))),  # too slowly
        ("where it waits", lambda s, n, lr: lr * min(1, (s + 1) / (n // 10), (n - s) / (n // 2))),  # falls too soon
        ("never be above lr", lambda s, n, lr: lr * (s + 1) / (n // 10)),
        ("uphill", lambda s, n, lr: lr * min(1, (s + 1) / (n // 10), (n - 5 - s) / (n // 5))),
        ("lr, here 0.003", lambda s, n, lr: by_cases(s, n, 1.0)),
        (
            "in step 10 of 100: your function returns nothing",
            lambda s, n, lr: by_cases(s, n, lr) if s < n // 10 else None,
        ),
        ("right for 100 steps with lr = 1, but for 250", lambda s, n, lr: by_cases(s, 100, lr)),
        ("of 250", lambda s, n, lr: lr * min(1, (s + 1) / 10, max(n - s, 0) / 20)),  # made for 100 steps only
    ],
)
def test_rate_rejects(capsys, words, rate):
    right, text = said(capsys, check_rate, rate)
    assert not right and words in text, text


def weighted(mean_gradient, parts):
    rows = sum(len(y) for _, y in parts)
    return sum(mean_gradient(x, y) * len(y) / rows for x, y in parts)


def running(mean_gradient, parts):
    "A mean that is kept up to date."
    mean, rows = 0.0, 0
    for x, y in parts:
        rows += len(y)
        mean = mean + (mean_gradient(x, y) - mean) * len(y) / rows
    return mean


def one_by_one(mean_gradient, parts):
    rows = [mean_gradient(x[i : i + 1], y[i : i + 1]) for x, y in parts for i in range(len(y))]
    return sum(rows) / len(rows)


def into_float32(mean_gradient, parts):
    total = torch.zeros(3)
    for x, y in parts:
        total += mean_gradient(x, y) * len(y)
    return total / sum(len(y) for _, y in parts)


def emptied(mean_gradient, parts):
    "Changes the targets that it was given."
    return sum(mean_gradient(x, y) * len(y.zero_()) for x, y in parts) / sum(len(y) for _, y in parts)


@pytest.mark.parametrize(
    "answer",
    [
        weighted,
        running,
        one_by_one,
        into_float32,
        lambda f, parts: weighted(f, [parts.pop() for _ in range(len(parts))]),  # the list is the function's own
        lambda f, parts: [float(g) for g in weighted(f, parts)],
    ],
)
def test_gradient_accepts(capsys, answer):
    assert said(capsys, check_gradient, answer)[0]


@pytest.mark.parametrize(
    "words, answer",
    [
        ("plain mean", lambda f, parts: sum(f(x, y) for x, y in parts) / len(parts)),
        ("grows with the number of parts", lambda f, parts: sum(f(x, y) for x, y in parts)),
        ("did not divide", lambda f, parts: sum(f(x, y) * len(y) for x, y in parts)),
        ("by the number of parts", lambda f, parts: sum(f(x, y) * len(y) for x, y in parts) / len(parts)),
        ("did not weight", lambda f, parts: sum(f(x, y) for x, y in parts) / sum(len(y) for _, y in parts)),
        ("last part alone", lambda f, parts: f(*parts[-1])),
        ("turned around", lambda f, parts: -weighted(f, parts)),
        ("put parts together", lambda f, parts: f(*(torch.cat(t) for t in zip(*parts, strict=True)))),
        ("first part alone", lambda f, parts: f(*parts[0])),
        ("return inside its loop", lambda f, parts: next(f(x, y) * len(y) / 16 for x, y in parts)),
        ("the last part is missing", lambda f, parts: weighted(f, parts[:-1])),
        ("you did it again", lambda f, parts: sum(f(x, y) / len(y) for x, y in parts)),
        ("you did it again", lambda f, parts: sum(f(x, y) / len(y) for x, y in parts) / len(parts)),
        ("3 times as long", lambda f, parts: weighted(f, parts) * 3),  # by x.numel() instead of len(x)
        ("for 6, 4 and 2", lambda f, parts: sum(f(x, y) * len(y) for x, y in parts) / len(parts) ** 2),
        ("for 6, 4 and 2", lambda f, parts: sum(f(x, y) * len(y) for x, y in parts) / 16),
        ("changed the parts", emptied),
        ("takes x of shape (rows, 3)", lambda f, parts: f(parts[0][1], parts[0][0])),
        ("should be", lambda f, parts: weighted(f, parts[1:])),
        ("shape (3,)", lambda f, parts: [f(x, y) for x, y in parts]),
    ],
)
def test_gradient_rejects(capsys, words, answer):
    right, text = said(capsys, check_gradient, answer)
    assert not right and words in text, text


def whole(run):
    return {"w": run.w, "speed": run.speed, "done": torch.tensor(run.done), "generator": run.generator.get_state()}


@pytest.mark.parametrize(
    "save",
    [
        whole,
        lambda run: {name: t.clone() for name, t in whole(run).items()},
        lambda run: {**whole(run), "done": torch.tensor([float(run.done)])},  # a row of one number
        lambda run: {**whole(run), "more": torch.ones(3)},  # does no harm
    ],
)
def test_saved_accepts(capsys, save):
    assert said(capsys, check_saved, save)[0]


def advanced(run):
    run.advance()
    return whole(run)


@pytest.mark.parametrize(
    "words, save",
    [
        ("without 'speed', the weights begin again from rest", lambda run: {"w": run.w}),
        ("without 'w'", lambda run: {}),
        *((f"without '{name}'", lambda run, name=name: {n: t for n, t in whole(run).items() if n != name}) for name in
          ("w", "speed", "done", "generator")),
        ("holds tensors only, and 'done' is of type int", lambda run: {**whole(run), "done": run.done}),
        ("holds tensors only, and 'generator'", lambda run: {**whole(run), "generator": run.generator}),
        ("'w' is not what it was, to the last bit", lambda run: {**whole(run), "w": run.w.float()}),
        ("'done' is not what it was", lambda run: {**whole(run), "done": torch.tensor(run.done + 1)}),
        ("'generator' is not what it was",
         lambda run: {**whole(run), "generator": torch.Generator().manual_seed(0).get_state()}),
        ("'w' must be a tensor of shape (2,)", lambda run: {**whole(run), "w": run.w[:1]}),
        ("not the state of a generator", lambda run: {**whole(run), "generator": torch.zeros(5056, dtype=torch.uint8)}),
        ("without 'generator', the pushes begin again, and are other ones; after nine more steps the weights are 0.8 away "
         "from where they should be (the run has no attribute 'rng')",
         lambda run: {"rng" if n == "generator" else n: t for n, t in whole(run).items()}),
        ("PyTorch's own generator", lambda run: {**whole(run), "generator": torch.get_rng_state()}),
        ("'done' is of type int", lambda run: vars(run)),  # the first of two mistakes, the same one in every process
        ("saving changed the run itself, its 'w'", lambda run: (whole(run), run.advance())[0]),
        ("saving changed the run itself, its 'generator'", lambda run: (whole(run), run.generator.seed())[0]),
        ("saving changed the run itself, its 'w'", lambda run: (whole(run), vars(run).clear())[0]),
        ("saving changed the run itself", advanced),  # saved a step too late
        ("return a dictionary", lambda run: [run.w, run.speed]),
        ("return a dictionary", lambda run: run),
    ],
)  # fmt: skip
def test_saved_rejects(capsys, words, save):
    right, text = said(capsys, check_saved, save)
    assert not right and words in text, text


def test_a_walk_repeats_and_learns():
    runs = [Walk(), Walk()]
    for run in runs:
        run.advance(30)
    assert torch.equal(runs[0].w, runs[1].w) and runs[0].done == 30
    assert runs[0].w.norm() < Walk().w.norm()
