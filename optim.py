"""AdamW on the flat buckets: a few large tensors, fp32 masters, clipping and overflow test on the device."""
import torch
import torch.distributed as dist


class Optimizer:
    """Steps each bucket's own slice (all of it without ZeRO). The master copy is in at least fp32; it is the
    weights themselves when the model's dtype is. AdamW: arXiv:1711.05101; the fused kernel is PyTorch's."""

    def __init__(self, dp, cfg, mesh):
        device = dp.buckets[0].flat.device
        # fp16 only: the loss is multiplied by this, halved at an overflow, doubled after 2000 steps without
        # (arXiv:1710.03740)
        self.scale = torch.full((), 65536.0, device=device) if cfg.dtype == "fp16" else None
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.dp, self.clip, self.world, self.tp = dp, cfg.clip, mesh.world, mesh.tp
        self.weight_decay = cfg.weight_decay  # of matrices
        # a Triton kernel reads each number once and writes the model's weights too, 30 bytes per weight; its
        # slow twin is torch's fused kernel, which writes the divided gradients back: 38 with the rounding
        self.triton = device.type == "cuda" and dp.buckets[0].grad.dtype == torch.float32
        self.before_step = None  # called when gradients are summed and nothing is updated yet
        self.saving = None  # event: a checkpoint has its copy of weights and moments
        self.masters = []  # per bucket (n/shards,)
        for b in dp.buckets:
            own = b.flat[b.mine]
            self.masters.append(own if own.dtype == b.grad.dtype else own.to(b.grad.dtype))
        groups = [{"params": [m for m, b in zip(self.masters, dp.buckets, strict=True) if b.decay == decay],
                   "weight_decay": cfg.weight_decay if decay else 0.0} for decay in (True, False)]
        self.adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.lr,
                                      betas=(cfg.beta1, cfg.beta2), eps=1e-8, fused=True)
        t = torch.zeros((), device=device)
        for m, b in zip(self.masters, dp.buckets, strict=True):
            m.grad = b.grad[b.mine]
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
        """Weights were written into the model from outside: the masters follow."""
        for m, b in zip(self.masters, self.dp.buckets, strict=True):
            m.copy_(b.flat[b.mine])

    @torch.no_grad()
    def publish(self):
        """The masters' values become the model's weights, on this rank and (ZeRO-1) on the others."""
        for m, b in zip(self.masters, self.dp.buckets, strict=True):
            b.flat[b.mine].copy_(m)  # rounds to the model's dtype; onto itself without masters
        self.dp.stepped()

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
        wide = torch.float64 if loss.device.type == "cpu" else None
        loss = loss.double() / self.tp.size  # every tp rank computed the same loss
        total = torch.stack([loss, *torch.zeros_like(loss).expand(3)])
        for m, b in zip(self.masters, self.dp.buckets, strict=True):
            g = m.grad
            total[1] += torch.linalg.vector_norm(g, dtype=wide).double() ** 2 * b.share
            if full:
                padding = max(0, b.mine.stop - max(b.used, b.mine.start))
                total[2] += (g.numel() - padding - g.count_nonzero()) * b.share
                total[3] += torch.linalg.vector_norm(m, dtype=wide).double() ** 2 * b.share
        if self.world.size > 1:
            self.world.count("all-reduce", total)
            dist.all_reduce(total, group=self.world.group)  # SUM of 4 numbers, over the world
        total[1] = self.unscaled(total[1].sqrt())
        total[3].sqrt_()
        return total

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
            for m in self.masters:
                m.grad.div_(divide)
            divide = torch.ones_like(divide)
        self.adam.grad_scale, self.adam.found_inf = divide.to(torch.float32), bad
        for group in self.adam.param_groups:
            group["lr"] = lr
        with self.dp.timers("optimizer"):
            if self.triton:
                self.adamw(lr, divide.float(), bad)
                self.dp.stepped()
            else:
                self.adam.step()
                self.publish()
        if self.scale is not None:
            torch._amp_update_scale_(self.scale, self.good_steps, bad, 2.0, 0.5, 2000)
        return bad

    def adamw(self, lr, divide, bad):
        """AdamW's update and publish()'s rounding in one pass; divide, bad: () fp32 on the device."""
        import kernels
        (beta1, beta2), eps = self.adam.defaults["betas"], self.adam.defaults["eps"]
        t = self.adam.state[self.masters[0]]["step"]  # one tensor for all
        t += 1 - bad
        wide = t.double()
        now = torch.stack([lr / (1 - beta1 ** wide), (1 - beta2 ** wide).sqrt(), divide, bad]).float()
        for b, m in zip(self.dp.buckets, self.masters, strict=True):
            state, flat = self.adam.state[m], b.flat[b.mine]
            decay = self.weight_decay if b.decay else 0.0
            kernels.adamw[(-(-m.numel() // 2048),)](
                m, m.grad, state["exp_avg"], state["exp_avg_sq"], flat, now, 1 - lr * decay, 1 - beta1,
                1 - beta2, eps, m.numel(), OUT=flat.dtype != m.dtype, BLOCK=2048, num_warps=8)
