"""Samples without files, --data synthetic; what other sources share: random order, inputs and targets."""
import hashlib

import numpy as np


def inputs_and_targets(windows):
    """Return x, y of token ids, (n, T+1) -> (n, T) each: new int64 tensors, y one token ahead of x."""
    import torch  # not at the top: prepare.py and its workers import this file and should start without torch

    x = torch.from_numpy(windows[:, :-1].astype(np.int64))
    y = torch.from_numpy(windows[:, 1:].astype(np.int64))
    return x, y


class Synthetic:
    """Samples without files: each sequence counts up with its own stride of 1 to 4, one token in 8 is noise.

    The rule is the same for every seed, so another seed serves as validation.
    """

    def __init__(self, vocab_size, seq_len, seed=0):
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.n_samples = 1 << 40
        self.all_trained = True
        self.has_documents = False
        self.key = draw_keys("synthetic", seed)[0]

    def batch(self, first, n):
        """Return samples first .. first+n-1 as x, y, (n, T) int64 each, as Tokens.batch."""
        samples = np.arange(first, first + n, dtype=np.uint64)[:, None]  # (n, 1)
        positions = np.arange(self.seq_len + 1, dtype=np.uint64)  # (T+1,)
        random = splitmix64(splitmix64(samples + self.key))  # (n, 1), gives the first token and the stride
        stride = np.uint64(1) + random % np.uint64(4)
        count = (random >> np.uint64(8)) + positions * stride  # (n, T+1)
        noise = splitmix64(random + splitmix64(positions + np.uint64(1)))  # (n, T+1)
        tokens = np.where(noise % np.uint64(8) == 0, noise >> np.uint64(8), count)
        return inputs_and_targets(tokens % np.uint64(self.vocab_size))

    def n_targets(self, first, n):
        """Return how many tokens of samples first .. first+n-1 are trained: here all."""
        return n * self.seq_len


# -----------------------------------------------------------------------------
# Random order without a table: the same on every machine, for any number of ranks and processes

def splitmix64(z):
    """Return the finaliser of splitmix64 (Steele et al. 2014) of uint64 numbers.

    It is a permutation in which every bit of the input changes about half of the output's bits.
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw_keys(*what):
    """Return eight random numbers, (8,) uint64, that depend on `what` (strings and numbers) alone."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=64).digest()
    return np.frombuffer(digest, "<u8")


def permute(i, n, keys):
    """Return where a random permutation of [0, n) sends the numbers i: (m,) -> (m,) uint64, with no table.

    keys: (rounds,) uint64. A Feistel network with one round per key permutes [0, 2^(2 half)), the smallest
    range of this form that holds [0, n). A result of n or more goes through the network again until it is
    below n (cycle walking, Black and Rogaway 2002): on average at most 4 passes.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    out = np.array(i, np.uint64)
    todo = np.arange(len(i))  # the places in `out` whose number is not final
    while len(todo):
        left = out[todo] >> half
        right = out[todo] & mask
        for key in keys:
            left, right = right, left ^ (splitmix64(right + key) & mask)
        out[todo] = left << half | right
        todo = todo[out[todo] >= n]
    return out
