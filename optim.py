"""AdamW on the flat buckets: a few large tensors, fp32 masters, clipping without the host.

In one step, Optimizer.stats sums loss and squares over the world. Then Optimizer.step clips, and
AdamW.step updates this rank's slice of every bucket: without ZeRO everything. None of them waits
for the device, which itself leaves all weights as they are if gradients are not finite.
"""
import math
from typing import NamedTuple

import torch

from muon import Muon
from ops import backend
from ops.split_master import SplitMaster, whole

INITIAL_LOSS_SCALE = 65536.0
LOSS_SCALE_STEPS = 2000  # without an overflow, after which the loss scale is doubled
VOTES = 6  # reasons to stop the run, which travel with the statistics: runtime.agree.REASONS


def learning_rate(cfg, step):
    """The rate of update `step`, counted from 1: linear warmup, then --lr-schedule to min_lr."""
    if step <= cfg.warmup:
        return cfg.lr * step / cfg.warmup
    low = cfg.lr / 10 if cfg.min_lr is None else cfg.min_lr
    last = cfg.decay_steps or cfg.steps
    start = cfg.warmup
    if cfg.lr_schedule == "wsd":  # arXiv:2404.06395, section 4: constant until the decay
        start = max(start, last - round(cfg.decay_ratio * last))
    if step <= start:
        return cfg.lr
    if step >= last:
        return low
    if cfg.lr_schedule == "wsd":
        return low + (last - step) / (last - start) * (cfg.lr - low)
    progress = (step - start) / (last - start)
    return low + 0.5 * (1 + math.cos(math.pi * progress)) * (cfg.lr - low)


class AdamW:
    """What torch.optim.AdamW(fused=True) does, with decoupled weight decay (arXiv:1711.05101).

    torch's own class imports torch's compiler, which takes 2 s at every start.
    decay: of matrices; vectors have none. moments_dtype: None is that of the masters.
    """
    moments = "exp_avg", "exp_avg_sq"
    eps = 1e-8

    def __init__(self, data_parallel, betas, decay, moments_dtype=None):
        self.buckets = [b for b in data_parallel.buckets if b.optimizer == "adamw"]
        self.betas = betas
        self.decay = decay
        master = self.buckets[0].master
        self.step_count = torch.zeros((), device=master.device)  # updates that were taken
        self.state = {}  # {a bucket's master: {name of a moment: tensor}}
        for bucket in self.buckets:
            self.state[bucket.master] = {
                name: torch.zeros(bucket.master.shape, dtype=moments_dtype or master.dtype,
                                  device=master.device) for name in self.moments}
        # If you change step(), change adamw in ops/kernels.py, or set this to False.
        self.use_triton = backend.use_triton(master)

    def step(self, lr, divisor, not_finite):
        """Update this rank's slice of each bucket: its master p, by the gradients' sum. In step t:

            g = grad / divisor
            p = p - lr * decay * p
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g**2
            p = p - lr * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)

        m is exp_avg, v is exp_avg_sq. divisor: (), in the masters' dtype. not_finite: () fp32;
        where it is 1.0, nothing changes.
        """
        self.step_count += 1 - not_finite
        if self.use_triton:  # what the lines below do, in one pass over memory
            from ops import kernels
            kernels.step_adamw(self, lr, divisor, not_finite)
            return

        for bucket in reversed(self.buckets):  # roughly the first layers: forward needs them first
            p = bucket.master
            master = whole(p)  # p itself, unless it is a SplitMaster
            moments = [self.state[p][name] for name in self.moments]
            exp_avg, exp_avg_sq = [moment.to(p.dtype) for moment in moments]  # bf16's are copied
            # The kernel of nanoGPT's AdamW(fused=True); [] is amsgrad's. A found_inf of 1 stops it.
            torch._fused_adamw_(
                [master], [bucket.grad_total.to(p.dtype) / divisor], [exp_avg], [exp_avg_sq], [],
                [self.step_count], lr=lr, beta1=self.betas[0], beta2=self.betas[1],
                weight_decay=self.decay if bucket.decayed else 0.0, eps=self.eps, amsgrad=False,
                maximize=False, found_inf=not_finite)
            moments[0].copy_(exp_avg)  # rounds; nothing where both are the same memory
            moments[1].copy_(exp_avg_sq)
            if master is p:
                bucket.own.copy_(p)  # rounds; in fp32 nothing: both are the same memory
            else:
                p.copy_(master)
            bucket.after_update()  # under ZeRO-1 and 2 it starts the all-gather


