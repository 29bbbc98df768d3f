"""Every number that cost/ and plan.py compute, for many layouts, is the one in estimates.json.

The other tests of the planner compare with what was measured, and allow for what a measurement varies by. An
operator that is another often stays within that. Here nothing may differ: a change of an estimate must be
intended. If it is, write the file again and read its diff:

    python tests/test_estimates.py --write
"""
import dataclasses
import sys
from pathlib import Path

import golden
import pytest

import plan
from config import Config
from cost import communication_time, memory, parameters, step_time, traffic
from cost.gpus import GPUS
from cost.meshes import stage_mesh
from interface.presets import GPT2, LLAMA

STORED = Path(__file__).with_name("estimates.json")

DENSE = dict(LLAMA, n_layer=6, n_head=8, n_kv_head=4, n_embd=512, ffn_hidden=1408, seq_len=1024,
             vocab_size=32000, micro_batch=4, dtype="bf16", compile=True)
GPT = dict(GPT2, n_layer=5, n_head=12, n_kv_head=12, n_embd=768, ffn_hidden=3072, seq_len=512,
           vocab_size=50257, micro_batch=8, dtype="bf16")
MOE = dict(DENSE, n_layer=4, ffn_hidden=768, n_experts=32, top_k=2, micro_batch=8)
MLM = dict(GPT, objective="mlm", vocab_size=30522)
BASES = {"dense": DENSE, "gpt": GPT, "moe": MOE, "mlm": MLM}

LAYOUTS = """
dense gpus=1
dense gpus=1 global_batch=16 gpu=a100-40
dense gpus=1 dtype=fp32 recompute=full compile=False
dense gpus=1 recompute=selective mlp=gelu dropout=0.1
dense gpus=1 recompute=selective compile=False dtype=fp16
dense gpus=1 recompute=full cuda_graph=False
dense gpus=1 recompute=full mlp=gelu tied=True gpu=h100
dense gpus=2 tp=2 vocab_size=32001 recompute=selective
dense gpus=8 tp=8 n_kv_head=2 seq_len=4096 recompute=full gpu=a100-80
dense gpus=4 cp=4 seq_len=2048 recompute=full
dense gpus=4 cp=2 tp=2 zero=1 bias=True norm=layer pos=learned
dense gpus=8 zero=0 global_batch=64
dense gpus=8 zero=1
dense gpus=8 zero=1 global_batch=64
dense gpus=8 zero=2 global_batch=96
dense gpus=8 zero=3 global_batch=96
dense gpus=16 zero=3 tied=True dtype=fp32
dense gpus=16 zero=2 tp=2
dense gpus=16 zero=1 shard=8
dense gpus=32 zero=3 shard=4 tp=2 global_batch=256
dense gpus=4 zero=3 tp=2 cp=2 gpu=a100-40
dense gpus=64 zero=1 tp=4 gpu=a100-80
dense gpus=32 tp=2 cp=8 seq_len=4096 zero=1
dense gpus=32 tp=16 n_head=16 n_kv_head=2
dense gpus=4 pp=2 zero=1 global_batch=64
dense gpus=3 pp=3 global_batch=8 tied=True recompute=full
dense gpus=6 pp=3 pp_chunks=2 global_batch=48 recompute=selective
dense gpus=3 pp=3 pp_chunks=2 global_batch=20 gpu=h100
dense gpus=16 pp=4 tp=2 zero=2 global_batch=64 pp_layers=1,2,2,1
dense gpus=8 pp=4 tp=2 pp_layers=1,1,3,1 tied=True global_batch=16
dense gpus=1 n_embd=260 n_head=4 n_kv_head=1 ffn_hidden=700 seq_len=100 vocab_size=1000 n_layer=2
dense gpus=1 n_layer=1 n_embd=8192 n_head=64 n_kv_head=64 ffn_hidden=32768 gpu=a100-40
gpt gpus=1
gpt gpus=1 dtype=fp64 dropout=0.2
gpt gpus=2 tp=2 recompute=full dropout=0.1 zero=0
gpt gpus=2 cp=2 zero=2
gpt gpus=4 tp=2 zero=3 global_batch=32 recompute=full
gpt gpus=12 pp=3 tp=2 zero=1 global_batch=48
mlm gpus=1
mlm gpus=1 tied=False bias=False recompute=selective
mlm gpus=4 cp=2 zero=1
mlm gpus=8 tp=2 pp=2 recompute=full global_batch=64
mlm gpus=8 zero=3 tied=False
moe gpus=1
moe gpus=1 dtype=fp32 recompute=selective n_shared_experts=1
moe gpus=1 mlp=gelu recompute=full bias=True
moe gpus=1 dtype=fp64 capacity_factor=1.25 cuda_graph=False
moe gpus=4 ep=4 zero=1
moe gpus=4 ep=4 n_experts=4 top_k=1 recompute=full
moe gpus=4 ep=2 ep_slack=1.1
moe gpus=4 ep=4 ep_slack=0 zero=2 global_batch=64 n_shared_experts=2 recompute=selective
moe gpus=8 ep=8 capacity_factor=1.5 recompute=full
moe gpus=16 ep=16 ep_slack=4
moe gpus=16 ep=16 capacity_factor=1.0 zero=1 router=sigmoid router_bias_rate=0.001
moe gpus=16 ep=4 tp=2 cp=2 zero=3 global_batch=32 router=sigmoid router_bias_rate=0.001
moe gpus=8 ep=2 tp=2 zero=2 optimizer=muon capacity_factor=1.25
dense gpus=2 zero=1 optimizer=muon
dense gpus=8 tp=4 pp=2 optimizer=muon
moe gpus=8 ep=4 tp=2 zero=1 recompute=full n_shared_experts=1 dropout=0.1
moe gpus=16 ep=4 pp=4 zero=2 global_batch=64 dtype=fp32
moe gpus=8 ep=2 tp=4 mlp=gelu n_kv_head=2
moe gpus=32 ep=4 pp=2 zero=2 shard=4 global_batch=256 optimizer=muon
moe gpus=16 ep=16 zero=1 shard=8
dense gpus=2 tp=2 lora=8
dense gpus=1 lora=16 recompute=selective
dense gpus=2 tp=2 qk_norm=all recompute=full
dense gpus=2 tp=2 qk_norm=all
dense gpus=4 cp=2 window=256 full_every=3 seq_len=2048
dense gpus=1 window=256 logit_softcap=30
dense gpus=2 cp=2 doc_mask=on seq_len=2048
dense gpus=2 fp8=True
dense gpus=4 tp=2 zero=3 fp8=True recompute=selective mlp=gelu
moe gpus=1 fp8=True recompute=full n_shared_experts=1
dense gpus=1 fp8=True lora=8
dense gpus=1 split_masters=True
dense gpus=4 zero=1 split_masters=True optimizer=muon
moe gpus=2 ep=2 zero=1 split_masters=True
dense gpus=1 moments_dtype=bf16
dense gpus=4 zero=1 moments_dtype=bf16 split_masters=True optimizer=muon
moe gpus=1 kernels=plain
moe gpus=1 gpu=a100-80
moe gpus=1 gpu=h100 recompute=full
moe gpus=4 ep=4 cuda_graph=False
moe gpus=4 ep=2 zero=1 gpu=h100 kernels=plain
"""


