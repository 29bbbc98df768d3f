"""The exercises of tutorial/README.md, one function per chapter. Each raises until you have filled it in.

    python -m pytest tutorial -k chapter_03        the test of chapter 3

solutions.py holds one answer to each. Look there last.
"""
import statistics  # noqa: F401 median() is of use in chapters 8 and 10

import torch  # noqa: F401
import torch.distributed as dist  # noqa: F401 chapter 4

from parallel import all_to_all  # noqa: F401 chapter 7


def doctor_verdict(lines):
    """Read what bench/doctor.py printed, as a job script would.

    lines: [str], such as "OK    device     cpu: 2 cores" or "WARN  data       none; fix: python prepare.py".
    The first word is the status; a fix stands behind "; fix: ".
    -> (exit code, [the fixes, in order]): 1 if any check is FAIL, else 0; a WARN stops nobody.
    """
    raise NotImplementedError("chapter 0: exit code and fixes")


def char_tokens(text, val_fraction):
    """Turn text into training and validation tokens, one token per character.

    -> (symbols, train, val): symbols, all distinct characters in code point order, as one str; train and val,
    lists of int, the position of each character in symbols. The text is cut once: train is its first
    int(len(text) * (1 - val_fraction)) characters, val the rest.
    """
    raise NotImplementedError("chapter 1: characters to tokens")


def causal_attention(q, k, v):
    """One head of attention for one sequence: position t looks at positions 0..t only.

    q, k, v: (T, D) float tensors. -> (T, D): softmax over the allowed positions of q . k / sqrt(D), times v.
    torch.triu and masked_fill(mask, -torch.inf) help; scaled_dot_product_attention is not the point.
    """
    raise NotImplementedError("chapter 2: causal attention")


def bus_bandwidth(kind, ranks, nbytes, seconds):
    """What one rank's link carried, in GB/s (1e9 bytes), when `ranks` ranks ran one collective in a ring.

    nbytes is the size of the whole: what is reduced, or what all ranks together end with. Each rank sends
        all-gather, reduce-scatter, all-to-all   (ranks - 1) / ranks of it
        all-reduce                               both of the first two, one after the other
    kind: one of these four names; ValueError for any other.
    """
    raise NotImplementedError("chapter 3: bytes sent, divided by the time")


def global_gradient(x, y, w, rows_of_all_ranks):
    """The gradient of the mean squared error over the rows of ALL ranks, the same on every rank.

    x (n, C), y (n,): the rows of this rank; n differs from rank to rank. w (C,): the weights, the same on all
    ranks, requires_grad is set. rows_of_all_ranks: the sum of n over the ranks.
    -> (C,): d/dw of sum over all rows of (x @ w - y)**2 / rows_of_all_ranks.
    One call of dist.all_reduce(tensor) is enough: it sums in place over the ranks.
    """
    raise NotImplementedError("chapter 4: divide once, then a plain sum")


def hot_spot(tree):
    """The function in which a profile spent most time itself, its callees not counted.

    tree: (name, seconds, [children]), each child the same; seconds include the children's. A name may stand
    at several places: add them up. -> (name, its own seconds over the whole tree).
    """
    raise NotImplementedError("chapter 5: own time, not total time")


def zero1_slice(n, rank, size):
    """Which part of a bucket of n gradients this rank of `size` owns under ZeRO-1.

    The bucket is padded at its end to a multiple of size * 128, then cut into `size` equal parts in the order
    of the ranks. -> slice(first, end) into the padded bucket.
    """
    raise NotImplementedError("chapter 6: the rank's slice")


def row_splits(ids, n_experts, ep):
    """How many rows this rank sends to each rank of ep, and how many it receives from each.

    ids: (N,) int64, the expert that each row of this rank wants. The experts are dealt in order: each rank
    holds e = n_experts / ep.size neighbours. Only this rank knows its ids, so the ranks must tell each other:
    all_to_all(counts, ep), counts (ep.size,) int64, gives number i to rank i and returns theirs for us.
    -> (send, receive), two lists of ep.size ints.
    """
    raise NotImplementedError("chapter 7: rows to send, rows to receive")


def is_spike(past, value, sigma):
    """Is value out of proportion with the past? Judged by medians, which one outlier cannot move.

    past: a list of floats. The width is 1.4826 times the median of |x - median(past)|, but at least 1.4826
    times a thousandth of |median(past)|: a flat past must not make everything a spike.
    -> True if value > median(past) + sigma * width.
    """
    raise NotImplementedError("chapter 8: median and median deviation")


def after_job(code, step_before, step_after):
    """What a job script does when train.py has ended with this exit code.

    step_before, step_after: the step of the newest checkpoint before and after the job.
    -> "done" after 0; "requeue" after 85 (stopped, and saved before), but "look" if no step was gained: the
    next job would stop at the same place, for ever; "look" after anything else: a person has to.
    """
    raise NotImplementedError("chapter 9: done, requeue or look")


def efficiency(runs):
    """How much of its speed a rank keeps when there are more of them.

    runs: {ranks: [row, ...]}, the rows of each run's metrics.jsonl: dicts with "step" and "tok_s" (tokens per
    second of all ranks together). Step 1 warms up and does not count. Of the other rows the later half counts
    (of 5 the last 3): the median of its tok_s.
    -> {ranks: tokens per second and rank, divided by the same of the run with the fewest ranks}.
    """
    raise NotImplementedError("chapter 10: medians, per rank, against the smallest run")
