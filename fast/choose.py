"""Which of the fast ways a run takes. Each has a plain twin that gives the same numbers."""
import functools
import socket
from typing import NamedTuple

import torch

from config import draws_random_numbers, head_width
from ddp import Bucket
from fast import flash, symm_mem
from fast.buckets import PEER, CopyBucket, KernelBucket, LoneBucket
from fast.flex import FlexAttention
from fast.padded import PaddedAllToAll
from interface.terminal import say
from layers import NORMS, Norm, vocab_cross_entropy
from model import DTYPES, MLP
from ops import backend, gelu_mlp, grouped_mm, norms, products
from ops.activations import swiglu_by_kernel
from ops.backend import version_of
from ops.cross_entropy import linear_cross_entropy

QUACK = "0.6.5"  # the version of quack-kernels that was tried; flash-attn-4 installs the library


class Choice(NamedTuple):
    graph: bool              # forward, backward and gradient sums are replayed as one CUDA graph
    symm_mem: bool           # rows reach the experts of other ranks through symmetric memory, not all_to_all
    peer_copies: bool        # ZeRO's gradients and weights travel as copies between the GPUs of a node
    single_microbatch: bool  # nothing is added to bf16 gradients, so they need no fp32 sum
    flex: bool = False       # windows and documents in a flash kernel, not through a mask
    flash: bool = False      # attention without a mask by flash-attn-4
    quack: bool = False      # products by quack-kernels: the experts' and, in a graph, those of narrow models

    def install(self, model):
        cfg = model.cfg
        device = next(model.parameters()).device
        # A compiled graph would keep, and not compute again, what an autograd.Function in it returns.
        one_graph = cfg.compile and model.mesh.tp.size * model.mesh.cp.size == 1
        recomputes_graph = one_graph and cfg.recompute == "full"
        library = None
        if self.quack:
            from quack import gemm_interface as library
        grouped_mm.quack = library
        products.quack = library if self.graph else None  # The host would launch small products late.
        flex = FlexAttention() if self.flex else None
        for block in model.blocks.values():
            block.attn.flex = flex
            block.attn.flash = flash.FlashAttention() if self.flash else None
            if self.flash and (cfg.recompute == "selective" or recomputes_graph):
                block.kept = [*block.kept, flash.FlashAttention.operation]
            if block.moe is not None:
                self.install_dispatcher(block.moe)
        dtype = DTYPES[cfg.dtype]
        has_kernels = device.type in backend.TRITON_DEVICES and dtype in backend.DTYPES
        norm_has_kernel = has_kernels and norms.fits(cfg.n_embd, dtype) and not recomputes_graph
        gelu_in_products = gelu_mlp.is_possible(cfg, device) and not recomputes_graph
        for module in model.modules():
            if isinstance(module, Norm) and norm_has_kernel:
                module.kernel = norms.KERNELS.get(NORMS[cfg.norm].kernel)
            elif isinstance(module, MLP) and has_kernels and cfg.mlp == "swiglu":
                module.act = swiglu_by_kernel
            elif isinstance(module, MLP) and gelu_in_products:
                module.products = gelu_mlp.products
        if device.type != "cpu" and not cfg.logit_softcap:
            model.fused_loss = head_loss(model.mesh.tp)

    def install_dispatcher(self, layer):  # a moe.MoE
        if self.symm_mem:
            layer.dispatcher = symm_mem.SymmMem(layer.cfg, layer.mesh)
        elif self.graph and needs_row_limit(layer.cfg, layer.mesh):
            # A graph needs messages of a fixed size.
            layer.dispatcher = PaddedAllToAll(layer.cfg, layer.mesh)

    def attention_by(self):
        return flash.NAME if self.flash else "torch"

    def bucket_class(self, plain, axis, params):
        """Return the class, in the place of `plain`, of a bucket that is reduced over axis."""
        if self.peer_copies and axis.sharing().shard.size > 1:
            return PEER[plain]
        if plain is Bucket and self.single_microbatch and axis.size == 1:
            return LoneBucket if len(params) == 1 else CopyBucket
        if plain is Bucket and params[0].device.type in backend.TRITON_DEVICES:
            return KernelBucket
        return plain


def head_loss(axis):
    """Return the head and its loss as one function, for a vocabulary that is cut over an axis."""
    if axis.size == 1:
        return linear_cross_entropy

    def losses(z, target, used):  # as ops.cross_entropy.cross_entropy_rows, but for the sum of the losses
        logits = z.detach().requires_grad_()
        with torch.enable_grad():
            loss = vocab_cross_entropy(logits, target, used, axis)
        grad, = torch.autograd.grad(loss, logits)
        z.copy_(grad)
        return loss.detach(), torch.ones_like(target, dtype=loss.dtype)
    return functools.partial(linear_cross_entropy, losses=losses)


