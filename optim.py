"""AdamW on the flat buckets: a few large tensors, fp32 masters, clipping and overflow test on the device.

One step: stats() sums loss and norms over the world, step() clips and updates this rank's slice of every
bucket (all of it without ZeRO) and passes each updated bucket to DataParallel.on_updated, which sends it. A
step never synchronises with the host: gradients that are not finite make it a no-op on the device.
"""
import math
from typing import NamedTuple

import torch

from ops import backend


def learning_rate(cfg, step):
    """Linear warmup, then a cosine down to min_lr. step is 1-based: the update about to happen."""
    low = cfg.lr / 10 if cfg.min_lr is None else cfg.min_lr
    last = cfg.decay_steps or cfg.steps
    if step <= cfg.warmup:
        return cfg.lr * step / cfg.warmup
    if step >= last:
        return low
    progress = (step - cfg.warmup) / (last - cfg.warmup)
    return low + 0.5 * (1 + math.cos(math.pi * progress)) * (cfg.lr - low)


# -----------------------------------------------------------------------------
# --rampup-batch-size START INCREMENT SAMPLES, as in Megatron-LM (its num_microbatches_calculator.py): the
# global batch starts at START sequences and grows by INCREMENT up to --global-batch while the first SAMPLES
# sequences are consumed, in stages of equally many samples. it is a function of the samples consumed alone: a
# resumed run, another layout and plan.py get the same batch. the learning rate stays a function of the step

