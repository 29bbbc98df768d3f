"""The usual wrong solutions of exercises.py, chapters 0 to 9. more_mistakes.py has the rest.

If your answers equal those of a wrong solution, its sentence is shown: grader.py compares them. Read
this file after you have solved the exercises.
"""
import math
import statistics

import torch
import torch.distributed as dist

from parallel import all_to_all
from tutorial import solutions

MISTAKES = {}  # the name of an exercise: [(a wrong solution, the sentence that says what is wrong)]


def mistake(exercise, sentence):
    """Put the function that follows into the table, as a wrong solution of the exercise."""
    def add(function):
        MISTAKES.setdefault(exercise, []).append((function, sentence))
        return function

    return add


# -----------------------------------------------------------------------------
# Chapter 0

@mistake("doctor_verdict", "You look for FAIL anywhere in a line, but only the first word is the status: a "
         "path or a name may contain FAIL, too.")
def fail_anywhere(lines):
    _, fixes = solutions.doctor_verdict(lines)
    return int(any("FAIL" in line for line in lines)), fixes


@mistake("doctor_verdict", "You stop the job at a WARN, too, but a WARN is only advice: exit code 1 needs a "
         "FAIL.")
def warn_stops(lines):
    _, fixes = solutions.doctor_verdict(lines)
    return int(any(line.split()[0] != "OK" for line in lines)), fixes


@mistake("doctor_verdict", "You return the number of FAILs as the exit code, but a shell keeps only the "
         "code modulo 256, so 256 failures would look like success: return 1 for any number.")
def count_of_fails(lines):
    _, fixes = solutions.doctor_verdict(lines)
    return sum(line.split()[0] == "FAIL" for line in lines), fixes


@mistake("doctor_verdict", "You list the fixes of the FAIL lines only, but a WARN has a fix that its reader "
         "wants.")
def fixes_of_fails(lines):
    code, _ = solutions.doctor_verdict(lines)
    return code, solutions.doctor_verdict([line for line in lines if line.startswith("FAIL")])[1]


# -----------------------------------------------------------------------------
# Chapter 1

def tokens_with(symbols, text, val_fraction):
    ids = [symbols.index(character) for character in text]
    cut = int(len(text) * (1 - val_fraction))
    return symbols, ids[:cut], ids[cut:]


@mistake("char_tokens", "You number the characters in the order in which they appear, so another text with "
         "the same characters gets other numbers: sort them by code point.")
def order_of_appearance(text, val_fraction):
    return tokens_with("".join(dict.fromkeys(text)), text, val_fraction)


@mistake("char_tokens", "You number the characters by how often they occur, so another text with the same "
         "characters gets other numbers: sort them by code point.")
def order_of_frequency(text, val_fraction):
    return tokens_with("".join(sorted(set(text), key=text.count, reverse=True)), text, val_fraction)


@mistake("char_tokens", "You collect the symbols from the training part only, so a character that first "
         "occurs in the validation part has no number: collect them from the whole text.")
def symbols_of_train(text, val_fraction):
    train = text[:int(len(text) * (1 - val_fraction))]
    return tokens_with("".join(sorted(set(train))), text, val_fraction)


@mistake("char_tokens", "You take the validation part from the beginning of the text, but it is what is "
         "left at the end.")
def validation_first(text, val_fraction):
    symbols, train, val = solutions.char_tokens(text, val_fraction)
    ids = train + val
    return symbols, ids[len(val):], ids[:len(val)]


@mistake("char_tokens", "You round the length of the validation part down instead of the length of the "
         "training part, so one token is on the other side of the cut.")
def rounded_validation(text, val_fraction):
    symbols, train, val = solutions.char_tokens(text, val_fraction)
    ids = train + val
    cut = len(text) - int(len(text) * val_fraction)
    return symbols, ids[:cut], ids[cut:]


# -----------------------------------------------------------------------------
# Chapter 2

def scores_and_future(q, k):
    """Return the scaled scores (T, T), and which of them look into the future."""
    return q @ k.T / math.sqrt(q.size(1)), torch.ones(len(q), len(q), dtype=torch.bool).triu(1)


@mistake("causal_attention", "You do not divide the scores by sqrt(D): a sum of D products grows with "
         "sqrt(D), and the softmax of large scores is almost 0 or 1 everywhere and learns no more.")
def no_scale(q, k, v):
    return solutions.causal_attention(q * math.sqrt(q.size(1)), k, v)


