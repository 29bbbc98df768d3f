"""ZeRO-3's weights: which parts of the model have whole weights when, and eight ranks.

test_layouts.py compares every --zero with one rank, test_faults.py has the faults of ZeRO, and
test_symm_mem.py has ZeRO by copies between GPUs.
"""
import itertools
import weakref
from collections import Counter
from unittest import mock

import pytest
from faults import with_faults
from pool import run_ranks
from test_layouts import CAPACITY, LLAMA, MOE, compare

import layers
import model as model_module
import train
from config import Config
from corpus.samples import Synthetic
from cost.memory import state_bytes
from cost.parameters import Rank
from fast.choose import choose
from parallel import make_mesh
from pipeline import generate
from zero import ShardedBucket


def parts_alive(world, flags):
    """Train a step, evaluate and generate under ZeRO-3 -> {"forward", "backward" of the step, "evaluation",
    "generation": [(number of the block that computes, numbers of the parts whose weights are whole)]}, the
    same after the step, the most bytes of weights, the bytes predicted. Parts: embedding 0, blocks, head."""
    cfg = Config(**flags, zero=3, eval_iters=1)
    mesh = make_mesh(world, cfg.tp, ep=cfg.ep)
    model, data_parallel, opt = train.build(cfg, mesh, cfg.vocab_size, world.device)
    seen, bytes_seen, kind = {}, [], "forward"

    def alive():
        whole = [i for i, part in enumerate(data_parallel.sharded) if any(b.storage.nbytes() for b in part)]
        at_rest = sum(b.own.nbytes if isinstance(b, ShardedBucket) else b.flat.nbytes
                      for b in data_parallel.buckets)
        sharded = {*itertools.chain(*data_parallel.sharded)}
        bytes_seen.append(at_rest + sum(b.storage.nbytes() for b in sharded))
        return whole

    def note(kind, i):
        seen.setdefault(kind, []).append((i, alive()))
    for i, block in enumerate(model.blocks.values(), 1):
        for module in block.modules():
            module.register_forward_pre_hook(lambda *_, i=i: note(kind, i))
        for p in block.parameters():
            p.register_hook(lambda grad, i=i: note("backward", i))
    source, batch = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed), 2 * cfg.micro_batch * mesh.dp.size
    batches = train.micro_batches(cfg, mesh, source, 0, batch, world.device)
    train.Step(cfg, model, data_parallel, opt)(batches, 1)
    after, kind = alive(), "evaluation"
    train.evaluate(cfg, model, source, batch, world.device)
    kind = "generation"
    generate(model, [1, 2, 3], 2)
    predicted = state_bytes(Rank(cfg, mesh, cfg.vocab_size, choose(cfg, mesh, world.device)))["weights"]
    return seen, after, max(bytes_seen), predicted


def check_parts(results, n_layer, recompute):
    """AssertionError unless at every hook the whole weights were those of the block that computes and of the
    part that comes next."""
    ahead = {i: {i, i + 1} for i in range(1, n_layer + 1)}
    turned = {i: {i, i - 1} - {0} for i in range(1, n_layer + 1)}  # the embedding's are not needed
    for seen, after, most, predicted in results:
        assert seen.keys() == {"forward", "backward", "evaluation", "generation"} and after == []
        for kind, events in seen.items():
            for part, alive in events:
                wants = [turned[part] if kind == "backward" else ahead[part]]
                wants += [turned[part]] * (recompute and kind == "forward")
                assert {*alive} in wants, f"{kind} of block {part}: {alive} are whole, not one of {wants}"
        assert most == pytest.approx(predicted, rel=0.15), "bytes of weights"


@pytest.mark.parametrize("n, flags", [
    (2, dict(LLAMA, micro_batch=2)), (2, dict(MOE, micro_batch=2, recompute="full"))],
    ids=["llama", "moe-recompute"])
def test_two_parts_have_whole_weights_at_most(n, flags):
    check_parts(run_ranks(n, parts_alive, flags), flags["n_layer"], "recompute" in flags)


def always_forward(original, zero, part, backward=False):
    original(zero, part)


def test_weights_in_memory_that_should_not_be_there():
    fault = "zero.ZeRO3.move_to_part", always_forward
    results = run_ranks(2, with_faults, [fault], parts_alive, dict(LLAMA, n_layer=2, micro_batch=2))
    with pytest.raises(AssertionError, match="are whole, not"):
        check_parts(results, 2, False)


