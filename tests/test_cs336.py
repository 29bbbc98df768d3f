"""parallel.describe_parameters: a module that is not ours, through bench/cs336.py, equals one process."""
import sys

import pytest
import torch
from faults import with_faults
from pool import ROOT, run_ranks

sys.path.append(str(ROOT / "bench"))  # also in the ranks of the pool, which import this module

import cs336

STEPS, SEQUENCES = 3, 8


class Foreign(torch.nn.Module):
    """A matrix that is used twice, a bias, a number, and a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 5)
        self.last = torch.nn.Linear(5, 3, bias=False)
        self.factor = torch.nn.Parameter(torch.tensor(1.5))
        self.fixed = torch.nn.Parameter(torch.tensor([0.5]), requires_grad=False)

    def forward(self, x):
        return self.last(self.first(self.first(x).tanh()).tanh()) * self.factor + self.fixed


def batches():
    """Return [(x, y)] of all steps, the same on every rank."""
    rng = torch.Generator().manual_seed(5)
    return [(torch.randn(SEQUENCES, 5, generator=rng, dtype=torch.float64),
             torch.randn(SEQUENCES, 3, generator=rng, dtype=torch.float64)) for _ in range(STEPS)]


def one_process(make_optimizer):
    """Train in plain torch, and return {name: weights}."""
    torch.manual_seed(0)
    model = Foreign().double()
    optimizer = make_optimizer(model.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def replicated(world):
    """Train through get_ddp: the ranks start with other weights, and each has half of the sequences."""
    torch.manual_seed(world.rank)
    model = cs336.get_ddp(Foreign().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        own = slice(world.rank * SEQUENCES // world.size, (world.rank + 1) * SEQUENCES // world.size)
        (model(x[own]) - y[own]).square().mean().backward()
        cs336.ddp_on_after_backward(model, optimizer)
        optimizer.step()
    return {name: p.detach() for name, p in model.module.named_parameters()}


ADAMW = dict(lr=0.1, weight_decay=0.1)


def sharded(world):
    """Train through get_sharded_optimizer: the ranks have the same sequences. Return weights and moments."""
    torch.manual_seed(0)
    model = Foreign().double()
    optimizer = cs336.get_sharded_optimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    for x, y in batches():
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    moments = sum(optimizer.optimizer.state[own]["exp_avg"].numel() for own in optimizer.slices)
    return {name: p.detach() for name, p in model.named_parameters()}, moments


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, weights in want.items():
        torch.testing.assert_close(got[name], weights, rtol=0, atol=1e-12)


def test_replicas_of_a_foreign_module_equal_one_process():
    want = one_process(lambda params: torch.optim.SGD(params, lr=0.1))
    for got in run_ranks(2, replicated):
        assert_equal(got, want)


def test_a_sharded_optimizer_of_a_foreign_module_equals_one_process():
    want = one_process(lambda params: torch.optim.AdamW(params, **ADAMW))
    for got, moments in run_ranks(2, sharded):
        assert_equal(got, want)
        assert moments == 2 * 128  # half of two padded buckets, one of matrices and one of vectors


def test_the_axis_of_the_parameters_decides():
    fault = ("parallel.describe_parameters", '"stage"', '"tp"')
    first, _ = run_ranks(2, with_faults, [fault], replicated)
    with pytest.raises(AssertionError):
        assert_equal(first, one_process(lambda params: torch.optim.SGD(params, lr=0.1)))
