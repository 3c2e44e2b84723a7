"Ways of scoring: the formulas by loops, shared keys, what is refused, and every pre-score module before each of them."

import math

import pytest
import torch
from coupled_qk.attention import MultiHeadAttention, Softmax, attention_weights
from coupled_qk.gpt import (
    GPT,
    GPTConfig,
    KVCache,
    count_parameters,
    load_model,
    n_parameters,
    save_model,
    scores,
    variants,
)
from coupled_qk.scoring import AffineCoupling, Differential, DifferentialV2, Lambda, QKNorm, lambda_start, pair_up
from test_attention import close, qkv, rand, refuses

IDS = torch.randint(0, 17, (2, 12), generator=torch.Generator().manual_seed(0))
SHARED = pytest.mark.parametrize("n_kv_heads", [4, 2])
DIFFERENTIAL = [name for name in scores if name != "softmax"]


def awake(module, std=0.3):
    "In float64, with all weights drawn: nothing starts at zero or one."
    torch.manual_seed(0)
    for p in module.double().parameters():
        torch.nn.init.normal_(p, std=std)
    return module


def layer(score, n_kv_heads=4, **options):
    return awake(MultiHeadAttention(32, 4, n_kv_heads, score=scores[score].for_layer(1, 32, 4), **options))


# -- version 1


