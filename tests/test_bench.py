"""The benchmark compares like with like, counts memory to the byte, and its bars on memory hold; times are not tested."""

import json, subprocess, sys

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import bench

from coupled_qk.gpt import GPT, presets


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_the_plain_gpt_is_as_large_and_as_much_work(name):
    "Within 2 %; learned positions, which cost a table but no work, are not counted."
    config = presets[name]
    plain, ours = (bench.size(model(config), config) for model in (bench.PlainGPT, GPT))
    for what in ("weights", "flops"):
        assert ours[what] == pytest.approx(plain[what], rel=0.02)


@torch.no_grad()
def test_the_plain_gpt_reads_in_order_and_not_ahead():
    config = presets["tiny"]
    torch.manual_seed(0)
    model, ids = bench.PlainGPT(config).double(), torch.arange(20)[None]
    before, changed = model(ids), ids.clone()
    changed[:, 10] = 99
    moved = (model(changed) - before).abs().amax(-1)[0]
    assert before.shape == (1, 20, 256) and moved[:10].max() < 1e-12 and moved[10:].min() > 1e-6
    assert not torch.allclose(model(ids.flip(1)).flip(1)[:, 5], before[:, 5])


def test_writing_is_compared_on_one_text():
    model, prompt = GPT(presets["tiny"]), torch.zeros(1, 1, dtype=torch.long)
    works = bench.writing(model, prompt, 5)
    assert torch.equal(works["cached"](), works["uncached"]()) and works["cached"]().shape == (1, 6)


def test_memory_is_counted_to_the_byte():
    "Two tensors are alive when the second is made, and when the third is; the first is gone by then."

    def work():
        first = torch.empty(1000)
        second = first.clone()
        del first
        return second.clone()

    assert bench.peak_bytes(work) == bench.peak_bytes(work) == 2 * 4000


@pytest.mark.parametrize("label", bench.LEAN)
def test_lean_coupling_needs_at_most_a_tenth_more_memory(label):
    "The project's bar, where it is hardest to meet: the less width, the larger the share of q and k."
    standard, lean = (
        bench.peak_bytes(lambda v=v: bench.model_step("tiny", *v)())
        for v in (bench.VARIANTS["standard"], bench.LEAN[label])
    )
    assert lean <= 1.1 * standard


def test_ratios_are_of_one_round():
    "Works that take 1 and 2, then 10 and 30 seconds; and a round before, which does not count."
    took = {"a": iter([99, 1, 10]), "b": iter([99, 2, 30])}
    now = [0]
    works = {label: lambda s=seconds: now.append(now[-1] + next(s)) for label, seconds in took.items()}
    rows = bench.in_turn(works, rounds=2, warm=1, clock=lambda: now[-1])
    assert rows["a"]["ratio"] == 1 and rows["b"]["ratio"] == 2.5 and rows["b"]["fastest_ratio"] == 2
    assert rows["b"]["seconds"] == 16 and rows["b"]["fastest"] == 2


def test_the_script(tmp_path):
    "It runs a part, prints a table, and writes what it found, and with what, as JSON."
    command = [
        sys.executable,
        "-W",
        "ignore",
        ROOT / "tools/bench.py",
        "import",
        "--rounds",
        "2",
        "--json",
        tmp_path / "out.json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "coupled_qk" in done.stdout, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["versions"]["torch"] == torch.__version__
    assert found["import"]["rows"]["torch"]["ratio"] == 1 and len(found["import"]["load"]) == 2


def test_an_unknown_part_is_refused():
    done = subprocess.run([sys.executable, ROOT / "tools/bench.py", "speed"], capture_output=True, text=True)
    assert done.returncode == 2 and "speed" in done.stderr and "memory" in done.stderr