def bytes_at_start(world, flags):
    """Build a model under ZeRO-3. Return the most bytes that its parameters have when one is drawn, and the
    bytes of the largest part and of all vectors. Each parameter is drawn once."""
    cfg = Config(**flags, zero=3)
    most, drawn, all_values = 0, Counter(), []

    def draw(p, name, model, seed):
        nonlocal most
        storages = {q.untyped_storage().data_ptr(): q.untyped_storage().nbytes() for q in model.parameters()}
        values = initial_weights(p, name, model, seed)
        assert all(drawn_before() is None for drawn_before in all_values)  # It was copied, and is gone.
        all_values.append(weakref.ref(values))
        most = max(most, sum(storages.values()) + values.nbytes)
        drawn[name] += 1
        return values
    mesh = make_mesh(world, cfg.tp, ep=cfg.ep)
    initial_weights = model_module.initial_weights
    with mock.patch.object(model_module, "initial_weights", draw):
        model, *_ = train.build(cfg, mesh, cfg.vocab_size, world.device)
    parts = [model.wte, model.head, *model.blocks.values()]
    largest = max(sum(p.numel() for p in part.parameters() if p.ndim > 1) for part in parts)
    vectors = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert drawn == Counter(dict.fromkeys(dict(model.named_parameters()), 1))
    return most, 8 * (largest + vectors)


START = dict(LLAMA, n_layer=8)


@pytest.mark.parametrize("flags", [START, dict(MOE, n_layer=8), dict(START, lora=2)], ids=str)
def test_no_rank_ever_has_the_whole_model(flags):
    """Not even while weights are drawn: one part of the model after the other, in fp64 here."""
    for most, part in run_ranks(2, bytes_at_start, flags):
        assert part / 2 < most <= part


def drawn_together(original, model, named_parameters):
    if all(p.untyped_storage().nbytes() == 0 for p in model.parameters()):
        original(model, list(model.named_parameters()))


def test_a_whole_model_at_the_start_is_seen():
    fault = "ddp.draw_weights", drawn_together
    results = run_ranks(2, with_faults, [fault], bytes_at_start, START)
    assert all(most > part for most, part in results)


def losses(world, zero, dtype, products=None):
    """The losses of five steps on a random text. products: 3 if ZeRO-3's way to multiply is taken."""
    cfg = Config(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_hidden=80, vocab_size=100, seq_len=16,
                 micro_batch=2, warmup=0, zero=zero, dtype=dtype)
    mesh, source = make_mesh(world), Synthetic(100, cfg.seq_len, 1)
    taken = layers.linear if products is None else layers.linear_without_copy
    with mock.patch.object(layers, "linear", taken):
        step = train.Step(cfg, *train.build(cfg, mesh, cfg.vocab_size, world.device))
        return [step(train.micro_batches(cfg, mesh, source, 4 * i, 4, world.device), i + 1)[0].loss.item()
                for i in range(5)]


@pytest.mark.parametrize("dtype, rounding", [("bf16", 1e-3), ("fp32", 1e-6), ("fp64", 1e-14)])
def test_zero_3_differs_from_zero_1_by_its_several_products_alone(dtype, rounding):
    """docs/zero.md says so."""
    zero_1, split, zero_3 = (run_ranks(2, losses, zero, dtype, products)[0]
                             for zero, products in ((1, None), (1, 3), (3, None)))
    assert split == zero_3 and zero_3 == pytest.approx(zero_1, rel=rounding)
    if dtype == "bf16":
        assert zero_3 != zero_1
        assert run_ranks(2, losses, 0, dtype)[0] == run_ranks(2, losses, 2, dtype)[0] == zero_1


@pytest.mark.long
def test_zero_3_on_eight_ranks_equals_one_rank():
    compare(dict(MOE, micro_batch=2), 8, 16, tp=2, ep=2, zero=3)
    compare(dict(CAPACITY, micro_batch=2), 8, 16, ep=4, zero=3, recompute="full")
    compare(dict(LLAMA, n_kv_head=1, micro_batch=2), 8, 16, tp=4, zero=3, recompute="full")
