"""plan.py against fact: parameters, autograd's own memory, counted collectives, measured GPUs, BLOOM."""
import dataclasses
import json
import statistics
from unittest import mock

import pytest
import torch
from pool import run_ranks
from shared import Documents
from torch.utils._python_dispatch import TorchDispatchMode

import attention
import model as model_
import moe
import plan
import train
from config import Config, head_width
from corpus.samples import Synthetic
from cost import step_time
from cost.gpus import GPUS
from cost.memory import saved_activations
from cost.parameters import Rank, count_parameters, flops_per_token, stage_mesh
from cost.step_time import peak_flops
from cost.traffic import reductions, traffic
from ddp import Bucket, DataParallel, assign_buckets, trained_parameters
from fast.buckets import CopyBucket, LoneBucket
from interface.command_line import parse
from interface.presets import PRESETS
from model import GPT
from ops import activations
from parallel import make_mesh
from runtime.agree import Stop
from runtime.launch import World

ONE = make_mesh(World(), groups=False)


def preset(name, **more):
    return Config(**{**PRESETS[name], "preset": name, **more})


# -----------------------------------------------------------------------------
# Parameters and FLOPs

@pytest.mark.parametrize("name, published, left_out", [
    ("nanochat-d20", 560_988_160, 0),
    # Value embeddings of 12 and 13 layers, the gates before them, and two factors for each layer
    ("nanochat-d24", 1_384_124_976, 12 * 32768 * 1536 + 12 * 32 * 12 + 2 * 24),
    ("nanochat-d26", 1_681_790_292, 13 * 32768 * 1664 + 13 * 32 * 13 + 2 * 26),
    # 124 million, without the head: untied, it is not counted there
    ("modded-nanogpt", 124e6 + 50304 * 768, 0)])
def test_models_whose_norms_have_no_weights_are_as_large_as_published(name, published, left_out):
    cfg = preset(name)
    norms = (2 * cfg.n_layer + 1) * cfg.n_embd + 2 * cfg.n_layer * head_width(cfg)
    found = count_parameters(cfg, cfg.vocab_size)["total"] - norms + left_out
    assert found == pytest.approx(published, rel=0.003 if isinstance(published, float) else 0)


def test_parameters_per_rank_add_up():
    cfg = preset("bloom-176b", tp=4, pp=12)
    share = [Rank(cfg, stage_mesh(cfg, 384, s), 250880).parameters() for s in range(12)]
    total, C = count_parameters(cfg, 250880)["total"], cfg.n_embd
    # Each of 4 ranks holds norms, positions and the biases behind row-parallel products. The last stage also
    # holds a copy of the tied embedding.
    twice = 3 * (70 * (4 * C + 2 * C) + 2 * C + cfg.seq_len * C) + 250880 * C
    assert 4 * sum(share) == total + twice


def test_flops_give_the_published_figures():
    w1 = flops_per_token(preset("dense-210m"), 128256)[0] * 64 * 2048
    assert abs(w1 / 0.226 / 8 / 1e12 - 85.9) < 0.5
    bloom = flops_per_token(preset("bloom-176b"), 250880)[0] * 2048 * 2048 * 4 / 3  # it recomputed: 8 for 6
    assert abs(bloom / 102.03 / 384 / 1e12 - 153.68) < 1.5
    plain, lora = (flops_per_token(preset("dense-210m", lora=n), 1000)[0] for n in (0, 8))
    assert plain - lora == 2 * 82_313_216 - 6 * 1_966_080  # 4 for a frozen weight, 6 for one of an adapter


# -----------------------------------------------------------------------------
# Memory: what saved_activations says against what autograd keeps, on a GPU's code paths with CPU tensors

HEADS = dict(n_head=4, n_kv_head=1)
FAMILY = {"swiglu": {}, "gelu": dict(norm="layer", mlp="gelu", pos="learned", n_kv_head=4),
          "moe": dict(n_experts=8, top_k=2), "capacity": dict(n_experts=8, top_k=2, capacity_factor=1.25)}
