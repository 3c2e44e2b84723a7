"""How fast the small GPT trains beside a plain one, and how long the library takes to import: what a release must not lose.

`coupled-qk bench` measures what coupling costs; here stands what only this project needs to know. The clock and the turns
are those of `coupled_qk.bench`: CPU seconds of this process on one thread, and ratios to the first competitor within a round.

    python tools/bench.py                     all parts
    python tools/bench.py import --rounds 5   one part, quicker and noisier
    python tools/bench.py --json guard.json   the same as JSON, too
"""

import argparse, subprocess, sys, time
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from coupled_qk.bench import Work, in_turn, relative
from coupled_qk.bench_runs import batch_sizes
from coupled_qk.compare import environment, format_table, write_result
from coupled_qk.gpt import GPT, GPTConfig, n_parameters, presets
from coupled_qk.training import TrainConfig, make_optimizer, train_step


# -- measuring


def some_text(config: GPTConfig, batch: int) -> Tensor:
    return torch.randint(config.vocab_size, (batch, config.context), generator=torch.Generator().manual_seed(0))


def training(model: nn.Module, config: GPTConfig, batch: int, compiled: bool) -> Work:
    "A step of training, with clipping and AdamW."
    if compiled:
        model.compile()
    settings, ids = TrainConfig(), some_text(config, batch)
    optimizer = make_optimizer(model, settings)
    return lambda: train_step(model, optimizer, ids, ids, settings)


def rows_of(seconds: dict[str, list[float]]) -> dict[str, dict]:
    "Median seconds, and the ratio to the first with its middle half."
    base = next(iter(seconds.values()))
    ratios = {label: relative(s, base) for label, s in seconds.items()}
    return {
        label: {"seconds": median(s), "ratio": ratios[label].median, "middle_half": ratios[label][1:]}
        for label, s in seconds.items()
    }


def table(title: str, rows: dict[str, dict]) -> str:
    "Rows of `rows_of`, to read."
    lines = [[title, "seconds", "ratio", "middle half"]]
    for label, row in rows.items():
        low, high = row["middle_half"]
        lines.append([label, f"{row['seconds']:.3f}", f"{row['ratio']:.3f}", f"{low:.3f} to {high:.3f}"])
    return format_table(lines)


# -- the plain GPT to compare with: nanoGPT's architecture from PyTorch's own modules


class PlainFeedForward(nn.Module):
    "GELU of width 4D."

    def __init__(self, d_model: int):
        super().__init__()
        self.up, self.down = nn.Linear(d_model, 4 * d_model, bias=False), nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class PlainBlock(nn.Module):
    "LayerNorm, one matrix for q, k and v, SDPA; LayerNorm, GELU of width 4D; no biases."

    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(d_model, bias=False), nn.LayerNorm(d_model, bias=False)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model, bias=False), nn.Linear(d_model, d_model, bias=False)
        self.ff = PlainFeedForward(d_model)

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.ff(self.norm2(x))


class PlainGPT(nn.Module):
    "Learned positions, blocks, LayerNorm, tied read-out."

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.context, config.d_model)
        self.blocks = nn.Sequential(*(PlainBlock(config.d_model, config.n_heads) for _ in range(config.n_layers)))
        self.norm = nn.LayerNorm(config.d_model, bias=False)
        for weight in (w for w in self.parameters() if w.ndim == 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return F.linear(self.norm(self.blocks(x)), self.embed.weight)


def taken_back(config: GPTConfig, *parts: str) -> GPT:
    "Our GPT with plain parts in place of its own: they tell where the time goes that the plain GPT does not take."
    model = GPT(config)
    norm = partial(nn.LayerNorm, config.d_model, bias=False)
    for block in model.blocks:
        if "RMSNorm" in parts:
            block.norm1, block.norm2, model.norm = norm(), norm(), norm()
        if "rotary" in parts:
            block.attn.base = None
        if "SwiGLU" in parts:
            block.ff = PlainFeedForward(config.d_model)
    return model


def size(model: nn.Module, config: GPTConfig) -> dict[str, int]:
    "Weights, without learned positions as nanoGPT counts, and FLOPs of the forward pass for each token."
    on_shapes = deepcopy(model).to("meta")  # the counter overlooks the CPU's own kernel for attention
    with FlopCounterMode(display=False) as counter:
        on_shapes.forward(some_text(config, 1).to("meta"))
    positions = model.positions.weight.numel() if isinstance(model, PlainGPT) else 0
    return {"weights": n_parameters(model) - positions, "flops": counter.get_total_flops() // config.context}


# -- the parts


def training_part(rounds: int, compiled: bool = False) -> dict:
    "Time of a training step, against the plain GPT."
    found = {}
    for name in ("tiny", "small"):
        config, batch = presets[name], batch_sizes[name]
        models = {"plain": PlainGPT(config), "plain again": PlainGPT(config)}
        models |= {pre: GPT(replace(config, pre=pre)) for pre in ("standard", "euler", "leapfrog_dkd")}
        without = [("RMSNorm",), ("rotary",), ("SwiGLU",), ("RMSNorm", "rotary", "SwiGLU")]
        if not compiled:
            models |= {f"no {', '.join(parts)}": taken_back(config, *parts) for parts in without}
        sizes = {label: size(model, config) for label, model in models.items()}
        works = {label: training(model, config, batch, compiled) for label, model in models.items()}
        rows = rows_of(in_turn(works, rounds, warm=2))
        print(table(f"training {name}, T = {config.context}, B = {batch}, {'compiled' if compiled else 'eager'}", rows))
        for label, row in rows.items():
            row |= sizes[label] | {"tokens_per_second": batch * config.context / row["seconds"]}
            print(
                "  {:28}{tokens_per_second:9.0f} tokens/s, {weights:,} weights, {flops:,} FLOPs a token".format(
                    label, **row
                )
            )
        found[name] = rows
    return found


def import_part(rounds: int) -> dict:
    "Time of an import in a new process, relative to that of torch, by the clock."
    models = "coupled_qk.gpt, coupled_qk.training, coupled_qk.compare"
    run = lambda names: lambda: subprocess.run([sys.executable, "-c", f"import {names}"], check=True)
    works = {names: run(names) for names in ("torch", "coupled_qk", models)}
    rows = rows_of(in_turn(works, rounds, clock=time.perf_counter))
    print(table("import", rows))
    return rows


PARTS = {
    "training": training_part,
    "training-compiled": partial(training_part, compiled=True),
    "import": import_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"what to measure: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each measurement (default: 15)")
    parser.add_argument("--json", type=Path, help="a file for the figures, with versions")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(unknown)}: choose among {', '.join(PARTS)}")
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {options.rounds}")
    torch.set_num_threads(1)
    result = {"environment": environment(), "rounds": options.rounds}
    for name in options.parts or PARTS:
        result[name] = PARTS[name](options.rounds)
    if options.json:
        write_result(result, options.json)


if __name__ == "__main__":
    main()
