"""The exercises of tutorial/README.md: one function per chapter, four in 13 and two in 15.

Each function raises an error until you fill it in. This command runs the test of chapter 3:

    python -m pytest tutorial -k chapter_03

solutions.py has one answer to each. Look there last.
"""
import statistics  # noqa: F401 useful in chapters 8, 10 and 12

import torch  # noqa: F401
import torch.distributed as dist  # noqa: F401 chapter 4

from parallel import all_to_all  # noqa: F401 chapter 7


def doctor_verdict(lines):
    """Read what bench/doctor.py printed, as a job script would. Return (exit code, [the fixes, in order]).

    lines: [str], such as "OK    device     cpu: 2 cores" or "WARN  data       none; fix: python prepare.py".
    The first word is the status. If there is a fix, it follows "; fix: ".

    The exit code is 1 if any status is FAIL, otherwise 0: a WARN does not stop a job.
    """
    raise NotImplementedError("chapter 0: exit code and fixes")


def char_tokens(text, val_fraction):
    """Turn text into tokens, one token per character. Return (symbols, train, val).

    symbols: all distinct characters in the order of their code points, as one str.
    train, val: lists of int. Each int is the position of a character in symbols. The text is cut once: train
    is the first int(len(text) * (1 - val_fraction)) characters, and val is the rest.
    """
    raise NotImplementedError("chapter 1: characters to tokens")


def causal_attention(q, k, v):
    """Compute one head of attention for one sequence: position t attends to positions 0..t only.

    q, k, v: (T, D) float tensors.
    Return (T, D): the softmax of q . k / sqrt(D) over the allowed positions, times v.

    Useful are torch.triu and masked_fill(mask, -torch.inf). Do not call scaled_dot_product_attention.
    """
    raise NotImplementedError("chapter 2: causal attention")


def bus_bandwidth(kind, ranks, nbytes, seconds):
    """Return the bus bandwidth of one collective, in GB/s (1e9 bytes).

    The bus bandwidth is what each rank sent, divided by the time.

    nbytes: the size of the whole tensor that is reduced, gathered or exchanged. In a ring each rank sends
        all-gather, reduce-scatter, all-to-all   (ranks - 1) / ranks of nbytes
        all-reduce                               a reduce-scatter, then an all-gather
    kind: one of these four names.
    ValueError: kind is any other name.
    """
    raise NotImplementedError("chapter 3: bytes sent, divided by the time")


def global_gradient(x, y, w, rows_of_all_ranks):
    """Return the gradient of the mean squared error over the rows of ALL ranks, the same on every rank.

    x (n, C), y (n,): the rows of this rank. n differs from rank to rank.
    w (C,): the weights, which are the same on all ranks. They have requires_grad.
    rows_of_all_ranks: the sum of n over the ranks.
    Return (C,): the derivative with respect to w of the sum over all rows of
    (x @ w - y)**2 / rows_of_all_ranks.

    One call of dist.all_reduce(tensor) is enough: it sums the tensor over the ranks, in place.
    """
    raise NotImplementedError("chapter 4: divide once, then a plain sum")


def hot_spot(tree):
    """Find the function with the largest own time in a profile. Return (its name, its own seconds).

    A function's own time is its time without the time of the functions that it calls.
    tree: (name, seconds, [children]). Each child is such a tuple too; its seconds are part of its parent's.
    A name may occur in several places of the tree: add up its own times.
    """
    raise NotImplementedError("chapter 5: own time, not total time")


def zero1_slice(n, rank, size):
    """Return the part of a bucket of n gradients that rank number `rank` of `size` ranks owns under ZeRO-1.

    The bucket is padded at its end to a multiple of size * 128. Then it is cut into `size` equal parts, in
    the order of the ranks. Return slice(first, end) of the padded bucket.
    """
    raise NotImplementedError("chapter 6: the rank's slice")


def row_splits(ids, n_experts, ep):
    """Return how many rows this rank sends to each rank of ep, and how many it receives from each.

    ids: (N,) int64, the expert that each row of this rank visits. ep: a parallel.Axis. Each rank of ep holds
    e = n_experts / ep.size experts: rank 0 holds the first e, rank 1 the next e, and so on.
    Return (send, receive), two lists of ep.size ints.

    Only this rank knows its ids, so the ranks must exchange counts. all_to_all(counts, ep) takes counts
    (ep.size,) int64, sends counts[i] to rank i, and returns the numbers that the ranks sent to this rank.
    """
    raise NotImplementedError("chapter 7: rows to send, rows to receive")


def is_spike(past, value, sigma):
    """Return whether value is far above the past values. Medians decide: one outlier does not move them.

    past: a list of floats.
    The width is 1.4826 times the median of |x - median(past)|, but at least 1.4826 times a thousandth of
    |median(past)|. So a small change after equal values is no spike.
    Return True if value > median(past) + sigma * width.
    """
    raise NotImplementedError("chapter 8: median and median deviation")


def after_job(code, step_before, step_after):
    """Return what a job script does after train.py has ended with this exit code.

    step_before, step_after: the step of the newest checkpoint before and after the job.
    After code 0 return "done". After code 85 the run has saved and stopped: return "requeue". But return
    "look" if the newest step is not later than before, because the next job would stop at the same place, and
    so on for ever. After any other code return "look": a person has to look.
    """
    raise NotImplementedError("chapter 9: done, requeue or look")