FAMILY.update({"wide heads": dict(head_dim=24), "norms after": dict(norm_place="after"),
               "norms of heads": dict(qk_norm="head"), "norm of all heads": dict(qk_norm="all")})
FAMILY.update({"four norms": dict(norm_place="both"), "geglu": dict(mlp="geglu")})
FAMILY.update({"norms of heads, cp": dict(qk_norm="head", cp=2)})
FAMILY.update({"swiglu, cp": dict(cp=2), "gelu, cp": dict(FAMILY["gelu"], cp=2)})


@mock.patch.dict(activations.ACTIVATIONS, swiglu=activations.swiglu_by_kernel)
@mock.patch.object(moe, "use_grouped_mm", lambda x, w: True)
# On a GPU, one kernel does this: it keeps x and a number per row, not fp32 copies
@mock.patch.object(model_.F, "rms_norm", lambda x, shape, w, e: torch.layer_norm(x, shape, w, None, e))
# Both ranks of cp hold the same values here; flash attention needs no mask
@mock.patch.object(attention, "gather_segments", lambda kv, axis: torch.cat([kv, kv]))
@mock.patch("torch.nn.attention.bias.causal_lower_right", lambda *sizes: None)
def kept_bytes(cfg, mesh):
    torch.set_default_dtype(torch.bfloat16)
    block = model_.Block(cfg, mesh)
    torch.set_default_dtype(torch.float32)
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.02)
    own, seen = {p.untyped_storage().data_ptr() for p in block.parameters()}, {}
    t = 64 // cfg.cp
    table = None, None
    if cfg.pos == "rope":
        table = attention.rope_cache(t, head_width(cfg), 1e4, "cpu", torch.float32)
    own |= {t.untyped_storage().data_ptr() for t in table if t is not None}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return t
    x = torch.randn(cfg.micro_batch * t, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = block(x, t, *table)
    assert out[0].shape == x.shape
    return sum(seen.values())


BLOCK = dict(n_embd=64, ffn_hidden=224, **HEADS, seq_len=64, micro_batch=2, dtype="bf16")


@pytest.mark.parametrize("family", FAMILY)
def test_saved_activations_are_what_autograd_keeps(family):
    cfg = Config(**{**BLOCK, **FAMILY[family]})
    mesh = make_mesh(World(size=cfg.cp), cp=cfg.cp, groups=False)
    assert saved_activations(Rank(cfg, mesh, 100))[0] == pytest.approx(kept_bytes(cfg, mesh), rel=0.03)


class Kept(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in model_.KEPT:
            tensors = [t for t in (out if isinstance(out, tuple) else [out]) if isinstance(t, torch.Tensor)]
            self.calls.setdefault(func.__name__.split(".")[0], []).append(sum(t.nbytes for t in tensors))
        return out


@pytest.mark.parametrize("family", ["swiglu", "gelu"])
def test_what_selective_recomputation_keeps(family):
    """The block's input, matrix products, attention, as predicted; none of them runs again in backward."""
    cfg = Config(**{**dict(n_embd=64, ffn_hidden=224, **HEADS, seq_len=64, micro_batch=8),
                    **FAMILY[family], "recompute": "selective"})
    block = model_.Block(cfg, ONE)
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.02)
    x = torch.randn(512, 64, requires_grad=True)
    table = attention.rope_cache(64, 16, 1e4, "cpu", torch.float32) if cfg.pos == "rope" else (None, None)
    with Kept() as forward:
        out, _ = block(x, 64, *table)
    nbytes = sum(map(sum, forward.calls.values()))
    assert saved_activations(Rank(cfg, ONE, 100))[1] == pytest.approx(nbytes + x.nbytes, rel=1e-9)
    with Kept() as backward:
        out.sum().backward()
    products = [c for name in ("mm", "addmm") for c in forward.calls.get(name, [])]
    assert {name: len(c) for name, c in backward.calls.items()} == {"mm": 2 * len(products)}, "dX and dW"


def test_zero_3_holds_seven_billion_parameters_on_four_gpus_of_40_gb():
    fits, memory = zip(*((p["fits"], p["memory"]) for p in (
        plan.estimate(preset("llama-7b", zero=zero, global_batch=4, recompute="full"), 4, "a100-40", 32000)
        for zero in range(4))), strict=True)
    assert fits == (False, False, False, True) and memory[3] < 36


def test_uneven_routing_has_a_sum_where_it_was_measured():
    """Not over more than eight ranks, not with a capacity, and not on one rank, where nobody waits."""
    def ms(gpus, *flags):
        cfg, _ = plan.arguments(["moe-4b", f"--ep={gpus}", f"--gpus={gpus}", *flags])
        return plan.plan_one(cfg, cfg.vocab_size)[1]["ms_uneven"]
    assert ms(4) and ms(8)
    assert ms(1) is None and ms(16) is None and ms(4, "--capacity-factor=1") is None


@pytest.mark.parametrize("flags, gpus, single", [
    (dict(), 1, True), (dict(), 1, False), (dict(), 2, True), (dict(n_experts=2), 1, True),
    (dict(n_experts=2), 2, True), (dict(n_experts=2, ep=2), 2, True)], ids=str)
def test_gradients_are_kept_as_buckets_keep_them(flags, gpus, single):
    """Rank.gradient_kind, of a model whose embedding, head and experts fill their buckets."""
    cfg = Config(n_layer=1, n_embd=512, n_head=4, n_kv_head=4, ffn_hidden=32768 if flags else 512, **flags)
    mesh = make_mesh(World(size=gpus), ep=cfg.ep, groups=False)
    choice = Rank(cfg, mesh, 40_000).choice._replace(single_microbatch=single, peer_copies=False)
    with torch.device("meta"):
        model = GPT(cfg, mesh, 40_000)
    elements = {LoneBucket: 0, CopyBucket: 0, Bucket: 0}
    lone_axes = [name for name, axis in mesh.axes().items() if axis.size == 1]
    for group in assign_buckets(trained_parameters(model), lone_axes=lone_axes):
        params = [p for _, p in group]
        axis = getattr(mesh, params[0].reduction_axis)
        elements[choice.bucket_class(Bucket, axis, params)] += sum(p.numel() for p in params)
    found = {"lone": 0, "alone": 0, "summed": 0}
    rank = Rank(cfg, mesh, 40_000, choice)
    for bucket in rank.trained:
        found[rank.gradient_kind(bucket)] += bucket.elements
    assert list(found.values()) == list(elements.values())
    assert bool(found["lone"]) == (single and (gpus == 1 or cfg.ep == 2))
    calls = sum(getattr(mesh, bucket.axis).size > 1 for bucket in rank.trained)
    assert sum(number for _, number in reductions(rank).values()) == calls


@pytest.mark.parametrize("name,peak", [("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12),
                                       ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", None),
                                       ("AMD Instinct MI250X", 191.5e12), ("NVIDIA L4", None),
                                       ("Intel(R) Data Center GPU Max 1550", 419e12)])
def test_peak_flops_by_the_device_name(name, peak, monkeypatch):  # dense; fms-fsdp #89 took the sparse peak
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak and peak_flops(torch.device("cpu")) is None


def test_the_fast_ways_are_those_of_choose():
    """GPUs of one node reach each other's memory; nothing else is decided by the planner."""
    def choice(gpus, *flags):
        cfg, mesh = plan.check_gpus(parse([*flags]), gpus)
        return Rank(cfg, mesh, cfg.vocab_size or 65).choice
    assert choice(8, "dense-210m", "--zero", "1") == (True, False, True, True, True, False, False)
    assert not choice(16, "dense-210m", "--zero", "1").peer_copies
    for zero in "23":  # nothing captured; rows by all_to_all
        assert choice(4, "moe-4b", "--ep", "4", "--zero", zero)[:5] == (False, False, True, True, True)
        dense = choice(4, "dense-210m", "--global-batch", "64", "--zero", zero)
        assert dense[:4] == (False, False, True, False)
    assert choice(4, "moe-4b", "--ep", "4", "--zero", "1")[:4] == (True, True, True, True)
    assert choice(16, "moe-4b", "--ep", "16")[:4] == (True, False, False, True)  # padded all_to_all
    assert choice(16, "moe-4b", "--ep", "16", "--capacity-factor", "1")[:2] == (True, False)
    assert choice(4, "tiny-moe", "--ep", "4")[:2] == (True, True)
    assert not choice(4, "dense-210m", "--recompute", "selective").flex
    assert choice(4, "tiny-moe", "--ep", "4", "--dtype", "fp64")[:2] == (False, False)  # a loop over experts
    cfg = parse(["moe-4b", "--ep", "4"])  # a rank has buffers for the rows of all
    rows = 4 * cfg.micro_batch * cfg.seq_len * cfg.top_k
    found = plan.estimate(cfg, 4, "h200", 65)["memory_gib"]["symm_mem"]
    assert found * 2**30 == (cfg.n_layer + 2) * rows * cfg.n_embd * 2


def test_buckets_are_those_of_data_parallel():
    for name, layout in (("tiny", {}), ("tiny-moe", dict(ep=2)), ("gpt2", dict(n_layer=4, bias=True))):
        cfg = preset(name, **layout)
        mesh = stage_mesh(cfg, 2, 0)
        real = DataParallel(GPT(cfg, mesh, 500), mesh)
        seen = sorted((bucket.axis.name, bucket.filled) for bucket in real.buckets)
        assert seen == sorted((bucket.axis, bucket.elements) for bucket in Rank(cfg, mesh, 500).buckets)


# -----------------------------------------------------------------------------
# Traffic: every byte that parallel.Axis counted

BASE = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=16, ffn_hidden=24, vocab_size=100, seq_len=8,
            dtype="fp64", micro_batch=2)
EXPERTS = dict(BASE, n_experts=8, top_k=2)
WIDE = dict(BASE, n_embd=64, ffn_hidden=256, micro_batch=1)
LAYOUTS = [dict(BASE, tp=2, pp=2), dict(BASE, tp=4, recompute="full"), dict(BASE, zero=1, tp=2),
           dict(WIDE, zero=2, pp=2, tied=True, micro_batch=1), dict(WIDE, zero=3, tp=2),
           dict(WIDE, zero=3, tied=True, pos="learned", n_experts=8, ep=2),
           dict(EXPERTS, ep=4, capacity_factor=1.0),
           dict(EXPERTS, ep=2, tp=2, capacity_factor=1.0, recompute="full"),
           dict(EXPERTS, ep=4, tp=2, n_shared_experts=1, recompute="full"), dict(EXPERTS, ep=2, tp=2),
           dict(BASE, tp=4, recompute="selective"),
           dict(EXPERTS, ep=2, tp=2, capacity_factor=1.0, n_shared_experts=1, recompute="selective"),
           dict(EXPERTS, ep=2, tp=2, router="sigmoid", router_bias_rate=0.1),
           dict(EXPERTS, ep=2, n_layer=4, pp=2, pp_chunks=2, router="sigmoid", router_bias_rate=0.1),
           dict(BASE, cp=2, tp=2, recompute="full"), dict(BASE, cp=2, pp=2, n_kv_head=1, pos="learned"),
           dict(EXPERTS, cp=4, ep=2, capacity_factor=1.0), dict(BASE, cp=2, zero=1),
           dict(WIDE, cp=2, zero=3), dict(BASE, n_layer=4, cp=2, pp=2, pp_chunks=2),
           dict(BASE, objective="mlm", tp=2, pp=2, tied=True, bias=True, norm="layer"),
           dict(EXPERTS, objective="mlm", tp=4, ep=2, capacity_factor=1.0),
           dict(WIDE, objective="mlm", tp=2, zero=3, tied=True, bias=True),
           dict(BASE, objective="mlm", cp=2, tp=2, zero=1, bias=True)]
# A norm behind the MLP needs the scatter again; adapters leave the embedding's gradient out.
LAYOUTS += [dict(BASE, tp=2, norm_place=place, recompute=recompute)
            for place in ("after", "both") for recompute in ("selective", "full")]
LAYOUTS += [dict(EXPERTS, tp=2, ep=2, norm_place="both", capacity_factor=1.0, n_shared_experts=1,
                 recompute="full"),
            dict(BASE, tp=2, lora=2), dict(BASE, tp=2, pp=2, lora=2, recompute="full")]
# Muon: matrices to their owners and back, sums of Gram matrices
LAYOUTS += [dict(BASE, optimizer="muon", **layout) for layout in
            (dict(tp=2), dict(zero=1), dict(tp=2, zero=2), dict(pp=2, cp=2, zero=1))]
LAYOUTS += [dict(EXPERTS, optimizer="muon", tp=2, ep=2, zero=3, capacity_factor=1.0, n_shared_experts=1)]
LAYOUTS += [dict(WIDE, zero=3, shard=2), dict(WIDE, zero=2, shard=2, tied=True, optimizer="muon"),
            dict(EXPERTS, zero=1, shard=1, tp=2, ep=4, capacity_factor=1.0)]
# Documents: the real rows are counted over tp and cp.
LAYOUTS += [dict(EXPERTS, tp=2, ep=2, doc_mask="on", capacity_factor=1.0),
            dict(EXPERTS, tp=2, cp=2, doc_mask="on", router="sigmoid")]
# What backward gathers again. A causal model over cp refuses --recompute selective: see config.py.
GATHERED = [dict(shape, objective=objective, cp=2, recompute=recompute)
            for shape in (BASE, dict(EXPERTS, ep=2, capacity_factor=1.0))
            for objective, recompute in (("clm", "none"), ("clm", "full"), ("mlm", "none"),
                                         ("mlm", "selective"), ("mlm", "full"))]


def sent(world, flags):
    """Take a step with two micro-batches on each replica, or one on each of four.

    Return {axis: bytes that this rank sent}, and the predicted ones.
    """
    cfg = Config(**flags)
    mesh = make_mesh(world, cfg.tp, cfg.pp, cfg.ep, cp=cfg.cp, shard=cfg.shard)
    model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, world.device)
    opt.stop = Stop(0.0)  # its votes travel with the statistics of a step
    batch = min(8, 2 * cfg.micro_batch * mesh.dp.size)
    source = (Documents if cfg.doc_mask == "on" else Synthetic)(100, 8, 1)
    batches = train.micro_batches(cfg, mesh, source, 0, batch, world.device)
    train.Step(cfg, model, data_parallel, opt)(batches, 1)
    axes = {name: sum(axis.sent.values()) for name, axis in mesh.axes().items()}
    return {k: v for k, v in axes.items() if v}, traffic(Rank(cfg, mesh, cfg.vocab_size), batch)


