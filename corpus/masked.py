"""Masked tokens for --objective mlm: BERT's task, arXiv:1810.04805, section 3.1.

In every sequence n_masked tokens, 15 %, are chosen and become targets. Of these, 80 % are replaced by [MASK],
10 % by a random token, and 10 % stay as they are. [MASK] is one id past the data's vocabulary. All this is a
pure function of (seed, sample); a sample of the second epoch has another number, and so it has other masks.
"""
import numpy as np

from config import n_masked
from corpus.order import draw_keys, splitmix64

MASK = "[MASK]"  # in a text for sample.py or transformers; no training text is ever encoded to its id


class Masked:
    """The samples of a source (samples.Blend or Synthetic), masked."""

    def __init__(self, source, seed):
        self.source = source
        self.seq_len = source.seq_len
        self.n_samples = source.n_samples
        self.n_masked = n_masked(self.seq_len)
        self.mask_token = source.vocab_size
        self.key = draw_keys("masked", seed)[0]
        self.all_trained = False
        self.has_documents = False

    def batch(self, first, n):
        """Return samples first .. first+n-1 as x, y, (n, T) int64 each.

        x has the masks. y has the tokens that were there, and IGNORE where none was chosen.
        """
        import torch  # not at the top: see samples.inputs_and_targets

        from ops.cross_entropy import IGNORE
        tokens = self.source.batch(first, n)[0].numpy()  # (n, T)
        samples = np.arange(first, first + n, dtype=np.uint64)[:, None]  # (n, 1)
        positions = np.arange(1, self.seq_len + 1, dtype=np.uint64)  # (T,)
        draws = splitmix64(splitmix64(samples + self.key) + splitmix64(positions))  # (n, T)
        # The chosen places are those of the smallest draws.
        places = np.argpartition(draws, self.n_masked, axis=1)[:, :self.n_masked]  # (n, n_masked)
        chosen = np.take_along_axis(tokens, places, axis=1)  # (n, n_masked)
        draws = np.take_along_axis(draws, places, axis=1)  # (n, n_masked)

        kind = splitmix64(draws) % np.uint64(10)  # 0 to 7: [MASK]; 8: a random token; 9: the token stays
        other = splitmix64(draws ^ self.key) % np.uint64(self.mask_token)  # never [MASK]
        replaced = np.select([kind < 8, kind == 8], [self.mask_token, other.astype(np.int64)], chosen)

        targets = np.full_like(tokens, IGNORE)
        np.put_along_axis(targets, places, chosen, axis=1)
        np.put_along_axis(tokens, places, replaced, axis=1)
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def n_targets(self, first, n):
        return n * self.n_masked
