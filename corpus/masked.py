"""Masked tokens for --objective mlm: BERT's task, arXiv:1810.04805, section 3.1.

In every sequence n_masked tokens, 15 %, are chosen and become targets. Of those 80 % are replaced by [MASK],
10 % by a random token, 10 % stay as they are. [MASK] is one id past the data's vocabulary. Which tokens, and
what they become, is a pure function of (seed, sample), the same in every layout and after a resume; a sample
of the second epoch has another number, and with it other masks.
"""
import numpy as np

from config import n_masked
from corpus.order import draw_keys, splitmix64


class Masked:
    """The samples of a source (shards.Tokens, Blend, Synthetic), masked. n_masked: tokens of each sequence;
    mask_token: the id of [MASK]."""

    def __init__(self, source, seed=0):
        self.source, self.seq_len, self.n_samples = source, source.seq_len, source.n_samples
        self.n_masked, self.all_trained = n_masked(self.seq_len), False
        self.mask_token, self.key = source.vocab_size, draw_keys("masked", seed)[0]

    def batch(self, first, n):
        """Samples first .. first+n-1 -> x, y, (n, T) int64 each: x has the masks, y the tokens that were
        there, and IGNORE where none was chosen."""
        import torch  # not at the top: see shards.inputs_and_targets

        from ops.cross_entropy import IGNORE
        tokens = self.source.batch(first, n)[0].numpy()  # (n, T)
        i, t = (np.arange(a, a + size, dtype=np.uint64) for a, size in ((first, n), (1, tokens.shape[1])))
        draws = splitmix64(splitmix64(i[:, None] + self.key) + splitmix64(t))  # (n, T)
        at = np.argpartition(draws, self.n_masked, axis=1)[:, :self.n_masked]  # where the smallest are
        chosen, draws = (np.take_along_axis(a, at, axis=1) for a in (tokens, draws))  # (n, n_masked)
        kind, other = splitmix64(draws) % np.uint64(10), splitmix64(draws ^ self.key)
        new = np.where(kind < 8, self.mask_token, chosen)
        new = np.where(kind == 8, other % np.uint64(self.mask_token), new.astype(np.uint64))  # never [MASK]
        targets = np.full_like(tokens, IGNORE)
        np.put_along_axis(targets, at, chosen, axis=1)
        np.put_along_axis(tokens, at, new.astype(np.int64), axis=1)
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def n_targets(self, first, n):
        """-> int: the trained tokens of samples first .. first+n-1: those with a mask."""
        return n * self.n_masked


def mask_sources(cfg, train, val):
    """A run's sources -> the same, under --objective mlm masked."""
    if cfg.objective == "causal":
        return train, val
    if not train.all_trained:
        raise ValueError(f"--data {cfg.data} has conversations, --objective mlm would mask their padding; "
                         "prepare them as text")
    return Masked(train, cfg.seed), Masked(val, cfg.seed + 1)