def choose(cfg, mesh, device, reach=None):
    """Return the Choice of this run. reach: peer_access, which is collective, or its substitute."""
    reach = reach or peer_access
    bf16 = cfg.dtype == "bf16" and device.type != "cpu"
    single = bf16 and cfg.global_batch in (0, cfg.micro_batch * mesh.dp.size)

    # ZeRO-1 adds up micro-batches on each rank, in fp32.
    worth_copying = single if cfg.zero == 1 else bf16 and cfg.zero > 1
    sharers = mesh.stage.sharing(cfg.zero).shard  # With --shard, those of one node may reach each other.
    one_stage_of_gpus = mesh.pp.size == 1 and sharers.size > 1 and has_cuda_api(device)
    peer_copies = worth_copying and one_stage_of_gpus and reach(mesh, sharers, device)

    graph = static_shapes(cfg, mesh, device)
    one_sided = graph and needs_row_limit(cfg, mesh) and reach(mesh, mesh.ep, device)
    return Choice(graph, one_sided, peer_copies, single, flex_possible(cfg, device),
                  flash.is_taken(cfg, device), quack_possible(cfg, device))


def has_cuda_api(device):
    return device.type == "cuda"  # also an AMD GPU, by HIP


def static_shapes(cfg, mesh, device):
    """Whether every step launches the same kernels on the same shapes, as a CUDA graph needs."""
    if not has_cuda_api(device) or not cfg.cuda_graph or cfg.timers:
        return False
    if mesh.pp.size > 1 or cfg.zero > 1 or cfg.recompute == "selective":
        return False  # these were never captured
    if cfg.recompute == "full" and draws_random_numbers(cfg):
        return False  # what is drawn again would differ from the first time
    if cfg.n_experts and not grouped_mm_possible(cfg, device):
        return False  # the loop over experts and torch's sort read row counts on the host
    return cfg.ep_slack > 0 or not needs_row_limit(cfg, mesh)


def needs_row_limit(cfg, mesh):
    """Whether only the GPUs know how many rows reach a rank's experts: dropless, over several ranks."""
    return cfg.n_experts > 0 and cfg.capacity_factor == 0 and mesh.ep.size > 1


def grouped_mm_possible(cfg, device):
    """Whether each product of the experts is one kernel. The device of plan.py has no index."""
    here = device.index is None or device.type in backend.TRITON_DEVICES
    return here and DTYPES[cfg.dtype] in backend.DTYPES


def quack_possible(cfg, device):
    is_here = device.index is not None and version_of("quack-kernels") == QUACK  # plan.py's has no index
    return is_here and backend.is_hopper(device) and cfg.dtype == "bf16"


def flex_possible(cfg, device):
    if not has_cuda_api(device) or not grouped_mm_possible(cfg, device):
        return False  # a kernel of Triton, in 16 bits or fp32, as those are
    if cfg.recompute == "selective":
        return False  # it keeps attention's output by the name of the operation, and this one has none
    return cfg.dropout == 0 and 16 <= head_width(cfg) <= 256  # the widths that its kernels know


# Which GPUs reach each other's memory

NO_ACCESS = ("note: the GPUs of {} {} cannot access each other's memory, or a process cannot see them: "
             "NCCL is used, which takes longer (docs/cluster.md, 'Which GPUs a process sees')")


def peer_access(mesh, axis, device):
    """Whether the ranks of each group of `axis` reach each other's memory. Collective over the world."""
    world = mesh.world
    n_seen = 0 if device.index is None else torch.cuda.device_count()
    reached = [gpu for gpu in range(n_seen)
               if gpu == device.index or torch.cuda.can_device_access_peer(device.index, gpu)]
    place = socket.gethostname(), device.index, n_seen, reached
    groups = {}
    # A few words go from each rank to all, over the world.
    for first, theirs in world.everyone.gather((axis.ranks[0], place)):
        groups.setdefault(first, []).append(theirs)
    if device.index is None:
        return all(len({host for host, *_ in group}) == 1 for group in groups.values())
    for group in groups.values():
        hosts, gpus, seen, reachable = zip(*group, strict=True)
        if len(set(hosts)) > 1:
            return False
        # An index that two ranks share, or that one does not know, means another GPU in each process.
        is_hidden = len(set(gpus)) < len(gpus) or max(gpus) >= min(seen)
        if is_hidden or any(set(gpus) - set(reached) for reached in reachable):
            if world.rank == 0:
                say(NO_ACCESS.format(axis.name, axis.size))
            return False
    return not world.everyone.any(allocation_fails(axis, device))  # a bool from each rank, over the world


def allocation_fails(axis, device):
    try:
        symm_mem.SymmetricBuffer(axis, 1, 128, torch.float32, device)
    except ValueError:
        return True
    return False
