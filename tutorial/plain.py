"""What train.py does to a model, in one plain file: read this first if you know nanoGPT.

    python tutorial/plain.py
    mpiexec -n 4 python tutorial/plain.py --tp 2    # each block cut in two halves; two replicas
    mpiexec -n 4 python tutorial/plain.py --pp 2    # two stages of two blocks; two replicas
    mpiexec -n 4 python tutorial/plain.py --ep 4    # eight experts, two on each rank

It trains the model of `train.py tiny` on CPUs, and the losses do not depend on the number of ranks.
Nothing is fast here: a rank computes, and then it waits for the others.
"""
import argparse
import hashlib
import math
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.append(os.path.join(os.path.dirname(__file__), ".."))  # the root of the repository
from corpus.samples import Synthetic
from runtime import launch

L = 4              # blocks
H, G = 4, 2        # query heads, key/value heads; a rank has h and g of them
V, C = 256, 128    # tokens in the vocabulary, width of the model
D = C // H         # width of a head
HIDDEN = 384       # width within an MLP or an expert
K = 2              # experts that a token visits, of E; a rank has e of them
AUX = 1e-2         # weight of the balance loss
B, T = 4, 128      # sequences in a micro-batch, tokens in a sequence; n = B*T rows
MICRO_BATCHES = 4  # in a step, over all replicas
LR, WARMUP = 2e-3, 5
WEIGHT_DECAY, CLIP = 0.1, 1.0
BETA1, BETA2 = 0.9, 0.95
SEED = 1337


def make_mesh(tp, pp, ep):
    """Return this rank's groups. The ranks of a group differ in one thing.

    Eight ranks with --tp 2 --pp 2:    stage 0    ranks 0 1 | 2 3    each pair is a replica,
                                       stage 1    ranks 4 5 | 6 7    cut in two halves
    """
    new_groups = dist.new_subgroups_by_enumeration  # every rank makes all groups, in one order
    grid = torch.arange(dist.get_world_size()).view(pp, -1, tp)  # (pp, dp, tp)
    experts = grid.view(pp, -1, ep)  # (pp, edp, ep): the ranks of a stage, by their experts
    mesh = SimpleNamespace()
    mesh.tp, _ = new_groups(grid.flatten(0, 1).tolist())  # other parts of the same matrices
    mesh.dp, _ = new_groups(grid.transpose(1, 2).flatten(0, 1).tolist())  # other sequences
    mesh.pp, _ = new_groups(grid.flatten(1).T.tolist())  # other blocks
    mesh.ep, _ = new_groups(experts.flatten(0, 1).tolist())  # other experts
    mesh.edp, _ = new_groups(experts.transpose(1, 2).flatten(0, 1).tolist())  # the same experts
    mesh.stage = dist.get_rank(mesh.pp)
    mesh.last_stage = pp - 1
    mesh.blocks = range(mesh.stage * L // pp, (mesh.stage + 1) * L // pp)
    return mesh


def normal(key, shape, std):
    """Draw from N(0, std). The seed depends on the key alone, so that all layouts start equal."""
    digest = hashlib.blake2b(f"{SEED}/{key}".encode(), digest_size=8).digest()
    rng = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=rng)