def batch_size(samples, full, ramp=()):
    """-> sequences in the step that starts after `samples` were consumed. full: the batch after the ramp."""
    if not ramp:
        return full
    start, increment, over = ramp
    stages = (full - start) // increment
    return min(full, start + increment * (samples * stages // over))


def check_ramp(full, ramp, unit):
    """ValueError if the batch of a stage of the ramp does not divide by unit = micro-batch * dp."""
    if not ramp:
        return
    start, increment, over = ramp
    flag = f"--rampup-batch-size {start} {increment} {over}"
    if not 0 < start <= full or (full - start) % increment:
        raise ValueError(f"{flag} does not reach global-batch {full} in whole increments; "
                         f"try --global-batch {start + max(1, -(-(full - start) // increment)) * increment}")
    if full - start > 1000 * increment:
        raise ValueError(f"{flag} has {(full - start) // increment} stages, more than 1000; "
                         f"try an INCREMENT of {-(-(full - start) // 1000)} or more")
    for size in start, min(full, start + increment):  # if these two divide, so do all that follow
        if size % unit:
            raise ValueError(f"{flag} has a stage of {size}, which does not divide by micro-batch * dp = "
                             f"{unit}; give START and INCREMENT as multiples of {unit}")


# -----------------------------------------------------------------------------
# the update

class StepStats(NamedTuple):
    """Of one step, summed over the world: () fp64 each, on the device."""
    loss: torch.Tensor        # mean cross-entropy in nats per token of the global batch
    grad_norm: torch.Tensor   # of the whole model's gradient, before clipping
    num_zeros: torch.Tensor   # gradients that are exactly zero; 0 unless full statistics were asked for
    param_norm: torch.Tensor  # norm of the weights; 0 unless full


class AdamW:
    """What torch.optim.AdamW(fused=True) does; torch's own class imports torch's compiler, which costs 2 s at
    every start. Decoupled weight decay: arXiv:1711.05101. decay: one number per parameter; state holds each
    parameter's moments and step count t."""
    moments = "exp_avg", "exp_avg_sq"

    def __init__(self, params, decay, betas, eps=1e-8):
        self.params, self.decay, self.betas, self.eps, self.state = params, decay, betas, eps, {}

    def step(self, grads, lr, grad_scale, found_inf):
        """grads: one per parameter; lr: float; grad_scale: () fp32, the gradients' divisor; found_inf: ()
        fp32, where 1.0 no tensor changes."""
        for decay in dict.fromkeys(self.decay):
            params, matching = zip(*[(p, g.to(p.dtype)) for p, g, d in
                                     zip(self.params, grads, self.decay, strict=True) if d == decay],
                                   strict=True)
            m, v, t = ([self.state[p][k] for p in params] for k in ("exp_avg", "exp_avg_sq", "step"))
            torch._foreach_add_(t, 1)  # the kernel wants the new t
            torch._fused_adamw_(params, matching, m, v, [], t, lr=lr, beta1=self.betas[0],
                                beta2=self.betas[1], weight_decay=decay, eps=self.eps, amsgrad=False,
                                maximize=False, grad_scale=grad_scale, found_inf=found_inf)
            torch._foreach_sub_(t, [found_inf] * len(t))


class Optimizer:
    """Clips, steps each bucket's own slice of the fp32 masters, and writes the model's weights. In an fp32 or
    fp64 model the masters are the weights themselves."""

    def __init__(self, cfg, dp):
        self.cfg, self.dp, device = cfg, dp, dp.buckets[0].flat.device
        # fp16 only: the loss is multiplied by loss_scale, which is halved at an overflow and doubled after
        # 2000 steps without one (arXiv:1710.03740)
        self.loss_scale = torch.full((), 65536.0, device=device) if cfg.dtype == "fp16" else None
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        # the Triton kernel reads each number once and writes the model's weights too: 30 bytes per weight.
        # its slow twin is torch's fused kernel, which also writes the divided gradients back: 38 with the
        # rounding
        self.use_triton = backend.use_triton(dp.buckets[0].master)
        self.on_grads_ready = None  # called when gradients are summed, before the update (also a refused one)
        self.snapshot_done = None  # event: the checkpoint's copy of weights and moments is made
        self.masters = [b.master for b in dp.buckets]  # (n/shards,) each
        self.grads = [b.total for b in dp.buckets]  # likewise
        self.replica_weights = torch.tensor([b.replica_weight for b in dp.buckets], dtype=torch.float64,
                                            device=device)
        self.adam = AdamW(self.masters, [cfg.weight_decay if b.decayed else 0.0 for b in dp.buckets],
                          (cfg.beta1, cfg.beta2))
        t = torch.zeros((), device=device)
        for m in self.masters:
            self.adam.state[m] = {"step": t if self.use_triton else t.clone(),
                                  **{k: torch.zeros_like(m) for k in self.adam.moments}}

    def adam_t(self):
        return self.adam.state[self.masters[0]]["step"].item()

    def set_adam_t(self, t):
        for m in self.masters:
            self.adam.state[m]["step"].fill_(t)

    def scaler(self):
        """[loss scale, steps since it last changed], or None."""
        return None if self.loss_scale is None else [self.loss_scale.item(), self.growth_tracker.item()]

    def set_scaler(self, saved):
        if self.loss_scale is not None and saved is not None:
            self.loss_scale.fill_(saved[0])
            self.growth_tracker.fill_(saved[1])

    def unscale(self, gradient):
        """The gradient of the loss itself: divided by fp16's loss scale."""
        return gradient if self.loss_scale is None else gradient / self.loss_scale

    @torch.no_grad()
    def masters_from_model(self):
        """The model's weights were overwritten, equally on all replicas. A master that still rounds to its
        weight is kept (with the first replica's low bits); another takes the weight's value. Collective."""
        for m, b in zip(self.masters, self.dp.buckets, strict=True):
            if b.shards < b.axis.size and m.dtype != b.own.dtype:
                b.axis.broadcast(m)  # n masters, first replica to all, over the bucket's axis
            m.copy_(torch.where(m.to(b.own.dtype) == b.own, m, b.own.to(m.dtype)))

    @torch.no_grad()
    def masters_to_model(self):
        """The masters' values become the model's weights, on this rank and (ZeRO-1) on the others."""
        for m, b in reversed(list(zip(self.masters, self.dp.buckets, strict=True))):
            b.own.copy_(m)  # rounds; a no-op where both are one
            self.dp.on_updated(b)

    @torch.no_grad()
    def stats(self, loss, full=True):
        """loss: () this rank's part of the mean -> StepStats; num_zeros and param_norm only if full. One
        all-reduce of four numbers serves all: the slices partition the model, and a slice that k ranks hold
        counts 1/k on each of them."""
        # torch's fp32 norm on a CPU is a plain sum, 5e-5 off for a million elements
        dtype = torch.float64 if loss.device.type == "cpu" else self.masters[0].dtype
        loss = loss.double() / self.dp.mesh.tp.size  # every tp rank computed the same loss
        total = torch.stack([loss, *torch.zeros_like(loss).expand(3)])
        total[1] = self.sum_of_squares(self.grads, dtype)
        if full:
            for g, b in zip(self.grads, self.dp.buckets, strict=True):
                padding = max(0, b.shard.stop - max(b.used, b.shard.start))
                total[2] += (g.numel() - padding - g.count_nonzero()) * b.replica_weight
            total[3] = self.sum_of_squares(self.masters, dtype)
        self.dp.mesh.world.all_reduce(total)  # SUM of 4 numbers, over the world
        total[1] = self.unscale(total[1].sqrt())
        total[3].sqrt_()
        return StepStats(*total)

    def sum_of_squares(self, slices, dtype):
        """-> () fp64: this rank's part of the squared norm of slices, one per bucket. _foreach_norm wants one
        dtype per call."""
        norms = [None] * len(slices)
        for kind in {s.dtype for s in slices}:
            alike = [i for i, s in enumerate(slices) if s.dtype == kind]
            for i, norm in zip(alike, torch._foreach_norm([slices[i] for i in alike], 2, dtype=dtype),
                               strict=True):
                norms[i] = norm
        return (torch.stack(norms).double().square() * self.replica_weights).sum()

    @torch.no_grad()
    def step(self, lr, grad_norm):
        """One update. Gradients are divided by max(1, (norm + 1e-6) / clip) inside the kernel, as in torch's
        clip_grad_norm_; a non-finite norm changes nothing (weights, moments, Adam's own t). No host sync.
        -> found_inf, () fp32, 1.0 where the step was not taken."""
        if self.on_grads_ready is not None:
            self.on_grads_ready()
        if self.snapshot_done is not None:
            self.snapshot_done.wait()  # the device waits, not the host
            self.snapshot_done = None
        clip = self.cfg.clip
        found_inf = (~torch.isfinite(grad_norm)).to(torch.float32)
        grad_scale = (torch.clamp((grad_norm + 1e-6) / clip, min=1.0) if clip > 0
                      else torch.ones_like(grad_norm))
        grad_scale = grad_scale if self.loss_scale is None else grad_scale * self.loss_scale
        if self.masters[0].dtype == torch.float64:  # torch's kernel takes an fp32 divisor only
            for g in self.grads:  # by 1 if refused: padding is never rewritten, a NaN there would stay
                g.div_(torch.where(found_inf > 0, 1.0, grad_scale))
            grad_scale = torch.ones_like(grad_scale)
        grad_scale = grad_scale.to(torch.float32)
        with self.dp.timers("optimizer"):
            if self.use_triton:
                self.step_triton(lr, grad_scale, found_inf)
            else:
                self.adam.step(self.grads, lr, grad_scale, found_inf)
                self.masters_to_model()
        if self.loss_scale is not None:
            torch._amp_update_scale_(self.loss_scale, self.growth_tracker, found_inf, 2.0, 0.5, 2000)
        return found_inf

    def step_triton(self, lr, grad_scale, found_inf):
        """AdamW's update and masters_to_model()'s rounding in one pass over memory."""
        from ops import kernels
        (beta1, beta2), eps = self.adam.betas, self.adam.eps
        t = self.adam.state[self.masters[0]]["step"]  # one tensor for all
        t += 1 - found_inf
        wide = t.double()
        scalars = torch.stack([lr / (1 - beta1 ** wide), (1 - beta2 ** wide).sqrt(), grad_scale,
                               found_inf]).float()
        for b, m, g, decay in reversed(list(zip(self.dp.buckets, self.masters, self.grads, self.adam.decay,
                                                strict=True))):
            state = self.adam.state[m]
            kernels.adamw[(-(-m.numel() // 2048),)](
                m, g, state["exp_avg"], state["exp_avg_sq"], b.own, scalars, 1 - lr * decay, 1 - beta1,
                1 - beta2, eps, m.numel(), OUT=b.own.dtype != m.dtype, BLOCK=2048, num_warps=8)
            self.dp.on_updated(b)