def efficiency(runs):
    """Return the speed per rank of each run, relative to the run with the fewest ranks.

    runs: {ranks: [row, ...]}, the rows of each run's metrics.jsonl: dicts with "step" and "tok_s" (tokens per
    second of all ranks together). Leave out step 1, which warms up. Take the later half of the other rows
    (the last 3 of 5 rows). The speed of the run is the median of their tok_s.
    Return {ranks: speed per rank / speed per rank of the run with the fewest ranks}.
    """
    raise NotImplementedError("chapter 10: medians, per rank, against the smallest run")


def gpu_of_rank(rank, ranks_per_node, visible):
    """Return the GPU of its node that a rank uses, by the name that the node gives it.

    Ranks fill one node after the other, ranks_per_node on each.
    visible: what CUDA_VISIBLE_DEVICES is in this process, such as "0,1,2,3" or "3,2,1,0", or "2" if each
    process sees only one GPU. A program numbers the GPUs that it sees from 0. A rank takes the GPU whose
    number is its local rank. If there are fewer GPUs than ranks, the count begins again at the first GPU.
    Return str, one of the names in visible.
    """
    raise NotImplementedError("chapter 11: the local rank's GPU")


def is_better(before, after):
    """Return whether a change lowered the loss by more than chance would.

    before, after: final losses, two or more. Losses at the same place are those of runs with the same seed.
    Take the differences, seed by seed. Their standard error is their standard deviation (with n - 1 in the
    denominator), divided by the square root of their number.
    Return True if the mean improvement is more than twice its standard error.
    """
    raise NotImplementedError("chapter 12: differences, seed by seed")


def reduce_in_slot(axis, grads, slot, total, first):
    """ZeRO-2: sum one micro-batch's gradients of a bucket over the ranks, and keep this rank's slice only.

    axis: a parallel.Axis. grads: a list of tensors, this rank's gradients.
    slot (n,): a buffer in which other buckets were summed before. n is a multiple of axis.size. All grads fit
    into it, one after the other. The rest of the slot is padding and counts as 0.
    total (n/size,): this rank's slice of the sums of earlier micro-batches. If first is true, there were no
    earlier ones, and total holds old numbers.
    Return None. total is changed in place, and nothing else is kept: the next bucket uses the slot.

    axis.reduce_scatter(x) takes x (n,) and returns (n/size,): this rank's slice of the sum over the axis.
    """
    raise NotImplementedError("chapter 13: copy, sum, add the slice")


def interleaved_order(rank, p, v, m):
    """Return what rank number `rank` of p does in a pipeline with v chunks per rank and m micro-batches.

    v > 1, and m is a multiple of p. Micro-batches go through a chunk in groups of p. Then the same group goes
    through the next chunk; after the last chunk comes the next group. Backwards come in the same order, but
    from the last chunk to the first. The rank warms up with (v - 1) p + 2 (p - rank - 1) forwards, or with
    all forwards if there are fewer. Then one forward and one backward alternate. At the end come the
    backwards that are left.
    Return [("F" or "B", micro-batch, chunk)]. Micro-batches and chunks count from 0.
    """
    raise NotImplementedError("chapter 13: warm-up, in turn, the rest")


def zigzag(T, cp, rank):
    """Return the positions of a sequence of T tokens that rank number `rank` of cp holds.

    T is a multiple of 2 cp. Position t attends to the t + 1 positions 0..t, so late positions cost more. Cut
    the sequence into 2 cp equal segments. Give each rank an early and a late segment such that every rank
    computes the same number of pairs of query and key. Rank 0 has the first segment, rank 1 the second, and
    so on.
    Return [int], T / cp positions in ascending order.
    """
    raise NotImplementedError("chapter 13: an early segment and a late one")


def keys_end(T, cp, rank):
    """Return how many keys, counted from position 0, the queries of each of zigzag's two segments need.

    Return [keys of the early segment, keys of the late segment].
    """
    raise NotImplementedError("chapter 13: up to the segment's own end")


def answer_mask(ids, assistant, end):
    """Return which tokens of a conversation are trained: [bool], one per id.

    ids: [int], the conversation. assistant: the id in front of what the assistant says. end: the id after
    each message. A model must learn to stop, so the end of an answer is trained, too. The id `assistant` is
    not trained, because the program that asks for an answer writes it.
    """
    raise NotImplementedError("chapter 14: from the role on, up to the end")


def training_days(parameters, tokens, gpus, tflops):
    """Return how many days it takes to train a model.

    parameters: the weights of all matrices. Each costs 2 FLOPs per token in the forward pass, which are a
    multiplication and an addition. The backward pass costs twice as much as the forward.
    tflops: the 1e12 FLOPs per second that each GPU reaches. It is a measured speed, not the one of its data
    sheet.
    """
    raise NotImplementedError("chapter 15: work, divided by speed")


def layouts(gpus, per_node, heads, blocks, batch):
    """Return [(dp, tp, pp)], all ways to lay a model out on gpus = dp * tp * pp GPUs.

    tp divides the heads of attention, because each head is computed on one rank. tp also divides per_node,
    the GPUs of a node, because it sends in each layer. Each of the pp stages has a block or more; they need
    not have the same number. dp divides the batch, the sequences of a step.
    The list is sorted by tp, then by pp.
    """
    raise NotImplementedError("chapter 15: what divides what")