def make_weights(mesh, E):
    """Return {name: weight}, with the names of train.py."""
    weights = {}

    def add(name, shape, std=0.02, group=None, dim=0):
        if len(shape) == 1:
            p = torch.ones(shape)  # a norm
        elif len(shape) == 3:
            p = torch.stack([normal(f"{name}/{i}", shape[1:], std) for i in range(E)])
        else:
            p = normal(name, shape, std)
        parts = 1
        if group is not None:  # cut along dim over the ranks of the group
            parts = dist.get_world_size(group)
            p = p.chunk(parts, dim)[dist.get_rank(group)]
        p = p.to(torch.float64, copy=True).requires_grad_()
        p.parts = parts  # it is one of so many
        weights[name] = p

    residual = 0.02 / math.sqrt(2 * L)  # of the matrices that write into the residual stream
    if mesh.stage == 0:
        add("wte.weight", (V, C))
    for i in mesh.blocks:
        block = f"blocks.{i}"
        add(f"{block}.norm1.weight", (C,))
        for matrix, heads in (("wq", H), ("wk", G), ("wv", G)):  # a rank has whole heads
            add(f"{block}.attn.{matrix}.weight", (heads * D, C), group=mesh.tp)
        add(f"{block}.attn.wo.weight", (C, H * D), residual, mesh.tp, dim=1)
        add(f"{block}.norm2.weight", (C,))
        if E:
            add(f"{block}.moe.router.weight", (E, C))
            add(f"{block}.moe.w1", (E, HIDDEN, C), group=mesh.ep)  # a rank has whole experts
            add(f"{block}.moe.w3", (E, HIDDEN, C), group=mesh.ep)
            add(f"{block}.moe.w2", (E, C, HIDDEN), residual, mesh.ep)
        else:
            add(f"{block}.mlp.w1.weight", (HIDDEN, C), group=mesh.tp)
            add(f"{block}.mlp.w3.weight", (HIDDEN, C), group=mesh.tp)
            add(f"{block}.mlp.w2.weight", (C, HIDDEN), residual, mesh.tp, dim=1)
    if mesh.stage == mesh.last_stage:
        add("norm.weight", (C,))
        add("head.weight", (V, C))
    return weights


class CopyToRanks(torch.autograd.Function):  # before matrices whose outputs are cut over tp
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return x.view_as(x)  # every rank computes with all of x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.tp)  # SUM of B*T*C numbers, over tp
        return grad, None


class SumOverRanks(torch.autograd.Function):  # after a matrix whose inputs are cut over tp
    @staticmethod
    def forward(ctx, x, tp):
        x = x.clone()  # every rank has a part of each sum
        dist.all_reduce(x, group=tp)  # SUM of B*T*C numbers, over tp
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class AllToAll(torch.autograd.Function):  # rows to the ranks of their experts, or back
    @staticmethod
    def forward(ctx, x, send, receive, ep):  # (sum(send), C) -> (sum(receive), C)
        ctx.way_back = receive, send, ep
        out = x.new_empty(sum(receive), C)
        # The first send[0] rows go to rank 0, the next send[1] rows to rank 1, ..., over ep.
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=ep)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, *ctx.way_back), None, None, None


def rotate(x):  # RoPE: (B, heads, T, D) -> same
    frequency = 10000.0 ** (-torch.arange(0, D, 2) / D)  # (D/2,)
    angle = torch.outer(torch.arange(T), frequency)  # (T, D/2)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(x, w, name, mesh):  # (B, T, C) -> (B, T, C)
    x = CopyToRanks.apply(x, mesh.tp)
    q = x @ w[f"{name}.wq.weight"].T  # (B, T, h*D): the columns of this rank's heads
    k = x @ w[f"{name}.wk.weight"].T  # (B, T, g*D)
    v = x @ w[f"{name}.wv.weight"].T
    q, k, v = (y.view(B, T, -1, D).transpose(1, 2) for y in (q, k, v))  # (B, h or g, T, D)
    y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
    y = y.transpose(1, 2).flatten(2)  # (B, T, h*D)
    return SumOverRanks.apply(y @ w[f"{name}.wo.weight"].T, mesh.tp)


