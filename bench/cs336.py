"""Our data parallelism behind the functions that the tests of Stanford's CS336, assignment 2, call.

Those tests are public: https://github.com/stanford-cs336/assignment2-systems. This file takes the place of
their tests/adapters.py; docs/cs336.md says how. Their modules are torch's own, so
parallel.describe_parameters gives the parameters what ddp.DataParallel reads. In those tests each rank's loss
is the mean over its own sequences. Our gradients are sums, so the functions below divide them by the number
of ranks.

    get_ddp, ddp_on_after_backward    a module whose gradients are summed while backward runs
    get_sharded_optimizer             ZeRO-1 with any elementwise optimizer
"""
import common  # noqa: F401 puts the repository's root on sys.path
from runtime.launch import World

import torch
import torch.distributed as dist

from ddp import DataParallel
from parallel import describe_parameters, make_mesh


def adopted(module, zero=0):
    """Return the DataParallel of a module over all ranks of the process group."""
    describe_parameters(module)
    return DataParallel(module, make_mesh(World(rank=dist.get_rank(), size=dist.get_world_size())), zero)


class Replicated(torch.nn.Module):
    """A module whose replicas start equal, and get the same gradients."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for p in module.parameters():
            dist.broadcast(p.data, 0)
        self.data_parallel = adopted(module)

    def forward(self, *args):
        self.data_parallel.reset()
        return self.module(*args)


def get_ddp(module):
    return Replicated(module)


def ddp_on_after_backward(ddp_model, optimizer):
    """Wait for the sums, and put the means where the optimizer of the tests reads them."""
    ddp_model.data_parallel.finish_grad_sync()
    for bucket in ddp_model.data_parallel.buckets:
        for p, window in zip(bucket.params, bucket.grad_windows, strict=True):
            p.grad = window / bucket.axis.size


class ShardedOptimizer:
    """An elementwise optimizer of which each rank updates its slice of every bucket."""

    def __init__(self, params, optimizer_class, **options):
        self.data_parallel = adopted(torch.nn.ParameterList(params), zero=1)
        self.slices = [torch.nn.Parameter(bucket.master) for bucket in self.data_parallel.buckets]
        self.optimizer = optimizer_class(self.slices, **options)

    def zero_grad(self):
        self.data_parallel.reset()

    def step(self):
        self.data_parallel.finish_grad_sync()
        buckets = self.data_parallel.buckets
        for own, bucket in zip(self.slices, buckets, strict=True):
            own.grad = bucket.grad_total / bucket.axis.size
        self.optimizer.step()  # in place: the slices are windows of the weights
        for bucket in buckets:
            self.data_parallel.on_updated(bucket)
            bucket.wait_for_weights()


def get_sharded_optimizer(params, optimizer_cls, **options):
    return ShardedOptimizer(params, optimizer_cls, **options)


def get_fsdp(module, compute_dtype=None):
    """Refuse: see docs/cs336.md."""
    raise NotImplementedError("ZeRO-3 gathers the blocks of our own GPT, not the modules of another model")


def fsdp_on_after_backward(fsdp_model, optimizer):
    get_fsdp(fsdp_model)


def fsdp_gather_full_params(fsdp_model):
    get_fsdp(fsdp_model)
