"""Planted faults that test_faults.py's layouts do not find, each beside the comparison that does."""
import dataclasses
import functools
import signal
from unittest import mock

import numpy as np
import pytest
import runs
import test_checkpoint
import test_masks
import test_metrics
import test_model
import test_moe
import test_sample
import torch
import torch.nn.functional as F
from faults import planted, with_faults
from pool import run_ranks
from runs import TINY, session
from shared import parameters

import prepare
from corpus.samples import Blend
from layers import vocab_cross_entropy
from parallel import make_mesh
from pipeline import Cache

# -----------------------------------------------------------------------------
# Faults that a layout and its reference share: other tests find them, in this process

def last_of_equals(original, scores, K):
    return scores.size(1) - 1 - original(scores.flip(1), K)


def loss_with_bias(original, layer, *args):
    """MoE.balance_loss that counts what the router chose with its bias."""
    with mock.patch.object(layer.router, "bias", None):
        return original(layer, *args)


def routed_again(original, layer, *args):
    """MoE.route that backward runs again."""
    return layer.maybe_recompute(functools.partial(original, layer), *args)


def angles_of_windows(original, *args):
    found = original(*args)
    return {False: found[True], True: found[True]}


def one_key_more(original, *args, places=None, **options):
    return original(*args, places=None if places is None else places + 1, **options)


def one_number_for_tp_and_cp(original, cfg, mesh, *args):
    """dropout_seeds that add the ranks of tp and cp up: (0, 1) and (1, 0) are the same."""
    return original(cfg, dataclasses.replace(mesh, tp=dataclasses.replace(mesh.tp, size=1)), *args)


def loop(*args):
    return functools.partial(test_moe.test_block_equals_the_loop_over_tokens, *args)


def written_out(form):
    return functools.partial(test_model.test_one_process_equals_the_model_written_out, form)


ONE_PROCESS = {  # name: (a fault as above, the test that detects it)
    "ties go to the last expert": ("moe.stable_top_k", last_of_equals, loop("softmax", 1)),
    "the router bias changes the balance loss": (
        "moe.MoE.balance_loss", loss_with_bias, loop("sigmoid bias", 2)),
    "routing recomputed in backward": (
        "moe.MoE.route", routed_again, lambda: test_moe.test_recompute_routes_once({})),
    "every layer turns by the windows' base": (
        "model.GPT._rotation", angles_of_windows, written_out("gemma3")),
    "a query sees the token before its document": (
        "attention.attend", one_key_more,
        lambda: test_masks.check_against_documents_alone("windows-documents")),
    "the same dropout on ranks of one sequence": (
        "pipeline.dropout_seeds", one_number_for_tp_and_cp, test_model.test_no_two_seeds_are_equal),
}


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process_detects_the_fault(name):
    *fault, test = ONE_PROCESS[name]
    with planted(*fault), pytest.raises(AssertionError):
        test()


# -----------------------------------------------------------------------------
# Counts: tokens, their rate and MFU are those of the job, not of a rank, an axis or a micro-batch

def by_rank(original, cfg, world, batch, *args):
    return original(cfg, world, batch * cfg.tp / cfg.cp, *args)


def by_micro_batch(original, cfg, world, batch, *args):
    return original(cfg, world, cfg.micro_batch, *args)


def of_half_the_parameters(original, *args):
    return [flops / 2 for flops in original(*args)]


COUNTS = {  # where it happened: (a run of test_metrics, the function, the fault)
    "TRL #7100": ("tp 2", "runtime.log.rates", by_rank),
    "prime-rl #2424": ("cp 2", "runtime.log.rates", by_rank),
    "nanochat #175": ("one", "runtime.log.rates", by_micro_batch),
    "fms-fsdp #67": ("dp 2", "cost.parameters.flops_per_token", of_half_the_parameters)}  # a rank has half


@pytest.mark.parametrize("name", parameters(COUNTS, ["TRL #7100", "prime-rl #2424"]))
def test_a_fault_of_counting_is_caught(name, tmp_path):
    layout, *fault = COUNTS[name]

    def faulty(n, *args):
        return run_ranks(n, with_faults, [fault], *args)
    with mock.patch.object(runs, "run_ranks", faulty), pytest.raises(AssertionError, match="tok_s|tflops"):
        test_metrics.test_every_logged_number_of_a_step(layout, tmp_path)


# -----------------------------------------------------------------------------
# Large logits

def loss_of_large_logits(world, words):
    """Return the loss of large logits, and this rank's gradient.

    The exponentials of these logits overflow unless the maximum is subtracted first.
    """
    tp = make_mesh(world, tp=world.size).tp
    z, target = large_logits(words)
    z = z.chunk(tp.size, dim=1)[tp.rank].clone().requires_grad_()
    loss = vocab_cross_entropy(z, target, words, tp)
    loss.backward()
    return loss.item(), z.grad


def large_logits(words):
    rng = torch.Generator().manual_seed(words)
    z = 1e4 * torch.randn(6, 128, generator=rng, dtype=torch.float64)
    return z, torch.randint(words, (6,), generator=rng)