@mistake("causal_attention", "You divide the scores by D, but the standard deviation of a sum of D products "
         "grows with the square root: divide by sqrt(D).")
def scale_of_d(q, k, v):
    return solutions.causal_attention(q / math.sqrt(q.size(1)), k, v)


@mistake("causal_attention", "You have no mask, so each position sees the tokens that it must learn to "
         "predict.")
def no_mask(q, k, v):
    scores, _ = scores_and_future(q, k)
    return scores.softmax(1) @ v


@mistake("causal_attention", "You set the masked scores to 0, but exp(0) is 1 and still gets a share of the "
         "softmax: set them to -inf.")
def masked_with_zero(q, k, v):
    scores, future = scores_and_future(q, k)
    return scores.masked_fill(future, 0.0).softmax(1) @ v


@mistake("causal_attention", "You mask after the softmax, so the weights of a row no longer add up to 1: "
         "set the scores to -inf before it.")
def masked_after_softmax(q, k, v):
    scores, future = scores_and_future(q, k)
    return scores.softmax(1).masked_fill(future, 0.0) @ v


@mistake("causal_attention", "Your mask hides the diagonal, too, so position 0 sees nothing and becomes "
         "NaN: a position attends to itself, triu(1) leaves the diagonal out.")
def diagonal_hidden(q, k, v):
    scores, _ = scores_and_future(q, k)
    return scores.masked_fill(torch.ones_like(scores).bool().triu(0), -torch.inf).softmax(1) @ v


@mistake("causal_attention", "Your mask hides the past and shows the future: row t of the scores has the "
         "queries, and its columns after t are the future, above the diagonal.")
def past_hidden(q, k, v):
    scores, future = scores_and_future(q, k)
    return scores.masked_fill(future.T, -torch.inf).softmax(1) @ v


@mistake("causal_attention", "Your softmax runs over the queries: the weights of each query add up to 1, so "
         "take it over the keys, the last dimension.")
def softmax_over_queries(q, k, v):
    scores, future = scores_and_future(q, k)
    return scores.masked_fill(future, -torch.inf).softmax(0) @ v


# -----------------------------------------------------------------------------
# Chapter 3

def ring_error(kind):
    solutions.bus_bandwidth(kind, 1, 1, 1)  # It raises the ValueError of an unknown kind.


@mistake("bus_bandwidth", "You divide the size of the tensor by the time: that is algbw, and says nothing "
         "about a link, because a rank sends more or less than the tensor.")
def size_by_time(kind, ranks, nbytes, seconds):
    ring_error(kind)
    return nbytes / seconds / 1e9


@mistake("bus_bandwidth", "You count an all-reduce like the other kinds, but it is a reduce-scatter and "
         "then an all-gather: each rank sends twice.")
def all_reduce_once(kind, ranks, nbytes, seconds):
    ring_error(kind)
    return solutions.bus_bandwidth("all-gather", ranks, nbytes, seconds)


@mistake("bus_bandwidth", "You let a rank send its own part to itself, too: in a ring it sends ranks - 1 of "
         "the ranks' parts.")
def own_part_too(kind, ranks, nbytes, seconds):
    ring_error(kind)
    passes = 2 if kind == "all-reduce" else 1
    return passes * nbytes / seconds / 1e9


@mistake("bus_bandwidth", "You take nbytes for the part of one rank, but it is the size of the whole "
         "tensor: each of the ranks - 1 messages has nbytes / ranks bytes.")
def bytes_of_a_part(kind, ranks, nbytes, seconds):
    return solutions.bus_bandwidth(kind, ranks, nbytes, seconds) * ranks


@mistake("bus_bandwidth", "You divide by 2**30, but a bandwidth in GB/s counts 1e9 bytes.")
def gibibytes(kind, ranks, nbytes, seconds):
    return solutions.bus_bandwidth(kind, ranks, nbytes, seconds) * 1e9 / 2**30


@mistake("bus_bandwidth", "You return a number for a kind that you do not know: raise a ValueError, because "
         "a wrong figure is worse than none.")
def any_kind(kind, ranks, nbytes, seconds):
    passes = 2 if kind == "all-reduce" else 1
    return passes * (ranks - 1) / ranks * nbytes / seconds / 1e9


# -----------------------------------------------------------------------------
# Chapter 4

def summed(loss, w):
    """Return the gradient of this rank's loss, summed over the ranks."""
    (grad,) = torch.autograd.grad(loss, w)
    dist.all_reduce(grad)
    return grad