def layout_of(line):
    """Return (Config, number of GPUs, their kind) of a line of LAYOUTS."""
    base, *words = line.split()
    flags = dict(BASES[base], preset=base)
    types = {field.name: type(field.default) for field in dataclasses.fields(Config)}
    types.update(gpus=int, gpu=str)
    for word in words:
        name, text = word.split("=")
        flags[name] = text == "True" if types[name] is bool else types[name](text)
    gpus, gpu = flags.pop("gpus"), flags.pop("gpu", "h200")
    cfg, _ = plan.check_gpus(Config(**flags), gpus)
    return cfg, gpus, gpu


def estimates(line):
    """Return {name: numbers} of a layout: the plan, and what it is made of on each kind of stage."""
    cfg, gpus, gpu = layout_of(line)
    vocab = cfg.vocab_size
    chip = plan.GPUS[gpu]
    whole = plan.estimate(cfg, gpus, gpu, vocab)
    summary = ("fits", "memory", "capacity_gib", "ms", "tok_s_gpu", "mfu")
    found = {"plan": {name: whole[name] for name in summary},
             "uneven": plan.uneven_ms(cfg, gpus, gpu, vocab), "quack": whole["quack"],
             "parameters": whole["parameters"], "flops": whole["flops"], "ms_parts": whole["ms_parts"],
             "traffic_mb": whole["traffic_mb"], "stage_ms": whole["stage_ms"],
             "warnings": plan.warnings(cfg, whole, gpu, vocab)}
    for stages in plan._groups_of_stages(cfg, gpus):
        mesh = stage_mesh(cfg, gpus, stages[0])
        of_stage = parts_of_stage(cfg, mesh, vocab, chip)
        found.update({f"stage {stages[0]} {name}": value for name, value in of_stage.items()})
    return found


