"""Samples without files, --data synthetic; and the inputs and targets of any windows of tokens."""
import numpy as np

from corpus.order import draw_keys, splitmix64


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
