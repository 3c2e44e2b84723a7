"Training: schedules, evaluation, guards, short numbers, several processes, and checkpoints that continue a run to the bit."

import json
import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import ROOT
from coupled_qk import runs
from coupled_qk.data import batches, windows
from coupled_qk.gpt import GPT, GPTConfig
from coupled_qk.training import (
    TrainConfig,
    add_gradients,
    bits_per_byte,
    evaluate,
    first_bad,
    fit,
    learning_rate,
    load_checkpoint,
    make_optimizer,
    save_checkpoint,
    train_step,
)
from safetensors.torch import load_file, save_file
from torch import nn

SHAPE = GPTConfig(context=16, n_layers=1, n_heads=2, d_model=16, pre="leapfrog")
TOKENS = torch.randint(256, (600,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
SHORT = TrainConfig(steps=12, batch_size=2, eval_every=4)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def batch(rows=4):
    return next(batches(TOKENS, rows, 16))


def after(n):
    "A wish to stop that comes after n steps."
    asked = iter(range(1, n + 1))
    return lambda: next(asked, n) == n


# --- the pieces


@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_learning_rate_climbs_and_falls_to_zero(steps):
    config = TrainConfig(steps=steps, lr=0.5)
    rates = [learning_rate(i, config) for i in range(steps)]
    assert max(rates) == 0.5 and all(r > 0 for r in rates)
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1]) and rates[peak:] == sorted(rates[peak:], reverse=True)
    if steps == 100:
        assert rates[-1] < 0.001 * max(rates)  # a cosine's end: (pi / 90)^2 / 4 of the highest


def test_decay_only_on_matrices():
    model = GPT(SHAPE)
    matrices, others = make_optimizer(model, SHORT).param_groups
    assert {p.ndim for p in matrices["params"]} == {2} and matrices["weight_decay"] > 0
    assert others["weight_decay"] == 0 and any(p is model.blocks[0].attn.pre[0].dt for p in others["params"])
    assert sum(len(g["params"]) for g in (matrices, others)) == len(list(model.parameters()))


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_evaluation_is_the_mean_over_all_tokens(batch_size):
    model = GPT(SHAPE)
    with torch.no_grad():
        parts = [nn.functional.cross_entropy(model(x)[0], y[0], reduction="none") for x, y in windows(TOKENS, 16, 1)]
    expected = torch.cat(parts).double().mean().item()
    assert len(torch.cat(parts)) == len(TOKENS) - 1
    assert evaluate(model, TOKENS, 16, batch_size) == pytest.approx(expected, rel=1e-5)  # float32 sums of 600 terms


def test_evaluation_leaves_the_model_as_it_was():
    "Dropout is off inside, and back on afterwards."

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.gpt, self.drop = GPT(SHAPE), nn.Dropout(0.9)

        def forward(self, x):
            return self.drop(self.gpt(x))

    model = Dropping()
    assert evaluate(model, TOKENS, 16) == pytest.approx(evaluate(model.gpt, TOKENS, 16)) and model.training


def test_bits_per_byte():
    assert bits_per_byte(math.log(256)) == pytest.approx(8)
    assert bits_per_byte(math.log(2) * 6, bytes_per_token=3.0) == pytest.approx(2)


@pytest.mark.parametrize("parts", [2, 4, 12])
def test_a_batch_in_parts_has_the_gradient_of_the_batch(parts):
    models = [GPT(SHAPE).double() for _ in range(2)]
    losses = [add_gradients(model, *batch(12), n) for model, n in zip(models, (1, parts), strict=True)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-12)
    torch.testing.assert_close(gradients(models[1]), gradients(models[0]), rtol=0, atol=1e-14)  # float64 rounding


def test_accumulation_trains_the_same_model():
    runs = [fit(GPT(SHAPE), TOKENS, TOKENS, replace(SHORT, batch_size=8, accumulate=n)) for n in (1, 4)]
    assert runs[1].losses == pytest.approx(runs[0].losses, abs=1e-5)  # float32 rounding over 12 steps


