"""One answer to each exercise of exercises.py. python -m pytest tutorial --solutions tests them."""
import math
import statistics

import torch
import torch.distributed as dist

from parallel import all_to_all


def doctor_verdict(lines):
    failed = any(line.split()[0] == "FAIL" for line in lines)
    fixes = [line.split("; fix: ", 1)[1] for line in lines if "; fix: " in line]
    return int(failed), fixes


def char_tokens(text, val_fraction):
    symbols = "".join(sorted(set(text)))
    number = {symbol: i for i, symbol in enumerate(symbols)}
    ids = [number[character] for character in text]
    cut = int(len(text) * (1 - val_fraction))
    return symbols, ids[:cut], ids[cut:]


def causal_attention(q, k, v):
    T, D = q.shape
    scores = q @ k.T / math.sqrt(D)  # (T, T): row t has the scores of position t
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(1) @ v  # (T, D)


def bus_bandwidth(kind, ranks, nbytes, seconds):
    if kind not in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        raise ValueError(f"no ring formula for {kind!r}")
    passes = 2 if kind == "all-reduce" else 1
    return passes * (ranks - 1) / ranks * nbytes / seconds / 1e9


def global_gradient(x, y, w, rows_of_all_ranks):
    # The sum runs over the rows of this rank. The divisor counts the rows of all ranks.
    loss = (x @ w - y).square().sum() / rows_of_all_ranks
    (grad,) = torch.autograd.grad(loss, w)
    dist.all_reduce(grad)  # SUM of C numbers, over all ranks
    return grad


def hot_spot(tree):
    own = {}

    def visit(node):
        name, seconds, children = node
        seconds_of_children = sum(child[1] for child in children)
        own[name] = own.get(name, 0.0) + seconds - seconds_of_children
        for child in children:
            visit(child)

    visit(tree)
    name = max(own, key=own.get)
    return name, own[name]


def zero1_slice(n, rank, size):
    part = math.ceil(n / (size * 128)) * 128
    return slice(rank * part, (rank + 1) * part)


def row_splits(ids, n_experts, ep):
    experts_per_rank = n_experts // ep.size
    send = torch.bincount(ids // experts_per_rank, minlength=ep.size)  # (ep,)
    receive = all_to_all(send, ep)  # (ep,): the rows that each rank sends to this rank
    return send.tolist(), receive.tolist()


def is_spike(past, value, sigma):
    median = statistics.median(past)
    deviation = statistics.median(abs(x - median) for x in past)
    width = 1.4826 * max(deviation, 1e-3 * abs(median))
    return value > median + sigma * width


def after_job(code, step_before, step_after):
    if code == 0:
        return "done"
    if code == 85 and step_after > step_before:
        return "requeue"
    return "look"


def efficiency(runs):
    per_rank = {}
    for ranks, rows in runs.items():
        speeds = [row["tok_s"] for row in rows if row["step"] > 1]
        later_half = speeds[len(speeds) // 2:]
        per_rank[ranks] = statistics.median(later_half) / ranks
    reference = per_rank[min(per_rank)]
    return {ranks: speed / reference for ranks, speed in per_rank.items()}


def gpu_of_rank(rank, ranks_per_node, visible):
    names = visible.split(",")
    local_rank = rank % ranks_per_node
    return names[local_rank % len(names)]


def is_better(before, after):
    gains = [a - b for a, b in zip(before, after, strict=True)]
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    return statistics.mean(gains) > 2 * error


def reduce_in_slot(axis, grads, slot, total, first):
    used = sum(grad.numel() for grad in grads)
    slot[:used].copy_(torch.cat([grad.flatten() for grad in grads]))
    slot[used:].zero_()  # The padding holds numbers of another bucket.
    part = axis.reduce_scatter(slot)  # SUM, n/size of n numbers to each rank, over the axis
    if first:
        total.copy_(part)
    else:
        total.add_(part)


def interleaved_order(rank, p, v, m):
    order = []  # (micro-batch, chunk) of the forwards
    for first in range(0, m, p):
        for chunk in range(v):
            order += [(first + i, chunk) for i in range(p)]
    forwards = [("F", i, chunk) for i, chunk in order]
    backwards = [("B", i, v - 1 - chunk) for i, chunk in order]

    warmup = min((v - 1) * p + 2 * (p - rank - 1), len(order))
    operations = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        operations += [forward, backward]
    return operations + backwards[len(order) - warmup:]


def zigzag(T, cp, rank):
    length = T // (2 * cp)
    early = rank
    late = 2 * cp - 1 - rank
    return [segment * length + i for segment in (early, late) for i in range(length)]


def keys_end(T, cp, rank):
    length = T // (2 * cp)
    return [(rank + 1) * length, T - rank * length]


def answer_mask(ids, assistant, end):
    mask = []
    in_answer = False
    for token in ids:
        mask.append(in_answer)
        if token == assistant:
            in_answer = True
        elif token == end:
            in_answer = False
    return mask


def training_days(parameters, tokens, gpus, tflops):
    work = 6 * parameters * tokens  # 2 FLOPs per weight and token forward, 4 backward
    return work / (gpus * tflops * 1e12) / 86_400


def layouts(gpus, per_node, heads, blocks, batch):
    found = []
    for tp in range(1, per_node + 1):
        for pp in range(1, blocks + 1):
            if per_node % tp or heads % tp or gpus % (tp * pp):
                continue
            dp = gpus // (tp * pp)
            if batch % dp == 0:
                found.append((dp, tp, pp))
    return found