def v1_by_loops(module, q, k, v):
    "Pair by pair, row by row, as the paper writes it; query head i reads key head i // r."
    share = module.share
    lam = math.exp(share.q1 @ share.k1) - math.exp(share.q2 @ share.k2) + share.start
    r, out = q.shape[1] // k.shape[1], []
    for g in range(k.shape[1] // 2):
        for i in range(r):
            maps = [attention_weights(q[:, [h]], k[:, [h // r]])[:, 0] for h in (2 * g * r + i, (2 * g + 1) * r + i)]
            read = (maps[0] - lam * maps[1]) @ v[:, g]
            length = (read.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            out.append((1 - share.start) * module.norm.weight * read / length)
    return torch.stack(out, 1)


@pytest.mark.parametrize("H,H_kv", [(4, 4), (4, 2), (12, 4), (6, 2)])
@torch.no_grad()
def test_version_1_by_loops(H, H_kv):
    q, k, v = qkv(H, H_kv, d=4, d_v=8)
    module = awake(Differential(4, layer=3))
    close(module(q, k, v[:, : H_kv // 2]), v1_by_loops(module, q, k, v[:, : H_kv // 2]))


@SHARED
@torch.no_grad()
def test_both_maps_of_a_pair_have_keys_of_their_own(n_kv_heads):
    "Each map changes when its own key head does, and only then."
    q, k, _ = qkv(4, n_kv_heads)
    for head in range(n_kv_heads):
        other = k.clone()
        other[:, head] = rand(*other[:, head].shape, seed=5)
        moved = [not torch.equal(a[1], b[1]) for a, b in zip(pair_up(q, k), pair_up(q, other), strict=True)]
        assert moved == [head % 2 == 0, head % 2 == 1]
    for (q_side, k_side), map_of in zip(pair_up(q, k), (0, 1), strict=True):
        r = 4 // n_kv_heads
        wanted = torch.cat([q[:, (2 * g + map_of) * r : (2 * g + map_of + 1) * r] for g in range(n_kv_heads // 2)], 1)
        close(q_side, wanted)
        close(k_side, k[:, map_of::2])


@torch.no_grad()
def test_a_share_of_zero_is_softmax_with_wide_values():
    module = awake(Differential(4))
    for vector in (module.share.q1, module.share.q2):
        vector.zero_()
    module.share.start = 0.0
    q, k, v = qkv(4, 4, d_v=8)
    close(module.weights(q, k), attention_weights(q[:, ::2], k[:, ::2]))


def test_where_lambda_starts():
    "The twelve values of the paper's schedule, to four digits."
    wanted = [0.2, 0.3555, 0.4707, 0.5561, 0.6193, 0.6661, 0.7008, 0.7265, 0.7456, 0.7597, 0.7701, 0.7779]
    assert [round(lambda_start(i), 4) for i in range(12)] == wanted
    model = GPT(GPTConfig(n_layers=3, score="differential"))
    assert [block.attn.score.share.start for block in model.blocks] == [lambda_start(i) for i in range(3)]
    refuses(lambda: lambda_start(-1), "layer")


@pytest.mark.parametrize("d", [16, 64, 128])
def test_lambda_spreads_around_its_start(d):
    torch.manual_seed(0)
    drawn = torch.tensor([Lambda(d, 0.5)().item() for _ in range(2000)])
    sd = 0.01 * (2 * d) ** 0.5
    assert abs(drawn.mean() - 0.5) < 4 * sd / 2000**0.5 + sd**2 * 2  # the mean of exp is a little above exp of the mean
    assert abs(drawn.std() / sd - 1) < 0.1  # four deviations of an estimate from 2,000, and heavier tails


def test_parameters_of_version_1():
    "4 D^2 + 6 d, as published for D = 1024, H = 8 pairs."
    with torch.device("meta"):
        count = lambda kind: n_parameters(MultiHeadAttention(1024, 16, score=kind.for_layer(0, 1024, 16)))
        assert (count(Differential), count(Softmax)) == (4_194_688, 4_194_304)
        assert 1.25 < count(DifferentialV2) / count(Softmax) < 1.26


# -- version 2


def v2_by_loops(module, q, k, v, x):
    share, r, out = 1 / (1 + (-(x @ module.share.weight.T)).exp()), q.shape[1] // k.shape[1], []
    for h in range(q.shape[1] // 2):
        even, odd = (attention_weights(q[:, [i]], k[:, [i // r]])[:, 0] @ v[:, i // r] for i in (2 * h, 2 * h + 1))
        out.append(even - share[..., [h]] * odd)
    return torch.stack(out, 1)


@pytest.mark.parametrize("H,H_kv", [(4, 4), (4, 2), (3, 1)])
@torch.no_grad()
def test_version_2_by_loops(H, H_kv):
    q, k, v = qkv(2 * H, H_kv, d=4, d_v=4)
    x, module = rand(2, 5, 12, seed=7), awake(DifferentialV2(12, H))
    close(module(q, k, v, x=x), v2_by_loops(module, q, k, v, x))
    assert all(i // (2 * H // H_kv) == (i + 1) // (2 * H // H_kv) for i in range(0, 2 * H, 2)), "a pair shares its key"


@torch.no_grad()
def test_version_2_keeps_lengths_below_the_root_of_two():
    "An even map subtracted from a sharp one: the length of random values stays in (0, sqrt 2)."
    module = DifferentialV2(64, 4)
    for scale in (0.0, 1.0, 100.0):
        q, k, v = (rand(4, n, 256, 16, seed=n, dtype=torch.float32) for n in (8, 4, 5))
        read = module(scale * q, k, v[:, :4], x=10 * rand(4, 256, 64, dtype=torch.float32))
        assert 0 < read[:, :, -1].square().mean().sqrt() < 2**0.5


def test_version_2_asks_for_the_layer_s_input():
    q, k, v = qkv(8, 4, d_v=4, dtype=torch.float32)
    refuses(lambda: DifferentialV2(16, 4)(q, k, v), "x", "None")


# -- as layers


@pytest.mark.parametrize("score", scores)
@SHARED
@torch.no_grad()
def test_weights_are_what_the_layer_reads_with(score, n_kv_heads):
    "Its output from the weights that it tells, and rows of softmax that add up to one."
    attn, x = layer(score, n_kv_heads, pre=awake(AffineCoupling(8))), rand(2, 6, 32)
    v = attn.project(x)[2]
    a = attn.weights(x)
    read = a @ v.repeat_interleave(a.shape[1] // v.shape[1], 1)
    if score == "differential":
        read = (1 - attn.score.share.start) * attn.score.norm(read)
    close(attn(x), attn.o_proj(read.transpose(1, 2).flatten(2)), 1e-11)
    assert a.triu(1).abs().max() == 0


@pytest.mark.parametrize("score", DIFFERENTIAL)
def test_gradients_against_finite_differences(score):
    attn = layer(score, 2)
    x = rand(1, 3, 32, grad=True)
    assert torch.autograd.gradcheck(lambda x: attn(x), (x,), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("score", DIFFERENTIAL)
@torch.no_grad()
def test_masks_reach_both_maps(score):
    attn, x = layer(score), rand(1, 5, 32)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[:, 1] = False
    mask[1, 1] = True
    changed = x.clone()
    changed[:, 1] += 1
    moved = (attn(x, mask) - attn(changed, mask)).abs().amax(-1)[0]
    assert moved[1] > 1e-3 and moved[[0, 2, 3, 4]].max() == 0


def test_refused_numbers_of_heads():
    refuses(lambda: GPTConfig(n_heads=3, d_model=96, score="differential"), "even", "3")
    refuses(lambda: GPTConfig(n_heads=4, n_kv_heads=1, score="differential"), "even", "1")
    GPTConfig(n_heads=3, d_model=96, score="differential_v2")
    refuses(lambda: GPTConfig(score="different"), "score", "differential_v2")
    refuses(lambda: GPTConfig(qk_norm=1), "qk_norm")


# -- affine coupling


def wild(d=4, n=2, **options):
    return awake(AffineCoupling(d, n, **options))


@pytest.mark.parametrize("H,H_kv", [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("n", [1, 3])
@torch.no_grad()
def test_affine_coupling_can_be_undone(H, H_kv, n):
    q, k, _ = qkv(H, H_kv)
    module = wild(n=n)
    moved = module(q, k)
    assert (moved[0] - q).abs().max() > 0.1 and (moved[1] - k).abs().max() > 0.1
    close(module.inverse(*moved), (q, k), 1e-12)
    close(module(*module.inverse(q, k)), (q, k), 1e-12)


@pytest.mark.parametrize("H,H_kv", [(1, 1), (3, 1), (4, 2)])
def test_change_of_volume_against_autograd(H, H_kv):
    "For shared keys too: a query moves as its group's mean does, and so does the volume."
    module = wild(d=3)
    q, k = rand(1, H, 1, 3), rand(1, H_kv, 1, 3, seed=1)
    cut = q.numel()

    def moved(z):
        return torch.cat([t.flatten() for t in module(z[:cut].view_as(q), z[cut:].view_as(k))])

    J = torch.autograd.functional.jacobian(moved, torch.cat([q.flatten(), k.flatten()]))
    close(module.log_det(q, k).sum(), torch.linalg.slogdet(J)[1], 1e-11)


@pytest.mark.parametrize("H_kv", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_affine_coupling_starts_as_the_identity_to_the_bit(H_kv, dtype):
    q, k, _ = qkv(4, H_kv, dtype=dtype)
    moved = AffineCoupling(4, 3).to(dtype)(q, k)
    assert torch.equal(moved[0], q) and torch.equal(moved[1], k)
    assert AffineCoupling(4, 3).to(dtype).log_det(q, k).abs().max() == 0


@torch.no_grad()
def test_a_model_with_affine_coupling_starts_as_the_standard_one():
    plain, with_it = (GPT(GPTConfig(vocab_size=17, context=12, n_heads=4, pre=p)) for p in ("standard", "affine"))
    assert torch.equal(plain(IDS), with_it(IDS))


@torch.no_grad()
def test_log_scales_are_bounded():
    module = AffineCoupling(4, bound=0.5)
    for p in module.parameters():
        p.fill_(1e3)
    q, k, _ = qkv(2, 2, dtype=torch.float32)
    s, _ = module.on_keys[0](q)
    assert s.abs().max() <= 0.5 and torch.isfinite(module(q, k)[1]).all()


def test_parameters_of_affine_coupling():
    "2 (3 d m + m + 2 d) a layer, from the formula of the coupling's shape; at d = 64 and 12 layers 0.24 % of 124 million."
    for d, m, n in ((64, 64, 1), (8, 3, 2)):
        assert n_parameters(AffineCoupling(d, n, m)) == n * 2 * (3 * d * m + m + 2 * d)
    assert round(100 * 12 * n_parameters(AffineCoupling(64)) / 124e6, 2) == 0.24


@pytest.mark.parametrize(
    "bad", [{"n": 0}, {"hidden": 0}, {"bound": 0}, {"bound": math.inf}, {"bound": "2"}, {"n": 1.5}]
)
def test_affine_coupling_refuses(bad):
    refuses(lambda: AffineCoupling(4, **bad), *bad)
    refuses(lambda: AffineCoupling(4)(*qkv(2, 2, d=3, dtype=torch.float32)[:2]), "head width 4")


# -- QK-norm


@torch.no_grad()
def test_qk_norm_bounds_scores_and_comes_last():
    q, k, _ = qkv(4, 2, d=16)
    q, k = QKNorm(16).double()(1e3 * q, 1e-3 * k)
    close(q.square().mean(-1), torch.ones(2, 4, 5, dtype=q.dtype), 1e-4)
    assert ((q.unflatten(1, (2, 2)) @ k[:, :, None].mT) / 4).abs().max() <= 4.001
    model = GPT(GPTConfig(pre="euler", qk_norm=True))
    assert [type(m).__name__ for m in model.blocks[0].attn.pre] == ["Coupling", "QKNorm"]
    assert len(model.displacements(IDS)) == 4  # a row for each coupling, none for the norm


# -- every pre-score module before every score


def pair(pre, score, dtype=torch.float64, **options):
    shape = GPTConfig(vocab_size=17, context=12, n_layers=2, n_heads=4, d_model=32, pre=pre, score=score, **options)
    return GPT(shape).to(dtype)


@pytest.mark.parametrize("score", scores)
@pytest.mark.parametrize("pre", variants)
@pytest.mark.parametrize("options", [{}, {"n_kv_heads": 2}, {"qk_norm": True}], ids=["plain", "shared", "norm"])
def test_every_pair(pre, score, options):
    "Nothing before a changed token moves; a cache changes nothing; every weight that is not behind a zero gets a gradient."
    model, cache = pair(pre, score, **options), KVCache(12)
    out = model(IDS)
    out.logsumexp(-1).sum().backward()
    waiting = {name.split(".")[-2] for name, p in model.named_parameters() if not p.grad.abs().sum() > 0}
    assert waiting <= ({"hidden"} if pre == "affine" else set())
    with torch.no_grad():
        close(torch.cat([model(part, cache) for part in IDS.split([5, 1, 6], 1)], 1), out, 1e-10)
        changed = IDS.clone()
        changed[:, 6] = (changed[:, 6] + 1) % 17
        moved = (model(changed) - out).abs().amax(-1)
    assert moved[:, :6].max() < 1e-12 and (moved[:, 6] > 1e-4).all()


@pytest.mark.parametrize("score", DIFFERENTIAL)
def test_saved_and_loaded(score, tmp_path):
    model = pair("affine", score, torch.float32, qk_norm=True)
    save_model(tmp_path, model)
    again = load_model(tmp_path)
    assert torch.equal(again(IDS), model(IDS)) and again.config == model.config
    assert count_parameters(model.config) == n_parameters(model)


@pytest.mark.parametrize("score", scores)
def test_variants_share_their_weights(score):
    "The same seed, another score: what they have in common is equal, but for the matrices of another shape."
    plain = dict(pair("standard", "softmax").named_parameters())
    theirs = dict(pair("euler", score).named_parameters())
    common = [name for name in plain if name in theirs and theirs[name].shape == plain[name].shape]
    assert len(common) >= len(plain) - 4 and all(torch.equal(plain[name], theirs[name]) for name in common)


@pytest.mark.parametrize("score", DIFFERENTIAL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_short_formats(score, dtype):
    model = pair("euler", score, dtype)
    assert model(IDS).dtype == dtype and torch.isfinite(model(IDS)).all()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(pair("euler", score, torch.float32)(IDS)).all()