@mistake("global_gradient", "You take the mean of the ranks' means, in which a row weighs more if its rank "
         "has few rows: divide by the rows of all ranks, and sum.")
def mean_of_means(x, y, w, rows_of_all_ranks):
    return summed((x @ w - y).square().mean(), w) / dist.get_world_size()


@mistake("global_gradient", "You divide by the rows of this rank and then sum over the ranks, so the result "
         "grows with their number: the divisor is rows_of_all_ranks.")
def sum_of_means(x, y, w, rows_of_all_ranks):
    return summed((x @ w - y).square().mean(), w)


@mistake("global_gradient", "You return the gradient of this rank's rows, the local one in the place of the "
         "global one: sum it over the ranks with dist.all_reduce.")
def local_gradient(x, y, w, rows_of_all_ranks):
    (grad,) = torch.autograd.grad((x @ w - y).square().sum() / rows_of_all_ranks, w)
    return grad


@mistake("global_gradient", "You divide twice, by the rows of all ranks and by the number of ranks: after "
         "the one division every reduction is a plain sum.")
def divided_twice(x, y, w, rows_of_all_ranks):
    return summed((x @ w - y).square().sum() / rows_of_all_ranks, w) / dist.get_world_size()


@mistake("global_gradient", "You never divide: the loss is the sum over all rows, divided by their number.")
def never_divided(x, y, w, rows_of_all_ranks):
    return summed((x @ w - y).square().sum(), w)


# -----------------------------------------------------------------------------
# Chapter 5

def nodes(tree):
    """Return a node of a profile and all nodes below it."""
    return [tree, *(node for child in tree[2] for node in nodes(child))]


@mistake("hot_spot", "You compare total times, and the largest total time is always that of the root: take "
         "the children's time away.")
def by_total_time(tree):
    return tree[:2]


@mistake("hot_spot", "You leave the root out but still compare total times, which contain the time of the "
         "functions that are called: take the children's time away.")
def by_total_time_below(tree):
    below = nodes(tree)[1:]
    return max(below, key=lambda node: node[1])[:2]


@mistake("hot_spot", "You take each place of the tree by itself, but a function that is called in several "
         "places costs the sum of its own times.")
def each_place_alone(tree):
    own = [(name, seconds - sum(child[1] for child in children)) for name, seconds, children in nodes(tree)]
    return max(own, key=lambda pair: pair[1])


@mistake("hot_spot", "You look only at functions that call no other, but a function can spend its time in "
         "its own lines and call others as well.")
def leaves_only(tree):
    own = {}
    for name, seconds, children in nodes(tree):
        if not children:
            own[name] = own.get(name, 0.0) + seconds
    name = max(own, key=own.get)
    return name, own[name]


# -----------------------------------------------------------------------------
# Chapter 6

@mistake("zero1_slice", "You do not pad, so the slices have different lengths or begin between the "
         "multiples of 128 that a reduce-scatter of equal, aligned parts needs.")
