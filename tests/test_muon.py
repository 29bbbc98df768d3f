"""Muon: its formula, what an update needs of memory, clipping, checkpoints.

test_layouts.py compares it in every layout with plain_muon.py, which is written from the papers, in fp64 to
1e-10; test_faults.py has its faults.
"""
import dataclasses
import math
import weakref
from functools import partial

import plain_muon
import pytest
import torch
from runs import assert_refused, final, go
from test_model import FAMILIES, built, steps
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import muon
from model import DTYPES

# -----------------------------------------------------------------------------
# One matrix

def whole(shape):
    return muon.Matrix(shape, shape, {})


@pytest.mark.parametrize("rows,count", [(2**28, 1), (2**27, 1), (2**26, 2), (3 * 2**24, 2), (2**25, 4)])
def test_how_many_matrices_are_computed_together(rows, count):
    batches = muon.batches_of([whole((rows, 1))] * 5, 2**40)
    assert max(map(len, batches)) == count and sum(batches, []) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("elements,count", [(100, 1), (8191, 3), (8192, 4), (3 * 2048, 3), (5 * 2048, 5)])
def test_a_batch_needs_no_more_elements_than_a_rank_has(elements, count):
    """Those of a matrix of 16 x 16 are 2 * 256 for the matrix and 6 * 256 for its Gram matrix."""
    assert whole((16, 16)).workspace == 2048
    cut = muon.Matrix((16, 16), (32, 16), {})  # this rank's share is as large
    *batches, share, other = muon.batches_of([*[whole((16, 16))] * 5, cut, whole((16, 17))], elements)
    assert max(map(len, batches)) == count and (share, other) == ([5], [6]), "matrices of one shape"


SHAPES = [(24, 16), (16, 24), (16, 16)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_plain_muon_is_torchs(shape):
    """Four steps of what torch.optim.Muon.step calls. The class itself imports torch's compiler: 4 s.

    torch computes the iteration in bf16. The update of a step has elements of about lr * UPDATE_RMS.
    """
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no torch.optim.Muon")
    theirs = torch.optim._muon._single_tensor_muon
    rng = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=rng)
    p = weight.clone()
    momentum, their_momentum = torch.zeros(shape), torch.zeros(shape)
    for t in range(1, 5):
        grad = torch.randn(shape, generator=rng)
        theirs([p], [grad], [their_momentum], lr=0.02, weight_decay=0.3, momentum=0.8, nesterov=True,
               ns_coefficients=muon.COEFFICIENTS, ns_steps=5, eps=1e-7, adjust_lr_fn="match_rms_adamw",
               has_complex=False)
        weight, momentum = plain_muon.muon(weight, grad, momentum, 0.02, 0.8, 0.3)
        torch.testing.assert_close(their_momentum, momentum)
        rms = (p - weight).square().mean().sqrt()
        assert rms < 0.05 * t * 0.02 * muon.UPDATE_RMS, "5 % of the updates so far: bf16's rounding"


