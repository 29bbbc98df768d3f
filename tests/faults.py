"""Plant a fault in our code, and see a test fail.

A test that has never failed proves little. So we plant a fault in the code that runs, in this process or
in a rank's process, and the test must notice it. A fault is a pair (name of a function, replacement):

    planted("ddp.Bucket.wait_sum", grad_average)

A call of Bucket.wait_sum becomes a call of grad_average(original, *arguments), where `original` is the
function as it was. The fault is in the arguments, the result or the effect, so it outlives the function's
lines. A fault that is never called is an error.
"""
import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import types
from operator import attrgetter
from unittest import mock

import pytest
import torch
from plain_muon import reference as plain_reference
from pool import run_ranks
from test_layouts import capacity_ranks, check, flags_of, reference, run, sequences, source_of

from parallel import Axis

PACKAGES = "ops", "fast", "runtime", "corpus", "cost", "interface"
numbers = itertools.count()  # one for each planted fault


# -----------------------------------------------------------------------------
# Planting

@contextlib.contextmanager
def planted(where, replacement):
    """Call replacement(original, *arguments) in place of the function `where`.

    AssertionError at the end: nothing has called it.
    """
    with replaced(where, replacement) as calls:
        yield
    assert calls, f"nothing has called {where}"


@contextlib.contextmanager
def replaced(where, replacement):
    """Do the same where it is no fault, and need not be called. Give a list with an entry for each call.

    The function object stays, and gets other code. So the fault reaches every module that has imported it.
    """
    function = find(where)
    before = function.__code__, function.__defaults__, function.__kwdefaults__
    original = types.FunctionType(function.__code__, function.__globals__, function.__name__,
                                  function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    calls = []

    def called(*args, **kwargs):
        calls.append(where)
        return replacement(original, *args, **kwargs)

    name = f"_replacement_{next(numbers)}"
    function.__globals__[name] = called
    function.__defaults__ = function.__kwdefaults__ = None
    function.__code__ = code_that_calls(name, function)
    try:
        yield calls
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = before
        del function.__globals__[name]


def code_that_calls(name, function):
    """Return code for a function that passes its arguments on to the global function `name`.

    Python only accepts new code that has the same number of outer variables as the old code. A method that
    calls super() has one, __class__. So the new code mentions the old code's outer variables.
    """
    outer = ", ".join(function.__code__.co_freevars)
    source = f"""def outside({outer}):
    def inside(*args, **kwargs):
        {outer or "pass"}
        return {name}(*args, **kwargs)
    return inside
"""
    made = {}
    exec(source, made)
    values = [None] * len(function.__code__.co_freevars)
    return made["outside"](*values).__code__


def find(where):
    """Return the function of this name. It may be a property's, and it may be decorated."""
    parts = where.split(".")
    depth = 2 if parts[0] in PACKAGES else 1
    module = importlib.import_module(".".join(parts[:depth]))
    found = attrgetter(".".join(parts[depth:]))(module)
    if isinstance(found, property):
        found = found.fget
    return inspect.unwrap(found)


def with_faults(world, faults, fn, *args):
    """Call fn on this rank while the faults are planted. AssertionError: no rank came to one of them."""
    with contextlib.ExitStack() as stack:
        calls = [stack.enter_context(replaced(*fault)) for fault in faults]
        result = fn(world, *args)
    counts = torch.tensor([len(of_fault) for of_fault in calls])
    if world.size > 1:
        torch.distributed.all_reduce(counts)
    for (where, _), count in zip(faults, counts.tolist(), strict=True):
        assert count, f"no rank has called {where}"
    return result


# -----------------------------------------------------------------------------
# Functions that are called in place of others. They are pickled for the ranks, so they are defined at the top
# level of a module, and functools.partial gives them the values that differ from fault to fault.

def nothing(original, *args, **kwargs):
    """Leave the call out."""


def constant(original, *args, value):
    return value


def other_group(original, mesh, tp_dim, *args, of, instead):
    """Return the group `instead` where parallel.reduction_axis returns `of`."""
    group = original(mesh, tp_dim, *args)
    return instead if group == of else group


def group(of, instead):
    """Return the fault that sums the gradients of the group `of` over the group `instead`."""
    return "parallel.reduction_axis", functools.partial(other_group, of=of, instead=instead)


def balance_loss_of_this_rank(original, layer, probabilities, tokens, rows, real):
    """MoE.balance_loss of this tp rank's tokens alone."""
    rows //= layer.mesh.tp.size
    with mock.patch.object(layer, "mesh", dataclasses.replace(layer.mesh, tp=Axis("tp"))):
        return original(layer, probabilities, tokens, rows, real)


def local_norm(optimizer):
    """Return the norm of this rank's own gradients, ()."""
    squares = [grad.double().square().sum() for grad in optimizer.grads]
    return (torch.stack(squares) * optimizer.count_factors).sum().sqrt()


# -----------------------------------------------------------------------------
# Training with faults

# (ranks, layout)
ONE, DP, TP, PP = (1, dict()), (2, dict()), (2, dict(tp=2)), (2, dict(pp=2))
CP, EP = (2, dict(cp=2)), (2, dict(ep=2))
ZERO, ZERO2, ZERO3 = (2, dict(zero=1)), (2, dict(zero=2)), (2, dict(zero=3))


def run_with_faults(family, place, *faults):
    """Train a family of test_layouts.py with the faults. Return check(): it asserts that the results equal
    those of one rank, or on one rank those of plain_muon.py.

    The run is over before check() is called, so a run that crashes does not count as a detected fault.
    """
    n, layout = place
    base, batch, kind = flags_of(family, layout), sequences(n, layout), source_of(family)
    if n == 1:
        want = plain_reference(base, batch)
    else:
        want = reference(base, batch, *capacity_ranks(base, layout), kind)
    results = run_ranks(n, with_faults, faults, run, dict(base, **layout), batch, 1, 1, kind)
    return functools.partial(check, base, results, want)


def assert_caught(family, place, *faults):
    """Assert that the results of a run with these faults differ from those of one rank."""
    compare_results = run_with_faults(family, place, *faults)
    with pytest.raises(AssertionError):
        compare_results()
