"""One GPT in two families, chosen by flags: GPT-2 and Llama. With --objective mlm, either is BERT.

GPT-2 has LayerNorm, GELU, learned positions, biases and a tied head. Llama has RMSNorm, SwiGLU,
RoPE, grouped-query attention and a head of its own.

Legend for activations, in the whole repository. Upper case counts the whole model, lower case
counts this rank's share. B counts one micro-batch of one replica. N and R are upper case, but count
what this rank has.

    B T C  sequences in a micro-batch, tokens in a sequence, width of the model    t = T/cp
    n      token rows that this rank keeps between the blocks, B*t/tp
    H D    query heads, width of a head                                            h = H/tp
    G g    key/value heads, g of them on this rank
    F      hidden width of the MLP                                                 f = F/tp
    V L    tokens in the vocabulary (padded), layers                     local_vocab = V/tp
    E K    experts, experts that each token visits (top-k)                         e = E/ep
    N R    N = n*K copies of this rank's rows, one for each expert that a row visits;
           R copies that this rank's experts received
    ()     a tensor of one number, without dimensions
In ddp.py and zero.py, n is the length of a whole buffer. In Axis, m is that of one rank's part.

Between the blocks the tokens lie flat, (n, C). Each tp rank holds n contiguous rows of the B*t.
parallel.py's primitives are the identity on an axis of one rank.
"""
import hashlib
import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import layers
from attention import Attention, rope_cache
from config import draws_random_numbers, head_width, n_masked, pad_vocab
from layers import ColumnLinear, Norm, RowLinear, vocab_cross_entropy, vocab_embedding
from moe import MoE
from ops import fp8
from ops.activations import ACTIVATIONS, GATED, gelu
from parallel import gather_rows, parameter, scatter_rows

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16,
          "fp16": torch.float16}


class MLP(nn.Module):
    """Computes w2(act(w1 x)), or gated w2(act(w1 x, w3 x)), arXiv:2002.05202."""

    def __init__(self, cfg, mesh, hidden):
        super().__init__()
        self.tp = mesh.tp
        self.act = ACTIVATIONS[cfg.mlp]  # see ops/activations.py
        self.w1 = ColumnLinear(cfg.n_embd, hidden, cfg.bias, mesh)
        self.w3 = ColumnLinear(cfg.n_embd, hidden, cfg.bias, mesh) if cfg.mlp in GATED else None
        self.w2 = RowLinear(hidden, cfg.n_embd, cfg.bias, mesh)
        self.products = None  # what Choice.install() may give: all of it but the sum, for training

    def forward(self, x):  # (n, C) -> (n, C)
        x = gather_rows(x, self.tp)  # (B*t, C): n rows from each rank to all, over tp
        if self.products is not None and torch.is_grad_enabled():
            partial_sum = self.products(x, self.w1.weight, self.w2.weight)  # (B*t, C)
            return scatter_rows(partial_sum, self.tp)  # SUM, n of B*t rows to each rank, over tp
        # A gated act splits its input in two halves, and multiplies one by act of the other.
        hidden = self.w1(x) if self.w3 is None else self.w1(x, self.w3)  # (B*t, f) or (B*t, 2f)
        return self.w2(self.act(hidden))  # (B*t, f) -> (n, C)