def swiglu(x, w1, w3, w2):
    return (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T


def mlp(x, w, name, mesh):  # (B, T, C) -> (B, T, C)
    x = CopyToRanks.apply(x, mesh.tp)
    y = swiglu(x, w[f"{name}.w1.weight"], w[f"{name}.w3.weight"], w[f"{name}.w2.weight"])
    return SumOverRanks.apply(y, mesh.tp)


def experts(x, w, name, mesh):  # (B, T, C) -> (B, T, C), balance loss ()
    rows = x.flatten(0, 1)  # (n, C)
    scores = (rows @ w[f"{name}.router.weight"].T).softmax(-1)  # (n, E)
    gates, chosen = scores.topk(K)  # (n, K) each
    E = scores.size(1)
    counts = chosen.flatten().bincount(minlength=E)  # (E,) of the n*K choices
    balance_loss = E * (counts / chosen.numel() * scores.mean(0)).sum()  # arXiv:2101.03961, eq. 4

    # K copies of each row, sorted by expert: those for rank 0 of ep come first.
    order = chosen.flatten().argsort(stable=True)  # (n*K,)
    row = order // K  # (n*K,) the row of each copy
    ranks = dist.get_world_size(mesh.ep)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=mesh.ep)  # e counts to each rank, over ep
    send = counts.view(ranks, -1).sum(1).tolist()  # copies to each rank
    receive = received.view(ranks, -1).sum(1).tolist()  # copies from each rank; R in all
    inputs = AllToAll.apply(rows[row], send, receive, mesh.ep)  # (R, C)

    expert = torch.arange(E // ranks).repeat(ranks).repeat_interleave(received)  # (R,) 0 to e - 1
    outputs = torch.zeros_like(inputs)
    for i in range(E // ranks):
        mine = (expert == i).nonzero().flatten()
        y = swiglu(inputs[mine], w[f"{name}.w1"][i], w[f"{name}.w3"][i], w[f"{name}.w2"][i])
        outputs = outputs.index_add(0, mine, y)
    outputs = AllToAll.apply(outputs, receive, send, mesh.ep)  # (n*K, C), where they came from
    outputs = outputs * gates.flatten()[order].unsqueeze(1)
    return torch.zeros_like(rows).index_add(0, row, outputs).view_as(x), balance_loss


def stage_forward(w, mesh, tokens, targets, hidden):
    """Return what the next stage gets, (B, T, C), or the summed loss, (); and the balance loss."""
    x = w["wte.weight"][tokens] if mesh.stage == 0 else hidden  # (B, T, C)
    balance_loss = 0.0
    for i in mesh.blocks:
        block = f"blocks.{i}"
        y = F.rms_norm(x, (C,), w[f"{block}.norm1.weight"], 1e-5)
        x = x + attention(y, w, f"{block}.attn", mesh)
        y = F.rms_norm(x, (C,), w[f"{block}.norm2.weight"], 1e-5)
        if f"{block}.moe.w1" in w:
            y, block_loss = experts(y, w, f"{block}.moe", mesh)
            balance_loss = balance_loss + block_loss
        else:
            y = mlp(y, w, f"{block}.mlp", mesh)
        x = x + y
    if mesh.stage == mesh.last_stage:
        logits = F.rms_norm(x, (C,), w["norm.weight"], 1e-5) @ w["head.weight"].T  # (B, T, V)
        x = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return x, balance_loss


def forward_backward(w, mesh, batches):
    """Add the gradients of the micro-batches [(tokens, targets)]; return their part of the loss.

    Over two stages, the order is 1F1B. A stage keeps the activations of one or two micro-batches:

        stage 0    F0 F1 B0 F2 B1 F3 B2 B3      warm-up F0; then F and B in turn; cool-down B3
        stage 1       F0 B0 F1 B1 F2 B2 F3 B3
    """
    total = torch.zeros(())
    waiting = []  # forwards whose backward has not come
    sent = []  # isend goes on at once: with send, two neighbours could wait for each other's recv

    def send(x, stage):  # activations to the next stage, gradients to the one before
        sent.append((x, dist.isend(x, group=mesh.pp, group_dst=stage)))  # B*T*C numbers, over pp

    def receive(stage):
        x = torch.empty(B, T, C)
        dist.recv(x, group=mesh.pp, group_src=stage)  # B*T*C numbers, over pp
        return x

    def forward(tokens, targets):
        hidden = None if mesh.stage == 0 else receive(mesh.stage - 1).requires_grad_()
        out, balance_loss = stage_forward(w, mesh, tokens, targets, hidden)
        if mesh.stage == mesh.last_stage:
            out = out / (MICRO_BATCHES * B * T)  # the one division, by the tokens of all replicas
            total.add_(out.detach())
        else:
            send(out.detach(), mesh.stage + 1)
        balance = AUX * balance_loss / MICRO_BATCHES  # this one is a mean over micro-batches
        waiting.append((hidden, out, balance))

    def backward():
        hidden, out, balance = waiting.pop(0)
        grad = torch.ones(()) if mesh.stage == mesh.last_stage else receive(mesh.stage + 1)
        ((out * grad).sum() + balance).backward()  # out gets the gradient grad
        if mesh.stage > 0:
            send(hidden.grad, mesh.stage - 1)

    warmup = mesh.last_stage - mesh.stage
    for batch in batches[:warmup]:
        forward(*batch)
    for batch in batches[warmup:]:
        forward(*batch)
        backward()
    while waiting:
        backward()
    for _, work in sent:
        work.wait()
    return total


@torch.no_grad()
def adamw(w, moments, step, steps, grad_norm):
    lr = LR * step / WARMUP
    if step > WARMUP:  # a cosine from LR to LR / 10
        progress = (step - WARMUP) / (steps - WARMUP)
        lr = LR / 10 + 0.45 * LR * (1 + math.cos(math.pi * progress))
    for name, p in w.items():
        grad = p.grad / max(1.0, (grad_norm + 1e-6) / CLIP)
        m, v = moments[name]
        m.lerp_(grad, 1 - BETA1)
        v.lerp_(grad.square(), 1 - BETA2)
        if p.ndim > 1:  # no norms
            p.mul_(1 - lr * WEIGHT_DECAY)
        mean = m / (1 - BETA1 ** step)
        root = (v / (1 - BETA2 ** step)).sqrt()
        p.sub_(lr * mean / (root + 1e-8))


def train(tp=1, pp=1, ep=1, experts=0, steps=20):
    """Train. Return [(loss, gradient norm)] of the steps, and the weights."""
    torch.set_default_dtype(torch.float64)  # the layouts agree to ten digits
    dp = dist.get_world_size() // (tp * pp)
    assert G % tp == 0 and L % pp == 0 and MICRO_BATCHES % dp == 0, "the ranks must divide these"
    assert experts % ep == 0 and (tp == 1 or not experts), "experts are cut over ep, not over tp"
    mesh = make_mesh(tp, pp, ep)
    w = make_weights(mesh, experts)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in w.items()}
    data = Synthetic(V, T, SEED)
    rows = []
    for step in range(1, steps + 1):
        own = range((step - 1) * MICRO_BATCHES + dist.get_rank(mesh.dp), step * MICRO_BATCHES, dp)
        batches = [data.batch(i * B, B) for i in own]  # no two replicas read the same sequences
        for p in w.values():
            p.grad = None
        loss = forward_backward(w, mesh, batches) / tp  # all tp ranks have the same loss
        squares = torch.zeros(())
        for name, p in w.items():
            same = mesh.edp if ".moe.w" in name else mesh.dp  # the ranks with the same weights
            dist.all_reduce(p.grad, group=same)  # SUM of the whole gradient, over dp or edp
            squares += p.grad.square().sum() * p.parts / (dp * tp)  # dp * tp / parts ranks have it
        sums = torch.stack([loss, squares])
        dist.all_reduce(sums)  # SUM of 2 numbers, over the world
        loss, norm = sums[0].item(), sums[1].sqrt().item()
        adamw(w, moments, step, steps, norm)
        rows.append((loss, norm))
        if dist.get_rank() == 0:
            print(f"step={step}/{steps} loss={loss:.10f} gnorm={norm:.10f}", flush=True)
    return rows, w


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tp", 1), ("pp", 1), ("ep", 1), ("experts", 0), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(argv)
    if args.ep > 1 and not args.experts:
        args.experts = 8
    _, rank, size, _ = launch.started_by()  # mpiexec, srun and torchrun say it in the environment
    port = 20000 + os.getppid() % 20000  # the ranks of a host have the same parent
    store = dist.TCPStore("localhost", port, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.set_num_threads(1)
    train(**vars(args))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
