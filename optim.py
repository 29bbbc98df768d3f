"""AdamW on the flat buckets: a few large tensors, fp32 masters, clipping and overflow test on the device."""
import torch


class AdamW:
    """torch.optim.AdamW(fused=True), whose own class imports torch's compiler, 2 s of every start. Decoupled
    weight decay: arXiv:1711.05101. decay: one number per parameter; moments and t stand in state."""

    def __init__(self, params, decay, betas, eps=1e-8):
        self.params, self.decay, self.betas, self.eps, self.state = params, decay, betas, eps, {}

    def step(self, grads, lr, divide, bad):
        """divide: () fp32, divisor of the gradients; bad: () fp32, 1.0 changes nothing."""
        for decay in dict.fromkeys(self.decay):
            params, of = zip(*[(p, g) for p, g, d in zip(self.params, grads, self.decay, strict=True)
                               if d == decay], strict=True)
            m, v, t = ([self.state[p][k] for p in params] for k in ("exp_avg", "exp_avg_sq", "step"))
            torch._foreach_add_(t, 1)
            torch._fused_adamw_(params, of, m, v, [], t, lr=lr, beta1=self.betas[0],
                                beta2=self.betas[1], weight_decay=decay, eps=self.eps, amsgrad=False,
                                maximize=False, grad_scale=divide, found_inf=bad)
            torch._foreach_sub_(t, [bad] * len(t))


