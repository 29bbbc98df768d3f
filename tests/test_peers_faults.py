"""Silent numerical faults that larger projects reported, planted here, each beside its threads.

A silent fault trains on: no error, a loss that still falls. Where a thread tells a symptom and no cause, the
fault here has the same symptom. faults.py says how they are planted. Four checks detect them:
    layouts        a layout against one process
    plain PyTorch  one process against a plain loop
    resumes        a run that is stopped around the end of an epoch and resumed, against one that never stops
    overflows      a run in fp16 in which one rank of tp has a gradient that is not finite
"""
import functools
import re
import signal
from unittest import mock

import pytest
import test_layouts
import torch
from faults import (
    CP,
    DP,
    EP,
    GPT2,
    LLAMA,
    MOE,
    PP,
    TP,
    assert_caught,
    constant,
    first_share,
    group,
    local_norm,
    nothing,
    router_loss_weight,
    run_with_faults,
    with_faults,
)
from pool import run_ranks
from runs import TINY, session
from shared import Masked

import prepare
from corpus.samples import Synthetic, open_tokens
from ddp import DataParallel

TP_EP, PP_DP, PP_ZERO = (2, dict(tp=2, ep=2)), (4, dict(pp=2)), (4, dict(pp=2, zero=1))
RECOMPUTED = (2, dict(recompute="full"))
CAPACITY = dict(test_layouts.CAPACITY, micro_batch=2, n_layer=2)


# -----------------------------------------------------------------------------
# Functions that are called in the place of others: the loss and its division