@pytest.mark.parametrize("clip, limit", [(0.01, 0.01), (0, math.inf), (1e9, math.inf)])
def test_clipping_limits_the_norm_and_zero_means_none(clip, limit):
    model, config = GPT(SHAPE), replace(SHORT, clip=clip)
    x, y = batch()
    add_gradients(model, x, y)
    norm = gradients(model).norm().item()
    _, told = train_step(model, make_optimizer(model, config), x, y, config)
    assert told == pytest.approx(norm, rel=1e-5)  # before clipping
    assert gradients(model).norm().item() == pytest.approx(min(norm, limit), rel=1e-4)


# --- guards


@pytest.mark.parametrize("name", ["embed.weight", "blocks.0.attn.pre.0.dt", "norm.weight"])
def test_non_finite_training_names_the_first_bad_weight(name):
    model, config = GPT(SHAPE), SHORT
    with torch.no_grad():
        dict(model.named_parameters())[name].fill_(math.nan)
    before = weights(model).clone()
    with pytest.raises(FloatingPointError, match=f"the weight {name}"):
        train_step(model, make_optimizer(model, config), *batch(), config)
    assert torch.equal(weights(model).isnan(), before.isnan())  # no update was made


class Overflows(torch.autograd.Function):
    "Hands on what it gets, and a gradient that is infinite."

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * math.inf


def test_non_finite_training_names_the_first_bad_module_or_gradient():
    model = GPT(SHAPE)
    hook = model.blocks[0].ff.register_forward_hook(lambda module, args, out: out / 0)
    assert first_bad(model, *batch()) == "the output of blocks.0.ff"
    hook.remove()
    model.blocks[0].ff.register_forward_hook(lambda module, args, out: Overflows.apply(out))
    assert (
        first_bad(model, *batch()) == "the gradient of blocks.0.ff.down.weight"
    )  # norm2 and norm come later, and are fine
    with pytest.raises(FloatingPointError, match=r"in step 1, .* the gradient of blocks.0.ff.down.weight"):
        fit(model, TOKENS, TOKENS, SHORT)


def test_non_finite_training_names_the_step():
    model, calls = GPT(SHAPE), []

    def poison(module, args, out):
        calls.append(1)
        return out * (math.nan if len(calls) == 3 else 1)

    model.norm.register_forward_hook(poison)
    with pytest.raises(FloatingPointError, match="in step 3, training became non-finite"):
        fit(model, TOKENS, TOKENS, SHORT)


def test_a_non_finite_evaluation_says_where():
    model = GPT(SHAPE)
    model.norm.weight.data[0] = math.inf
    with pytest.raises(FloatingPointError, match="held-out loss became non-finite, first in the weight norm.weight"):
        evaluate(model, TOKENS, 16)


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 0},
        {"steps": 1.5},
        {"batch_size": 0},
        {"accumulate": 0},
        {"accumulate": 3},
        {"eval_every": 0},
        {"lr": -1.0},
        {"lr": math.nan},
        {"clip": math.inf},
        {"warmup": 1.5},
        {"weight_decay": "much"},
        {"precision": "fp8"},
        {"precision": None},
        {"compile": "yes"},
    ],
    ids=str,
)
def test_bad_settings(settings):
    (name,) = settings
    with pytest.raises((ValueError, TypeError), match=name):
        TrainConfig(**settings)


def test_text_shorter_than_one_context():
    for train, valid in ((TOKENS[:9], TOKENS), (TOKENS, TOKENS[:9])):
        with pytest.raises(ValueError, match="longer than one context of 16, got only 9"):
            fit(GPT(SHAPE), train, valid, SHORT)


# --- whole runs


