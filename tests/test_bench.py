"""The bench compares like with like, counts to the byte and to the FLOP, and its bars on memory hold; times are not tested."""

import json, subprocess, sys, time
from dataclasses import replace

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import bench as guard  # tools/bench.py

from coupled_qk import bench, bench_runs
from coupled_qk.attention import Softmax, attend
from coupled_qk.bench_runs import BenchConfig, bench_arms, scaling_points, scaling_shape
from coupled_qk.cli import main
from coupled_qk.compare import stored_result
from coupled_qk.gpt import GPT, GPTConfig, n_parameters, presets, variants

little = GPTConfig(vocab_size=17, context=12, n_layers=1, n_heads=4, d_model=16, d_ff=24)


# -- counting


@pytest.mark.parametrize("pre", sorted(set(variants) - {"affine", "euler_terms"}))
@pytest.mark.parametrize("n_kv_heads", [None, 2])
def test_the_formula_is_what_pytorch_counts(pre, n_kv_heads):
    "Three times the forward pass; two blocks cost two blocks, two rows two rows, and the loss adds the read-out."
    if n_kv_heads and pre in ("query_mlp", "both_mlp", "cross_mlp"):
        pytest.skip("these move every query, and not one for each key")
    config = replace(little, pre=pre, n_kv_heads=n_kv_heads, qk_norm=True)
    costs = bench.block_costs(config, 3, bench.force_evaluations(config))
    forward = sum(c.flops for c in costs.values())
    assert bench.training_flops(config, 3, whole=False) == 3 * forward
    assert bench.training_flops(replace(config, n_layers=2), 3, whole=False) == 6 * forward
    assert bench.training_flops(config, 3) == 3 * (forward + 2 * 3 * 12 * 16 * 17)


@pytest.mark.parametrize(
    "pre, n, calls", [("euler", 1, 1), ("euler", 7, 7), ("leapfrog", 7, 8), ("leapfrog_dkd", 7, 7), ("rk4", 2, 8)]
)
def test_lean_computes_each_force_once_more(pre, n, calls):
    config = replace(little, pre=pre, pre_options={"n": n})
    assert bench.force_evaluations(config) == calls
    lean = replace(config, pre_options={"n": n, "lean": True})
    one = bench.block_costs(little, forces=1)["force"].flops
    flops = [bench.training_flops(c, whole=False) for c in (little, config, lean)]
    assert [f - flops[0] for f in flops] == [0, 3 * calls * one, 4 * calls * one]


def test_bytes_of_a_product_and_of_the_fused_kernel():
    costs = bench.block_costs(little, 2, 1)
    n, D, d = 24, 16, 4
    assert costs["projections"].bytes == 4 * (n * D + D * 3 * D + n * 3 * D + n * D + D * D + n * D)
    assert costs["scores"].bytes == 4 * 4 * n * D  # q, k, v and the result: no T x T
    assert costs["force"].bytes == 4 * (2 * (2 * n * D + d * d) + 2 * n * D)
    assert costs["force"].intensity == costs["force"].flops / costs["force"].bytes


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="softmax"):
        bench.block_costs(replace(little, score="differential"))
    with pytest.raises(ValueError, match="one force"):
        bench.force_evaluations(replace(little, pre="affine"))
    for wrong in ({"batch_size": 0}, {"forces": -1}, {"batch_size": 1.5}):
        with pytest.raises(ValueError):
            bench.block_costs(little, **wrong)


# -- measuring


def test_memory_is_counted_to_the_byte():
    "Two tensors are alive when the second is made, and when the third is; the first is gone by then."

    def work():
        first = torch.empty(1000)
        second = first.clone()
        del first
        return second.clone()

    assert bench.peak_bytes(work) == bench.peak_bytes(work) == 2 * 4000
    assert bench.memory_curve(work)[-1] == 4000
    assert bench.peak_bytes(lambda: None) == 0