class StepStats(NamedTuple):
    """The numbers of the whole model that judge a step: () fp64 each, on the device."""
    loss: torch.Tensor        # mean cross-entropy, in nats per trained token of the global batch
    grad_norm: torch.Tensor   # of the whole model's gradient, before clipping
    num_zeros: torch.Tensor   # gradients that are zero, those of the vocabulary's padding too
    param_norm: torch.Tensor  # norm of the weights; without full=True, both of these are 0


class Optimizer:
    """Judges a step, clips, and updates this rank's slice of each bucket's masters and weights."""

    def __init__(self, cfg, data_parallel):
        self.cfg = cfg
        self.data_parallel = data_parallel
        buckets = data_parallel.buckets
        device = buckets[0].flat.device
        # This rank's slices, one per bucket, (n/n_slices,) each: tensors or SplitMasters
        self.masters = [bucket.master for bucket in buckets]
        self.count_factors = torch.tensor([bucket.count_factor for bucket in buckets],
                                          dtype=torch.float64, device=device)
        moments_dtype = torch.bfloat16 if cfg.moments_dtype == "bf16" else None
        self.adam = AdamW(data_parallel, (cfg.beta1, cfg.beta2), cfg.weight_decay, moments_dtype)
        self.muon = Muon(cfg, data_parallel) if cfg.optimizer == "muon" else None
        # fp16 multiplies the loss by loss_scale, which is halved at an overflow (arXiv:1710.03740).
        scale = torch.full((), INITIAL_LOSS_SCALE, device=device)
        self.loss_scale = scale if cfg.dtype == "fp16" else None
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.stop = None  # The run's runtime.agree.Stop: this rank's votes to stop, and their sums.
        self.snapshot_done = None  # event: the checkpoint has its copy of weights and moments

    @property
    def grads(self):
        """This rank's slice of each bucket's gradients. A LoneBucket has another in each step."""
        return [bucket.grad_total for bucket in self.data_parallel.buckets]

    @torch.no_grad()
    def stats(self, loss, full=True):
        """Return the StepStats. loss: () this rank's part of the mean.

        Over all ranks each number of the model counts once, because a slice that k ranks hold
        counts 1/k on each.
        """
        loss = loss.double() / self.data_parallel.mesh.tp.size  # Every tp rank has the same loss.
        grads = [bucket.grad_total for bucket in self.data_parallel.buckets]
        grad_squares = (self.squares(grads) * self.count_factors).sum()
        num_zeros = param_squares = torch.zeros_like(loss)
        if full:
            num_zeros = self.num_zeros()
            squares = torch.cat([self.squares([whole(master)]) for master in self.masters])
            param_squares = (squares * self.count_factors).sum()

        # Votes to stop the run, such as for a signal, are summed in the same message. Nobody votes
        # in one process, in tests and in bench/.
        votes = [] if self.stop is None else self.stop.votes(loss.device)
        sums = torch.stack([loss, grad_squares, num_zeros, param_squares, *votes])
        self.data_parallel.mesh.world.all_reduce(sums)  # SUM of 4 numbers and 6 votes, over world
        if self.stop is not None:
            self.stop.sums = sums[4:]  # train.Run.judge asks for them
        grad_norm = self.unscale(sums[1].sqrt())
        return StepStats(sums[0], grad_norm, num_zeros=sums[2], param_norm=sums[3].sqrt())

    def squares(self, slices):
        """Return the sum of squares of each slice, (k,) fp64."""
        # In fp64 on a CPU, whose fp32 norm is a plain sum, 5e-5 off for a million elements.
        dtype = torch.float32 if self.adam.use_triton else torch.float64
        norms = [torch.linalg.vector_norm(piece, dtype=dtype) for piece in slices]
        return torch.stack(norms).double().square()

    def num_zeros(self):
        """Return this rank's part of the number of gradients that are zero, () fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self.count_factors.device)
        for bucket in self.data_parallel.buckets:
            end_of_filled = max(bucket.filled, bucket.own_slice.start)
            padding = max(0, bucket.own_slice.stop - end_of_filled)
            grad = bucket.grad_total
            zeros = grad.numel() - padding - grad.count_nonzero()
            total += zeros * bucket.count_factor
        return total

    @torch.no_grad()
    def step(self, lr, grad_norm):
        """Do one update. Return not_finite, () fp32: 1.0 where the norm was not finite.

        Then only fp16's loss scale changes, neither weights nor moments nor Adam's step count.
        """
        if self.snapshot_done is not None:
            self.snapshot_done.wait()  # The device waits, not the host.
            self.snapshot_done = None

        # The gradients are divided once: to clip them, as torch's clip_grad_norm_ does, and by the
        # factor of the loss.
        divisor = torch.ones_like(grad_norm)
        if self.cfg.clip > 0:
            divisor = torch.clamp((grad_norm + 1e-6) / self.cfg.clip, min=1.0)
        if self.loss_scale is not None:
            divisor = divisor * self.loss_scale
        divisor = divisor.to(self.masters[0].dtype)
        not_finite = (~torch.isfinite(grad_norm)).to(torch.float32)

        with self.data_parallel.timers("optimizer"):
            self.adam.step(lr, divisor, not_finite)
            if self.muon is not None:  # It computes while AdamW's weights travel.
                self.muon.step(lr, divisor, not_finite)

        if self.loss_scale is not None:  # halved after an overflow, else doubled now and then
            torch._amp_update_scale_(self.loss_scale, self.growth_tracker, not_finite, 2.0, 0.5,
                                     LOSS_SCALE_STEPS)
        return not_finite

    @torch.no_grad()
    def masters_to_model(self):
        """Write the masters, which were loaded, into the model's weights, on all ranks."""
        for bucket in reversed(self.data_parallel.buckets):
            if not isinstance(bucket.master, SplitMaster):  # That one has rounded into own already.
                bucket.own.copy_(bucket.master)
            bucket.after_update()

    @torch.no_grad()
    def masters_from_model(self):
        """Set the masters after the model's weights were overwritten, equally on all replicas.

        If rounding a master gives its weight, the master is kept, with the low bits of the first
        replica. Otherwise it takes the weight's value. Collective.
        """
        for master, bucket in zip(self.masters, self.data_parallel.buckets, strict=True):
            if isinstance(master, SplitMaster):
                # The low bits of this rank's slice, first replica to all, over its replicas, as
                # bytes: gloo and NCCL know no int16.
                bucket.replicas.broadcast(master.low.view(torch.uint8))
                master.low.masked_fill_(master.own == 0, 0)
                continue
            if master.dtype != bucket.own.dtype:
                # This rank's slice of the masters, first replica to all, over its replicas
                bucket.replicas.broadcast(master)
            is_same = master.to(bucket.own.dtype) == bucket.own
            master.copy_(torch.where(is_same, master, bucket.own.to(master.dtype)))

    def moments(self):
        """Return {name of a moment: its slice of each bucket, None where a bucket has none}."""
        state = dict(self.adam.state)
        names = self.adam.moments
        if self.muon is not None:
            state.update(self.muon.state)
            names += self.muon.moments
        return {name: [state[master].get(name) for master in self.masters] for name in names}

    def scaler(self):
        """Return [loss scale, steps since it last changed]; None without a loss scale."""
        if self.loss_scale is None:
            return None
        return [self.loss_scale.item(), self.growth_tracker.item()]

    def set_scaler(self, saved):
        """Go on with the loss scale of a checkpoint, if both runs have one."""
        if self.loss_scale is not None and saved is not None:
            self.loss_scale.fill_(saved[0])
            self.growth_tracker.fill_(saved[1])

    def unscale(self, grad):  # fp16's loss scale taken out
        return grad if self.loss_scale is None else grad / self.loss_scale
