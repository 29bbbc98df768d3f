"""bench/floor.py: kernels by kind, products that run alone, bytes by hand, and a whole run at a tiny size."""
import contextlib
import dataclasses
import io
import json
import sys
from unittest import mock

import pytest
import test_flash
import torch
import torch.nn.functional as F
from faults import planted
from pool import ROOT, run_ranks
from test_gelu_mlp import aligned, stand_in  # noqa: F401 - a fixture

sys.path.insert(0, str(ROOT / "bench"))

import floor
import ladder

from config import Config
from fast import flash
from interface.command_line import parse
from parallel import make_mesh
from runtime.launch import World

CPU = torch.device("cpu")


@pytest.mark.parametrize("name,kind", [
    ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "products"),
    ("void cutlass::device_kernel<GroupProblemShape>", "products"),
    ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_geluaux_auxt_TNN", "products"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_aux_bf16_dgelu_execute", "products"),
    ("grouped_wgrad", "products"), ("triton_tem_fused_mm_3", "products"), ("aten::addmm", "products"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
    ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
    ("triton_red_fused_add_mm_scaled_dot_product_7", "elementwise"),
    ("triton_poi_fused_mul_sigmoid_2", "activations"), ("swiglu_backward", "activations"),
    ("cross_entropy", "cross-entropy"), ("adamw", "optimizer"), ("sum_squares", "optimizer"),
    ("unpermute_backward", "rows"), ("Memcpy DtoD (Device -> Device)", "copies"),
    ("Memcpy PtoP (Device -> Device)", "sent"), ("put", "sent"), ("ncclDevKernel_AllGather_RING_LL", "sent"),
    ("_compute_input_grad", "other"), ("nanoshard::attention_backward", "attention"),
    ("void at::native::elementwise_kernel", "elementwise"), ("something_new", "other")])
def test_the_kind_of_a_kernel(name, kind):
    assert floor.kind_of_kernel(name) == kind


def test_what_the_kernels_leave_of_a_step_are_gaps():
    kinds = floor.by_kind(10.0, {"nvjet_a": 4.0, "gemm": 1.0, "adamw": 2.0})
    assert kinds["products"] == 5 and kinds["optimizer"] == 2 and kinds["gaps"] == 3
    assert sum(kinds.values()) == 10 and set(kinds) == set(floor.KINDS)