def test_turns():
    "Works that take 1 and 2, then 10 and 30 seconds; and a round before, which does not count."
    took = {"a": iter([99, 1, 10]), "b": iter([99, 2, 30])}
    now = [0]
    works = {label: lambda s=seconds: now.append(now[-1] + next(s)) for label, seconds in took.items()}
    seconds = bench.in_turn(works, rounds=2, clock=lambda: now[-1])
    assert seconds == {"a": [1, 10], "b": [2, 30]}
    assert bench.relative(seconds["b"], seconds["a"]).median == 2.5
    assert bench.relative(seconds["a"], seconds["a"]) == (1, 1, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: bench.in_turn({}, 3),
        lambda: bench.in_turn({"a": print}, 0),
        lambda: bench.in_turn({"a": print}, 3, warm=-1),
        lambda: bench.relative([1.0], [1.0]),
        lambda: bench.relative([1.0, 2.0], [1.0, 2.0, 3.0]),
        lambda: bench.relative([1.0, 2.0], [0.0, 2.0]),
        lambda: bench.relative([1.0, float("nan")], [1.0, 2.0]),
        lambda: bench.matmul_rate(n=0),
        lambda: bench.matmul_rate(precision="float8"),
        lambda: bench.copy_rate(n=-1),
        lambda: bench.training_pass(little, 0),
        lambda: bench_runs.writing(little, 0),
    ],
)
def test_bad_input_is_one_sentence(call):
    with pytest.raises(ValueError) as error:
        call()
    assert "\n" not in str(error.value) and "must" in str(error.value) or "choose" in str(error.value)


def test_a_gpu_is_waited_for_before_the_clock_is_read(monkeypatch):
    "There is none here: the order of the calls is all that can be tested."
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append(device))
    monkeypatch.setattr(time, "perf_counter", lambda: seen.append("clock") or 1.0)
    assert bench.clock_of("cuda:1")() == 1.0 and seen == ["cuda:1", "clock"]
    assert bench.clock_of("cpu") is time.process_time


def test_the_rates_are_rates():
    assert 1e8 < bench.matmul_rate(n=64) < 1e16 and 1e7 < bench.copy_rate(n=2**16) < 1e14


@pytest.mark.parametrize("n", [1, 3])
def test_careless_habits_change_no_result(n):
    "Nor the gradient of the input; the slope's own pair is compared by its closed form in the chapter."
    torch.manual_seed(0)
    q, k = (torch.randn(2, 4, 5, 8, dtype=torch.float64, requires_grad=True) for _ in "qk")
    ways = bench_runs.habits(8, n)
    good = ways["none"][0].double()
    want = torch.stack(torch.autograd.grad(sum((x**2).sum() for x in good(q, k)), (q, k)))
    for name in ("2n forces", "a loop over heads", "copies", "all of these"):
        way = ways[name][0].double()
        way.load_state_dict(good.state_dict())
        got = torch.stack(torch.autograd.grad(sum((x**2).sum() for x in way(q, k)), (q, k)))
        assert torch.allclose(got, want, rtol=0, atol=1e-12), name
    for name in ("explicit scores", "all of these"):
        assert torch.allclose(ways[name][1](q, k, k), attend(q, k, k), rtol=0, atol=1e-12)


def test_the_derived_force_is_a_slope_without_gradients_too():
    force, q = bench.DerivedForce(3).double(), torch.randn(5, 3, dtype=torch.float64)
    with torch.no_grad():
        f = force(q)
    assert torch.allclose(f, -force.hidden(q).sigmoid() @ force.hidden.weight)
    torch.autograd.gradcheck(force, q.requires_grad_())


def test_two_n_forces_are_counted():
    calls = []
    force = lambda q: calls.append(1) or -q
    bench.leapfrog_twice(torch.ones(2), torch.ones(2), force, 0.1, n=4)
    assert len(calls) == 8


# -- the whole bench


def test_arms():
    arms = bench_arms(BenchConfig())
    assert len(arms) == 15 and list(arms)[:2] == ["standard", "standard again"]
    assert arms["leapfrog, 7 steps, lean"].pre_options == {"n": 7, "lean": True}
    assert "query_mlp, lean" not in arms and "query_mlp, 7 steps" not in arms
    everything = bench_arms(BenchConfig(variants=tuple(variants)))
    assert {c.pre for c in everything.values()} == set(variants)
    assert list(bench_arms(BenchConfig(variants=("euler",), steps=(2,))))[:2] == [
        "euler, 2 steps",
        "euler, 2 steps again",
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"variants": ()},
        {"variants": ("euler", "euler")},
        {"variants": ("eular",)},
        {"variants": "euler"},
        {"steps": ()},
        {"steps": (0,)},
        {"steps": (1.5,)},
        {"steps": 7},
        {"size": "huge"},
        {"batch_size": 0},
        {"rounds": 1},
        {"rounds": "many"},
        {"device": "mps"},
        {"device": "tpu"},
        {"device": 0},
        {"precision": "int8"},
        {"compiled": 1},
    ],
    ids=str,
)
def test_bad_settings_are_one_sentence(wrong):
    with pytest.raises((ValueError, TypeError)) as error:
        BenchConfig(**wrong)
    assert "\n" not in str(error.value) and str(next(iter(wrong))).rstrip("s") in str(error.value)