@pytest.mark.parametrize("dtype,error", [(torch.float64, 1e-12), (torch.bfloat16, 0.06)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_batch_of_matrices_is_orthogonalised_one_by_one(shape, dtype, error):
    """One matrix of the batch is zero, as that of an unused expert. bf16: directions of a 16-bit model."""
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x[1] = 0
    got = muon.orthogonalise(x.to(dtype, copy=True))
    assert got.dtype == muon.iteration_dtype(dtype) and not got[1].any()
    for matrix, result in zip(x.to(dtype).double(), got, strict=True):
        torch.testing.assert_close(result.double(), plain_muon.orthogonalised(matrix), rtol=0, atol=error)
    singular = torch.linalg.svdvals(got[0].double())
    assert singular.min() > 0.6 and singular.max() < 1.3


def hard_matrices(side, other):
    """Return matrices (5, side, other) in fp64 whose Gram matrices are hard to round."""
    rng = torch.Generator().manual_seed(3)
    noise = torch.randn(side, other, generator=rng, dtype=torch.float64)
    left = torch.linalg.qr(noise[:, :side])[0]
    right = torch.linalg.qr(noise.T)[0].T
    falling = torch.logspace(0, -4, side, dtype=torch.float64)
    of_rank_4 = left[:, :4] @ right[:4]
    return torch.stack([noise, noise.abs(), of_rank_4 + 1e-3 * noise / side, left * falling @ right,
                        left / torch.arange(1, side + 1) @ right])


@pytest.mark.parametrize("size", [(48, 48), (48, 72), (48, 168)], ids=str)
def test_the_iteration_in_fp16_is_nearer_to_fp64_than_torchs_in_bf16(size):
    """Random, one sign, low rank, singular values that fall to 1e-4, or as 1 / k. Gradients are small."""
    x = (1e-6 * hard_matrices(*size)).bfloat16()
    got = muon.orthogonalise(x.clone())
    tall = muon.orthogonalise(x.mT.contiguous())
    for matrix, *ours in zip(x, got, tall.mT, strict=True):
        want = plain_muon.orthogonalised(matrix.double())
        theirs = (plain_muon.orthogonalised(matrix).double() - want).norm()
        for result in ours:
            assert (result.double() - want).norm() < 0.7 * theirs


def test_updates_stand_where_the_directions_were():
    cfg = dataclasses.replace(FAMILIES["llama"], optimizer="muon", n_experts=4, n_layer=2, dtype="bf16")
    _, _, opt = built(cfg)
    assert max(len(batch) for group in opt.muon.groups for batch in group.batches) > 1
    for group in opt.muon.groups:
        vector = torch.randn(sum(group.sizes)).bfloat16()
        directions = vector.clone()
        updates = group.orthogonalise(vector)
        assert updates.data_ptr() == vector.data_ptr() and updates.dtype == torch.float16
        for matrix in group.matrices:
            direction = directions[matrix.parts[0]].view(1, *matrix.shape)
            scale = muon.UPDATE_RMS * math.sqrt(max(matrix.full_shape))
            want = muon.orthogonalise(direction, scale=scale).flatten()
            torch.testing.assert_close(updates[matrix.parts[0]], want, rtol=0, atol=1e-2)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made in this context and not yet freed; peak: at most."""

    def __init__(self):
        super().__init__()
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)}
        made = function(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            storage = x.untyped_storage() if torch.is_tensor(x) else None
            if storage is not None and storage._cdata not in given and storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.live.values()))
        return made


def test_the_update_needs_no_more_memory_than_adamws_second_moment():
    """For which Muon has no use. So the planner counts nothing for the update."""
    cfg = dataclasses.replace(FAMILIES["llama"], optimizer="muon", n_layer=6, dtype="bf16")
    _, _, opt = built(cfg)
    [group] = opt.muon.groups
    vector = torch.randn(sum(group.sizes)).bfloat16()
    with LiveBytes() as seen:
        group.orthogonalise(vector)
    peak = seen.peak + vector.nbytes
    assert vector.nbytes < peak <= 4 * vector.numel()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_both_passes_of_an_update_are_the_same_as_graphs(dtype):
    """As --compile traces them. In fp32 weights and masters are one tensor; a refused step changes none."""
    rng = torch.Generator().manual_seed(1)
    w, m, grad, update = torch.randn(4, 5000, generator=rng)
    own = w.to(DTYPES[dtype])
    update = update.to(muon.iteration_dtype(own.dtype))
    found = []
    for form in (lambda f: f), partial(torch.compile, dynamic=True, backend="aot_eager"):
        master, momentum = w.clone(), m.clone()
        weight = master if dtype == "fp32" else own.clone()
        direction = torch.empty(5000, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16)
        for refused in torch.tensor([0.0, 1.0]):
            before = [t.clone() for t in (master, momentum, weight)]
            bad = grad.where(refused == 0, torch.nan)
            form(muon.add_gradient)(momentum, bad, direction, torch.tensor(3.0), refused, 0.9)
            if not refused:
                want = direction.clone()
            form(muon.update_masters)(master, update, weight, 0.1 * (1 - refused), 0.5)
        for now, then in zip((master, momentum, weight), before, strict=True):
            assert torch.equal(now, then)
        found.append((master, momentum, weight, want))
    assert not torch.equal(found[0][0], w) and not torch.equal(found[0][1], m)
    for got, plain in zip(*found, strict=True):
        torch.testing.assert_close(got, plain, rtol=1e-6, atol=1e-7)


# -----------------------------------------------------------------------------
# Clipping

@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_momenta_have_clipped_gradients_without_the_loss_scale(dtype):
    """After one step they are 1 - momentum of the gradient, scaled down to --clip, as in fp64."""
    norms = {}
    for width in ("fp64", dtype):
        cfg = dataclasses.replace(FAMILIES["llama"], dtype=width, clip=0.05, optimizer="muon", momentum=0.9)
        model, data_parallel, opt = built(cfg)
        [(stats, _)] = steps(cfg, model, data_parallel, opt, [1])
        assert stats.grad_norm > 2 * cfg.clip
        momenta = [state["momentum"].double().norm() for state in opt.muon.state.values()]
        norms[width] = torch.stack(momenta).norm() / 0.1
        assert norms[width] < cfg.clip
    torch.testing.assert_close(norms[dtype], norms["fp64"], rtol=1e-5 if dtype == "fp32" else 0.03, atol=0)


# -----------------------------------------------------------------------------
# Checkpoints

DOUBLE = ["--dtype=fp64", "--steps=3", "--optimizer=muon", "--ffn-hidden=24"]


def test_a_run_goes_on_in_another_layout(tmp_path):
    """After two steps with ZeRO-2, the third with tp: as one process does all three."""
    go(1, tmp_path / "one", *DOUBLE)
    go(2, tmp_path / "two", *DOUBLE, "--steps=2", "--decay-steps=3", "--zero=2", "--save-every=2")
    go(2, tmp_path / "two", *DOUBLE, "--tp=2", "--resume=auto")
    want, _ = final(tmp_path / "one", 3)
    got, _ = final(tmp_path / "two", 3)
    assert got.keys() == want.keys() and "momentum/blocks.0.attn.wq.weight" in want
    assert "exp_avg/blocks.0.attn.wq.weight" not in want and "exp_avg_sq/wte.weight" in want
    for name, tensor in want.items():
        most = tensor.abs().max().item()
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=1e-10 * most, msg=name)


def test_a_checkpoint_of_the_other_optimizer_is_refused_in_one_line(tmp_path):
    """--init-from takes its weights alone."""
    for name, other in (("adamw", "muon"), ("muon", "adamw")):
        go(1, tmp_path / name, f"--optimizer={name}", "--steps=1")
        step = tmp_path / name / "step_000001"
        said = go(1, tmp_path / "no", f"--optimizer={other}", f"--resume={step}", "--steps=2", code=2)
        assert_refused(said, f"{step} was trained with --optimizer {name} (this run: {other}); give the same")
        out = tmp_path / f"from_{name}"
        said = go(1, out, f"--optimizer={other}", f"--init-from={step}", "--steps=1")
        assert f"starts from the weights of {step}, with a fresh optimizer" in said["out"]
