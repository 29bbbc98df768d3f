"""What a run trains on, and which samples each of its ranks reads.

    open_data        the data of --data, for training and validation
    batch_size       the sequences of a step, while --rampup-batch-size lets them grow
    trained_tokens   how many tokens of a batch are trained, by which its loss is divided
    micro_batches    this rank's share of a batch: its samples, and its segments of them
"""
from corpus.blend import parse_blend
from corpus.masked import mask_sources
from corpus.shards import load_blend_meta, open_tokens, verify
from corpus.synthetic import Synthetic


def open_data(cfg, local_rank):
    """Return the data of a run: train, val, vocab_size and the identity of the data, a str.

    Every rank checks headers; local rank 0, one per node, also the checksums. vocab_size is that of cfg or,
    where it is 0, of the data and [MASK]. ValueError, OSError: see load_meta.
    """
    n_mask = 1 if cfg.objective == "mlm" else 0  # [MASK] is one id past the data's: corpus/masked.py
    if cfg.data == "synthetic":
        if cfg.doc_mask == "on":
            raise ValueError("--doc-mask on: --data synthetic has no documents; leave out --doc-mask")
        vocab_size = cfg.vocab_size or 256 + n_mask
        train = Synthetic(vocab_size - n_mask, cfg.seq_len, cfg.seed)
        val = Synthetic(vocab_size - n_mask, cfg.seq_len, cfg.seed + 1)
        identity = f"synthetic-{vocab_size}"
    else:
        meta = load_blend_meta(cfg.data)
        if local_rank == 0:
            for folder, _ in parse_blend(cfg.data):
                verify(folder)
        needed = meta["vocab_size"] + n_mask
        vocab_size = cfg.vocab_size or needed
        if vocab_size < needed:
            with_mask = " with [MASK]" if n_mask else ""
            raise ValueError(f"--vocab-size {vocab_size} is less than the {needed} symbols of {cfg.data}"
                             f"{with_mask}; try --vocab-size {needed}")
        train = open_tokens(cfg.data, "train", cfg.seq_len, cfg.seed, cfg.doc_mask)
        val = open_tokens(cfg.data, "val", cfg.seq_len, cfg.seed, cfg.doc_mask)
        identity = meta["identity"]

    train, val = mask_sources(cfg, train, val)
    return train, val, vocab_size, identity


def batch_size(samples, full, ramp=()):
    """Return the sequences of the step that starts after `samples` were consumed.

    full: the batch after the ramp. ramp: () for none, or the (START, INCREMENT, SAMPLES) of
    --rampup-batch-size, as in Megatron-LM: the batch begins with START sequences and grows by INCREMENT while
    the first SAMPLES are consumed, in stages of the same number of samples. It is a function of the samples
    consumed alone: a resumed run, another layout and plan.py get the same batch.
    """
    if not ramp:
        return full
    start, increment, over = ramp
    stages = (full - start) // increment
    return min(full, start + increment * (samples * stages // over))


def trained_tokens(source, first, count, device):
    """Return the trained tokens of the `count` samples from `first` on, by which their loss is divided.

    Every rank knows the number with no message. If the source trains every token, it is an int, a constant
    of a recorded CUDA graph. Otherwise it is () int64 on the device, also in a step that trains all tokens:
    a graph recorded with the one kind does not hold the other.
    """
    n = source.n_targets(first, count)
    if source.all_trained:
        return n
    import torch

    return torch.full((), n, device=device)


def micro_batches(cfg, mesh, source, first, count, device):
    """Return this rank's micro-batches of the `count` samples from `first` on, [(x, y)].

    x, y: (B, T/cp) int64. With micro-batches of mb samples, micro-batch j holds samples j*mb .. (j+1)*mb-1.
    Rank d of dp takes n_batches of them, from d*n_batches on, and its cp ranks their segments of each sample.
    Where --doc-mask separates documents, a micro-batch is (x, y, places): the place of each token in its
    document (corpus/documents.py), counted before the samples are cut over cp.
    """
    n_batches = count // (cfg.micro_batch * mesh.dp.size)
    start = first + mesh.dp.rank * n_batches * cfg.micro_batch
    batches = []
    for number in range(start, start + n_batches * cfg.micro_batch, cfg.micro_batch):
        batch = source.batch(number, cfg.micro_batch)
        if source.has_documents:
            batch = (*batch, source.places(number, batch[0]))
        if mesh.cp.size > 1:
            batch = tuple(mesh.cp.own_segments(tensor, 1) for tensor in batch)
        if device.type != "cpu":
            batch = tuple(to_device(tensor, device) for tensor in batch)
        batches.append(batch)
    return batches


def to_device(tensor, device):
    """Return a copy of a tensor on the device, without waiting for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True)