def test_too_little_memory_is_told_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(bench_runs, "free_memory", lambda: 1e6)
    with pytest.raises(ValueError, match="variants must be fewer"):
        bench_runs.bench()


@pytest.mark.parametrize("label", [label for label in bench_arms(BenchConfig(size="tiny")) if label.endswith("lean")])
def test_lean_coupling_needs_at_most_a_tenth_more_memory(label):
    "The project's bar, where it is hardest to meet: the less width, the larger the share of q and k."
    arms = bench_arms(BenchConfig(size="tiny"))
    standard, lean = (
        bench.peak_bytes(lambda c=arms[name]: bench.training_pass(c, 8)()) for name in ("standard", label)
    )
    assert lean <= 1.1 * standard


def test_writing_is_compared_on_one_text():
    texts = [bench_runs.writing(presets["tiny"], 5, cached)() for cached in (True, False)]
    assert torch.equal(*texts) and texts[0].shape == (1, 6)


def test_scaling_points():
    "All have the tokens of the reference in a batch, and the formula is a ratio of counted FLOPs."
    for point in scaling_points():
        config, size = scaling_shape(point, "leapfrog")
        assert size * config.context == 2048 and config.heads.d == point["d"] and config.n_layers == point["L"]
    rows = [
        {
            **point,
            "variant": pre,
            "flops": bench.training_flops(*scaling_shape(point, pre), False),
            "seconds": [1.0, 1.0],
        }
        for point in scaling_points()
        if point["T"] == 512
        for pre in ("standard", "euler", "leapfrog")
    ]
    flops = {(*(row[x] for x in "TndL"), row["variant"]): row["flops"] for row in rows}
    for letter in "ndL":
        for x, spread, predicted in bench_runs.scaling_ratios(rows, letter, "leapfrog"):
            at = tuple({**bench_runs.reference, letter: x}.values())
            assert spread.median == 1 and predicted == pytest.approx(
                flops[(*at, "leapfrog")] / flops[(*at, "standard")]
            )
    with pytest.raises(ValueError, match="letter"):
        bench_runs.scaling_ratios(rows, "H", "euler")


# -- the command


@pytest.fixture
def small_world(monkeypatch):
    "A shape in which everything takes milliseconds."
    monkeypatch.setattr(bench_runs, "block_shape", replace(little, context=16, d_model=32, n_heads=4))
    monkeypatch.setattr(bench_runs, "matmul_rate", lambda *_: 1e9)
    monkeypatch.setattr(bench_runs, "copy_rate", lambda *_: 1e9)
    monkeypatch.setattr(bench_runs, "writing", lambda c, cached=True, **_: lambda: sum(range(1000)))
    monkeypatch.setattr(bench_runs, "grid", {"T": (8, 16), "n": (1, 2), "d": (8, 16), "L": (1, 2)})
    monkeypatch.setattr(bench_runs, "reference", {"T": 16, "n": 1, "d": 8, "L": 1})
    tick = iter(range(10**9))
    monkeypatch.setattr(bench_runs, "clock_of", lambda device: lambda: float(next(tick)))  # each work takes a second


def test_the_command(small_world, tmp_path, capsys):
    "Tables, facts and files; what is stored is what is printed."
    args = ["--variants", "standard", "leapfrog", "query_mlp", "--steps", "1", "2", "--rounds", "2"]
    assert main(["bench", *args, "--scaling", "--habits", "--out", str(tmp_path / "new")]) == 0
    out, err = capsys.readouterr()
    for word in (
        "standard again",
        "leapfrog, 2 steps, lean",
        "query_mlp",
        "slope derived",
        "load of the machine",
        "times as fast",
    ):
        assert word in out
    assert "Traceback" not in err and all(f"{name} " in out for name in bench_runs.bench_legend)
    result = json.loads((tmp_path / "new" / "bench.json").read_text(encoding="utf-8"))
    assert all(len(arm["seconds"]) == 2 for arm in result["arms"].values())
    assert {"commit", "torch", "cpu", "threads"} <= result["environment"].keys() and set(result["habits"]) == {"1", "2"}
    for name in ("bench.png", "scaling.png"):
        assert (tmp_path / "new" / name).read_bytes().startswith(b"\x89PNG")