def check_large_logits(words, *faults):
    """AssertionError if the loss over 2 tp ranks, or its gradient, differs from F.cross_entropy's."""
    z, target = large_logits(words)
    z.requires_grad_()
    want = F.cross_entropy(z[:, :words], target, reduction="sum")
    want.backward()
    losses, grads = zip(*run_ranks(2, with_faults, faults, loss_of_large_logits, words), strict=True)
    np.testing.assert_allclose(losses, want.item(), rtol=1e-12)
    torch.testing.assert_close(torch.cat(grads, dim=1), z.grad, rtol=0, atol=1e-12)


def maximum_of_zero(original, axis, x, *op):
    return x.zero_() if op else original(axis, x)


def test_cross_entropy_of_large_logits():
    check_large_logits(100)
    check_large_logits(60)  # the second rank holds only padding
    with pytest.raises(AssertionError, match="Not equal|not close"):
        check_large_logits(100, ("parallel.Axis.all_reduce", maximum_of_zero))


# -----------------------------------------------------------------------------
# Generated text, checkpoints

def cached_by_first_chunk(original, model, tokens, cache=None, chunk=0, **options):
    return original(model, tokens, cache=Cache() if chunk else cache, chunk=chunk, **options)


def test_generation_detects_a_chunk_that_caches_nothing():
    fault = "model.GPT.forward", cached_by_first_chunk
    family = test_sample.FAMILIES["llama"]
    (want,) = run_ranks(1, test_sample.texts, family)
    layout = dict(family, pp=2, pp_chunks=2)
    assert want not in run_ranks(2, with_faults, [fault], test_sample.texts, layout)


def pieces_without_buffers(original, data_parallel, *args, **kwargs):
    with mock.patch.object(data_parallel, "buffers", {}):
        return original(data_parallel, *args, **kwargs)


def pieces_of_first_experts(original, *args, owned_only=True):
    """runtime.pieces.own_pieces that reads the first rank's w1 on every rank."""
    pieces = original(*args, owned_only=owned_only)
    for i, piece in enumerate(pieces):
        if ".w1" in piece.name and not owned_only:
            pieces[i] = piece._replace(offset=(0, *piece.offset[1:]))
    return pieces


@pytest.mark.parametrize("function,fault", [
    ("write", pieces_without_buffers), ("read", pieces_of_first_experts)])
def test_loading_in_another_layout_detects_the_fault(function, fault, tmp_path):
    def run_with_fault(n, fn, *args):
        faults = [("runtime.pieces.own_pieces", fault)] if fn.__name__ == function else []
        return run_ranks(n, with_faults, faults, fn, *args)
    with mock.patch.object(test_checkpoint, "run_ranks", run_with_fault), pytest.raises(AssertionError):
        test_checkpoint.test_any_layout_reads_the_checkpoint_of_any_other("moe, router bias", tmp_path)


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
    assert Blend(str(folder / "toy"), "train", 16, 0).n_samples == 4 * LAST
    return folder / "toy"


def steps_of(toy, out, *flags, plan=None, faults=(), code=0):
    """Run a session on one rank. Return what each of its steps started with."""
    argv = [*TINY, f"--data={toy}", "--vocab-size=0", "--save-every=1", "--keep=0", "--steps=10",
            f"--out={out}", *flags]
    (result,) = run_ranks(1, with_faults, faults, session, argv, plan)
    assert result["code"] == code, result["err"] + result["out"]
    return result["steps"]


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    """The steps of a run of two and a half epochs that never stops."""
    return steps_of(toy, tmp_path_factory.mktemp("runs") / "whole")


@pytest.mark.parametrize("last", [
    LAST, *(pytest.param(n, marks=pytest.mark.long) for n in (LAST - 1, LAST + 1, 2 * LAST))])
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


def an_epoch_too_late(original, source, epoch, windows):
    return original(source, epoch + 1, windows)


def skipped_again(original, source, epoch, windows):
    """shuffled_starts that leaves out the first step's windows in later epochs as well."""
    return original(source, epoch, (windows + 4) % source.n_samples if epoch else windows)


@pytest.mark.parametrize("fault", [an_epoch_too_late, skipped_again])
def test_a_fault_of_a_resume_is_caught(fault, toy, whole, tmp_path):
    """accelerate #2823, #4071: a resumed run has the order of another epoch. #1451: what a resume skipped is
    skipped in later epochs."""
    steps_of(toy, tmp_path, plan={LAST: signal.SIGTERM}, code=85)
    faults = [("corpus.samples.Tokens.shuffled_starts", fault)]
    assert steps_of(toy, tmp_path, "--resume=auto", faults=faults) != whole[LAST:]


def samples_since_the_resume(original, run):
    """Run.save that counts the samples of this process alone."""
    steps = run.state.step - run.first_step + 1
    with mock.patch.object(run.state, "samples", steps * run.batch):
        original(run)


def test_a_fault_of_a_second_resume_is_caught(toy, whole, tmp_path):
    """KempnerForge #57: the second resume in an epoch counts from the first."""
    steps_of(toy, tmp_path, plan={1: signal.SIGTERM}, code=85)
    second = steps_of(toy, tmp_path, "--resume=auto", plan={2: signal.SIGTERM}, code=85,
                      faults=[("train.Run.save", samples_since_the_resume)])
    assert second == whole[1:2]  # the fault does not show before the next resume
    assert steps_of(toy, tmp_path, "--resume=auto") != whole[2:]
