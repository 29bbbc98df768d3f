"""The usual wrong solutions of exercises.py from chapter 10 on. See mistakes.py."""
import math
import statistics

import torch

from tutorial import solutions
from tutorial.mistakes import mistake

# -----------------------------------------------------------------------------
# Chapter 10

def relative(runs, speed_of, reference=min):
    """Return {ranks: speed_of(ranks, rows) relative to the run that reference(runs) names}."""
    speed = {ranks: speed_of(ranks, rows) for ranks, rows in runs.items()}
    return {ranks: x / speed[reference(speed)] for ranks, x in speed.items()}


def speeds(rows):
    return [row["tok_s"] for row in rows if row["step"] > 1]


def later_half(numbers):
    return numbers[len(numbers) // 2:]


@mistake("efficiency", "You compare the tokens of all ranks together, so more ranks always look better: "
         "divide by the number of ranks.")
def not_per_rank(runs):
    return relative(runs, lambda ranks, rows: statistics.median(later_half(speeds(rows))))


@mistake("efficiency", "You take the mean, so one step in which another program used the machine changes "
         "the result: take the median.")
def mean_of_speeds(runs):
    return relative(runs, lambda ranks, rows: statistics.mean(later_half(speeds(rows))) / ranks)


@mistake("efficiency", "You take all rows but the first, and the early ones are still slow: take the later "
         "half.")
def all_rows(runs):
    return relative(runs, lambda ranks, rows: statistics.median(speeds(rows)) / ranks)


@mistake("efficiency", "You leave step 1 in, which compiles, opens connections and warms up caches, so the "
         "later half begins too early.")
def with_first_step(runs):
    return relative(runs, lambda ranks, rows: statistics.median(
        later_half([row["tok_s"] for row in rows])) / ranks)


@mistake("efficiency", "You compare with the run that comes first, but the order of the runs says nothing: "
         "compare with the one that has the fewest ranks.")
def against_the_first(runs):
    return relative(runs, lambda ranks, rows: statistics.median(later_half(speeds(rows))) / ranks,
                    lambda speed: next(iter(speed)))


# -----------------------------------------------------------------------------
# Chapter 11

@mistake("gpu_of_rank", "You take the rank among all ranks, the global number in the place of the local "
         "one: the second node's ranks count its GPUs from 0 again.")
def global_rank(rank, ranks_per_node, visible):
    names = visible.split(",")
    return names[rank % len(names)]


@mistake("gpu_of_rank", "You return the number of the GPU among those that the process sees, but the node "
         "calls it by its name in CUDA_VISIBLE_DEVICES.")
def number_not_name(rank, ranks_per_node, visible):
    return str(rank % ranks_per_node % len(visible.split(",")))


@mistake("gpu_of_rank", "You divide the rank by the ranks per node, which gives the number of the node: the "
         "remainder is the local rank.")
def number_of_the_node(rank, ranks_per_node, visible):
    names = visible.split(",")
    return names[rank // ranks_per_node % len(names)]


@mistake("gpu_of_rank", "You forget that a process may see fewer GPUs than the node has ranks, for example "
         "only its own: begin again at the first.")
def one_gpu_per_rank(rank, ranks_per_node, visible):
    return visible.split(",")[rank % ranks_per_node]


@mistake("gpu_of_rank", "You give all ranks that are left over to the last GPU: begin again at the first.")
def last_gpu_for_the_rest(rank, ranks_per_node, visible):
    names = visible.split(",")
    return names[min(rank % ranks_per_node, len(names) - 1)]


# -----------------------------------------------------------------------------
# Chapter 12

def gains(before, after):
    return [a - b for a, b in zip(before, after, strict=True)]


@mistake("is_better", "You compare the means alone, so chance decides half of the cases: compare the gain "
         "with its standard error.")
def means_alone(before, after):
    return statistics.mean(after) < statistics.mean(before)


@mistake("is_better", "You compare two groups of runs, but runs with the same seed are pairs: the spread of "
         "their differences is much smaller than the spread between seeds.")
def unpaired(before, after):
    gain = statistics.mean(before) - statistics.mean(after)
    return gain > 2 * math.sqrt((statistics.variance(before) + statistics.variance(after)) / len(before))


@mistake("is_better", "You compare with one standard error, which chance exceeds in one case of six: twice "
         "is the rule here.")
def one_standard_error(before, after):
    gain = gains(before, after)
    return statistics.mean(gain) > statistics.stdev(gain) / math.sqrt(len(gain))


@mistake("is_better", "You compare the mean with the standard deviation of one difference, but a mean of n "
         "is less uncertain: divide by the square root of n.")
def deviation_of_one(before, after):
    gain = gains(before, after)
    return statistics.mean(gain) > 2 * statistics.stdev(gain)


@mistake("is_better", "You divide by n where n - 1 belongs (pstdev for stdev), so the error looks too small "
         "if there are few seeds.")
def divided_by_n(before, after):
    gain = gains(before, after)
    return statistics.mean(gain) > 2 * statistics.pstdev(gain) / math.sqrt(len(gain))


@mistake("is_better", "You ask whether every seed gained, but one small loss among large gains proves "
         "nothing, and gains that differ much may be chance: compare the mean gain with its standard error.")
def every_seed(before, after):
    return all(gain > 0 for gain in gains(before, after))


@mistake("is_better", "You take a higher loss for an improvement: the gain is before minus after.")
def higher_is_better(before, after):
    return solutions.is_better(after, before)


# -----------------------------------------------------------------------------
# Chapter 13

def summed_slice(axis, grads, slot):
    """Return this rank's slice of the sum of the grads, with zeros in the padding of the slot."""
    part = torch.zeros_like(slot[:len(slot) // axis.size])
    solutions.reduce_in_slot(axis, grads, slot, part, True)
    return part


@mistake("reduce_in_slot", "You leave the end of the slot as it is, so numbers of another bucket are summed "
         "in the place of the padding: set it to 0.")
def stale_padding(axis, grads, slot, total, first):
    flat = torch.cat([grad.flatten() for grad in grads])
    slot[:len(flat)] = flat
    part = axis.reduce_scatter(slot)
    total.copy_(part if first else total + part)


@mistake("reduce_in_slot", "You add to total also for the first micro-batch, when it still holds the "
         "numbers of an earlier step: copy then.")
def added_to_old(axis, grads, slot, total, first):
    total.add_(summed_slice(axis, grads, slot))


@mistake("reduce_in_slot", "You replace total with each micro-batch, so only the last one counts: add all "
         "but the first.")
def last_only(axis, grads, slot, total, first):
    total.copy_(summed_slice(axis, grads, slot))


@mistake("reduce_in_slot", "You take the mean over the ranks, but the loss has been divided by the tokens "
         "of all ranks already: every reduction is a plain sum.")
def mean_over_ranks(axis, grads, slot, total, first):
    part = summed_slice(axis, grads, slot) / axis.size
    total.copy_(part if first else total + part)


@mistake("reduce_in_slot", "You keep your own gradients' slice, the local one in the place of the global "
         "one: the slice of the sum comes from axis.reduce_scatter.")
def own_gradients(axis, grads, slot, total, first):
    summed_slice(axis, grads, slot)  # All ranks must call it.
    flat = torch.cat([grad.flatten() for grad in grads])
    whole = torch.zeros_like(slot)
    whole[:len(flat)] = flat
    part = whole.chunk(axis.size)[axis.rank]
    total.copy_(part if first else total + part)


def forwards_of(p, v, m):
    """Return [(micro-batch, chunk)] of the forwards in their order."""
    return [(op[1], op[2]) for op in solutions.interleaved_order(p - 1, p, v, m) if op[0] == "F"]


def one_by_one(order, v, warmup, turned=False):
    """Return the operations of forwards in this order: a warm-up, in turn, the rest.

    turned: the backward comes before the forward.
    """
    forwards = [("F", i, chunk) for i, chunk in order]
    backwards = [("B", i, v - 1 - chunk) for i, chunk in order]
    operations = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        operations += [backward, forward] if turned else [forward, backward]
    return operations + backwards[len(order) - len(forwards[:warmup]):]


def right_warmup(rank, p, v):
    return (v - 1) * p + 2 * (p - rank - 1)


@mistake("interleaved_order", "You warm up as 1F1B without chunks does, with p - rank - 1 forwards, so the "
         "first backward comes before the last chunk has run a forward.")
def warmup_without_chunks(rank, p, v, m):
    return one_by_one(forwards_of(p, v, m), v, p - rank - 1)


@mistake("interleaved_order", "Your warm-up has (v - 1) p + p - rank - 1 forwards, but with chunks it needs "
         "twice the distance to the last rank, so that no rank waits for a message in flight.")
def short_warmup(rank, p, v, m):
    return one_by_one(forwards_of(p, v, m), v, (v - 1) * p + p - rank - 1)


@mistake("interleaved_order", "You send all micro-batches through a chunk before the next chunk begins, but "
         "they go in groups of p: else all activations of a chunk are alive at once.")
def chunk_after_chunk(rank, p, v, m):
    order = [(i, chunk) for chunk in range(v) for i in range(m)]
    return one_by_one(order, v, right_warmup(rank, p, v))


@mistake("interleaved_order", "Your backwards go from the first chunk to the last, but the gradient comes "
         "from the loss: the last chunk is the first.")
def backwards_from_the_first(rank, p, v, m):
    right = solutions.interleaved_order(rank, p, v, m)
    return [(kind, i, v - 1 - chunk if kind == "B" else chunk) for kind, i, chunk in right]


@mistake("interleaved_order", "After the warm-up you begin with a backward, but the steady phase begins "
         "with a forward: one forward, then one backward.")
def backward_first(rank, p, v, m):
    return one_by_one(forwards_of(p, v, m), v, right_warmup(rank, p, v), turned=True)


@mistake("interleaved_order", "You run all forwards and then all backwards, so the activations of all "
         "micro-batches are alive at once: alternate after the warm-up.")
def all_forwards_first(rank, p, v, m):
    return one_by_one(forwards_of(p, v, m), v, m * v)


def two_segments(T, cp, early, late):
    length = T // (2 * cp)
    return [segment * length + i for segment in (early, late) for i in range(length)]


@mistake("zigzag", "You cut the sequence into cp pieces as it is, so the last rank has nearly all the "
         "pairs: late positions attend to more keys.")
def in_one_piece(T, cp, rank):
    return list(range(rank * T // cp, (rank + 1) * T // cp))


@mistake("zigzag", "You deal the positions out one by one, which is almost even, but each rank then needs "
         "all keys, and the last rank still has more pairs than the first.")
def position_by_position(T, cp, rank):
    return list(range(rank, T, cp))


@mistake("zigzag", "You give each rank segments number rank and rank + cp, so the last rank has the later "
         "one of both kinds: pair the first segment with the last.")
def second_round_in_order(T, cp, rank):
    return two_segments(T, cp, rank, rank + cp)


@mistake("zigzag", "You have the right positions in the wrong order: they must ascend, so that the early "
         "segment comes first.")
def late_segment_first(T, cp, rank):
    return two_segments(T, cp, 2 * cp - 1 - rank, rank)


@mistake("keys_end", "You count as many keys as the segment has queries, but a query attends to all "
         "positions before it, also those of other ranks: count from position 0.")
def keys_of_the_segment(T, cp, rank):
    return [T // (2 * cp)] * 2


@mistake("keys_end", "You let both segments read all T keys, the global length in the place of each "
         "segment's own: the keys after a segment are masked anyway, so half of the work is in vain.")
def all_keys(T, cp, rank):
    return [T, T]


@mistake("keys_end", "You return the first position of each segment, but its last query needs the keys up "
         "to the segment's end.")
def first_positions(T, cp, rank):
    length = T // (2 * cp)
    return [rank * length, (2 * cp - 1 - rank) * length]


@mistake("keys_end", "You return the last position that is needed, but positions count from 0: the number "
         "of keys is one more.")
def last_positions(T, cp, rank):
    return [end - 1 for end in solutions.keys_end(T, cp, rank)]


# -----------------------------------------------------------------------------
# Chapter 14

@mistake("answer_mask", "You do not train the end of the answer, so the model never learns to stop.")
def end_not_trained(ids, assistant, end):
    right = solutions.answer_mask(ids, assistant, end)
    return [trained and token != end for token, trained in zip(ids, right, strict=True)]


@mistake("answer_mask", "You train the token of the assistant's role, but the program that asks writes it: "
         "the model never has to predict it.")
def role_trained(ids, assistant, end):
    right = solutions.answer_mask(ids, assistant, end)
    return [trained or token == assistant for token, trained in zip(ids, right, strict=True)]


@mistake("answer_mask", "You train the end of every message, but the model does not write the user's: only "
         "the end of an answer counts.")
def every_end_trained(ids, assistant, end):
    right = solutions.answer_mask(ids, assistant, end)
    return [trained or token == end for token, trained in zip(ids, right, strict=True)]


@mistake("answer_mask", "You train everything after the first answer begins, also what the user says next: "
         "an end closes the answer.")
def never_closed(ids, assistant, end):
    return [assistant in ids[:i] for i in range(len(ids))]


@mistake("answer_mask", "You train the first answer only, but a conversation can have several.")
def first_answer_only(ids, assistant, end):
    right = solutions.answer_mask(ids, assistant, end)
    begins = ids.index(assistant) if assistant in ids else len(ids)
    closed = ids.index(end, begins) if end in ids[begins:] else len(ids)
    return [trained and i <= closed for i, trained in enumerate(right)]


@mistake("answer_mask", "You train the whole conversation, so the model also learns to ask what the user "
         "asks: only what the assistant says counts.")
def all_trained(ids, assistant, end):
    return [True] * len(ids)


# -----------------------------------------------------------------------------
# Chapter 15

@mistake("training_days", "You count 2 FLOPs per weight and token, which is the forward alone: the backward "
         "costs twice as much again, 6 in all.")
def forward_only(parameters, tokens, gpus, tflops):
    return solutions.training_days(parameters, tokens, gpus, tflops) / 3


@mistake("training_days", "You let one GPU do all the work, but tflops is the speed of each, and all work "
         "at the same time: multiply it by gpus.")
def one_gpu_works(parameters, tokens, gpus, tflops):
    return solutions.training_days(parameters, tokens, 1, tflops)


@mistake("training_days", "You let the backward cost as much as the forward, but it makes two products for "
         "each of the forward's: the gradients of the input and of the weight.")
def backward_like_forward(parameters, tokens, gpus, tflops):
    return solutions.training_days(parameters, tokens, gpus, tflops) * 4 / 6


@mistake("training_days", "You return hours; a day has 24 of them.")
def hours(parameters, tokens, gpus, tflops):
    return solutions.training_days(parameters, tokens, gpus, tflops) * 24


@mistake("training_days", "You return seconds; a day has 86,400 of them.")
def seconds(parameters, tokens, gpus, tflops):
    return solutions.training_days(parameters, tokens, gpus, tflops) * 86_400


def layouts_that(wanted, gpus, stages):
    """Return [(dp, tp, pp)] with dp * tp * pp = gpus that are wanted, as solutions.layouts orders them."""
    return [(gpus // (tp * pp), tp, pp) for tp in range(1, gpus + 1) for pp in range(1, stages + 1)
            if gpus % (tp * pp) == 0 and wanted(gpus // (tp * pp), tp)]


@mistake("layouts", "You let tp reach over several nodes, but it sends in each layer: it must divide the "
         "GPUs of a node.")
def tp_over_nodes(gpus, per_node, heads, blocks, batch):
    return layouts_that(lambda dp, tp: heads % tp == 0 and batch % dp == 0, gpus, blocks)


@mistake("layouts", "You let the replicas take unequal shares of the batch: dp must divide the global "
         "batch, and 400 has two factors 5 that a batch of 2048 lacks.")
def uneven_batch(gpus, per_node, heads, blocks, batch):
    return layouts_that(lambda dp, tp: heads % tp == 0 and per_node % tp == 0, gpus, blocks)


@mistake("layouts", "You let ranks of tp share a head, but each head is computed whole on one rank: tp must "
         "divide the heads.")
def shared_heads(gpus, per_node, heads, blocks, batch):
    return layouts_that(lambda dp, tp: per_node % tp == 0 and batch % dp == 0, gpus, blocks)


@mistake("layouts", "You allow more pipeline stages than there are blocks, but a stage without a block has "
         "nothing to do.")
def empty_stages(gpus, per_node, heads, blocks, batch):
    return solutions.layouts(gpus, per_node, heads, gpus, batch)


@mistake("layouts", "You ask that the blocks divide by pp, but stages may differ by one block: 70 blocks go "
         "over 25 stages as 20 stages of 3 and 5 of 2.")
def equal_stages(gpus, per_node, heads, blocks, batch):
    right = solutions.layouts(gpus, per_node, heads, blocks, batch)
    return [(dp, tp, pp) for dp, tp, pp in right if blocks % pp == 0]