@pytest.mark.parametrize("n, flags", [(4, flags) for flags in LAYOUTS] + [(2, flags) for flags in GATHERED])
def test_traffic_is_what_the_axes_counted(n, flags):
    ranks = run_ranks(n, sent, flags)
    for axis in set().union(*(a | b for a, b in ranks)):
        measured, predicted = (sum(r[i].get(axis, 0) for r in ranks) for i in (0, 1))
        # Without a capacity, the router decides how many rows each rank gets
        loose = axis == "ep" and "capacity_factor" not in flags
        assert predicted == pytest.approx(measured, rel=0.35 if loose else 1e-9), axis


# -----------------------------------------------------------------------------
# BLOOM: constants from other models' rows, judged on its own

# Rows of width, layers, dp, tp, pp, micro-batch, global batch and seconds, with 64 or 96 heads. They were
# measured from 02-25 on, when the cluster was tuned. The one row with micro-batch 1 is left out: it took
# 148 s, and our estimate is 115. The stages of EQUAL are equal. BALANCED dates from 02-28 on: there the
# embedding and the head count as layers, as they do here.
EQUAL = [(13312, 84, 8, 4, 12, 2, 2048, 103.82), (13312, 84, 8, 4, 12, 4, 2048, 113.21),
         (13312, 84, 8, 8, 6, 2, 2048, 129.61), (13824, 78, 8, 4, 12, 2, 2048, 103.51),
         (13824, 78, 8, 4, 12, 4, 2048, 106.72), (13824, 78, 8, 4, 12, 2, 512, 35.77),
         (13824, 78, 8, 4, 12, 2, 1024, 59.65), (13824, 78, 8, 4, 12, 2, 2048, 107.12),
         (13824, 78, 8, 8, 6, 2, 2048, 133.57), (13824, 78, 8, 8, 6, 4, 2048, 118.24),
         (13824, 78, 16, 4, 6, 4, 2048, 115.55)]
