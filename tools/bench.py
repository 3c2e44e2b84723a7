"""What coupling costs in time and in memory, and how fast the small GPT trains and writes.

Times are CPU seconds of this process on one thread: on a quiet machine they are seconds of the clock, and on a busy one
they leave out the time for which others hold the processor. The competitors of a part take turns, so that what disturbs one
disturbs all; the first stands there twice, and its second line shows how far from 1 noise alone goes. A ratio is the median
over rounds of a competitor's time by the first one's in the same round, with the middle half of the rounds beside it.

Memory is the most that PyTorch's allocator has handed out at one time, from the building of the model to the end of its
first forward and backward pass: weights, gradients, all that is kept for the backward pass and all that is needed in passing,
but no optimizer. It is counted and not sampled: it does not depend on the machine's load, and its first line stands alone.

    python tools/bench.py                          all parts
    python tools/bench.py step memory --rounds 5   some parts, quicker and noisier
    python tools/bench.py --json bench.json        the same as JSON, too
"""

import argparse, itertools, json, os, platform, subprocess, sys, time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from coupled_qk import __version__
from coupled_qk.files import write_whole
from coupled_qk.gpt import GPT, GPTConfig, n_parameters, presets
from coupled_qk.training import TrainConfig, make_optimizer, train_step

Work = Callable[[], object]

BLOCK = GPTConfig(context=512, n_layers=1, n_heads=8, d_model=512, d_ff=2048)  # one block of the preset 60M
BATCH = {"block": 4, "tiny": 8, "small": 4}  # sequences
VARIANTS = {
    "standard": ("standard", {}),
    "euler": ("euler", {}),
    "leapfrog_dkd": ("leapfrog_dkd", {}),
    "leapfrog": ("leapfrog", {}),
    "euler, 7 steps": ("euler", {"n": 7}),
    "leapfrog, 7 steps": ("leapfrog", {"n": 7}),
}
LEAN = {f"{label}, lean": (pre, {**more, "lean": True}) for label, (pre, more) in VARIANTS.items() if pre != "standard"}


# -- measuring


def in_turn(
    works: dict[str, Work],
    rounds: int,
    warm: int = 2,  # rounds before these, to warm up or to compile
    clock: Callable[[], float] = time.process_time,
) -> dict[str, dict]:
    "Seconds of each work, and their ratio to the first one's of the same round."
    seconds: dict[str, list[float]] = {label: [] for label in works}
    for turn in range(-warm, rounds):
        for label, work in works.items():
            began = clock()
            work()
            seconds[label] += [clock() - began] if turn >= 0 else []
    base = next(iter(seconds.values()))
    ratios = {label: [a / b for a, b in zip(s, base, strict=True)] for label, s in seconds.items()}
    return {
        label: {
            "seconds": median(s),
            "fastest": min(s),
            "ratio": median(ratios[label]),
            "middle_half": quantiles(ratios[label], n=4)[::2],
            "fastest_ratio": min(s) / min(base),
        }
        for label, s in seconds.items()
    }


def peak_bytes(work: Work) -> int:
    "The most bytes that PyTorch's allocator had handed out at one time during `work`."
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]  # sizes; frees are negative
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def table(title: str, rows: dict[str, dict]) -> str:
    "Rows of `in_turn`, to read."
    lines = [f"{title}\n  {'':28}{'median':>10}{'fastest':>10}{'ratio':>8}  middle half     of the fastest"]
    for label, row in rows.items():
        line = "  {:28}{seconds:8.3f} s{fastest:8.3f} s{ratio:8.3f}  {middle_half[0]:.3f} to {middle_half[1]:.3f} {fastest_ratio:10.3f}"
        lines.append(line.format(label, **row))
    return "\n".join(lines)


def kind(compiled: bool) -> str:
    return "compiled" if compiled else "eager"


def versions() -> dict[str, str]:
    "What the figures depend on."
    return {
        "coupled_qk": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
    }


# -- one block, and whole models


def block_step(pre: str, more: dict, compiled: bool = False) -> Work:
    "A forward and backward pass of one block."
    block = GPT(replace(BLOCK, pre=pre, pre_options=more)).blocks[0]
    x = torch.randn(BATCH["block"], BLOCK.context, BLOCK.d_model, requires_grad=True)
    if compiled:
        block.compile()

    def step() -> None:
        block.zero_grad(set_to_none=True)
        block(x).sum().backward()

    return step


def some_text(config: GPTConfig, batch: int) -> Tensor:
    return torch.randint(config.vocab_size, (batch, config.context), generator=torch.Generator().manual_seed(0))


def model_step(name: str, pre: str, more: dict) -> Work:
    "A forward and backward pass of a preset."
    config = replace(presets[name], pre=pre, pre_options=more)
    model, ids = GPT(config), some_text(config, BATCH[name])
    return lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()