def no_padding(n, rank, size):
    return slice(rank * n // size, (rank + 1) * n // size)


@mistake("zero1_slice", "You pad to a multiple of the ranks only: a slice must be a multiple of 128, so the "
         "bucket is a multiple of size * 128.")
def padded_to_ranks(n, rank, size):
    part = math.ceil(n / size)
    return slice(rank * part, (rank + 1) * part)


@mistake("zero1_slice", "You pad to a multiple of 128 and then cut, so the slices are no multiples of 128, "
         "and their lengths can differ: pad to a multiple of size * 128.")
def padded_to_128(n, rank, size):
    padded = math.ceil(n / 128) * 128
    return slice(rank * padded // size, (rank + 1) * padded // size)


@mistake("zero1_slice", "You add padding also where none is needed: a bucket that is a multiple of size * "
         "128 stays as it is, so round up instead of rounding down and adding one.")
def always_padded(n, rank, size):
    part = (n // (size * 128) + 1) * 128
    return slice(rank * part, (rank + 1) * part)


@mistake("zero1_slice", "You cut the slice at n, but the padding belongs to the slices: all slices have the "
         "same length, and it is the padded bucket that is cut.")
def cut_at_n(n, rank, size):
    whole = solutions.zero1_slice(n, rank, size)
    return slice(min(whole.start, n), min(whole.stop, n))


@mistake("zero1_slice", "You give the length of the slice as its end: slice(first, end) counts both from "
         "the beginning of the bucket.")
def length_as_end(n, rank, size):
    whole = solutions.zero1_slice(n, rank, size)
    return slice(whole.start, whole.stop - whole.start)


# -----------------------------------------------------------------------------
# Chapter 7

def counts_of(owners, ep):
    return torch.bincount(owners, minlength=ep.size)


@mistake("row_splits", "You return the rows that this rank sends as those that it receives, but what it "
         "receives is what the other ranks want from its experts: exchange the counts.")
def same_both_ways(ids, n_experts, ep):
    send = counts_of(ids // (n_experts // ep.size), ep).tolist()
    return send, send


@mistake("row_splits", "You deal the experts out like cards (expert modulo ep), but each rank holds a block "
         "of neighbours: divide the expert by the experts per rank.")
def experts_dealt_out(ids, n_experts, ep):
    send = counts_of(ids % ep.size, ep)
    return send.tolist(), all_to_all(send, ep).tolist()


@mistake("row_splits", "You count the rows of each expert, but the ranks exchange one number per rank: add "
         "up the counts of the experts that a rank holds.")
def count_per_expert(ids, n_experts, ep):
    send = torch.bincount(ids, minlength=n_experts)
    return send.tolist(), all_to_all(send, ep).tolist()


@mistake("row_splits", "You return what this rank receives as what it sends, and the other way round.")
def swapped(ids, n_experts, ep):
    send, receive = solutions.row_splits(ids, n_experts, ep)
    return receive, send


# -----------------------------------------------------------------------------
# Chapter 8

def median_and_deviation(past):
    median = statistics.median(past)
    return median, statistics.median(abs(x - median) for x in past)


@mistake("is_spike", "You take the mean and the standard deviation, which one outlier moves so far that the "
         "next spike looks normal: take medians.")
def by_mean(past, value, sigma):
    return value > statistics.mean(past) + sigma * statistics.pstdev(past)


@mistake("is_spike", "You take the median, but the width is a mean of the deviations, which a few outliers "
         "make as wide as themselves: take the median of the deviations.")
def mean_of_deviations(past, value, sigma):
    median, _ = median_and_deviation(past)
    deviation = statistics.mean(abs(x - median) for x in past)
    return value > median + sigma * 1.4826 * max(deviation, 1e-3 * abs(median))


@mistake("is_spike", "You forget the least width, so after equal values every change is a spike: the width "
         "is at least 1.4826 times a thousandth of the median.")
def no_least_width(past, value, sigma):
    median, deviation = median_and_deviation(past)
    return value > median + sigma * 1.4826 * deviation


@mistake("is_spike", "You add the least width to the deviation, a sum in the place of the maximum: 'at "
         "least' means the larger of the two.")
def sum_for_maximum(past, value, sigma):
    median, deviation = median_and_deviation(past)
    return value > median + sigma * 1.4826 * (deviation + 1e-3 * abs(median))


@mistake("is_spike", "You leave out the factor 1.4826, which makes a median deviation as wide as a standard "
         "deviation, so a value counts as a spike too early.")
def no_factor(past, value, sigma):
    median, deviation = median_and_deviation(past)
    return value > median + sigma * max(deviation, 1e-3 * abs(median))


@mistake("is_spike", "You take a fall for a spike, too, but a loss that drops is good news: compare without "
         "an absolute value.")
def falls_too(past, value, sigma):
    median, deviation = median_and_deviation(past)
    return abs(value - median) > sigma * 1.4826 * max(deviation, 1e-3 * abs(median))


# -----------------------------------------------------------------------------
# Chapter 9

@mistake("after_job", "You requeue a job that has gained no step, so it is repeated for ever and uses up "
         "the allocation: compare the newest steps.")
def requeued_for_ever(code, step_before, step_after):
    return {0: "done", 85: "requeue"}.get(code, "look")


@mistake("after_job", "You requeue if the step is not earlier than before, but an equal step is no "
         "progress: it must be later.")
def equal_step_is_progress(code, step_before, step_after):
    if code == 85 and step_after >= step_before:
        return "requeue"
    return "done" if code == 0 else "look"


@mistake("after_job", "You ask for a later step also after exit code 0, but a run that had been finished "
         "before has nothing left to do, and is done.")
def done_needs_a_step(code, step_before, step_after):
    if step_after <= step_before:
        return "look"
    return solutions.after_job(code, step_before, step_after)


@mistake("after_job", "You requeue after any error that left a later checkpoint, but a wrong flag, a NaN or "
         "a full disk would only come back: only 85 asks for another job.")
def any_error_requeued(code, step_before, step_after):
    if code == 0:
        return "done"
    return "requeue" if step_after > step_before else "look"