def test_training_learns():
    model = GPT(SHAPE)
    text = torch.tensor(list(b"abcdefgh" * 80), dtype=torch.uint8)
    history = fit(model, text, text, TrainConfig(steps=150, batch_size=8, lr=2e-2))
    assert len(history.losses) == 150 and history.tokens_per_second > 0
    assert history.evaluations[-1][1] < 0.1  # the next letter is certain


def test_a_seed_means_one_run():
    runs = [GPT(SHAPE), GPT(SHAPE)]
    histories = [fit(model, TOKENS, TOKENS, SHORT) for model in runs]
    assert histories[0].losses == histories[1].losses and torch.equal(*map(weights, runs))


@pytest.mark.parametrize("precision, off", [("bf16", 0.03), ("fp16", 0.004)])
def test_short_numbers_train_nearly_the_same(precision, off):
    "Weights stay in float32; losses differ by the rounding of 8 and of 11 bits, 0.4 and 0.05 %, times some growth."
    exact, short = GPT(SHAPE), GPT(SHAPE)
    expected = fit(exact, TOKENS, TOKENS, SHORT).losses
    losses = fit(short, TOKENS, TOKENS, replace(SHORT, precision=precision)).losses
    assert losses != expected and losses == pytest.approx(expected, abs=off)
    assert {p.dtype for p in short.parameters()} == {torch.float32}


def test_fp16_skips_a_step_that_overflows_and_lowers_the_scale():
    model, config = GPT(SHAPE), replace(SHORT, precision="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    before, optimizer = weights(model).clone(), make_optimizer(model, config)
    train_step(model, optimizer, *batch(), config, scaler)
    assert torch.equal(weights(model), before) and scaler.get_scale() < 2.0**60
    for _ in range(60):
        if torch.equal(weights(model), before):
            train_step(model, optimizer, *batch(), config, scaler)
    assert not torch.equal(weights(model), before) and weights(model).isfinite().all()
    assert 1 < scaler.get_scale() < 2.0**40


def test_fp16_gives_up_when_no_scale_is_small_enough():
    model, config = GPT(SHAPE), replace(SHORT, precision="fp16", steps=60)
    model.blocks[0].ff.register_forward_hook(lambda module, args, out: Overflows.apply(out))
    with pytest.raises(FloatingPointError, match="at any scale"):
        fit(model, TOKENS, TOKENS, config)


def test_compiled_training_is_the_same(monkeypatch):
    "With a backend that traces and does not generate code, which would take a compiler and a minute."
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    expected = fit(GPT(SHAPE), TOKENS, TOKENS, SHORT)
    model = GPT(SHAPE)
    found = fit(model, TOKENS, TOKENS, replace(SHORT, compile=True))
    assert found.losses == pytest.approx(expected.losses, abs=1e-5)
    assert all(not name.startswith("_orig_mod") for name in model.state_dict())


def test_the_log_and_the_bar(tmp_path, capsys):
    history = fit(GPT(SHAPE), TOKENS, TOKENS, SHORT, tmp_path, bar="a run", bytes_per_token=2.0)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13)) and [line["loss"] for line in lines] == history.losses
    assert [(line["step"], line["valid"]) for line in lines if "valid" in line] == history.evaluations
    assert lines[3]["bits_per_byte"] == pytest.approx(lines[3]["valid"] / math.log(2) / 2)
    assert all(line["lr"] > 0 and line["norm"] > 0 and line["tokens_per_second"] > 0 for line in lines)
    told = capsys.readouterr().err
    assert all(words in told for words in ("a run", "12/12", "loss ", "bits/byte", "tokens/s", "<00:00"))  # time left


# --- stopped and continued


@pytest.fixture(scope="module")
def unbroken():
    model = GPT(SHAPE)
    return model, fit(model, TOKENS, TOKENS, SHORT)


class Crash(Exception):
    pass