def test_a_step_has_the_products_of_the_model():
    """Four products of each block and the head's, each with two in backward, counted by their FLOPs."""
    cfg = ladder.workload("W1", World())
    found = floor.operations(cfg, World())
    entries = [entry for entry in found.values() if entry[0] == "products"]
    assert sum(entry[-1] for entry in entries) == 3 * (4 * cfg.n_layer + 1)
    rows, C, f = cfg.micro_batch * cfg.seq_len, cfg.n_embd, cfg.ffn_hidden
    qkv = (cfg.n_head + 2 * cfg.n_kv_head) * (C // cfg.n_head)
    forward = cfg.n_layer * (qkv + C + 3 * f) * C + C * 256
    assert sum(entry[-1] * floor.flops(entry) for entry in entries) == 3 * 2 * rows * forward
    attention = [entry for entry in found.values() if entry[0] == "attention"]
    assert sum(entry[-1] for entry in attention) == 2 * cfg.n_layer

    rows, calls = floor.all_alone(World(), found, 2)
    assert len(rows) == len(found) and all(row["ms"] > 0 for row in rows)
    totals = [row["count"] * row["ms"] for row in rows]
    assert totals == sorted(totals, reverse=True)


def test_an_operation_that_cannot_run_alone_says_why():
    """Its row stays, and the next one follows."""
    one = torch.ones(2, 3)
    found = {"a": ["products", torch.ops.aten.mm.default, (one, one), {}, 4]}
    [row], calls = floor.all_alone(World(), found, 1)
    assert row["ms"] is None and "failed" in row["what"] and "tflops" not in row and not calls


@pytest.mark.parametrize("x", [
    torch.randn(4, 6), torch.randn(4, 6).T, torch.randn(5, 8)[1:, 2:6], torch.randn(4).expand(3, 4),
    torch.tensor([1, 2]), torch.tensor(3.0)])
def test_an_argument_is_kept_with_its_numbers_and_strides(x):
    kept = floor.keep(x)
    assert torch.equal(kept, x) and kept.stride() == x.stride()
    kept.fill_(7)
    assert not torch.equal(kept, x), "another memory"


def test_what_is_no_tensor_is_kept_as_it_is_and_forms_are_words():
    assert floor.keep(True) is True and floor.keep(None) is None
    assert floor.form(torch.ones(4, 6)) == "4x6" and floor.form(torch.ones(4, 6).T) == "6x4'"
    assert floor.form(torch.ones(3)) == "3"


def test_bytes_by_hand():
    """W1 and W2b written out with their numbers."""
    n, C, f, V = 8 * 2048, 512, 1792, 128256
    cfg = parse(["dense-210m"], data="synthetic")
    elements = floor.passes(cfg, make_mesh(World()), V, CPU)
    assert elements["cross-entropy"] == 2 * n * V and elements["activations"] == 24 * n * (3 * f + 5 * f)
    assert elements["elementwise"] == n * (24 * (16 * C + 4 * 5 * 128) + 5 * C)
    assert elements["rows"] == 3 * n * C + V * C
    experts = floor.passes(parse(["moe-4b"], data="synthetic"), make_mesh(World()), V, CPU)
    assert experts["activations"] == elements["activations"], "each token meets one expert of the same width"
    assert experts["rows"] - elements["rows"] == 24 * 9 * n * C

    gelu = parse(["gpt2", "--no-bias"], data="synthetic")
    for inside, times in ((False, 5), (True, 2)):  # Only Hopper computes GELU in a product.
        with mock.patch.object(floor.gelu_mlp, "is_possible", lambda cfg, device, inside=inside: inside):
            elements = floor.passes(gelu, make_mesh(World()), 50257, CPU)
        assert elements["activations"] == 12 * times * 4 * 768 * gelu.micro_batch * 1024

    found = [{"kind": "products", "count": 3, "ms": 2.0}, {"kind": "attention", "count": 1, "ms": None}]
    bound = floor.floors(cfg, World(), V, found, 4.0)
    assert bound["products"] == 6 and bound["attention"] == 0 == bound["gaps"]
    assert bound["cross-entropy"] == pytest.approx(2 * 2 * n * V / 4e9)
    without = floor.fused(bound)
    assert without["activations"] == without["cross-entropy"] == 0 and without["rows"] == bound["rows"] > 0


@pytest.mark.parametrize("goal, words", [
    (33.0, "1.0 above the floor under load of 32.0"), (31.0, "1.0 above the floor of 30.0"),
    (28.0, "3.0 above the fused floor of 25.0"), (20.0, "5.0 below the fused floor of 25.0")])
def test_above_which_of_the_floors_a_goal_lies(goal, words):
    bounds = {"floor under load": 32.0, "floor": 30.0, "fused floor": 25.0}
    assert floor.verdict(goal, bounds) == f"goal {goal} ms: {words}"


def test_the_calls_of_a_step_are_spread_evenly():
    """Each as often as it counts, and the rare ones neither first nor together."""
    assert floor.in_turn([("a", 4), ("b", 2), ("c", 1)]) == ["a", "b", "a", "c", "a", "b", "a"]


def test_under_load_all_calls_run_and_the_other_bytes_are_copied(monkeypatch):
    """On a CPU once each; the rest of the floor, 6 ms at 1 TB/s, is 6 GB read and written."""
    kinds = dict.fromkeys(floor.KINDS, 0.0)
    bound = {**kinds, "products": 5.0, "attention": 2.0, "optimizer": 4e-3, "rows": 2e-3}
    copied = []
    monkeypatch.setattr(floor, "MOST_COPIED", 2**20)
    monkeypatch.setattr(floor, "alone", lambda world, f, repeat: f() or 3.0)
    real = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, x: copied.append(x.numel() * 4) or real(to, x))
    seen = []
    calls = [(lambda: seen.append("product"), 3), (lambda: seen.append("attention"), 1)]
    assert floor.under_load(World(), calls, bound, 1.0, 1.0) == 3.0
    assert sorted(seen) == ["attention", "product", "product", "product"]
    assert len(copied) == 2 and sum(copied) == pytest.approx(6e6, rel=0.01)