BALANCED = [(13312, 82, 4, 8, 12, 4, 2048, 111.79), (13312, 82, 8, 4, 12, 2, 2048, 104.45),
            (13312, 82, 8, 4, 12, 4, 2048, 104.82), (12288, 106, 8, 4, 12, 2, 2048, 116.54),
            (12288, 100, 8, 8, 6, 2, 2048, 139.72), (12288, 100, 8, 8, 6, 4, 2048, 120.96)]
# All 14336-wide layouts that ran on 48 nodes on 02-25: dp, tp, pp, micro-batch, global batch
CONTENDERS = [(8, 8, 6, 4, 2048), (8, 8, 6, 6, 2016), (4, 8, 12, 4, 2048), (4, 8, 12, 2, 2048),
              (6, 8, 8, 4, 2016),
              (12, 8, 4, 2, 2016), (12, 8, 4, 4, 2016), (24, 8, 2, 1, 2016), (24, 8, 2, 2, 2016),
              (8, 4, 12, 4, 2048),
              (8, 4, 12, 2, 2048), (16, 4, 6, 4, 2048), (16, 4, 6, 2, 2048), (16, 2, 12, 2, 2048),
              (8, 2, 24, 1, 2048), (8, 2, 24, 2, 2048), (4, 4, 24, 1, 2048)]


