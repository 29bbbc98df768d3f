"""--compile: how many graphs a model has, and what a run says of its cost."""
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from runs import TINY as FLAGS
from runs import rows, session

import attention
import parallel
from config import Config
from fast import compile as compile_
from fast.choose import choose
from fast.flex import FlexAttention
from fast.graph import make_step
from ops.activations import _SwiGLU
from runtime.launch import World
from train import Step, build

TINY = dict(n_head=2, n_kv_head=2, n_embd=16, ffn_hidden=32, seq_len=8, micro_batch=2, compile=True)


@pytest.fixture
def graphs(monkeypatch):
    """Let torch.compile trace, and run the graphs in eager mode. Yield the list of the graphs so far."""
    from torch._dynamo import reset
    monkeypatch.setenv("TORCH_WARM_POOL", "0")  # no worker processes
    traced = []

    def eager(graph, inputs):
        traced.append(graph)
        return graph.forward
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=eager))
    for place, name in ((parallel, "_uncompiled"), (parallel.Axis, "_all_reduce"),
                        (attention, "attend_segments")):
        monkeypatch.setattr(place, name, getattr(place, name))  # compile_blocks() replaces them
    reset()
    yield traced
    reset()


def micro_batch():
    tokens = torch.zeros(TINY["micro_batch"], TINY["seq_len"], dtype=torch.int64)
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
    counts = []
    for n_layer in (2, 4):
        cfg = Config(**TINY, n_layer=n_layer, **flags)
        mesh = parallel.make_mesh(World(), 1, 1, 1, n_experts=cfg.n_experts, cp=1)
        choice = choose(cfg, mesh, torch.device("cpu"))
        parts = build(cfg, mesh, 64, torch.device("cpu"), choice=choice)
        step = make_step(Step(cfg, *parts), choice)
        for number in (1, 2):
            step([micro_batch(), micro_batch()], number)
        counts.append(len(graphs))
        graphs.clear()
        torch._dynamo.reset()
    assert counts[0] == counts[1] <= 4, counts


def test_a_run_says_what_compiling_cost(graphs, tmp_path):
    for out, more in ("eager", []), ("compiled", ["--compile"]):
        done = session(World(), [*FLAGS, *more, "--steps=3", "--save-every=0", "--prompt=",
                                 f"--out={tmp_path / out}"])
        assert done["code"] == 0, done
        said = "s of them to compile 2 graphs; 0 of their 0 parts" in " ".join(done["out"].split())
        assert said == (out == "compiled"), done["out"]
    plain, compiled = rows(tmp_path / "eager"), rows(tmp_path / "compiled")
    assert [row["loss"] for row in plain] == pytest.approx([row["loss"] for row in compiled], rel=1e-6)
    first, *others = map(json.loads, (tmp_path / "compiled/metrics.jsonl").read_text().splitlines())
    assert 0 < first["compile_s"] < first["ms"] / 1e3 and all("compile_s" not in row for row in others)


@pytest.mark.long  # A C++ compiler takes 20 s.
def test_the_cache_keeps_graphs_with_functions_of_our_own(monkeypatch, tmp_path):
    """torch leaves a graph with an autograd.Function out of its cache. Ours, as SwiGLU, are found."""
    from torch._dynamo.utils import counters
    from torch._functorch import config
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_WARM_POOL", "0")  # no worker processes
    x = torch.randn(4, 8, requires_grad=True)
    found = []
    with config.patch(autograd_cache_allow_custom_autograd_functions=False):
        compile_.prepare_compiler()
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            y = torch.compile(lambda x: _SwiGLU.apply(x))(x)
            found.append((counters["aot_autograd"]["autograd_cache_hit"], *torch.autograd.grad(y.sum(), x)))
    torch._dynamo.reset()
    (first, grad), (second, again) = found
    assert (first, second) == (0, 1) and torch.equal(grad, again)


def test_the_flash_kernel_is_made_before_the_blocks_are_compiled(monkeypatch):
    """... which then call it inside their graphs."""
    made = []
    monkeypatch.setattr("fast.flex.make_kernel", lambda: made.append(1))
    monkeypatch.setattr(compile_, "keep_eager", lambda place, name: None)
    model = torch.nn.Module()
    model.mesh, model.norm = parallel.make_mesh(World(), 1, 1, 1), None
    block = SimpleNamespace(attn=SimpleNamespace(flex=FlexAttention()), moe=None,
                            compile=lambda fullgraph: made.append("compiled"))
    model.blocks = {"0": block}
    assert not made, "a model that hides no keys never imports it"
    compile_.compile_blocks(model)
    assert made == [1, "compiled"]