def parts_of_stage(cfg, mesh, vocab, chip):
    local = parameters.local_parameters(cfg, mesh, vocab)
    choice = step_time.expected_choice(cfg, mesh)
    sharded, parts = parameters.sharded_parameters(cfg, mesh, vocab)
    dense, experts = step_time.matmul_shapes(cfg, mesh)
    return {
        "choice": choice,
        "parameters": local,
        "owned": parameters.owned_parameters(cfg, mesh, local),
        "gathered": [sharded, [sum(part.values()) for part in parts]],
        "bytes": memory.memory(cfg, mesh, vocab),
        "block": memory.saved_activations(cfg, mesh),
        "block, balanced": memory.saved_activations(cfg, mesh, 1.0, choice),
        "sent": traffic.traffic(cfg, mesh, vocab, 0),
        "reductions": traffic.reductions(cfg, mesh, vocab),
        "products": [*dense, *experts],
        "load": [step_time.max_load_factor(cfg, mesh), step_time.row_limit_factor(cfg, mesh)],
        "load, uneven": [step_time.max_load_factor(cfg, mesh, uneven=True),
                         step_time.row_limit_factor(cfg, mesh, uneven=True)],
        "passes": [step_time.expert_passes(cfg, mesh, chip), step_time.expert_passes(cfg, mesh, chip, True)],
        "seconds": [step_time.dense_matmuls(cfg, mesh, chip), step_time.expert_matmuls(cfg, mesh, chip),
                    step_time.attention_seconds(cfg, mesh, chip),
                    step_time.head_seconds(cfg, mesh, chip, vocab)]}


def all_estimates():
    return {line: estimates(line) for line in LAYOUTS.strip().splitlines()}


def test_every_estimate_is_the_stored_one():
    golden.compare(STORED, all_estimates())


def test_a_number_that_differs_is_named():
    stored = {"a": {"b": [1, 2.0], "c": "x"}, "d": {}}
    assert golden.differences(stored, {"a": {"b": [1, 2.0 + 1e-13], "c": "x"}, "d": {}}) == []
    assert golden.differences(stored, {"a": {"b": [1, 2.001], "c": "y"}, "e": {}}) == [
        "/a/b[1]: 2.0 -> 2.001", "/a/c: 'x' -> 'y'", "/d: {} -> 'absent'", "/e: 'absent' -> {}"]
    with pytest.raises(AssertionError, match="differences from estimates.json"):
        golden.compare(STORED, {})


def test_a_ring_over_nodes_is_slower_and_longer():
    h200, dp = GPUS["h200"], stage_mesh(Config(**DENSE), 64, 0).dp
    assert communication_time.ring_bandwidth(dp, 1, h200) == h200.link  # 8 adapters of 40 GB/s together
    assert communication_time.ring_bandwidth(dp, 4, h200) == 2 * h200.net
    assert communication_time.ring_bandwidth(dp, 8, h200) == h200.net
    assert communication_time.ring_latency(dp, 1, h200) == pytest.approx(56 * 1.9e-6 + 7 * 4e-6)
    assert communication_time.ring_latency(stage_mesh(Config(**DENSE), 1, 0).dp, 1, h200) == 0


@pytest.mark.parametrize("kind, share", [("gradients", 2 / 3), ("weights", 1 / 3)])
def test_what_compute_hides_of_messages(kind, share):
    """Gradients travel beside backward, 2/3 of compute, and weights beside forward, 1/3 of it."""
    h200 = GPUS["h200"]
    mesh = stage_mesh(Config(**DENSE), 2, 0)

    def exposed(seconds, last):
        sent = traffic.Reduction(0, 0, 1, last)._replace(**{kind: seconds * h200.link})
        return communication_time.exposed_seconds(mesh, h200, {"dp": sent}, 1.0, 0.5)
    assert exposed(10.0, 0.01) == pytest.approx(10 - share / 2, abs=1e-4)  # more than compute could hide
    assert exposed(0.1, 0.25) == pytest.approx(0.1 - 0.075 / 2, abs=1e-4)  # the last quarter is never hidden


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    golden.write(STORED, all_estimates())