def test_under_load_the_second_half_of_the_time_is_measured(monkeypatch):
    """A step of the floor's work takes 2 ms at first: 500 calls make the GPU warm, 500 are timed."""
    times = iter([2.0, 2.5, 2.6])
    calls = []
    monkeypatch.setattr(floor, "graphed", lambda f: f)
    monkeypatch.setattr(floor, "gpu_milliseconds", lambda f, n: calls.append(n) or next(times))
    gpu = mock.MagicMock(device=mock.MagicMock(type="cuda"))
    monkeypatch.setattr(floor.torch, "randn", lambda n, dtype, device: torch.zeros(n))
    bound = {**dict.fromkeys(floor.KINDS, 0.0), "rows": 1e-6}
    assert floor.under_load(gpu, [], bound, 1.0, 2.0) == 2.6 and calls == [1, 500, 500]


def test_products_of_hopper_are_timed_in_every_way(stand_in, monkeypatch):  # noqa: F811
    """Both of torch's libraries, and the algorithm that a run would measure to be the fastest."""
    monkeypatch.setattr(floor, "is_hopper", lambda device: True)
    fastest = []
    monkeypatch.setattr(floor, "fastest", lambda plan: fastest.append(plan) or plan.proposals[1].name())
    libraries = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library",
                        lambda name=None: libraries.append(name) or "before")
    a, b = (aligned(torch.randn(shape).bfloat16()) for shape in ((16, 8), (8, 24)))
    entry = ["products", torch.ops.aten.mm.default, (a, b), {}, 1]
    world = World(device=torch.device("cuda", 0))
    found = floor.ways(world, entry)
    assert len(found) == 3 and len(fastest) == 1 and stand_in.multiplied == 0
    assert all(torch.equal(way(), a @ b) for way in found)
    assert stand_in.algorithms == [1]
    assert libraries == [None, "cublas", "before", None, "cublaslt", "before"]
    assert len(floor.ways(world, entry)) == 3 and len(fastest) == 1, "it is measured once"
    wide = ["products", torch.ops.aten.mm.dtype, (a, b, torch.float32), {}, 1]
    assert len(floor.ways(world, wide)) == 2, "the library writes bf16"