def tokens_of_this_rank(original, source, first, count, device):
    """trained_tokens that takes the share of one replica's sequences for the share of each."""
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return size * original(source, first + rank * (count // size), count // size, device)


def tokens_times(original, model, data_parallel, batches, n_trained, *args, factor):
    """forward_backward that divides the loss by another number of tokens."""
    return original(model, data_parallel, batches, n_trained * factor, *args)


def token_count(factor):
    """Return the fault that divides the loss by `factor` times the number of tokens."""
    return "pipeline.forward_backward", functools.partial(tokens_times, factor=factor)


def divided_after_backward(original, model, data_parallel, batches, n_trained, *args):
    """several_stages that divides the loss, but not what backward starts from."""
    return original(model, data_parallel, batches, 1, *args) / n_trained


def mean_of_means(original, model, data_parallel, batches, n_trained, *args):
    """forward_backward that divides each micro-batch by its own tokens."""
    forward = model.forward
    parts = len(batches) * model.mesh.dp.size

    def mean(x, y):
        loss, router_loss = forward(x, y)
        return loss * n_trained / ((y >= 0).sum() * parts), router_loss

    with mock.patch.object(model, "forward", mean):
        return original(model, data_parallel, batches, n_trained, *args)


# Sums and norms

def always_last(original, model, data_parallel, *args):
    always = property(lambda self: True, lambda self, completes: None)
    with mock.patch.object(DataParallel, "completes_grads", always, create=True):
        return original(model, data_parallel, *args)


def reduce_and_wait(original, bucket):
    original(bucket)
    bucket.sum_handle.wait()


def scaled_at_each_addition(original, bucket, i):
    original(bucket, i)
    bucket.grad_windows[i].div_(2)


def experts_of_first_rank(original, bucket):
    return 0.0 if bucket.axis.name == "edp" and torch.distributed.get_rank() else original(bucket)


def doubled_experts(original, bucket):
    original(bucket)
    if bucket.axis.name == "edp":
        bucket.grad.mul_(2)


def clipped_by_local_norm(original, optimizer, lr, grad_norm):
    return original(optimizer, lr, local_norm(optimizer))


def epsilon_of_every_rank(original, optimizer, lr, grad_norm):
    return original(optimizer, lr, grad_norm + 1e-6 * (torch.distributed.get_world_size() - 1))


# First weights, rows, positions, dropout

def draw_of_this_rank(original, shape, std, key, device):
    """normal_from_key with another key on each rank."""
    return original(shape, std, f"{key}/{torch.distributed.get_rank()}", device)


def numbered_from_its_stage(original, shape, std, key, device):
    """normal_from_key as if the blocks of every stage, of which each has one, began with number 0."""
    return original(shape, std, re.sub(r"blocks\.\d+", "blocks.0", key), device)


def repeated_grad(original, ctx, grad):
    """_ScatterRows.backward without the all-gather."""
    return torch.cat([grad] * ctx.axis.size), None


def own_rows(original, ctx, grad):
    """_GatherRows.backward without the sum."""
    return grad.chunk(ctx.axis.size)[ctx.axis.rank], None


def one_piece(original, model, t, cache, device):
    """GPT._positions as if each rank of cp had one piece of the sequence."""
    return slice(t * model.mesh.cp.rank, t * model.mesh.cp.rank + t)


def other_masks(original, block, *args):
    """Block.maybe_recompute as if nothing were drawn in the block."""
    with mock.patch("model.draws_random_numbers", return_value=False):
        return original(block, *args)


# Experts

def no_router_gradient(original, *args, **kwargs):
    """GPT.forward whose router loss has a value and no gradient."""
    out, router_loss = original(*args, **kwargs)
    return out, router_loss.detach()


def gates_without_gradient(original, layer, x, gates, plan):
    """MoE.experts that does not tell the router what its gates did."""
    return original(layer, x, gates.detach(), plan)


def gates_of_own_experts(original, layer, x, gates, plan):
    """MoE.experts in which a gate has a gradient only if its expert is on this rank."""
    rank = layer.dispatcher.ep.rank
    start = sum(plan.send[:rank])
    is_own = torch.zeros(gates.numel(), dtype=torch.bool)
    is_own[plan.perm[start:start + plan.send[rank]]] = True
    return original(layer, x, torch.where(is_own.view_as(gates), gates, gates.detach()), plan)


def own_block_alone(original, ctx, grad):
    """_AllToAll.backward that loses the gradients of the rows that other ranks had."""
    grad, *others = original(ctx, grad)
    for rank, block in enumerate(grad.split(ctx.send)):
        if rank != ctx.axis.rank:
            block.zero_()
    return grad, *others


def garbage_in_empty_slots(original, ctx, x, perm, inv_perm, K=1):
    """Permute.forward that leaves whatever was in memory in the slots that nobody fills."""
    out = original(ctx, x, perm, inv_perm, K)
    return out.masked_fill((perm >= K * x.size(0)).unsqueeze(1), torch.nan)


# -----------------------------------------------------------------------------
# The faults

FAULTS = {  # threads: what went wrong there: (model, (ranks, layout), faults as arguments of planted)
    "Megatron-LM #7452 (3): the loss divided by local numbers of tokens": (
        LLAMA, DP, ("corpus.samples.trained_tokens", tokens_of_this_rank)),
    "torchtitan #2206: the mean of each micro-batch's mean": (
        LLAMA, DP, ("pipeline.forward_backward", mean_of_means)),
    "torchtitan #2972: a pipeline divides the logged loss alone": (
        LLAMA, PP, ("pipeline.several_stages", divided_after_backward)),
    "AReaL #1273: a pipeline divides once more by its micro-batches": (LLAMA, PP, token_count(4)),
    "Megatron-LM #906, modded-nanogpt #146: the loss lacks one factor of its divisor": (
        LLAMA, CP, token_count(1 / 2)),
    # Sums of gradients
    "pytorch #144530, trl #7245: no gradient summed over the replicas": (
        LLAMA, DP, ("ddp.Bucket.start_sum", nothing), ("ddp.Bucket.wait_sum", nothing)),
    "picotron #5: gradients sent before the last micro-batch of 1F1B": (
        LLAMA, PP_DP, ("pipeline.several_stages", always_last),
        ("ddp.Bucket.start_sum", reduce_and_wait)),
    "torchtitan #1733: the total rescaled at each accumulation": (
        LLAMA, PP, ("ddp.Bucket.take", scaled_at_each_addition)),
    "VeOmni #1115: gradients summed over dp without cp": (
        LLAMA, CP, group("stage", "dp"), group("dpcp", "dp")),
    "Megatron-LM #844: a tied gradient summed over the stages of one replica": (
        GPT2, PP_ZERO, group("tied", "pp")),
    "Megatron-LM #7452 (11), Pai-Megatron-Patch #397: what tp does not cut not summed over tp": (
        dict(MOE, qk_norm="head"), TP, group("stage", "dp")),
    "Megatron-LM #1628: experts summed over the ranks of the dense weights": (MOE, TP, group("edp", "dp")),
    "Megatron-LM #5956, pytorch #160285, torchtitan #1551: experts' gradients times a number of ranks": (
        MOE, EP, ("ddp.Bucket.wait_sum", doubled_experts)),
    # The norm, clipping
    "Megatron-LM #7452 (8), #7228: a weight counted by a wrong number of ranks in the norm": (
        GPT2, PP, ("ddp.Bucket.count_factor", functools.partial(constant, value=1))),
    "Megatron-LM #5916: experts of later tp ranks left out of the norm": (
        MOE, TP_EP, ("ddp.Bucket.count_factor", experts_of_first_rank)),
    "torchtitan #596, Automodel #3817: a rank clips by its own norm": (
        LLAMA, PP, ("optim.Optimizer.step", clipped_by_local_norm)),
    "pytorch #149768: the epsilon of clipping added by every rank": (
        LLAMA, DP, ("optim.Optimizer.step", epsilon_of_every_rank)),
    # First weights
    "torchtitan #166: replicas that start from other weights": (
        LLAMA, DP, ("model.normal_from_key", draw_of_this_rank)),
    "torchtitan #514: every stage draws from the same seed": (
        LLAMA, PP, ("model.normal_from_key", numbered_from_its_stage)),
    "torchtitan #1750, ms-swift #7944: tp ranks draw equal shares": (
        LLAMA, TP, ("model.initial_weights", first_share)),
    # Rows and positions
    "nanotron #172: of the input's gradient only the rank's own rows are right": (
        LLAMA, TP, ("parallel._ScatterRows.backward", repeated_grad)),
    "torchtitan #1878, SkyRL #1886, Megatron-LM #1464: the gradient of gathered rows not summed": (
        LLAMA, TP, ("parallel._GatherRows.backward", own_rows)),
    "Megatron-LM #560: positions of cp ranks": (LLAMA, CP, ("model.GPT._positions", one_piece)),
    "OLMo-core #828: recomputed dropout draws other masks": (
        dict(LLAMA, dropout=0.2), RECOMPUTED, ("model.Block.maybe_recompute", other_masks)),
    # Experts
    "Megatron-LM #7452 (10), #5047, Automodel #3359: the router's loss scaled": (
        MOE, TP, router_loss_weight(2)),
    "Automodel #1408: the router's loss has no gradient": (
        MOE, DP, ("model.GPT.forward", no_router_gradient)),
    "Automodel #2995: the router learns nothing from the loss": (
        MOE, EP, ("moe.MoE.experts", gates_without_gradient)),
    "transformers #48205 (2), #48687: the gates' gradients of ep ranks not summed": (
        MOE, EP, ("moe.MoE.experts", gates_of_own_experts)),
    "Automodel #1260: rows get no gradient from other ranks' experts": (
        MOE, EP, ("parallel._AllToAll.backward", own_block_alone)),
    "transformers #48205 (1): rows that nobody wrote": (
        CAPACITY, EP, ("ops.permute.Permute.forward", garbage_in_empty_slots)),
}
UNEQUAL = {"Megatron-LM #7452 (3)", "torchtitan #2206"}  # ranks with other numbers of trained tokens


def kind_of(name):
    return Masked if name.partition(":")[0] in UNEQUAL else Synthetic


def unless_short(names, is_short):
    """Return pytest's parameters of these names; make long has those that are not short."""
    return [pytest.param(name, marks=[] if is_short(name) else [pytest.mark.long]) for name in names]


@pytest.mark.parametrize("name", unless_short(FAULTS, lambda name: FAULTS[name][1][0] <= 2))
def test_a_peers_fault_is_caught(name):
    base, place, *faults = FAULTS[name]
    assert_caught(base, place, *faults, kind=kind_of(name))


CONTROLS = {str((base, place, kind_of(name))): (base, place, kind_of(name))
            for name, (base, place, *_) in FAULTS.items()}


@pytest.mark.long
@pytest.mark.parametrize("key", CONTROLS, ids=lambda key: str(list(CONTROLS).index(key)))
def test_the_same_runs_without_faults_pass(key):
    base, place, kind = CONTROLS[key]
    run_with_faults(base, place, kind=kind)()


# -----------------------------------------------------------------------------
# Around the end of an epoch

LAST = 4  # steps of an epoch, each of 4 sequences of 16 tokens


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Token files whose training split has exactly LAST steps."""
    folder = tmp_path_factory.mktemp("epochs")
    text = "".join(chr(97 + i * i % 23) for i in range(322))  # of which 257 are for training
    (folder / "text.txt").write_text(text)
    argv = [str(folder / "text.txt"), "--name", "toy", "--tokenizer", "char", "--out", str(folder),
            "--val-fraction", "0.2"]
    assert prepare.main(argv) == 0
    assert open_tokens(str(folder / "toy"), "train", 16, 0).n_samples == 4 * LAST
    return folder / "toy"


def steps_of(toy, out, *flags, plan=None, faults=(), code=0):
    """Run a session on one rank. Return what each of its steps started with."""
    argv = [*TINY, f"--data={toy}", "--vocab-size=0", "--save-every=1", "--keep=0", "--steps=10",
            f"--out={out}", *flags]
    (result,) = run_ranks(1, with_faults, faults, session, argv, plan)
    assert result["code"] == code, result["err"] + result["out"]
    return result["steps"]


def an_epoch_too_late(original, source, epoch, windows):
    """shuffled_starts of the epoch after."""
    return original(source, epoch + 1, windows)


def skipped_again(original, source, epoch, windows):
    """shuffled_starts that leaves out the first step's windows in later epochs as well."""
    return original(source, epoch, (windows + 4) % source.n_samples if epoch else windows)


def samples_since_the_resume(original, run):
    """Run.save that counts the samples of this process alone."""
    steps = run.state.step - run.first_step + 1
    with mock.patch.object(run.state, "samples", steps * run.batch):
        original(run)


RESUMES = {  # threads: what went wrong there: a fault of the resumed process
    "accelerate #2823, #4071, #4233: a resumed run has the order of another epoch": (
        "corpus.samples.Tokens.shuffled_starts", an_epoch_too_late),
    "accelerate #1451: what a resume skipped is skipped in later epochs": (
        "corpus.samples.Tokens.shuffled_starts", skipped_again),
}
SECOND_RESUMES = {  # faults of a process that was resumed and is stopped again
    "KempnerForge #57: the second resume in an epoch counts from the first": (
        "train.Run.save", samples_since_the_resume),
}


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    """The steps of a run of two and a half epochs that never stops."""
    return steps_of(toy, tmp_path_factory.mktemp("runs") / "whole")


@pytest.mark.parametrize("last", unless_short([LAST - 1, LAST, LAST + 1, 2 * LAST], lambda n: n == LAST))
def test_a_run_killed_around_the_end_of_an_epoch_goes_on_with_the_same_data(last, toy, whole, tmp_path):
    """It stops in step `last`; then a process resumes from the step before, as after a kill, and stops again
    one step later; and the next process, the second resume in an epoch, does the rest."""
    first = steps_of(toy, tmp_path, plan={last: signal.SIGTERM}, code=85)
    assert first == whole[:last]
    killed = f"--resume={tmp_path}/step_{last - 1:06d}"
    second = steps_of(toy, tmp_path, killed, plan={last + 1: signal.SIGTERM}, code=85)
    assert second == whole[last - 1:last + 1]
    assert steps_of(toy, tmp_path, "--resume=auto") == whole[last + 1:]
    assert len({step["data"] for step in whole}) == 10  # each step of each epoch has data of its own


@pytest.mark.parametrize("name", RESUMES)
def test_a_peers_fault_of_a_resume_is_caught(name, toy, whole, tmp_path):
    steps_of(toy, tmp_path, plan={LAST: signal.SIGTERM}, code=85)
    assert steps_of(toy, tmp_path, "--resume=auto", faults=[RESUMES[name]]) != whole[LAST:]


@pytest.mark.parametrize("name", SECOND_RESUMES)
def test_a_peers_fault_of_a_second_resume_is_caught(name, toy, whole, tmp_path):
    steps_of(toy, tmp_path, plan={1: signal.SIGTERM}, code=85)
    second = steps_of(toy, tmp_path, "--resume=auto", plan={2: signal.SIGTERM}, code=85,
                      faults=[SECOND_RESUMES[name]])
    assert second == whole[1:2]  # the fault does not show before the next resume
    assert steps_of(toy, tmp_path, "--resume=auto") != whole[2:]


# -----------------------------------------------------------------------------
# The scale of an fp16 loss

def scale_of_this_rank(original, optimizer, lr, grad_norm):
    is_refused = (~torch.isfinite(local_norm(optimizer))).float()
    update_scale = torch._amp_update_scale_

    def update_by_own_norm(scale, tracker, _, *factors):
        return update_scale(scale, tracker, is_refused, *factors)
    with mock.patch.object(torch, "_amp_update_scale_", update_by_own_norm):
        return original(optimizer, lr, grad_norm)


OVERFLOWS = {
    "fairseq2 #1374: each rank of tp has its own loss scale": (
        "optim.Optimizer.step", scale_of_this_rank),
}


def fp16_steps(out, *faults):
    """Train 4 steps over tp 2; the last rank's gradient is not finite in step 2. Return each rank's steps."""
    argv = [*TINY, "--tp=2", "--dtype=fp16", "--steps=4", f"--out={out}"]
    results = run_ranks(2, with_faults, faults, session, argv, {2: "nan"})
    assert [result["code"] for result in results] == [0, 0], results[0]["err"] + results[0]["out"]
    return [result["steps"] for result in results]


@pytest.mark.parametrize("name", OVERFLOWS)
def test_a_peers_fault_of_an_overflow_is_caught(name, tmp_path):
    want = fp16_steps(tmp_path / "right")
    assert want == fp16_steps(tmp_path / "again") and len(want[0]) == 4
    assert want != fp16_steps(tmp_path / "wrong", OVERFLOWS[name])