@pytest.mark.parametrize("at", [1, 5, 8, 11])
def test_a_crashed_run_continues_to_the_bit(tmp_path, at, unbroken):
    "Crash before step `at` is done, start again with other weights: the file brings back the right ones."
    whole, expected = unbroken
    crashing, calls = GPT(SHAPE), []

    def count(*_):
        if crashing.training and torch.is_grad_enabled():
            calls.append(1)
            if len(calls) > at:
                raise Crash

    crashing.register_forward_pre_hook(count)
    with pytest.raises(Crash):
        fit(crashing, TOKENS, TOKENS, SHORT, tmp_path)
    continued = GPT(SHAPE, seed=at)
    fresh = at < SHORT.eval_every  # no checkpoint yet: nothing to continue, so begin with the same weights
    found = fit(GPT(SHAPE) if fresh else continued, TOKENS, TOKENS, SHORT, tmp_path)
    assert found.losses == expected.losses and found.evaluations == expected.evaluations
    if not fresh:
        assert torch.equal(weights(continued), weights(whole))
    log = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log == list(range(1, 13))  # each step once, although some were done twice


@pytest.mark.parametrize("changes", [{}, {"precision": "fp16"}, {"precision": "bf16", "accumulate": 2}], ids=str)
def test_a_stopped_run_continues_to_the_bit(tmp_path, changes):
    config = replace(SHORT, **changes)
    whole, continued = GPT(SHAPE), GPT(SHAPE, seed=9)
    expected = fit(whole, TOKENS, TOKENS, config)
    assert len(fit(GPT(SHAPE), TOKENS, TOKENS, config, tmp_path, stop=after(6)).losses) == 6
    found = fit(continued, TOKENS, TOKENS, config, tmp_path)
    assert found.losses == expected.losses and found.evaluations == expected.evaluations
    assert torch.equal(weights(continued), weights(whole))


class WithDropout(GPT):
    def __init__(self, seed=0):
        super().__init__(SHAPE, seed=seed)
        self.norm = nn.Sequential(self.norm, nn.Dropout(0.2))


def test_random_numbers_go_on_where_they_were(tmp_path):
    "A module that draws sees the same numbers, though others are drawn between the stop and the next start."
    whole, continued = WithDropout(), WithDropout(3)
    torch.manual_seed(5)
    expected = fit(whole, TOKENS, TOKENS, SHORT)
    torch.manual_seed(5)
    fit(WithDropout(), TOKENS, TOKENS, SHORT, tmp_path, stop=after(7))
    torch.rand(100)
    found = fit(continued, TOKENS, TOKENS, SHORT, tmp_path)
    assert found.losses == expected.losses and torch.equal(weights(continued), weights(whole))


KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from coupled_qk.gpt import GPT, GPTConfig
from coupled_qk.training import TrainConfig, fit


def start(folder):
    "A process of its own, which trains; forked, so that torch is imported once."
    if child := os.fork():
        return child
    tokens = torch.arange(600).remainder(251).to(torch.uint8)
    config = TrainConfig(steps=150, batch_size=2, eval_every=7)
    torch.manual_seed(0)
    fit(GPT(GPTConfig(context=16, n_layers=1, n_heads=2, d_model=16)), tokens, tokens[:200], config, folder)
    os._exit(0)


def finish(folder):
    assert os.waitpid(start(folder), 0)[1] == 0


alone, killed, moments = Path(sys.argv[1], "alone"), Path(sys.argv[1], "killed"), random.Random(0)
log, ends = killed / "log.jsonl", []
finish(alone)
for _ in range(4):
    before = log.read_bytes() if log.exists() else b""
    child = start(killed)
    while not log.exists() or log.read_bytes() in (before, b""):
        assert os.waitpid(child, os.WNOHANG) == (0, 0)  # one that has ended would be waited for in vain
        time.sleep(0.005)
    time.sleep(moments.uniform(0, 0.04))  # a step takes 2 ms on a fast machine, and four kills must find it at work
    os.kill(child, signal.SIGKILL)
    ends.append(os.waitpid(child, 0)[1])
