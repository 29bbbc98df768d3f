"""Random order without a table: the same on every machine, for any number of ranks and processes."""

import hashlib

import numpy as np


def splitmix64(z):
    """splitmix64's finaliser (Steele et al. 2014) on uint64: a permutation in which every bit of the input
    changes about half of the output's bits."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw_keys(*what):
    """-> (8,) uint64, random, a function of `what` (strings and numbers): the same on every machine."""
    return np.frombuffer(hashlib.blake2b(repr(what).encode(), digest_size=64).digest(), "<u8")


def permute(i, n, keys):
    """Where a random permutation of [0, n) sends the numbers i, (m,) -> (m,) uint64. It needs no table.

    keys: (rounds,) uint64. A Feistel network with one round per key permutes [0, 2^(2h)), the smallest such
    range that holds [0, n). A result of n or more is sent through the network again until it is below n
    (cycle walking, Black and Rogaway 2002): at most 4 passes on average."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    out, todo = np.array(i, np.uint64), np.arange(len(i))
    while len(todo):
        left, right = out[todo] >> half, out[todo] & mask
        for key in keys:
            left, right = right, left ^ (splitmix64(right + key) & mask)
        out[todo] = left << half | right
        todo = todo[out[todo] >= n]
    return out