def training(model: nn.Module, config: GPTConfig, batch: int, compiled: bool) -> Work:
    "A step of training, with clipping and AdamW."
    if compiled:
        model.compile()
    settings, ids = TrainConfig(), some_text(config, batch)
    optimizer = make_optimizer(model, settings)
    return lambda: train_step(model, optimizer, ids, ids, settings)


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
    "Weights, without learned positions as nanoGPT counts, and FLOPs of the forward pass."
    with FlopCounterMode(display=False) as counter:
        model.forward(some_text(config, 1))
    positions = model.positions.weight.numel() if isinstance(model, PlainGPT) else 0
    return {"weights": n_parameters(model) - positions, "flops": counter.get_total_flops() // config.context}


def writing(model: GPT, prompt: Tensor, n: int) -> dict[str, Work]:
    "Write n tokens with the cache, and by reading the whole text again for every token."

    @torch.no_grad()
    def uncached() -> Tensor:
        ids = prompt
        for _ in range(n):
            ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
        return ids

    return {"cached": lambda: model.generate(prompt, n, temperature=0), "uncached": uncached}


# -- the parts


def step_part(rounds: int, compiled: bool = False) -> dict:
    "Time of one block, forward and backward."
    variants = {"standard": VARIANTS["standard"], "standard again": VARIANTS["standard"], **VARIANTS, **LEAN}
    rows = in_turn({label: block_step(*variant, compiled) for label, variant in variants.items()}, rounds)
    print(table(f"one block 512/1/8/2048, T = 512, B = 4, forward and backward, {kind(compiled)}", rows))
    return rows


def memory_part(rounds: int) -> dict:
    "Peak memory of a forward and backward pass; counted, so one round is enough."
    makers = {"block": block_step, "tiny": partial(model_step, "tiny"), "small": partial(model_step, "small")}
    found: dict[str, dict] = {}
    print(f"{'peak of forward and backward, MiB':34}" + "".join(f"{name:>18}" for name in makers))
    for label, variant in {**VARIANTS, **LEAN}.items():
        found[label] = {name: peak_bytes(lambda make=make, v=variant: make(*v)()) for name, make in makers.items()}
        cells = (f"{n / 2**20:9.1f}{n / found['standard'][name]:9.3f}" for name, n in found[label].items())
        print(f"  {label:32}{''.join(cells)}", flush=True)
    return found


def training_part(rounds: int, compiled: bool = False) -> dict:
    "Time of a training step, against the plain GPT."
    found = {}
    for name in ("tiny", "small"):
        config, batch = presets[name], BATCH[name]
        models = {"plain": PlainGPT(config), "plain again": PlainGPT(config)}
        models |= {pre: GPT(replace(config, pre=pre)) for pre in ("standard", "euler", "leapfrog_dkd")}
        without = [("RMSNorm",), ("rotary",), ("SwiGLU",), ("RMSNorm", "rotary", "SwiGLU")]
        if not compiled:
            models |= {f"no {', '.join(parts)}": taken_back(config, *parts) for parts in without}
        rows = in_turn({label: training(model, config, batch, compiled) for label, model in models.items()}, rounds)
        print(table(f"training {name}, T = {config.context}, B = {batch}, {kind(compiled)}", rows))
        for label, row in rows.items():
            row |= size(models[label], config) | {"tokens_per_second": batch * config.context / row["seconds"]}
            print(
                "  {:28}{tokens_per_second:9.0f} tokens/s, {weights:,} weights and {flops:,} FLOPs a token".format(
                    label, **row
                )
            )
        found[name] = rows
    return found


def writing_part(rounds: int) -> dict:
    "Time to write 256 tokens after one with `small`, with the cache and without."
    found = {}
    for pre, batch in itertools.product(("standard", "euler"), (1, 8)):
        model = GPT(replace(presets["small"], context=257, pre=pre))
        works = writing(model, torch.zeros(batch, 1, dtype=torch.long), 256)
        rows = found[f"{pre}, B = {batch}"] = in_turn(works, max(2, rounds // 5), warm=0)  # each writes for seconds
        print(table(f"writing 256 tokens with small, B = {batch}, {pre}", rows), flush=True)
    return found


def import_part(rounds: int) -> dict:
    "Time of an import in a new process, relative to that of torch, by the clock."
    models = "coupled_qk.gpt, coupled_qk.training, coupled_qk.compare"
    run = lambda names: lambda: subprocess.run([sys.executable, "-c", f"import {names}"], check=True)
    rows = in_turn({names: run(names) for names in ("torch", "coupled_qk", models)}, rounds, clock=time.perf_counter)
    print(table("import", rows))
    return rows


PARTS = {
    "memory": memory_part,
    "step": step_part,
    "step-compiled": partial(step_part, compiled=True),
    "training": training_part,
    "training-compiled": partial(training_part, compiled=True),
    "writing": writing_part,
    "import": import_part,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"what to measure: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each measurement (default: 15)")
    parser.add_argument("--json", type=Path, help="a file for the figures, with versions and load")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(unknown)}: choose among {', '.join(PARTS)}")
    torch.set_num_threads(1)
    result = {"versions": versions(), "rounds": options.rounds}
    for name in options.parts or PARTS:
        load = os.getloadavg()[0]
        result[name] = {"rows": PARTS[name](options.rounds), "load": [load, os.getloadavg()[0]]}
        print(f"  load of the machine before and after: {load:.1f}, {os.getloadavg()[0]:.1f}\n", flush=True)
    if options.json:
        write_whole(options.json, json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    main()