def test_each_rank_updates_its_share_and_the_goal_is_that_of_its_gpus(monkeypatch):
    """The optimizer's floor with ZeRO-1 over two ranks, and goals for one and two H200."""
    def optimizer(*flags, size=1):
        cfg = parse(["dense-210m", *flags], data="synthetic")
        return floor.floors(cfg, World(size=size), 128256, [], 4.0)["optimizer"]

    alone = optimizer()
    assert optimizer("--zero", "1", size=2) == pytest.approx(alone / 2, rel=1e-3)
    assert optimizer(size=2) == alone == pytest.approx(213148160 * floor.ADAM / 4e9)

    cfg = parse(["dense-210m"], data="synthetic")
    gpu = World(device=torch.device("cuda", 0))
    monkeypatch.setattr(floor, "total_memory", lambda device: 140 * 2**30)
    monkeypatch.setattr(floor, "device_name", lambda device: "NVIDIA H200")
    for size in (1, 2):
        of_size = dataclasses.replace(gpu, size=size)
        _, tokens_per_s = floor.PEERS["W1", size]
        ours = 8 * 2048 / floor.goal_ms("W1", cfg, of_size) * 1e3
        assert ours / tokens_per_s == pytest.approx(floor.GOALS["W1", size])
    assert floor.goal_ms("W2a", cfg, gpu) is None and floor.goal_ms("W1", cfg, World()) is None
    monkeypatch.setattr(floor, "device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert floor.goal_ms("W1", cfg, gpu) is None, "the peers ran on H200s"


def by_expert(x, w, ends):
    """What experts_mm and experts_wgrad return, one expert after the other; a gradient where w is (R, I)."""
    parts = [slice(0, ends[0]), slice(ends[0], ends[1])]
    if w.dim() == 3:
        return torch.cat([x[rows] @ w[i] for i, rows in enumerate(parts)])
    return torch.stack([x[rows].t() @ w[rows] for rows in parts])


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no F.grouped_mm")
def test_experts_alone_by_torch_and_by_our_kernels(monkeypatch):
    """What torch's grouped_mm gets, given to our kernels, has its result: a product, a weight gradient."""
    monkeypatch.setattr(floor.grouped_mm, "experts_mm", by_expert)
    monkeypatch.setattr(floor.grouped_mm, "experts_wgrad", by_expert)
    x, w, grad = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((6, 8), (2, 8, 16), (6, 16)))
    ends = torch.tensor([2, 6], dtype=torch.int32)
    found = floor.Operations()
    with found:
        expected = [F.grouped_mm(x, w, offs=ends), F.grouped_mm(grad.t(), x, offs=ends)]
    entries = list(found.found.values())
    assert [entry[0] for entry in entries] == ["products"] * 2
    for (a, b), product in zip([(x, w), (grad.t(), x)], expected, strict=True):
        by_ours = floor.experts_product(floor.grouped_mm, a, b, ends)
        assert torch.allclose(by_ours, product, atol=0.05, rtol=0.05)


def floor_of_two(world):
    """What is printed of two ranks, of which the first has the higher floor."""
    def examine(world, name, flags, copy_tb_s):
        kinds = dict.fromkeys(floor.KINDS, 0.0)
        of_rank = {**kinds, "products": 7.0 - world.rank}
        return {"workload": name, "measured": kinds, "floor": of_rank, "fused": of_rank, "alone": [],
                "under_load": 8.0, "goal": None}
    replaced = mock.patch.multiple(floor, launch=lambda **options: world, shutdown=lambda world: None,
                                   examine=examine)
    with replaced, contextlib.redirect_stdout(io.StringIO()) as out:
        floor.main(["W1"])
    return out.getvalue()


def test_the_rank_with_the_highest_floor_speaks():
    first, second = run_ranks(2, floor_of_two)
    assert "7.00" in first and "6.00" not in first and second == ""


def test_flash_attn_4_is_noted_as_attention():
    q, k, v = (torch.randn(1, 128, 2, 64, requires_grad=True) for _ in range(3))
    with planted(*test_flash.ON_A_CPU), floor.Operations() as noted:
        out, _ = flash.attention(q, k, v, True)
        out.sum().backward()
    kinds = {entry[1].overloadpacket.__name__: entry[0] for entry in noted.found.values()}
    assert kinds["attention"] == kinds["attention_backward"] == "attention"


@pytest.mark.parametrize("problem, hopper, best, ways", [
    ("it is not installed", True, 3.0, 2), ("", False, 3.0, 2), ("", True, 2.0, 3)])
def test_experts_are_timed_in_every_way(problem, hopper, best, ways, monkeypatch):
    """torch's grouped_mm, our kernels and the library alone: the best counts."""
    times = iter([5.0, 3.0, 2.0])
    calls = []
    monkeypatch.setattr(floor, "alone", lambda world, f, repeat: calls.append(f) or next(times))
    monkeypatch.setattr(floor, "is_hopper", lambda device: hopper)
    monkeypatch.setitem(vars(floor.experts.QUACK), "problem", problem)
    x, w, ends = torch.ones(4, 8), torch.ones(2, 8, 8), torch.tensor([1, 4])
    entry = ["products", torch.ops.aten._grouped_mm.default, (x, w, ends), {}, 1]
    ms, _ = floor.best_alone(World(device=torch.device("cuda", 0)), entry, 2)
    assert ms == best and len(calls) == ways
    if not problem and hopper:
        grad = torch.ones(8, 4)  # of the weights: its rows are the second factor's
        assert floor.multipliers(torch.device("cpu"), grad, x, ends)[1].balanced == 4
        monkeypatch.setattr(floor.experts.QuackProducts, "experts_mm",
                            lambda self, *args: (self.balanced, *args))
        rows, *args = calls[-1]()
        assert rows == 4 and all(mine is theirs for mine, theirs in zip(args, (x, w, ends), strict=True))


