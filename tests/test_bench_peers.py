"""Other trainers beside ours: what a cell trains."""
import dataclasses
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from pool import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import peer_cell

import plan
from cost.parameters import count_parameters
from interface.command_line import parse
from runtime.launch import World

TINY = ("--n-layer 2 --n-embd 32 --n-head 2 --n-kv-head 2 --ffn-hidden 128 --seq-len 32 --vocab-size 256 "
        "--micro-batch 2 --dtype fp32 --no-compile")


def tiny(workload):
    """Return the flags that make a workload small enough for a CPU."""
    return f"{TINY} --n-experts 4" if workload == "W2b" else TINY


def cell(workload, trainer, path=""):
    flags = peer_cell.Flags(workload, trainer, path=path, steps=4, flags=tiny(workload))
    return peer_cell.run(flags, World())


@pytest.mark.parametrize("workload, trainer", [("W1", "hf"), ("G2", "hf-bf16"), ("W2b", "hf"),
                                               ("BERT", "hf")])
def test_a_cell_of_transformers(workload, trainer, hf):
    """Each kind of model begins at the loss of a guess, and learns: with ours' batches and parameters."""
    row = cell(workload, trainer)
    flags = peer_cell.train_flags(peer_cell.Flags(workload, "ours", flags=tiny(workload)), 1)
    ours = count_parameters(parse(flags.split(), data="synthetic"), 256)["total"]
    assert row["parameters"] - sum(row["beside_ours"].values()) == ours
    assert list(row["beside_ours"]) == {"G2": ["biases"], "BERT": ["token types"]}.get(workload, [])
    assert row["loss"][0] == pytest.approx(math.log(256), abs=0.1) and row["loss"][0] != row["loss"][1]


def test_a_step_trains_on_the_next_tokens(hf):
    """transformers' loss is that of the targets as they are, not shifted again; a step accumulates."""
    cfg = parse(f"dense-210m {TINY}".split(), data="synthetic")
    peer = peer_cell.Transformers(cfg, World(), 256, "")
    x, y = torch.randint(256, (2, 4, 32))
    want = F.cross_entropy(peer.model(input_ids=x).logits.flatten(0, 1), y.flatten())
    torch.testing.assert_close(peer.loss(x, y), want)
    before = {name: p.detach().clone() for name, p in peer.model.named_parameters()}
    peer.set_rate(1e-2)
    loss = peer.step([(x[:2], y[:2]), (x[2:], y[2:])])
    torch.testing.assert_close(loss, want.detach())
    assert all((p != before[name]).any() for name, p in peer.model.named_parameters())
    assert all(p.grad is None for p in peer.model.parameters())


def test_the_8b_model_is_llamas_and_fits_one_gpu_by_prediction():
    """Of 139.8 GiB it needs 108 with full recomputation, and 119 with selective. Two GPUs use ZeRO-3."""
    def flags_of(trainer, gpus):
        return peer_cell.train_flags(peer_cell.Flags("8B", trainer), gpus)

    assert "--zero 3" in flags_of("ours", 2) and "--zero" not in flags_of("ours", 1)
    assert "--zero" not in flags_of("torchtitan", 2)
    cfg = parse(flags_of("ours", 1).split(), data="synthetic", global_batch=1)
    assert count_parameters(cfg, cfg.vocab_size)["total"] == 8030261248
    assert (cfg.seq_len, cfg.rope_base, cfg.rope_scaling) == (8192, 500000.0, (8.0, 1.0, 4.0, 8192.0))
    assert (cfg.n_head, cfg.n_kv_head, cfg.ffn_hidden, cfg.tied) == (32, 8, 14336, False)
    needed = {}
    for recompute in ("full", "selective", "none"):
        layout = dataclasses.replace(cfg, recompute=recompute)
        found = plan.estimate(layout, 1, "h200", cfg.vocab_size)
        needed[recompute] = found["memory"]
        assert found["fits"] == (recompute != "none")
    assert needed["full"] == pytest.approx(108.1, abs=1)
    assert needed["selective"] == pytest.approx(119.0, rel=0.02)
    two = parse(f"{flags_of('ours', 2)} --recompute selective".split(), data="synthetic", global_batch=2)
    assert plan.estimate(two, 2, "h200", cfg.vocab_size)["fits"]


def test_llama_7b_trains_over_two_gpus_with_zero_3():
    """By prediction it needs 73 GiB per GPU there."""
    flags = peer_cell.train_flags(peer_cell.Flags("7B", "ours"), 2)
    cfg = parse(flags.split(), data="synthetic", global_batch=4)
    assert (cfg.zero, cfg.micro_batch) == (3, 2)
    assert plan.estimate(cfg, 2, "h200", 32000)["memory"] == pytest.approx(73.0, abs=1)
