"Training: schedules, evaluation, guards, and checkpoints that continue a run to the bit."

import math
import pickle

import pytest
import torch
from coupled_qk.data import windows
from coupled_qk.gpt import GPT, GPTConfig
from coupled_qk.training import (
    TrainConfig,
    bits_per_byte,
    evaluate,
    fit,
    learning_rate,
    load_checkpoint,
    make_optimizer,
    save_checkpoint,
    train_step,
)
from safetensors.torch import save_file

SHAPE = GPTConfig(context=16, n_layers=1, n_heads=2, d_model=16, pre="leapfrog")
TOKENS = torch.randint(256, (600,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
SHORT = TrainConfig(steps=12, batch_size=2, eval_every=4)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


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
        parts = [
            torch.nn.functional.cross_entropy(model(x)[0], y[0], reduction="none") for x, y in windows(TOKENS, 16, 1)
        ]
    expected = torch.cat(parts).double().mean().item()
    assert len(torch.cat(parts)) == len(TOKENS) - 1
    assert evaluate(model, TOKENS, 16, batch_size) == pytest.approx(expected, rel=1e-5)  # float32 sums of 600 terms


def test_bits_per_byte():
    assert bits_per_byte(math.log(256)) == pytest.approx(8)
    assert bits_per_byte(math.log(2) * 6, bytes_per_token=3.0) == pytest.approx(2)


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


class Crash(Exception):
    pass


@pytest.mark.parametrize("at", [1, 5, 8, 11])
def test_a_crashed_run_continues_to_the_bit(tmp_path, at):
    "Crash before step `at` is done, start again with other weights: the file brings back the right ones."
    whole = GPT(SHAPE)
    expected = fit(whole, TOKENS, TOKENS, SHORT)

    crashing, calls = GPT(SHAPE), []

    def count(*_):
        if crashing.training and torch.is_grad_enabled():
            calls.append(1)
            if len(calls) > at:
                raise Crash

    crashing.register_forward_pre_hook(count)
    with pytest.raises(Crash):
        fit(crashing, TOKENS, TOKENS, SHORT, checkpoint=tmp_path / "last.safetensors")
    continued = GPT(SHAPE, seed=at)
    fresh = at < SHORT.eval_every  # no checkpoint yet: nothing to continue, so begin with the same weights
    found = fit(GPT(SHAPE) if fresh else continued, TOKENS, TOKENS, SHORT, checkpoint=tmp_path / "last.safetensors")
    assert found.losses == expected.losses and found.evaluations == expected.evaluations
    if not fresh:
        assert torch.equal(weights(continued), weights(whole))


def test_a_finished_run_is_not_trained_again(tmp_path):
    path = tmp_path / "last.safetensors"
    model = GPT(SHAPE)
    first = fit(model, TOKENS, TOKENS, SHORT, checkpoint=path)
    again = GPT(SHAPE, seed=3)
    second = fit(again, TOKENS, TOKENS, SHORT, checkpoint=path)
    assert second.losses == first.losses and torch.equal(weights(again), weights(model))
    assert not list(tmp_path.glob("*.part"))


def other_model(path):
    model = GPT(GPTConfig(context=16, n_layers=2, d_model=16))
    save_checkpoint(path, model, make_optimizer(model, SHORT), 1)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "not a whole safetensors file"),
        (lambda path: path.write_bytes(pickle.dumps({"model": 1})), "not a whole safetensors file"),
        (lambda path: path.write_bytes(b""), "not a whole safetensors file"),
        (lambda path: save_file({"a": torch.ones(1)}, path), "not a checkpoint"),
        (other_model, "does not fit the model"),
    ],
    ids=["cut", "pickle", "empty", "foreign", "other shape"],
)
def test_a_bad_checkpoint_changes_nothing(tmp_path, spoil, words):
    path, model = tmp_path / "x.safetensors", GPT(SHAPE)
    save_checkpoint(path, GPT(SHAPE, seed=1), make_optimizer(model, SHORT), 3)
    spoil(path)
    before = weights(model).clone()
    with pytest.raises(ValueError, match=words):
        load_checkpoint(path, model)
    assert torch.equal(weights(model), before)


def test_a_missing_checkpoint():
    with pytest.raises(FileNotFoundError):
        load_checkpoint("no-such-file.safetensors", GPT(SHAPE))


@pytest.mark.parametrize("name", ["embed.weight", "blocks.0.attn.pre.0.dt", "norm.weight"])
def test_non_finite_training_names_the_first_bad_tensor(name):
    model = GPT(SHAPE)
    with torch.no_grad():
        dict(model.named_parameters())[name].fill_(math.nan)
    x = TOKENS[:32].long().reshape(2, 16)
    before = weights(model).clone()
    with pytest.raises(FloatingPointError, match=f"the weight {name}"):
        train_step(model, make_optimizer(model, SHORT), x, x)
    assert torch.equal(weights(model).isnan(), before.isnan())  # no update was made


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 0},
        {"steps": 1.5},
        {"batch_size": 0},
        {"eval_every": 0},
        {"lr": -1.0},
        {"lr": math.nan},
        {"clip": math.inf},
        {"weight_decay": "much"},
    ],
)
def test_bad_settings(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=name):
        TrainConfig(**settings)


def test_text_shorter_than_one_context():
    with pytest.raises(ValueError, match="longer than one context of 16, got only 9"):
        fit(GPT(SHAPE), TOKENS[:9], TOKENS, SHORT)
