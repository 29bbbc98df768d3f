"""The flags of plan.py, without torch: so --help and wrong flags are answered at once."""
import dataclasses
import math
import re
from typing import Literal

from config import Config
from cost.gpus import GPUS
from interface.command_line import given, parse
from interface.layout import check_flags

MOST_GPUS = 2**17


@dataclasses.dataclass(frozen=True)
class PlanFlags(Config):
    """train.py's flags say what runs; these say where, and what is to be printed."""
    gpus: int = 1  # GPUs in all
    # kind of GPU; x4: four to a node. a100-40x4: Polaris; mi250x, pvc: half a card of Frontier, of Aurora
    gpu: Literal[tuple(GPUS)] = "h200"
    tokens: float = 0.0  # tokens to train on: prints the steps and days that they take; 0 prints none
    search: bool = False  # rank every layout that fits into memory, fastest first
    scaling: str | None = None  # numbers of GPUs such as 1,8,64: a plan for each, with the same work per GPU
    json: bool = False  # print the numbers as JSON
    serve: bool = False  # show the plan in the browser, at http://127.0.0.1:8000, where its flags are a form
    port: int = 8000  # serve: the port; 0 finds a free one

    RANGES = {"gpus": (1, MOST_GPUS), "tokens": (0, 10**18), "port": (0, 65535)}


def arguments(argv):
    """Return (PlanFlags, [numbers of GPUs of --scaling]).

    ValueError: one line that says what is wrong.
    """
    # Without --data, the plan is that of no data: it must not depend on what lies in a folder.
    no_data = {} if given(argv, "config") else {"data": ""}
    about = ("Predict what a training run will cost before it runs: parameters, memory, bytes sent and "
             "milliseconds per step.")
    cfg = parse(argv, cls=PlanFlags, prog="plan.py", about=about, **no_data)
    if cfg.search and cfg.scaling is not None:
        raise ValueError("--search ranks the layouts of one number of GPUs, and --scaling plans one layout; "
                         "leave out one of them")
    if cfg.serve and (cfg.json or cfg.search or cfg.scaling is not None or given(argv, "config")):
        raise ValueError("--serve shows a preset's plan; leave out --json, --search, --scaling and --config")
    needed = cfg.pp * math.lcm(cfg.tp * cfg.cp, cfg.ep)
    if needed > 1 and not (given(argv, "gpus") or cfg.scaling or cfg.search):
        raise ValueError(f"--gpus is missing, the number of GPUs, which this layout needs {needed} of; try "
                         f"--gpus {needed}")
    if not (cfg.scaling or cfg.search or cfg.serve):
        check_flags(cfg, cfg.gpus)
    counts = []
    if cfg.scaling is not None:
        if not re.fullmatch("[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*", cfg.scaling):
            raise ValueError(f"--scaling takes numbers of GPUs such as 1,2,4,8, not {cfg.scaling!r}")
        counts = [int(word) for word in cfg.scaling.split(",")]
    return cfg, counts