finish(killed)
print(ends.count(signal.SIGKILL))
"""


def test_a_killed_process_continues_to_the_bit(tmp_path):
    "SIGKILL at random moments, four times, and then to the end: the same files as a run that was left alone."
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLER, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and int(done.stdout) >= 3, done.stderr  # a quick machine may finish before the last
    ends = [load_file(tmp_path / name / "last.safetensors") for name in ("alone", "killed")]
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(t, ends[1][name]) for name, t in ends[0].items())
    steps = [json.loads(line)["step"] for line in (tmp_path / "killed/log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 151)) and not list((tmp_path / "killed").glob(".*"))  # nor is half a file left


def test_a_finished_run_is_not_trained_again(tmp_path):
    model = GPT(SHAPE)
    first = fit(model, TOKENS, TOKENS, SHORT, tmp_path)
    again = GPT(SHAPE, seed=3)
    second = fit(again, TOKENS, TOKENS, SHORT, tmp_path)
    assert second.losses == first.losses and torch.equal(weights(again), weights(model))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.safetensors", "last.safetensors", "log.jsonl"]


def test_the_best_checkpoint_is_that_of_the_best_evaluation(tmp_path):
    "A text that cannot be learned from the training text: the held-out loss soon rises."
    train = torch.tensor(list(b"ab" * 300), dtype=torch.uint8)
    history = fit(GPT(SHAPE), train, TOKENS, replace(SHORT, steps=40, lr=0.02), tmp_path)
    step, held_out = min(history.evaluations, key=lambda e: e[1])
    model = GPT(SHAPE, seed=2)
    assert step < 40 and load_checkpoint(tmp_path / "best.safetensors", model)[0] == step
    assert evaluate(model, TOKENS, 16) == held_out


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"config": replace(SHORT, lr=0.5)}, "lr was 0.003, and is 0.5"),
        ({"config": replace(SHORT, seed=1)}, "seed was 0, and is 1"),
        ({"train": TOKENS.flip(0)}, "training text was 600 tokens"),
        ({"valid": TOKENS[:99]}, "held-out text was 600 tokens, .* and is 99 tokens"),
        ({"model": GPT(replace(SHAPE, pre="euler"))}, "model was"),
    ],
    ids=["rate", "seed", "text", "held-out", "model"],
)
def test_another_run_is_not_continued(tmp_path, changes, words):
    usual = {"model": GPT(SHAPE), "train": TOKENS, "valid": TOKENS, "config": SHORT}
    fit(**usual, checkpoint=tmp_path, stop=after(2))
    kept = (tmp_path / "last.safetensors").read_bytes()
    with pytest.raises(ValueError, match=f"belongs to another run: {words}"):
        fit(**{**usual, **changes}, checkpoint=tmp_path)
    assert (tmp_path / "last.safetensors").read_bytes() == kept


def test_how_a_batch_is_divided_may_change(tmp_path):
    "On another machine the batch may have to be cut: that only rounds."
    config = replace(SHORT, batch_size=4)
    expected = fit(GPT(SHAPE), TOKENS, TOKENS, config)
    fit(GPT(SHAPE), TOKENS, TOKENS, config, tmp_path, stop=after(5))
    found = fit(GPT(SHAPE), TOKENS, TOKENS, replace(config, accumulate=2), tmp_path)
    assert found.losses == pytest.approx(expected.losses, abs=1e-5)


# --- checkpoints


def quadratic(model, optimizer):
    optimizer.zero_grad()
    sum((p - 0.3).square().sum() for p in model.parameters()).backward()
    optimizer.step()


KINDS = {
    "sgd": partial(torch.optim.SGD, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, fused=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_optimizer_goes_on_to_the_bit(tmp_path, kind, dtype):
    make = lambda: nn.Linear(3, 2).to(dtype)
    model, other = make(), make()
    optimizer = KINDS[kind](model.parameters())
    for _ in range(3):
        quadratic(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.007  # a schedule's rate comes back too
    save_checkpoint(tmp_path / "x", model, optimizer, 3, {"a": [1, None]})
    theirs = KINDS[kind](other.parameters())
    assert load_checkpoint(tmp_path / "x", other, theirs) == (3, {"a": [1, None]})
    for _ in range(3):
        quadratic(model, optimizer)
        quadratic(other, theirs)
    assert torch.equal(weights(model), weights(other))


def test_weights_that_joined_later_keep_their_own_count(tmp_path):
    "AdamW's count of steps is kept for each weight: one that had no gradient at first has a smaller one."
    model, other = nn.ParameterList([torch.ones(2), torch.ones(3)]), nn.ParameterList([torch.ones(2), torch.ones(3)])
    optimizer, theirs = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    for both in (False, False, True):
        optimizer.zero_grad()
        (model[0].square().sum() + (model[1].square().sum() if both else 0)).backward()
        optimizer.step()
    save_checkpoint(tmp_path / "x", model, optimizer, 3)
    load_checkpoint(tmp_path / "x", other, theirs)
    quadratic(model, optimizer)
    quadratic(other, theirs)
    assert torch.equal(weights(model), weights(other))


@pytest.mark.parametrize(
    "make, words",
    [
        (torch.optim.LBFGS, "must be a tensor or a number, got list"),
        (torch.optim.Adafactor, r"row_var must be like the weight, \(2, 3\)"),
    ],
    ids=["lbfgs", "adafactor"],
)
def test_an_optimizer_of_another_kind_is_refused(tmp_path, make, words):
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())

    def loss():
        optimizer.zero_grad()
        value = model(torch.ones(1, 3)).square().sum()
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(loss)
    with pytest.raises(TypeError, match=words):
        save_checkpoint(tmp_path / "x", model, optimizer, 1)
    assert not list(tmp_path.iterdir())


def test_tied_weights_are_kept(tmp_path):
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].weight = tied[0].weight
    save_checkpoint(tmp_path / "x", tied, torch.optim.SGD(tied.parameters()), 1)
    other = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    other[1].weight = other[0].weight
    load_checkpoint(tmp_path / "x", other)
    assert torch.equal(weights(other), weights(tied))


def trained(seed=0, steps=2):
    model = GPT(SHAPE, seed=seed)
    optimizer = make_optimizer(model, SHORT)
    for _ in range(steps):
        train_step(model, optimizer, *batch(), SHORT)
    return model, optimizer


def other_model(path):
    model = GPT(GPTConfig(context=16, n_layers=2, d_model=16))
    save_checkpoint(path, model, make_optimizer(model, SHORT), 1)


def spoil_tensor(ending, change):
    "Rewrite the file with the tensors whose name ends so changed, or left out."

    def spoil(path):
        with runs.safe_open(path, "pt") as f:
            meta = f.metadata()
        tensors = {n: change(t) if n.endswith(ending) else t for n, t in load_file(path).items()}
        save_file({n: t for n, t in tensors.items() if t is not None}, path, meta)

    return spoil


def spoil_header(**changes):
    def spoil(path):
        with runs.safe_open(path, "pt") as f:
            meta = f.metadata()
        save_file(load_file(path), path, {**meta, **changes})

    return spoil


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "not a whole safetensors file"),
        (lambda path: path.write_bytes(pickle.dumps({"model": 1})), "not a whole safetensors file"),
        (lambda path: path.write_bytes(b""), "not a whole safetensors file"),
        (lambda path: save_file({"a": torch.ones(1)}, path), "not a checkpoint"),
        (other_model, "does not fit the model"),
        (spoil_header(step="many"), "damaged header"),
        (spoil_header(info="{"), "damaged header"),
        (spoil_header(optimizer="[]"), "does not fit the optimizer"),
        (spoil_tensor("model.norm.weight", torch.Tensor.double), r"norm.weight it holds \(16,\) of torch.float64"),
        (spoil_tensor("model.norm.weight", lambda t: None), "norm.weight it holds nothing"),
        (spoil_tensor("optimizer.norm.weight.exp_avg", lambda t: t[:5]), "must be like the weight"),
        (spoil_tensor("optimizer.norm.weight.exp_avg", torch.Tensor.double), "must be like the weight"),
        (spoil_tensor("optimizer.norm.weight.exp_avg", lambda t: None), "memories are incomplete"),
        (spoil_tensor("random", lambda t: t[:, :9]), "does not fit the optimizer"),
    ],
    ids=["cut", "pickle", "empty", "foreign", "other shape", "no step", "no info", "no optimizer", "dtype", "missing"]
    + ["moment's shape", "moment's dtype", "missing moment", "random state"],
)
def test_a_bad_checkpoint_changes_nothing(tmp_path, spoil, words):
    path, (model, optimizer) = tmp_path / "x.safetensors", trained(seed=1)
    save_checkpoint(path, model, optimizer, 2)
    spoil(path)
    model, optimizer = trained()
    before, memory, state = weights(model).clone(), str(optimizer.state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        load_checkpoint(path, model, optimizer)
    assert torch.equal(weights(model), before) and str(optimizer.state_dict()) == memory
    assert torch.equal(torch.get_rng_state(), state)


def test_a_file_of_another_dtype_is_refused(tmp_path):
    save_checkpoint(tmp_path / "x", *trained(), 2)
    with pytest.raises(ValueError, match="float32, and the model has .* of torch.float64"):
        load_checkpoint(tmp_path / "x", GPT(SHAPE).double())


def test_another_optimizer_is_refused(tmp_path):
    model, optimizer = trained()
    save_checkpoint(tmp_path / "x", model, optimizer, 2)
    with pytest.raises(ValueError, match="it holds the memory of AdamW, and the optimizer is SGD"):
        load_checkpoint(tmp_path / "x", model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="groups hold other weights"):
        load_checkpoint(tmp_path / "x", model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="parameters of the model only"):
        load_checkpoint(tmp_path / "x", model, torch.optim.AdamW(GPT(SHAPE).parameters()))


@pytest.mark.parametrize("path", ["no-such-file.safetensors", "."])
def test_a_missing_checkpoint(path):
    with pytest.raises(FileNotFoundError):
        load_checkpoint(path, GPT(SHAPE))


def test_a_damaged_file_leaves_the_best_one_usable(tmp_path, unbroken):
    whole, expected = unbroken
    fit(GPT(SHAPE), TOKENS, TOKENS, SHORT, tmp_path, stop=after(9))
    last, best = tmp_path / "last.safetensors", tmp_path / "best.safetensors"
    last.write_bytes(last.read_bytes()[:-100])
    model = GPT(SHAPE, seed=4)
    before = weights(model).clone()
    with pytest.raises(ValueError, match="not a whole safetensors file.*best.safetensors is whole: copy it over"):
        fit(model, TOKENS, TOKENS, SHORT, tmp_path)
    assert torch.equal(weights(model), before)
    last.write_bytes(best.read_bytes())
    assert fit(model, TOKENS, TOKENS, SHORT, tmp_path).losses == expected.losses
    assert torch.equal(weights(model), weights(whole))


def test_a_full_disk_leaves_the_older_checkpoint(tmp_path, monkeypatch, unbroken):
    fit(GPT(SHAPE), TOKENS, TOKENS, SHORT, tmp_path, stop=after(5))

    def full(path, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        write = runs.write_whole
        patch.setattr(runs, "write_whole", lambda path, data: (full if "last" in str(path) else write)(path, data))
        with pytest.raises(OSError, match="No space"):
            fit(GPT(SHAPE), TOKENS, TOKENS, SHORT, tmp_path)
    assert fit(GPT(SHAPE), TOKENS, TOKENS, SHORT, tmp_path).losses == unbroken[1].losses


# --- several processes

TOGETHER = """
import json, sys
from dataclasses import replace
from itertools import count
from pathlib import Path
import torch, torch.distributed as dist
from coupled_qk.gpt import GPT, GPTConfig
from coupled_qk.training import TrainConfig, first_bad, fit
out = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
tokens = torch.randint(256, (600,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
config = TrainConfig(steps=50, batch_size=8, eval_every=20)
shape = GPTConfig(context=16, n_layers=1, n_heads=2, d_model=16, pre="leapfrog")
own = out / f"of-rank-{rank}"  # a folder of its own: only the first may write
history = fit(GPT(shape, seed=rank), tokens, tokens, config, own)
asked = count(1)
wish = lambda: next(asked) == 30 and rank == 1  # one process's wish is enough
model = GPT(shape)
stopped = fit(model, tokens, tokens, config, out / "shared", stop=wish)
again = GPT(shape, seed=5)
resumed = fit(again, tokens, tokens, config, out / "shared")
parts = fit(GPT(shape), tokens, tokens, replace(config, steps=10, accumulate=2))
whole = fit(GPT(shape), tokens, tokens, replace(config, steps=10))
broken = GPT(shape)
if rank == 1:
    tokens = tokens.clone()
    broken.norm.register_forward_hook(lambda module, args, out: out / 0)
try:
    fit(broken, tokens, tokens, config)
    said = ""
except FloatingPointError as error:
    said = str(error)
report = {"losses": history.losses, "evaluations": history.evaluations, "stopped": len(stopped.losses)}
report |= {"parts": parts.losses, "whole": whole.losses}
report |= {"resumed": resumed.losses, "said": said, "weights": float(sum(p.detach().double().sum() for p in again.parameters()))}
(out / f"{rank}.json").write_text(json.dumps(report))
dist.destroy_process_group()
"""


def test_two_processes_train_the_same_model(tmp_path):
    (tmp_path / "together.py").write_text(TOGETHER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, tmp_path / "together.py", tmp_path], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    expected = fit(GPT(SHAPE), TOKENS, TOKENS, TrainConfig(steps=50, batch_size=8, eval_every=20))
    assert one["losses"] == pytest.approx(expected.losses, abs=1e-4)  # float32 rounding, grown over 50 steps
    for (step, loss), (s, x) in zip(one["evaluations"], expected.evaluations, strict=True):
        assert step == s and loss == pytest.approx(x, abs=1e-4)
    assert one["parts"] == pytest.approx(one["whole"], abs=1e-5)  # each process's share in two parts
    assert two["losses"] == one["losses"] and two["weights"] == one["weights"]
    assert one["stopped"] == two["stopped"] == 30 and one["resumed"] == one["losses"]  # to the bit
    assert "in step 1" in one["said"] and "the output of norm" in two["said"]  # neither waits for the other for ever
    assert (tmp_path / "of-rank-0" / "last.safetensors").exists() and not (tmp_path / "of-rank-1").exists()


def test_a_batch_that_cannot_be_divided(monkeypatch):
    monkeypatch.setattr("coupled_qk.training.world", lambda: (0, 3))
    with pytest.raises(ValueError, match="batch_size must divide into 2 parts on each of 3 devices, got 8"):
        fit(GPT(SHAPE), TOKENS, TOKENS, replace(SHORT, batch_size=8, accumulate=2))


def test_queries_and_keys_can_learn_faster():
    "The two projections move twice as far in the first step, whose size Adam fixes; nothing else differs."
    moved = {}
    for pace in (1.0, 2.0):
        model = GPT(SHAPE, seed=0)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        config = replace(SHORT, steps=1, warmup=0.0, weight_decay=0.0, qk_lr=pace)
        fit(model, TOKENS, TOKENS, config)
        moved[pace] = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    for name, gap in moved[1.0].items():
        factor = 2 if "q_proj" in name or "k_proj" in name else 1
        torch.testing.assert_close(
            moved[2.0][name], factor * gap, rtol=1e-3, atol=1e-6
        )  # a difference of float32 weights
