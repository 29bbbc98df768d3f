"""The flags of plan.py, without torch: so --help and wrong flags are answered at once."""
import dataclasses
import math
import re
from typing import Literal

from config import Config, largest_divisor
from cost.gpus import GPUS
from interface.command_line import given, parse
from interface.terminal import say

MOST_GPUS = 2**17


@dataclasses.dataclass(frozen=True)
class PlanFlags(Config):
    """train.py's flags say what runs; these say where, and what is to be printed."""
    gpus: int = 1  # GPUs in all
    gpu: Literal[tuple(GPUS)] = "h200"  # kind of GPU; x4: four to a node, as on Polaris, else eight
    tokens: float = 0.0  # tokens to train on: prints the steps and days that they take; 0 prints none
    search: bool = False  # rank every layout that fits into memory, fastest first
    scaling: str | None = None  # numbers of GPUs such as 1,8,64: a plan for each, with the same work per GPU
    json: bool = False  # print the numbers as JSON
    serve: bool = False  # show the plan in the browser, at http://127.0.0.1:8000, where its flags are a form
    port: int = 8000  # serve: the port; 0 finds a free one

    RANGES = {"gpus": (1, MOST_GPUS), "tokens": (0, 10**18), "port": (0, 65535)}


ABOUT = ("Predict what a training run will cost before it runs: parameters, memory, bytes sent and "
         "milliseconds per step.")


def arguments(argv):
    """Return (PlanFlags, [numbers of GPUs of --scaling]).

    ValueError: one line that says what is wrong.
    """
    # Without --data, the plan is that of no data: it must not depend on what lies in a folder.
    no_data = {} if given(argv, "config") else {"data": ""}
    cfg = parse(argv, cls=PlanFlags, prog="plan.py", about=ABOUT, **no_data)
    if cfg.search and cfg.scaling is not None:
        raise ValueError("--search ranks the layouts of one number of GPUs, and --scaling plans one layout; "
                         "leave out one of them")
    if cfg.serve and (cfg.json or cfg.search or cfg.scaling is not None or given(argv, "config")):
        raise ValueError("--serve shows a preset's plan; leave out --json, --search, --scaling and --config")
    needed = cfg.pp * math.lcm(cfg.tp * cfg.cp, cfg.ep)
    if needed > 1 and not (given(argv, "gpus") or cfg.scaling or cfg.search):
        raise ValueError(f"--gpus is missing, the number of GPUs, which this layout needs {needed} of; try "
                         f"--gpus {needed}")
    if cfg.scaling is None:
        return fill_batch(cfg, argv, cfg.gpus), []
    counts = []
    for word in cfg.scaling.split(","):
        if not re.fullmatch(" *[0-9]{1,7} *", word) or not 1 <= int(word) <= MOST_GPUS:
            raise ValueError(f"--scaling takes numbers of GPUs such as 1,2,4,8, not {cfg.scaling!r}")
        counts.append(int(word))
    return fill_batch(cfg, argv, counts[0]), counts


def fill_batch(cfg, argv, gpus):
    """Return cfg with the largest micro-batch, up to the preset's, that fills the global batch on the GPUs.

    gpus: their number. A line says so if it is another one. A --micro-batch that is typed stays, and --search
    finds one by itself.
    """
    replicas = gpus // (cfg.tp * cfg.pp * cfg.cp)
    if given(argv, "micro_batch") or cfg.search or gpus % (cfg.tp * cfg.pp * cfg.cp):
        return cfg
    if not replicas or cfg.global_batch % replicas:
        return cfg
    if not cfg.global_batch or cfg.global_batch % (cfg.micro_batch * replicas) == 0:
        return cfg
    size = largest_divisor(cfg.micro_batch, cfg.global_batch // replicas)
    if not cfg.json:
        say(f"micro-batches of {size}: {cfg.micro_batch} * dp {replicas} does not divide "
            f"global-batch {cfg.global_batch}; train.py needs --micro-batch {size}, too")
    return dataclasses.replace(cfg, micro_batch=size)
