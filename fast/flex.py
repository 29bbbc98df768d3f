"""Attention to the keys of a window or a document in a flash kernel: the fast twin of attend's mask.

torch's flash kernels take no mask, and a mask has a number for each pair of tokens. flex_attention is
compiled into a flash kernel that gets two lists for each block of queries: the blocks of keys that all its
queries see, and the blocks that some of them see. It skips all other blocks. In a block of the second list it
asks for each pair whether the query sees the key. Here the window is 5, a block has 4 tokens, and a document
starts at token 6 (o: seen). The kernel skips block 0 from query 8 on, and asks in all others:

    key block   0 1 2 3|4 5 6 7|8 9
    query  4    o o o o|o      |
           5      o o o|o o    |
           6           |    o  |
           7           |    o o|
           8           |    o o|o
           9           |    o o|o o

The host never reads the lists, so a captured CUDA graph makes those of each step's documents anew.
"""
import torch

BLOCK = 128  # queries, and keys, of a block


class FlexAttention:
    """Called as attention.attend calls it."""
    kernel = None  # of prepare(): a model whose layers hide no early keys never needs it

    def __call__(self, q, k, v, window, places):
        """q (B, h, queries, D), k and v (B, g, keys, D) -> (B, h, queries, D). See attention.attend."""
        self.prepare()
        mask = block_mask(q, k, window, places)
        return self.kernel(q, k, v, block_mask=mask, enable_gqa=q.size(1) != k.size(1))

    def prepare(self):
        if self.kernel is None:
            self.kernel = make_kernel()


def make_kernel():
    from torch.nn.attention.flex_attention import flex_attention
    # Lengths differ between training and evaluation, windows, and the segments of cp.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def block_mask(q, k, window, places):
    from torch.nn.attention.flex_attention import BlockMask  # This takes a while.
    n_queries = q.size(2)
    n_keys = k.size(2)
    some, every = seen_blocks(first_keys(q, k, window, places), n_keys)
    return BlockMask((n_queries, n_keys), *listed(some), *listed(every), *listed(some.mT), *listed(every.mT),
                     BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=pair_rule(n_queries, n_keys, window, places))


def pair_rule(n_queries, n_keys, window, places):
    """Return sees(b, h, query, key), which the kernel asks: whether in sequence b the query sees the key."""
    before = n_keys - n_queries  # keys before the first query's own
    window = window or n_keys

    def in_window(b, h, query, key):
        own = query + before
        return (key <= own) & (key > own - window)

    def in_document(b, h, query, key):
        return in_window(b, h, query, key) & (key > query + before - places[b, query].clamp(min=1))

    return in_window if places is None else in_document


def first_keys(q, k, window, places):
    """Return the index of the first key that each query sees, (B, queries). In a row it never falls."""
    n_queries = q.size(2)
    n_keys = k.size(2)
    windows = torch.full((q.size(0), n_queries), window or n_keys, device=q.device)
    if places is not None:
        windows = torch.minimum(places.clamp(min=1), windows)  # padding, of place 0, sees itself
    ends = torch.arange(n_keys - n_queries + 1, n_keys + 1, device=q.device)  # after each query's own key
    return (ends - windows).clamp(min=0)


def seen_blocks(first, n_keys):
    """Return which blocks are seen in part, and which whole, (B, query blocks, key blocks) bool each."""
    n_queries = first.size(1)
    before = n_keys - n_queries
    # The first and the last query of each block, (query blocks, 1), and the first key of each, (key blocks,).
    # Later queries see later keys, so these two speak for all queries of their block.
    early = torch.arange(0, n_queries, BLOCK, device=first.device).unsqueeze(1)
    late = (early + BLOCK - 1).clamp(max=n_queries - 1)
    keys = torch.arange(0, n_keys, BLOCK, device=first.device)
    some = (keys + BLOCK > first[:, early]) & (keys <= late + before)
    every = (keys >= first[:, late]) & (keys + BLOCK - 1 <= early + before) & (early + BLOCK <= n_queries)
    return some & ~every, every


def listed(blocks):
    """Return how many of each row of blocks (B, rows, columns) are True, and the columns of these first."""
    blocks = blocks.unsqueeze(1).contiguous()  # The GPU's kernels count on it.
    columns = (~blocks).byte().argsort(dim=-1, stable=True)  # (B, 1, rows, columns)
    return blocks.sum(-1, dtype=torch.int32), columns.int().contiguous()
