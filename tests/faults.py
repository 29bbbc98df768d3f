"""Plant a fault in our code, and see a test fail. See `planted` for the two ways.

    planted, with_faults   plant faults here, or in the process of a rank
    nothing, constant, ... functions that are called in the place of others
    run_with_faults        train with faults, and compare with one rank's numbers
"""
import contextlib
import functools
import importlib
import inspect
import types
from operator import attrgetter
from unittest import mock

import test_layouts
import torch
from pool import run_ranks
from test_layouts import compare, run

from config import Config
from corpus.shards import Synthetic
from model import GPT, init_weights
from optim import learning_rate
from parallel import make_mesh
from runtime.launch import World

PACKAGES = "ops", "fast", "runtime", "corpus", "cost", "interface"


# -----------------------------------------------------------------------------
# Planting

def find(where):
    """Return the function that has this name, also that of a property or under a decorator."""
    parts = where.split(".")
    depth = 2 if parts[0] in PACKAGES else 1
    module = importlib.import_module(".".join(parts[:depth]))
    found = attrgetter(".".join(parts[depth:]))(module)
    if isinstance(found, property):
        found = found.fget
    return inspect.unwrap(found)


def planted(where, *fault):
    """Plant a fault in the function `where`, however other modules have imported it.

    By name: planted(where, replacement). Calls of the function become replacement(original, *arguments).
    By text: planted(where, old, new) replaces a piece of the function's source.
    """
    return replaced(where, *fault) if callable(fault[0]) else edited(where, *fault)


@contextlib.contextmanager
def edited(where, old, new):
    """Replace `old` by `new` in the source of the function `where`."""
    function = find(where)
    source = inspect.getsource(function)
    assert source.count(old) == 1, f"{where} contains {old!r} {source.count(old)} times: rewrite this fault"
    source = source.replace(old, new)
    if source[0] == " ":
        source = "class _:\n" + source  # A method stands in a class, so that super() works.
    codes = [compile(source, f"fault in {where}", "exec")]
    while codes[0].co_name != function.__name__:
        codes[:1] = [c for c in codes[0].co_consts if inspect.iscode(c)]
    original, function.__code__ = function.__code__, codes[0]
    try:
        yield
    finally:
        function.__code__ = original


@contextlib.contextmanager
def replaced(where, replacement):
    """Call replacement(original, *arguments) in the place of the function `where`.

    The function object stays, because other modules may hold it: only its code is exchanged.
    """
    function = find(where)
    assert not function.__code__.co_freevars, f"{where} is a closure: plant this fault by text"
    before = function.__code__, function.__defaults__, function.__kwdefaults__
    original = types.FunctionType(before[0], function.__globals__, function.__name__, before[1])
    original.__kwdefaults__ = before[2]
    name = f"_replacement_of_{function.__name__}"
    function.__globals__[name] = functools.partial(replacement, original)
    code = {}
    exec(f"def {function.__name__}(*args, **kwargs): return {name}(*args, **kwargs)", code)
    function.__defaults__ = function.__kwdefaults__ = None
    function.__code__ = code[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = before
        del function.__globals__[name]


def with_faults(world, faults, fn, *args):
    """fn on this rank with the faults planted. They are removed afterwards, also after an error."""
    with contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(planted(*fault))
        return fn(world, *args)


# -----------------------------------------------------------------------------
# Functions that are called in the place of others. They are of a module because they travel to the ranks.

def nothing(original, *args, **kwargs):
    """Leave the call out."""


def other_group(original, mesh, tp_dim, *args, of, instead):
    """parallel.reduction_group with another answer where it is `of`."""
    group = original(mesh, tp_dim, *args)
    return instead if group == of else group


def constant(original, *args, value):
    return value


GROUP = "parallel.reduction_group"


def group(of, instead):
    """The fault that sums the gradients of one group over another."""
    return GROUP, functools.partial(other_group, of=of, instead=instead)


# -----------------------------------------------------------------------------
# Models and layouts that have faults, and what is in the functions that have several

LLAMA, GPT2, MOE, BERT = (
    dict(base, micro_batch=2, n_layer=2)
    for base in (test_layouts.LLAMA, test_layouts.GPT2, test_layouts.MOE, test_layouts.BERT))

DP, TP, PP, ZERO = (2, dict()), (2, dict(tp=2)), (2, dict(pp=2)), (2, dict(zero=1))  # ranks, layout

ONE_STAGE, SEVERAL_STAGES = "pipeline.one_stage", "pipeline.several_stages"
BALANCE = "router_loss / (len(batches) * model.mesh.dp.size)"


def sequences(n, layout):
    """-> sequences per step, in micro-batches of 2: two of them on every dp rank, four with two stages."""
    return 4 * (n // layout.get("tp", 1) // layout.get("cp", 1))


# -----------------------------------------------------------------------------
# Training with faults

def plain_pytorch(flags, batch):
    """Train as one rank's run() does, by a loop that shares only model and learning rate with train.py
    -> (stats of each step, {name: full array}, None), as test_layouts.reference()."""
    cfg = Config(**flags)
    source = Synthetic(cfg.vocab_size, cfg.seq_len, cfg.seed)
    model = GPT(cfg, make_mesh(World(rank=0, size=1)), cfg.vocab_size).double()
    init_weights(model, cfg.seed)
    named = dict(model.named_parameters())
    vectors = {n for n in named if "norm" in n or n.endswith("bias")}
    adam = torch.optim.AdamW([dict(params=[p for n, p in named.items() if n not in vectors]),
                              dict(params=[p for n, p in named.items() if n in vectors], weight_decay=0.0)],
                             betas=(cfg.beta1, cfg.beta2), weight_decay=cfg.weight_decay)
    stats, want = [], {}
    for step in range(1, test_layouts.STEPS + 1):
        x, y = source.batch((step - 1) * batch, batch)
        adam.zero_grad()
        loss = model(x, y)[0] / y.numel()
        loss.backward()
        want.update({f"step {step} grad {n}": p.grad.numpy().copy() for n, p in named.items()})
        zeros = sum((p.grad == 0).sum().item() for p in named.values())
        size = torch.cat([p.detach().flatten() for p in named.values()]).norm().item()
        norm = torch.nn.utils.clip_grad_norm_(named.values(), cfg.clip).item()
        stats.append([loss.item(), norm, zeros, size])
        for group in adam.param_groups:
            group["lr"] = learning_rate(cfg, step)
        adam.step()
    for n, p in named.items():
        want["end " + n] = p.detach().numpy()
        want.update({f"end {k}/{n}": adam.state[p][k].numpy() for k in ("exp_avg", "exp_avg_sq")})
    return stats, want, None


def run_with_faults(base, place, faults=(), batch=None):
    """Train with the faults -> check(): AssertionError if the results differ from one rank's. The run is over
    before check() is called, so a run that crashes does not count as a fault that was caught."""
    n, layout = place
    batch = batch or sequences(n, layout)
    chunks = test_layouts.capacity_ranks(base, layout)
    want = plain_pytorch(base, batch) if n == 1 else test_layouts.reference(dict(base), batch, *chunks)
    results = run_ranks(n, with_faults, faults, run, dict(base, **layout), batch)

    def check():
        with mock.patch.object(test_layouts, "run_ranks", lambda *job: results), \
                mock.patch.object(test_layouts, "reference", lambda *job: want):
            compare(base, n, batch, **layout)
    return check
