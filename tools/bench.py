"""What coupling costs: one transformer block, forward and backward, against the same block without coupling.

One run, one thread, the variants interleaved, so that a busy machine disturbs all alike; ratios are medians over
rounds. Also the time of `import coupled_qk` and of all its modules that a model needs, against `import torch`.

    python tools/bench.py             the project's bars: 512/1/8/2048, T = 512, B = 4, eager and compiled
    python tools/bench.py --rounds 5  quicker, noisier
"""

import argparse, json, statistics, subprocess, sys, time
from dataclasses import asdict

import torch
from coupled_qk.gpt import GPT, GPTConfig

SHAPE = GPTConfig(context=512, n_layers=1, n_heads=8, d_model=512, d_ff=2048)
VARIANTS = {
    "standard": ("standard", {}),
    "standard again": ("standard", {}),  # how far from 1 noise alone goes
    "euler": ("euler", {}),
    "leapfrog_dkd": ("leapfrog_dkd", {}),
    "leapfrog": ("leapfrog", {}),
    "euler, n=7": ("euler", {"n": 7}),
    "leapfrog, n=7": ("leapfrog", {"n": 7}),
    "query_mlp": ("query_mlp", {}),
}


def step(block, x):
    "Seconds for one forward and backward pass."
    began = time.perf_counter()
    block.zero_grad(set_to_none=True)
    block(x).sum().backward()
    return time.perf_counter() - began


def ratios(compiled, rounds, batch):
    "Median over rounds of each variant's time relative to standard in the same round, and standard's seconds."
    blocks = {}
    for label, (name, options) in VARIANTS.items():
        block = GPT(GPTConfig(**{**asdict(SHAPE), "pre": name, "pre_options": options})).blocks[0]
        blocks[label] = torch.compile(block) if compiled else block
    x = torch.randn(batch, SHAPE.context, SHAPE.d_model, requires_grad=True)
    for block in blocks.values():
        step(block, x), step(block, x)  # compile and warm up
    times = [{label: step(block, x) for label, block in blocks.items()} for _ in range(rounds)]
    base = statistics.median(t["standard"] for t in times)
    return {label: statistics.median(t[label] / t["standard"] for t in times) for label in blocks}, base


def import_ratio(module, rounds):
    "Time of importing `module` in a fresh process, relative to torch; the median of interleaved rounds."
    seconds = {name: [] for name in ("torch", module)}
    for _ in range(rounds):
        for name in seconds:
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import {name}"], check=True)
            seconds[name].append(time.perf_counter() - began)
    return statistics.median(b / a for a, b in zip(seconds["torch"], seconds[module], strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each measurement (default: 15)")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch (default: 4)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {"torch": torch.__version__, "rounds": options.rounds, "batch": options.batch}
    for mode in ("eager", "compiled"):
        result[mode], seconds = ratios(mode == "compiled", options.rounds, options.batch)
        print(f"{mode}: standard takes {1000 * seconds:.0f} ms a step; relative to it", flush=True)
        for label, ratio in result[mode].items():
            print(f"  {label:15} {ratio:.3f}")
    models = "coupled_qk.gpt, coupled_qk.training, coupled_qk.experiments"
    result["import"] = {name: import_ratio(name, options.rounds) for name in ("coupled_qk", models)}
    for name, ratio in result["import"].items():
        print(f"import {name}: {ratio:.3f} of import torch")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