def test_json_is_all_that_is_printed(small_world, tmp_path, capsys):
    args = ["--variants", "standard", "euler_terms", "affine", "--rounds", "2", "--json", "--out", str(tmp_path)]
    assert main(["bench", *args]) == 0
    out, _ = capsys.readouterr()
    assert json.loads(out) == json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "args, words",
    [
        (["--variants", "standard", "leapfrg"], "(did you mean 'leapfrog'?)"),
        (["--variants", "euler", "euler"], "variants must be different"),
        (["--steps", "0"], "must be a positive integer, got 0"),
        (["--size", "huge"], "unknown size 'huge'"),
        (["--rounds", "1"], "rounds must be at least 2"),
        (["--batch-size", "0"], "batch_size must be a positive integer, got 0"),
        (["--device", "tpu"], "device must be"),
        (["--precision", "int8"], "unknown precision 'int8'"),
        (["--scaling", "--size", "tiny"], "--scaling measure the block as it is"),
        (["--habits", "--compile"], "--habits are measured eager"),
        (["--out", ""], "must not be empty"),
        (["--out", "/proc/no/folder"], "output folder"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_options_are_one_sentence(args, words, tmp_path, capsys):
    try:
        code = main(["bench", *args, *([] if "--out" in args else ["--out", str(tmp_path / "new")])])
    except SystemExit as stop:  # argparse's own
        code = stop.code
    err = capsys.readouterr().err
    assert code == 2 and words in err and (err.startswith("usage") or err.count("\n") == 1), err
    assert not (tmp_path / "new").exists()


def test_help_names_all_variants_and_sizes(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and "examples:" in out
    assert all(name in out for name in (*variants, *bench_runs.batch_sizes))


def test_the_stored_result_is_whole():
    "Of the bars' block, with all default variants, scaling and habits, and with its standard measured twice."
    result = stored_result("bench")
    assert result["size"] == "block" and list(result["arms"]) == list(bench_arms(BenchConfig()))
    assert {len(arm["seconds"]) for arm in result["arms"].values()} == {result["rounds"]}
    for label, config in bench_arms(BenchConfig()).items():
        assert result["arms"][label]["flops"] == bench.training_flops(config, 4, whole=False)
    assert len(bench_runs.scaling_ratios(result["scaling"], "T", "leapfrog")) == 4
    assert set(result["habits"]["7"]) == {"standard", *bench_runs.habits(8)}


# -- what only this project needs to know


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_the_plain_gpt_is_as_large_and_as_much_work(name):
    "Within 2 %; learned positions, which cost a table but no work, are not counted."
    config = presets[name]
    plain, ours = (guard.size(model(config), config) for model in (guard.PlainGPT, GPT))
    for what in ("weights", "flops"):
        assert ours[what] == pytest.approx(plain[what], rel=0.02)
    assert ours["weights"] == n_parameters(GPT(config))


@torch.no_grad()
def test_the_plain_gpt_reads_in_order_and_not_ahead():
    config = presets["tiny"]
    torch.manual_seed(0)
    model, ids = guard.PlainGPT(config).double(), torch.arange(20)[None]
    before, changed = model(ids), ids.clone()
    changed[:, 10] = 99
    moved = (model(changed) - before).abs().amax(-1)[0]
    assert before.shape == (1, 20, 256) and moved[:10].max() < 1e-12 and moved[10:].min() > 1e-6
    assert not torch.allclose(model(ids.flip(1)).flip(1)[:, 5], before[:, 5])


def test_parts_taken_back_are_plain():
    block = guard.taken_back(presets["tiny"], "RMSNorm", "rotary", "SwiGLU").blocks[0]
    assert isinstance(block.norm1, torch.nn.LayerNorm) and block.attn.base is None
    assert isinstance(block.ff, guard.PlainFeedForward) and isinstance(block.attn.score, Softmax)


def test_the_script(tmp_path):
    "It runs a part, prints a table, and writes what it found, and with what, as JSON."
    command = [sys.executable, "-W", "ignore", ROOT / "tools/bench.py", "import", "--rounds", "2"]
    done = subprocess.run([*command, "--json", tmp_path / "out.json"], capture_output=True, text=True)
    assert done.returncode == 0 and "coupled_qk" in done.stdout, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["environment"]["torch"] == torch.__version__ and found["import"]["torch"]["ratio"] == 1


def test_an_unknown_part_is_refused():
    done = subprocess.run([sys.executable, ROOT / "tools/bench.py", "speed"], capture_output=True, text=True)
    assert done.returncode == 2 and "speed" in done.stderr and "import" in done.stderr
