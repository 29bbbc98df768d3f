"""--compile: how many graphs a model has, and what a run says of its cost."""
import contextlib
from functools import partial
from unittest import mock

import pytest
import torch
from pool import run_ranks
from runs import TINY as FLAGS
from runs import rows, session

import attention
import moe
import muon
import parallel
from config import Config
from fast import flash
from fast.choose import Choice, choose
from fast.graph import make_step
from ops import backend, cross_entropy
from runtime.launch import World
from train import Step, build

TINY = dict(n_head=2, n_kv_head=2, n_embd=16, ffn_hidden=32, seq_len=8, micro_batch=2, compile=True)


PLACES = ((parallel, "_uncompiled"), (parallel.Axis, "start_all_reduce"), (attention, "attend_segments"),
          (moe.MoE, "forward"), (cross_entropy, "scale_rows"), (muon, "add_gradient"),
          (muon, "update_masters"))


@contextlib.contextmanager
def tracing():
    """Let torch.compile trace, and run the graphs in eager mode. Yield the list of the graphs so far."""
    from torch._dynamo import reset
    traced = []

    def eager(graph, inputs):
        traced.append(graph)
        return graph.forward
    with contextlib.ExitStack() as stack:
        for place, name in PLACES:  # compile_blocks() replaces them
            stack.enter_context(mock.patch.object(place, name, getattr(place, name)))
        stack.enter_context(mock.patch.object(torch, "compile", partial(torch.compile, backend=eager)))
        stack.enter_context(mock.patch.dict("os.environ", TORCH_WARM_POOL="0"))  # no worker processes
        reset()
        yield traced
        reset()


@pytest.fixture
def graphs():
    with tracing() as traced:
        yield traced


def micro_batch(token=0, cp=1):
    tokens = torch.full((TINY["micro_batch"], TINY["seq_len"] // cp), token)
    return tokens, tokens


@pytest.mark.parametrize("flags", [
    {}, {"n_experts": 4, "top_k": 1, "n_shared_experts": 1},
    pytest.param({"n_experts": 4, "n_shared_experts": 1, "recompute": "full"}, marks=pytest.mark.long),
    pytest.param({"n_experts": 4, "n_shared_experts": 1, "recompute": "selective"}, marks=pytest.mark.long),
    pytest.param({"window": 4, "full_every": 2}, marks=pytest.mark.long),
    pytest.param({"no_rope_every": 2}, marks=pytest.mark.long),
    pytest.param({"recompute": "full"}, marks=pytest.mark.long)],
    ids=["dense", "experts", "experts-full", "experts-selective", "window", "no-rope", "recompute"])
def test_the_number_of_graphs_does_not_grow_with_the_layers(flags, graphs):
    cfg = Config(**TINY, n_layer=5, **flags)
    mesh = parallel.make_mesh(World(), 1, 1, 1, cp=1)
    choice = choose(cfg, mesh, torch.device("cpu"))
    parts = build(cfg, mesh, 64, torch.device("cpu"), choice=choice)
    step = make_step(Step(cfg, *parts), choice)
    for number in (1, 2):
        step([micro_batch(), micro_batch()], number)
    assert 0 < len(graphs) <= 4


def train_traced(world, flags):
    """Train two steps with blocks that are traced, and run in eager mode.

    Return {"losses", "gradients" of the second, "sent": bytes of the first over each axis, "graphs": their
    sizes, but the final norm's}.
    """
    cfg = Config(**{**TINY, "n_layer": 4, **flags})
    mesh = parallel.make_mesh(world, cfg.tp, cfg.pp, cfg.ep, cp=cfg.cp)
    choice = choose(cfg, mesh, world.device)
    with tracing() as traced:
        model, data_parallel, opt = build(cfg, mesh, 64, world.device, choice=choice)
        step = make_step(Step(cfg, model, data_parallel, opt), choice)
        batches = [micro_batch(token, cfg.cp) for token in (0, 1)]
        losses = [step(batches, 1)[0].loss.item()]
        sent = {name: dict(axis.sent) for name, axis in mesh.axes().items()}
        losses.append(step(batches, 2)[0].loss.item())
    return {"losses": losses, "gradients": [grad.clone() for grad in opt.grads], "sent": sent,
            "graphs": [len(graph.graph.nodes) for graph in traced][:len(traced) - model.has_head]}


def check_same_training(one, other):
    assert one["losses"] == other["losses"] and one["sent"] == other["sent"]
    assert all(map(torch.equal, one["gradients"], other["gradients"]))


@pytest.mark.parametrize("flags", [
    dict(tp=2), pytest.param(dict(cp=2, n_experts=4, top_k=2), marks=pytest.mark.long),
    pytest.param(dict(cp=2), marks=pytest.mark.long),
    pytest.param(dict(tp=2, ep=2, n_experts=4, n_shared_experts=1, zero=3), marks=pytest.mark.long)],
    ids=str)
def test_what_backward_runs_again_is_compiled_between_collectives(flags):
    """Over tp and cp --recompute full has the graphs of a run without it, and the numbers of eager mode."""
    full = dict(flags, recompute="full", n_layer=1)
    runs = [run_ranks(2, train_traced, more) for more in (full, dict(full, recompute="none"),
                                                          dict(full, compile=False))]
    for compiled, plain, eager in zip(*runs, strict=True):
        assert compiled["graphs"] == plain["graphs"] and len(compiled["graphs"]) > 4
        assert eager["graphs"] == []
        check_same_training(compiled, eager)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_compiled_run_has_the_losses_of_the_run_without(optimizer, graphs, tmp_path):
    for out, more in ("eager", []), ("compiled", ["--compile"]):
        done = session(World(), [*FLAGS, *more, f"--optimizer={optimizer}", "--steps=3", "--save-every=0",
                                 "--prompt=", f"--out={tmp_path / out}"])
        assert done["code"] == 0, done
    traced = "\n".join(graph.code for graph in graphs)
    assert all(name in traced for name in ("lerp_", "mul_", "sub_")) == (optimizer == "muon")
    plain, compiled = rows(tmp_path / "eager"), rows(tmp_path / "compiled")
    assert [row["loss"] for row in plain] == pytest.approx([row["loss"] for row in compiled], rel=1e-6)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_one_graph_keeps_of_a_block(recompute, monkeypatch):
    """With full recomputation its input, and what has no rows of tokens; no result of a kernel of ours."""
    monkeypatch.setattr(backend, "TRITON_DEVICES", ("cpu",))
    cfg = Config(**TINY, n_layer=1, vocab_size=64, recompute=recompute, dtype="fp32")
    model, *_ = build(cfg, parallel.make_mesh(World()), 64, torch.device("cpu"))
    Choice(False, False, False, False, flash=True).install(model)
    block = model.blocks["0"]
    over_cp, *_ = build(cfg, parallel.make_mesh(World(size=2), cp=2, groups=False), 64, torch.device("cpu"))
    Choice(False, False, False, False).install(over_cp)
    assert over_cp.blocks["0"].norm1.kernel is not None  # several graphs, which keep a kernel's results
    is_full = recompute == "full"
    assert (block.norm1.kernel is None) == is_full == (flash.FlashAttention.operation in block.kept)
    monkeypatch.undo()
    block.attn.flash = block.norm1.kernel = block.norm2.kernel = None  # they need a GPU
    kept = []
    x = torch.randn(24, 16, requires_grad=True)  # three sequences
    block.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        block(x, 8, *model._rotation(slice(0, 8), x.device)[False])
    assert (sum(shape[:1] == (24,) for shape in kept) == 1) == is_full
