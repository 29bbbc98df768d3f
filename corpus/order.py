"""Random order without a table: the same on every machine, for any number of ranks and processes."""
import hashlib

import numpy as np


def splitmix64(z):
    """Return the finaliser of splitmix64 (Steele et al. 2014) of uint64 numbers.

    It is a permutation in which every bit of the input changes about half of the output's bits.
    """
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def split_of(text, val_fraction):
    """Return train or val. The hash of a text alone decides, so equal texts stay together."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    uniform = int.from_bytes(digest, "little") / 2**64
    return "val" if uniform < val_fraction else "train"


def draw_keys(*what):
    """Return eight random numbers, (8,) uint64, that depend on `what` (strings and numbers) alone."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=64).digest()
    return np.frombuffer(digest, "<u8")


def permute(i, n, keys):
    """Return where a random permutation of [0, n) sends the numbers i: (m,) -> (m,) uint64.

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
