"""The flags of plan.py, without torch: so --help and wrong flags are answered at once."""
import dataclasses
from typing import Literal

from config import Config
from cost.gpus import GPUS
from interface.command_line import given, parse
from interface.layout import check_layout, ranks_needed


@dataclasses.dataclass(frozen=True)
class PlanFlags(Config):
    """train.py's flags say what runs; these say where, and what is to be printed."""
    gpus: int = 0  # GPUs in all; 0: as few as the layout needs
    # kind of GPU; x4: four to a node. a100-40x4: Polaris; mi250x, pvc: half a card of Frontier, of Aurora
    gpu: Literal[tuple(GPUS)] = "h200"
    tokens: float = 0.0  # tokens to train on: prints the steps and days that they take; 0 prints none
    search: bool = False  # rank every layout that fits into memory, fastest first
    scaling: str = ""  # numbers of GPUs such as 1,8,64: a plan for each, with the same work per GPU
    json: bool = False  # print the numbers as JSON
    serve: bool = False  # show the plan in the browser, at http://127.0.0.1:8000, where its flags are a form
    port: int = 8000  # serve: the port; 0 finds a free one

    RANGES = {"gpus": (0, 2**17), "tokens": (0, 10**18), "port": (0, 65535)}


def arguments(argv):
    """Return (PlanFlags, [numbers of GPUs of --scaling]). ValueError: one line that says what is wrong."""
    # Without --data, the plan is that of no data: it must not depend on what lies in a folder.
    no_data = {} if given(argv, "config") else {"data": ""}
    about = ("Predict what a training run will cost before it runs: parameters, memory, bytes sent and "
             "milliseconds per step.")
    cfg = parse(argv, cls=PlanFlags, prog="plan.py", about=about, **no_data)
    if sum(map(bool, (cfg.search, cfg.scaling, cfg.serve))) > 1:
        raise ValueError("--search, --scaling and --serve show different things; give one of them")
    counts = []
    if cfg.scaling:
        counts = [int(word) if word.isdecimal() else 0 for word in cfg.scaling.split(",")]
        if not all(0 < count <= cfg.RANGES["gpus"][1] for count in counts):
            raise ValueError(f"--scaling takes numbers of GPUs such as 1,2,4,8, not {cfg.scaling!r}")
    cfg = dataclasses.replace(cfg, gpus=cfg.gpus or ranks_needed(cfg))
    if not (cfg.search or cfg.scaling or cfg.serve):
        check_layout(cfg, cfg.gpus)
    return cfg, counts