def test_torch_multiplies_experts_in_a_noted_step(monkeypatch):
    without = []
    monkeypatch.setattr(floor, "Training", lambda cfg, world, off: without.append(off) or mock.MagicMock())
    monkeypatch.setattr(floor.grouped_mm, "use_tma", lambda x, w: True)
    floor.operations(Config(), World())
    assert without == [("graph", "quack")]
    with floor.experts_by_torch():
        assert not floor.grouped_mm.use_tma(None, None)


def test_the_trace_is_of_one_step(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(floor.time, "perf_counter", lambda: next(clock))
    a = torch.ones(2, 2)
    for n in (1, 3):
        assert floor.traced(World(), lambda: a @ a, n) == {"aten::mm": 1000.0}


def floor_of_w2b(world, path):
    """Run bench/floor.py for W2b on this rank and return what it printed."""
    ranks = mock.patch.multiple(floor, launch=lambda **options: world, shutdown=lambda world: None)
    with ranks, contextlib.redirect_stdout(io.StringIO()) as out:
        floor.main(["W2b", "--steps", "4", "--top", "0", "--json", path])
    return out.getvalue()


def test_two_ranks_write_one_row(tmp_path):
    """One table and one line of json. Experts have other rows on each rank, and nobody waits for that."""
    path = tmp_path / "floor.jsonl"
    first, second = run_ranks(2, floor_of_w2b, str(path))
    assert first.count("measured") == 1 and "failed" not in first and second == ""
    [line] = path.read_text().splitlines()
    result = json.loads(line)
    assert result["gpus"] == 2 and result["measured"]["sent"] > 0 == result["floor"]["sent"]


def test_the_time_of_the_host_by_operation():
    a = torch.randn(64, 64)
    with floor.HostTimes() as times:
        a @ a + 1
    assert set(times.ms) == {"aten::mm", "aten::add.Tensor"} and min(times.ms.values()) > 0
    assert floor.kind_of_kernel("aten::mm") == "products"
    assert floor.kind_of_kernel("aten::add.Tensor") == "elementwise"
    assert floor.kind_of_kernel("c10d::allreduce_") == "sent"


@pytest.mark.long
def test_a_whole_run_at_a_tiny_size(capsys, tmp_path):
    path = tmp_path / "floor.jsonl"
    with pytest.raises(SystemExit) as end:
        floor.start(lambda: floor.main(["W1", "W2b", "--steps", "4", "--top", "1", "--json", str(path)]))
    assert not end.value.code
    said = capsys.readouterr().out
    assert said.count("measured") == 2 == said.count("fused") and "failed" not in said
    assert "goal" not in said, "it is for the workload's own size"
    results = [json.loads(line) for line in path.read_text().splitlines()]
    for result in results:
        assert sum(result["measured"].values()) == pytest.approx(result["ms"])
        assert result["measured"]["products"] > 0 and result["floor"]["products"] > 0
    assert [result["workload"] for result in results] == ["W1", "W2b"]
    floor.show({**results[0], "goal": 1e6}, 0)
    assert "goal 1000000.0 ms" in capsys.readouterr().out
    failed = {"what": "mm: failed, no memory", "count": 1, "ms": None}
    floor.show({**results[0], "goal": 1e6, "alone": [failed]}, 0)
    said = capsys.readouterr().out
    assert "no memory" in said and "lack what failed" in said and "goal" not in said