class Optimizer:
    """Steps each bucket's own slice (all of it without ZeRO). The master copy is in at least fp32; it is the
    weights themselves when the model's dtype is."""

    def __init__(self, dp, cfg, mesh):
        device = dp.buckets[0].flat.device
        # fp16 only: the loss is multiplied by this, halved at an overflow, doubled after 2000 steps without
        # (arXiv:1710.03740)
        self.scale = torch.full((), 65536.0, device=device) if cfg.dtype == "fp16" else None
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.dp, self.clip, self.world, self.tp = dp, cfg.clip, mesh.world, mesh.tp
        # a Triton kernel reads each number once and writes the model's weights too, 30 bytes per weight; its
        # slow twin is torch's fused kernel, which writes the divided gradients back: 38 with the rounding
        self.triton = device.type == "cuda" and dp.buckets[0].master.dtype == torch.float32
        self.before_step = None  # called when gradients are summed, before an update (of a void step too)
        self.saving = None  # event: a checkpoint has its copy of weights and moments
        self.masters = [b.master for b in dp.buckets]  # (n/shards,) each
        self.grads = [b.total for b in dp.buckets]  # likewise
        self.shares = torch.tensor([b.share for b in dp.buckets], dtype=torch.float64, device=device)
        self.adam = AdamW(self.masters, [cfg.weight_decay if b.decay else 0.0 for b in dp.buckets],
                          (cfg.beta1, cfg.beta2))
        t = torch.zeros((), device=device)
        for m in self.masters:
            self.adam.state[m] = {"step": t if self.triton else t.clone(), "exp_avg": torch.zeros_like(m),
                                  "exp_avg_sq": torch.zeros_like(m)}

    def adam_t(self):
        return self.adam.state[self.masters[0]]["step"].item()

    def set_adam_t(self, t):
        for m in self.masters:
            self.adam.state[m]["step"].fill_(t)

    def scaler(self):
        """[loss scale, steps since it last changed], or None."""
        return None if self.scale is None else [self.scale.item(), self.good_steps.item()]

    def set_scaler(self, saved):
        if self.scale is not None and saved is not None:
            self.scale.fill_(saved[0]), self.good_steps.fill_(saved[1])

    def unscaled(self, gradient):
        return gradient if self.scale is None else gradient / self.scale

    @torch.no_grad()
    def reload(self):
        """Weights were written into the model from outside, the same on all replicas: the masters follow. A
        master that rounds to its weight keeps the digits for which the model's dtype has no room, those of
        the first replica."""
        for m, b in zip(self.masters, self.dp.buckets, strict=True):
            own = b.flat[b.mine]
            if b.shards < b.axis.size and m.dtype != own.dtype:
                b.axis.broadcast(m)  # n masters, first replica to all
            m.copy_(torch.where(m.to(own.dtype) == own, m, own.to(m.dtype)))

    @torch.no_grad()
    def publish(self):
        """The masters' values become the model's weights, on this rank and (ZeRO-1) on the others."""
        for m, b in reversed(list(zip(self.masters, self.dp.buckets, strict=True))):
            b.flat[b.mine].copy_(m)  # rounds to the model's dtype; onto itself without masters
            self.dp.stepped(b)

    def wait(self):
        """The other ranks' new weights are here after this: for all readers but the next forward."""
        self.dp.send_owed()
        for b in self.dp.buckets:
            b.arrive()

    @torch.no_grad()
    def totals(self, loss, full=True):
        """-> (4,) fp64 on the device: mean loss, gradient norm before clipping, number of zero gradients,
        parameter norm (the last two only if full). loss: this rank's part of the mean. One all-reduce of four
        numbers serves all: slices partition the model, and what several ranks hold in common counts 1/ranks
        on each."""
        # torch's fp32 norm on a CPU is a plain sum, 5e-5 off for a million elements
        wide = torch.float64 if loss.device.type == "cpu" else self.masters[0].dtype
        loss = loss.double() / self.tp.size  # every tp rank computed the same loss
        total = torch.stack([loss, *torch.zeros_like(loss).expand(3)])
        total[1] = self.squared(self.grads, wide)
        if full:
            for g, b in zip(self.grads, self.dp.buckets, strict=True):
                padding = max(0, b.mine.stop - max(b.used, b.mine.start))
                total[2] += (g.numel() - padding - g.count_nonzero()) * b.share
            total[3] = self.squared(self.masters, wide)
        self.world.all_reduce(total)  # SUM of 4 numbers, over the world
        total[1] = self.unscaled(total[1].sqrt())
        total[3].sqrt_()
        return total

    def squared(self, slices, wide):
        """-> () fp64, the squared norm of what slices, one per bucket, hold; torch batches those of one
        dtype."""
        norms = [None] * len(slices)
        for dtype in {s.dtype for s in slices}:
            alike = [i for i, s in enumerate(slices) if s.dtype == dtype]
            for i, norm in zip(alike, torch._foreach_norm([slices[i] for i in alike], 2, dtype=wide),
                               strict=True):
                norms[i] = norm
        return (torch.stack(norms).double().square() * self.shares).sum()

    @torch.no_grad()
    def step(self, lr, grad_norm):
        """One update. Gradients are divided by max(1, norm/clip) inside the kernel; a non-finite norm changes
        nothing at all (weights, moments, Adam's own t). No host synchronisation.
        -> () 1.0 where the step was not taken."""
        if self.before_step is not None:
            self.before_step()
        if self.saving is not None:
            torch.cuda.current_stream().wait_event(self.saving)
            self.saving = None
        bad = (~torch.isfinite(grad_norm)).to(torch.float32)
        divide = (torch.clamp((grad_norm + 1e-6) / self.clip, min=1.0) if self.clip > 0
                  else torch.ones_like(grad_norm))
        divide = divide if self.scale is None else divide * self.scale
        if self.masters[0].dtype == torch.float64:  # torch's kernel takes an fp32 divisor only
            for g in self.grads:  # padding is never written anew: a NaN would stay in it
                g.div_(torch.where(bad > 0, 1.0, divide))
            divide = torch.ones_like(divide)
        divide = divide.to(torch.float32)
        with self.dp.timers("optimizer"):
            if self.triton:
                self.adamw(lr, divide, bad)
            else:
                self.adam.step(self.grads, lr, divide, bad)
                self.publish()
        if self.scale is not None:
            torch._amp_update_scale_(self.scale, self.good_steps, bad, 2.0, 0.5, 2000)
        return bad

    def adamw(self, lr, divide, bad):
        """AdamW's update and publish()'s rounding in one pass; divide, bad: () fp32 on the device."""
        from ops import kernels
        (beta1, beta2), eps = self.adam.betas, self.adam.eps
        t = self.adam.state[self.masters[0]]["step"]  # one tensor for all
        t += 1 - bad
        wide = t.double()
        now = torch.stack([lr / (1 - beta1 ** wide), (1 - beta2 ** wide).sqrt(), divide, bad]).float()
        for b, m, g, decay in reversed(list(zip(self.dp.buckets, self.masters, self.grads, self.adam.decay,
                                                strict=True))):
            state, flat = self.adam.state[m], b.flat[b.mine]
            kernels.adamw[(-(-m.numel() // 2048),)](
                m, g, state["exp_avg"], state["exp_avg_sq"], flat, now, 1 - lr * decay, 1 - beta1,
                1 - beta2, eps, m.numel(), OUT=flat.dtype != m.dtype, BLOCK=2048, num_warps=8)
            self.dp.stepped(b)