# What --recompute selective keeps: results of matrix products, attention's output and log-sum-exp.
# Norms, rotation, activation and the concatenated weights are computed again.
KEPT = [getattr(torch.ops.aten, name).default for name in (
    "mm", "addmm", "_scaled_mm", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu")]


class Block(nn.Module):
    """Attention, then the MLP or the experts, each added to the residual stream."""

    def __init__(self, cfg, mesh, layer=0):
        super().__init__()
        self.cfg = cfg
        self.kept = KEPT if cfg.recompute == "selective" else []  # Choice.install() may add to it.
        self.norm1 = Norm(cfg, mesh)
        self.attn = Attention(cfg, mesh, layer)
        self.norm2 = Norm(cfg, mesh)
        if cfg.norm_place == "both":  # on the outputs of attention and MLP
            self.out_norm1, self.out_norm2 = Norm(cfg, mesh), Norm(cfg, mesh)
        self.moe = None
        if cfg.n_experts:
            shared_hidden = cfg.n_shared_experts * cfg.ffn_hidden
            shared = MLP(cfg, mesh, shared_hidden) if shared_hidden else None
            self.moe = MoE(cfg, mesh, shared)
        else:
            self.mlp = MLP(cfg, mesh, cfg.ffn_hidden)
        if cfg.fp8 or cfg.zero == 3:
            for module in self.modules():
                if isinstance(module, (ColumnLinear, RowLinear)):
                    module.linear = fp8.linear if cfg.fp8 else layers.linear_without_copy

    def forward(self, x, t, cos, sin, cache=None, places=None):
        """(n, C) -> (n, C) and this rank's part of the router loss: (), or None without experts."""
        if self.moe is None:
            return self.maybe_recompute(self.compute, x, t, cos, sin, cache, places)
        return self.compute(x, t, cos, sin, cache, places)  # routes once: see MoE.route

    def compute(self, x, t, cos, sin, cache, places):  # as forward
        if self.moe is None:
            x, y = self.attention_half(x, t, cos, sin, cache, places)
            y = self.mlp(y)  # (n, C)
            router_loss = None
        else:
            x, y = self.maybe_recompute(self.attention_half, x, t, cos, sin, cache, places)
            gates, expert_ids, router_loss = self.moe.route(y, places)
            y = self.moe(y, gates, expert_ids)  # (n, C)
        if self.cfg.norm_place == "after":
            y = self.norm2(y)
        elif self.cfg.norm_place == "both":
            y = self.out_norm2(y)
        return x + F.dropout(y, self.cfg.dropout, self.training), router_loss

    def attention_half(self, x, t, cos, sin, cache, places):
        """(n, C) -> (n, C), and what the MLP or the experts read of it, (n, C)."""
        place = self.cfg.norm_place
        x, y = (x, x) if place == "after" else self.norm1.input_and_norm(x)
        y = self.attn(y, t, cos, sin, cache, places)
        if place == "after":
            y = self.norm1(y)
        elif place == "both":
            y = self.out_norm1(y)
        x = x + F.dropout(y, self.cfg.dropout, self.training)
        return (x, x) if place == "after" else self.norm2.input_and_norm(x)

    def maybe_recompute(self, f, *args):
        """Return f(*args). Under --recompute, autograd keeps only the arguments and the results of
        the functions in self.kept, and backward runs f again."""
        if self.cfg.recompute == "none" or not self.training:
            return f(*args)
        options = {"use_reentrant": False, "preserve_rng_state": draws_random_numbers(self.cfg)}
        if self.kept:
            options["context_fn"] = partial(create_selective_checkpoint_contexts, self.kept)
        return checkpoint(f, *args, **options)


class Weight(nn.Module):
    """A bare matrix with a name: the token embedding, the positions, the head."""

    def __init__(self, shape, mesh, **kwargs):
        super().__init__()
        self.weight = parameter(shape, mesh, **kwargs)


class MaskedHead(nn.Module):
    """What BERT has after the last norm: a dense layer with GELU, a norm, a bias on the logits.

    Every tp rank computes all rows. The gradient on a rank comes from the rank's own columns of the
    logits, so the sum over the stage is the whole gradient.
    Source: arXiv:1810.04805; google-research/bert, get_masked_lm_output.
    """

    def __init__(self, cfg, mesh, V, used):
        super().__init__()
        self.dense = ColumnLinear(cfg.n_embd, cfg.n_embd, cfg.bias, mesh, cut=False)
        self.norm = Norm(cfg, mesh)
        self.bias = parameter((V,), mesh, tp_dim=0, used=used) if cfg.bias else None

    def forward(self, x):  # (rows, C) -> (rows, C)
        return self.norm(gelu(self.dense(x)))

    @staticmethod
    def masked_rows(x, targets, cp):
        """Return the rows that have a target, the masked ones, and their targets.

        x (B*t, C), targets (B, t) -> (B*masked, C), (B*masked,). The shapes are static, for a CUDA
        graph: one cp rank may hold all masked tokens of a sequence, and where a rank holds fewer,
        rows with target IGNORE fill the rest.
        """
        B, t = targets.shape
        count = B * min(n_masked(t * cp.size), t)
        targets = targets.reshape(-1)
        rows = (targets < 0).byte().argsort(stable=True)[:count]  # in the order of the tokens
        return x.index_select(0, rows), targets[rows]


class GPT(nn.Module):
    """This rank's part of the model: the blocks of its stages, and 1/tp of each layer.

    chunks: a pair (first, end) of block numbers for each chunk of this rank; None is all blocks.
    """

    def __init__(self, cfg, mesh, vocab_size, chunks=None):
        super().__init__()
        self.cfg = cfg
        self.mesh = mesh
        self.vocab_size = vocab_size
        self.chunks = chunks or [(0, cfg.n_layer)]
        is_first = self.chunks[0][0] == 0
        self.has_head = self.chunks[-1][1] == cfg.n_layer
        self.rope = None  # cos and sin of all positions, of layers without and with a window
        self.data_parallel = None  # set by ddp.DataParallel, which knows which weights have come

        C = cfg.n_embd
        V = pad_vocab(vocab_size)
        self.wte = self.wpe = self.norm = self.head = self.mlm = None
        if is_first or (cfg.tied and self.has_head):
            # A tied head is the embedding. Where the last stage is not the first one, it keeps a
            # copy of the embedding, and the gradients of the two copies are summed.
            two_copies = cfg.tied and is_first != self.has_head
            self.wte = Weight((V, C), mesh, tp_dim=0, used=vocab_size, tied=two_copies)
        if is_first and cfg.pos == "learned":
            self.wpe = Weight((cfg.seq_len, C), mesh)
        self.blocks = nn.ModuleDict()
        for first, end in self.chunks:
            for i in range(first, end):
                self.blocks[str(i)] = Block(cfg, mesh, i)
        if self.has_head:
            self.norm = Norm(cfg, mesh)
            self.head = None if cfg.tied else Weight((V, C), mesh, tp_dim=0, used=vocab_size)
            self.mlm = MaskedHead(cfg, mesh, V, vocab_size) if cfg.objective == "mlm" else None
        self.fused_loss = None  # what Choice.install() may give: head and loss in one function
        self.base = {}  # of --lora: which checkpoint the frozen weights are from
        if cfg.lora:
            layers.add_lora(self)

    def draw(self, p, name):  # called by ddp.draw_weights
        return initial_weights(p, name, self, self.cfg.seed)

    def provide_weights(self, module, x=None):
        """Wait for a module's weights, if ZeRO gathers them. x: its input, for ZeRO-3's hook."""
        if self.data_parallel is not None:
            self.data_parallel.provide_weights(module, x)

    def forward(self, tokens, targets=None, places=None, hidden=None, cache=None, chunk=0):
        """Return the output of a chunk of this rank's blocks, and its part of the router loss.

        tokens (B, t) int64; targets (B, t); places (B, t): the place of each token in its
        document, from 1, or 0 for padding; None where a token sees all that is before it; hidden
        (n, C): the output of the previous stage; cache: a Cache, for generation.
        The output is hidden (n, C) on every stage except the last. On the last stage it is the
        logits (B*t, local_vocab) or, with targets, the sum of their cross-entropy in nats, ().
        """
        t = tokens.size(1)
        first, end = self.chunks[chunk]
        positions = self._positions(t, cache, tokens.device)
        rotation = self._rotation(positions, tokens.device)
        x = self._embed(tokens, positions) if first == 0 else hidden  # (n, C)
        router_loss = torch.zeros((), device=tokens.device)
        for i in range(first, end):
            block = self.blocks[str(i)]
            self.provide_weights(block, x)
            cos, sin = rotation[block.attn.window > 0]  # layers with a window may have other angles
            x, block_loss = block(x, t, cos, sin, cache, places)
            if block_loss is not None:
                router_loss = router_loss + block_loss
        if end < self.cfg.n_layer:
            return x, router_loss

        # x is for ZeRO-3: when x has its gradient, backward has left this norm and the head.
        head = self.wte if self.head is None else self.head
        self.provide_weights(self.norm, x)
        self.provide_weights(head)
        x = self.norm(x)
        x = gather_rows(x, self.mesh.tp)  # (B*t, C): n rows from each rank to all, over tp
        bias = None
        if self.mlm is not None:
            self.provide_weights(self.mlm)
            if targets is not None:  # only the masked tokens have one
                x, targets = self.mlm.masked_rows(x, targets, self.mesh.cp)
            x = self.mlm(x)
            bias = self.mlm.bias
        if targets is not None and self.fused_loss is not None:
            loss = self.fused_loss(x, head.weight, targets.reshape(-1), self.vocab_size, bias)
            return loss, router_loss
        logits = F.linear(x, head.weight, bias)  # (B*t, local_vocab)
        if self.cfg.logit_softcap:
            logits = self.cfg.logit_softcap * torch.tanh(logits / self.cfg.logit_softcap)
        if targets is None:
            return logits, router_loss
        loss = vocab_cross_entropy(logits, targets.reshape(-1), self.vocab_size, self.mesh.tp)
        return loss, router_loss

    def _positions(self, t, cache, device):
        """An index: the positions of t tokens in their sequences."""
        cp = self.mesh.cp
        if cp.size == 1 or cache is not None:  # with a cache each cp rank has whole sequences
            start = 0 if cache is None else cache.length
            return slice(start, start + t)
        return cp.own_segments(torch.arange(t * cp.size, device=device), 0)

    def _rotation(self, positions, device):
        """{whether a layer has a window: cos and sin of the positions, (t, D/2) each}."""
        cfg = self.cfg
        if cfg.pos != "rope":
            return {False: (None, None), True: (None, None)}
        if self.rope is None:
            D = head_width(cfg)
            dtype = torch.promote_types(DTYPES[cfg.dtype], torch.float32)
            rope = rope_cache(cfg.seq_len, D, cfg.rope_base, device, dtype, cfg.rope_scaling)
            self.rope = {False: rope, True: rope}
            if cfg.window_rope_base:
                self.rope[True] = rope_cache(cfg.seq_len, D, cfg.window_rope_base, device, dtype)
        return {windowed: (cos[positions], sin[positions])
                for windowed, (cos, sin) in self.rope.items()}

    def _embed(self, tokens, positions):  # (B, t) -> (n, C)
        self.provide_weights(self.wte)
        x = vocab_embedding(tokens.reshape(-1), self.wte.weight, self.mesh.tp)  # (n, C)
        if self.cfg.embed_scale:
            x = x * math.sqrt(self.cfg.n_embd)
        if self.wpe is not None:
            self.provide_weights(self.wpe)
            position_rows = self.wpe.weight[positions]  # (t, C)
            n = x.size(0)
            t = position_rows.size(0)
            if n % t == 0:
                x = (x.view(-1, *position_rows.shape) + position_rows).view(n, -1)
            else:  # this rank's rows start inside a sequence
                first = self.mesh.tp.rank * n
                index = torch.arange(first, first + n, device=x.device) % t  # (n,)
                x = x + F.embedding(index, position_rows)
        return F.dropout(x, self.cfg.dropout, self.training)


# Where a parameter of one dimension starts, by the last part of its name.
VECTOR_STARTS = {"weight": 1.0, "bias": 0.0, "offset": 0.0}


@torch.no_grad()
def initial_weights(p, name, model, seed):
    """Return what the parameter p of that name starts from, in any layout the same.

    The *full* tensor is drawn from N(0, 0.02) in fp32, by (seed, name), and this rank keeps its
    share. What writes into the residual stream is divided by sqrt(2 L) (GPT-2 paper, section 2.3).
    p may have no memory.
    """
    *_, module, role = ["", *name.split(".")]
    if p.ndim == 1:
        if role not in VECTOR_STARTS:
            raise ValueError(f"nothing says where {name} starts; give {role!r} a number in "
                             "VECTOR_STARTS of model.py, 1.0 for a factor, 0.0 for a summand")
        return torch.full_like(p, VECTOR_STARTS[role])
    std = 0.02
    if module in ("wo", "w2") or role == "w2":  # An expert's w2 is itself a parameter.
        std = 0.02 / math.sqrt(2 * model.cfg.n_layer)
    if module == "lora":  # A as that of peft, uniform up to 1/sqrt(n_in); B is zero
        std = 1 / math.sqrt(3 * p.full_shape[1]) if role == "A" else 0.0
    if p.expert:  # each expert has its own key
        own = torch.empty(p.shape, dtype=torch.float32, device=p.device)
        for i in range(p.size(0)):
            key = f"{seed}/{name}/{p.offset[0] + i}"
            own[i] = normal_from_key(p.shape[1:], std, key, p.device)
        return own
    full = torch.zeros(p.full_shape, dtype=torch.float32, device=p.device)  # padding stays zero
    full[:p.used] = normal_from_key(full[:p.used].shape, std, f"{seed}/{name}", p.device)
    for dim, (start, size) in enumerate(zip(p.offset, p.shape, strict=True)):
        full = full.narrow(dim, start, size)
    return full


def normal_from_key(shape, std, key, device):
    """Return N(0, std) of this shape, fp32, from a generator seeded by the text `key`."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    rng = torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, std, generator=rng)