def bloom(dp, tp, pp, mbs, gbs, **more):
    cfg = preset("bloom-176b", tp=tp, pp=pp, micro_batch=mbs, global_batch=gbs, recompute="full",
                 zero=1, **more)
    return plan.estimate(cfg, dp * tp * pp, "a100-80", 250880)


def test_rows_that_fixed_the_constants():
    errors = []
    for width, layers, dp, tp, pp, mbs, gbs, seconds in EQUAL + BALANCED:
        split = {84: [84 // pp] * pp, 78: [7] * 11 + [1] if pp == 12 else [13] * 6}.get(layers, [])
        got = bloom(dp, tp, pp, mbs, gbs, n_embd=width, n_layer=layers, n_head=64, n_kv_head=64,
                    ffn_hidden=4 * width, pp_layers=",".join(map(str, split)))
        errors.append(got["ms"] / 1e3 / seconds - 1)
    assert statistics.fmean(e * e for e in errors) ** 0.5 < 0.06


def test_a_width_that_is_no_multiple_of_64_is_charged():
    """BLOOM's planning table: 94.39 TFLOP/s with 14,400 columns over tp 8, and 120.05 with 13,824."""
    tflops = [bloom(4, 8, 10, 1, 2048, n_embd=width, n_layer=80, n_head=96, n_kv_head=96,
                    ffn_hidden=4 * width)["tflops"] for width in (14400, 13824)]
    assert tflops[0] / tflops[1] == pytest.approx(94.39 / 120.05, rel=0.05)


def test_blooms_layout_fits_and_is_among_the_first_three():
    plans = {row: bloom(*row) for row in CONTENDERS}
    order = sorted(plans, key=lambda row: plans[row]["ms"] / row[4])  # per sample: 2016 is not 2048
    chosen = plans[8, 4, 12, 2, 2048]
    assert chosen["fits"] and (8, 4, 12, 2, 2048) in order[:3]
    assert chosen["ms"] / 1e3 == pytest.approx(102.03, rel=0.1)


# -----------------------------------------------------------------------------
# The command

def test_search_lists_only_what_fits_fastest_first(capsys):
    small = ["smol-1.7b", "--n-layer", "4", "--gpus", "4", "--global-batch", "16", "--search"]
    plans = planned(capsys, *small, "--gpu", "a100-40")
    assert len(plans) > 10 and all(p["fits"] for p in plans)
    assert [p["ms"] for p in plans] == sorted(p["ms"] for p in plans)
    keys = ("dp", "tp", "pp", "pp_chunks", "ep", "micro_batch", "recompute", "zero")
    layouts = [tuple(p["layout"][k] for k in keys) for p in plans]
    assert len(set(layouts)) == len(layouts) and all(a * b * c == 4 for a, b, c, *_ in layouts)
    assert {chunks for _, _, _, chunks, *_ in layouts} == {1, 2}
    plans = planned(capsys, *small, "--cp", "2")
    assert plans and all(p["layout"]["dp"] * p["layout"]["tp"] * p["layout"]["pp"] == 2 for p in plans)
    plan.main(["tiny-moe", "--gpus", "2", "--search", "--tokens", "1e9"])
    assert "fastest first" in capsys.readouterr().out


def test_search_cuts_long_sequences(capsys):
    """Halves of one sequence of 131,072 are faster than two stages. Short sequences are not cut."""
    plans = planned(capsys, "dense-210m", "--seq-len", "131072", "--gpus", "2", "--global-batch", "1",
                    "--search", "--gpu", "a100-80")
    fastest = {name: min(p["ms"] for p in plans if p["layout"][name] == 2) for name in ("cp", "pp", "tp")}
    assert fastest["tp"] < fastest["cp"] < fastest["pp"] / 1.2
    cfg = preset("dense-210m", seq_len=4096, global_batch=1)
    assert {this.cp for this in plan.layouts(cfg, 4, "h200")} == {1, 2}  # 4 would leave 1,024 positions
    assert {this.cp for this in plan.layouts(dataclasses.replace(cfg, seq_len=2048), 4, "h200")} == {1}
    wide = dataclasses.replace(cfg, n_head=16, n_kv_head=16)
    assert max(this.tp for this in plan.layouts(wide, 16, "h200")) == 8  # all GPUs of a node, no more


def planned(capsys, *flags):
    plan.main([*flags, "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_days_of_tokens(capsys):
    """Whole global batches consume the tokens. A ramp is not counted, but its first batch must fit."""
    flags = ["smol-1.7b", "--gpus", "4", "--n-layer", "4", "--global-batch", "64", "--tokens", "5e6",
             "--rampup-batch-size", "16", "16", "1200"]
    found = planned(capsys, *flags)
    assert found["steps"] == -(-5_000_000 // (64 * 2048)) == 39
    assert found["days"] * 86.4e6 == pytest.approx(39 * found["ms"])
    assert found["gpu_hours"] == pytest.approx(found["days"] * 24 * 4)
    plan.main(flags)
    assert "5e+06 tokens\n  steps of a global batch    39\n" in capsys.readouterr().out
    plans = planned(capsys, *flags, "--search")
    assert plans and all(p["steps"] == 39 and 16 % (p["layout"]["dp"] * p["layout"]["micro_batch"]) == 0
                         for p in plans)


def test_weak_scaling(capsys):
    plan.main(["dense-210m", "--zero", "1", "--scaling", "1,8,64", "--json"])
    plans = json.loads(capsys.readouterr().out)
    assert [p["layout"]["gpus"] for p in plans] == [1, 8, 64]
    assert [p["layout"]["global_batch"] for p in plans] == [8, 64, 512]
    got = [p["efficiency"] for p in plans]
    assert got[0] == 1 and 0.9 < got[2] < got[1] < 1.03  # ZeRO: each of more GPUs steps less
    assert plans[1]["ms"] == planned(capsys, "dense-210m", "--zero", "1", "--gpus", "8")["ms"]
    plan.main(["moe-4b", "--ep", "4", "--scaling", "1,2,16"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert [r[:3] for r in rows] == [["1", "1", "1"], ["2", "2", "2"], ["16", "16", "4"]]


def test_a_plan_says_what_wastes_the_gpu(capsys):
    flags = "dense-210m --gpus 8 --gpu h200 --tp 4 --pp 2 --ffn-hidden 1800 --vocab-size 50257"
    plan.main(flags.split())
    said = " ".join(capsys.readouterr().out.split())
    for part in ("ffn-hidden / tp 4 is 450, no multiple of 64",
                 "tp 4 exceeds n-kv-head 1",
                 "wave quantisation", "the ranks idle 50.0 % of the step"):
        assert part in said, part
    plan.main(["dense-210m", "--gpus", "16", "--gpu", "h200", "--tp", "2", "--cp", "8"])
    assert "cp 8 * tp 2 reaches over the node's 8 GPUs" in " ".join(capsys.readouterr().out.split())


def test_buffers_of_experts_are_planned_as_large_as_they_grow():
    """Over 4 ranks to all rows, while routing is young. Over 16 ranks, of which no loads were summed, to
    those of 8, or to --ep-slack."""
    def estimate(ep, slack):
        cfg, mesh = plan.check_gpus(parse(["moe-4b", f"--ep={ep}", "--zero=1", f"--ep-slack={slack}"]), ep)
        return step_time.allocated_row_factor(cfg, mesh), plan.estimate(cfg, ep, "h200", cfg.vocab_size)
    (least, small), (more, large) = estimate(4, 1.0), estimate(4, 4.0)
    assert least == more == 4.0
    assert small["memory"] == large["memory"] and small["ms"] == large["ms"]
    (least, small), (same, also), (more, large) = [estimate(16, slack) for slack in (1.0, 2.0, 12.0)]
    assert least == same == 8.0 and more == 12.0
    assert small["memory"] == also["memory"] < large["memory"]


def test_matrix_products_as_measured():
    gpu = GPUS["h200"]
    for m, n, k, low, high in ((8192, 8192, 8192, 650, 720), (16384, 512, 1792, 495, 605),
                               (16384, 128256, 512, 587, 683)):
        assert low <= 2 * m * n * k / step_time.matmul_seconds(m, n, k, gpu) / 1e12 <= high


def test_eight_gpus_are_one_node_or_two(capsys):
    """With four to a node half of the ring's messages go to the other node, whose network is slower."""
    flags = "smol-1.7b", "--gpus", "8", "--zero", "1", "--micro-batch", "1"
    one, two = (planned(capsys, *flags, "--gpu", gpu) for gpu in ("a100-40", "a100-40x4"))
    assert one["between_nodes_mb"] == 0 < two["between_nodes_mb"] and one["ms"] < two["ms"]
    flags = *flags[:3], "--zero", "3", "--recompute", "full", "--gpu", "a100-40x4-tcp"
    assert planned(capsys, *flags, "--shard", "4")["ms"] < 0.7 * planned(capsys, *flags)["ms"]
