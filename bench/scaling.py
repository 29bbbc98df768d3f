"""How fast is each layout, and how well does it scale? python bench/scaling.py out/*      (the runs' folders)

The table has a row per run, of any launcher and any number of hosts: medians over the later rows of its
metrics.jsonl, memory of the fullest and of the emptiest rank, the loss at the end, on a known GPU what
plan.py predicts, and the efficiency: tokens per second and rank relative to the run with the fewest ranks.
A run that went on in another layout has a row for each: RUN@100 is after step 100. The table says whether a
run shows weak scaling (the same batch per rank) or strong scaling (the same global batch). Each model has a
plot. --published prints Megatron-LM's table of BERT 345M next to plan.py's prediction and to runs of it.
"""
import dataclasses
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common import start

from tyro.conf import Positional

from config import Config, Outcome
from cost.gpus import GPUS, kind_of
from interface.command_line import command_line, wrong_input
from interface.paths import GIVE_RUN, meant_run
from interface.terminal import warn

MODEL = ("preset", "n_layer", "n_embd", "seq_len", "ffn_hidden", "n_experts", "top_k", "vocab_size_used",
         "dtype")  # runs that agree in these are one curve


# A run that goes on with others of these is another row.
LAYOUT = ("world", "nodes", "dp", "tp", "cp", "pp", "pp_chunks", "ep", "zero", "shard", "micro_batch",
          "global_batch", "compile", "machine")

COLUMNS = {  # title: (key of the row, format). A column that says nothing of any run is left out.
    "nodes": ("nodes", "d"), "ranks": ("world", "d"), "dp": ("dp", "d"), "tp": ("tp", "d"), "pp": ("pp", "d"),
    "cp": ("cp", "d"), "ep": ("ep", "d"), "zero": ("zero", "d"), "mbs": ("micro_batch", "d"),
    "gbs": ("batch", "d"), "GiB": ("mem_gb", ".2f"), "plan GiB": ("planned_memory", ".2f"),
    "s/it": ("seconds", ".4f"), "plan s/it": ("planned_seconds", ".4f"),
    "ms/sample": ("ms_per_sample", ".2f"), "tok/s/GPU": ("tok_s_gpu", ",.0f"), "TFLOP/s": ("tflops", ".3g"),
    "mfu %": ("mfu", ".1f"), "eff %": ("eff", ".1f"), "scaling": ("kind", "s"), "comm %": ("comm", ".1f"),
    "loss": ("loss", ".4f"), "valid.": ("val_loss", ".4f"), "min GiB": ("mem_gb_min", ".2f")}
PLAIN = {"nodes": 1, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": 0}  # of a run without this axis


def parts(folder):
    """Return [(first step, config, rows)] of a run, one for each layout in which it trained.

    history.jsonl has every start. A start at an earlier step than the ones before it has replaced them.
    """
    starts = []
    if (folder / "history.jsonl").exists():
        for line in (folder / "history.jsonl").read_text().splitlines():
            start = json.loads(line)
            starts = [before for before in starts if before["step"] < start["step"]] + [start]
    starts = starts or [{"step": 0, "config": json.loads((folder / "config.json").read_text())}]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = []
    for start in starts:
        cfg = start["config"]
        if not found or any(cfg.get(key) != found[-1][1].get(key) for key in LAYOUT):
            found.append((start["step"], cfg, []))
    for row in rows:
        [*_, mine] = (part for part in found if part[0] < row["step"] or part is found[0])
        mine[2].append(row)
    return found


def read(path, share=0.5):
    """Return a run's rows of the table, one for each layout, from the last `share` of its timed rows.

    path: the run's folder or its metrics.jsonl. ValueError, OSError: why there is no row.
    """
    path = Path(path)
    folder = path.parent if path.name == "metrics.jsonl" else path
    there = parts(folder)
    found = []
    for first, cfg, rows in there:
        timed = [r for r in rows if "ms" in r and r["step"] > first + 1]  # the first compiles and connects
        if timed:
            name = folder.name if len(there) == 1 else f"{folder.name}@{first}"
            found.append(row_of(name, cfg, timed, rows, share))
    if not found:
        raise ValueError(f"{folder}/metrics.jsonl has no timed row after step 1; run more steps")
    return found


def row_of(name, cfg, timed, rows, share):
    """Return a row of the table, of a run in one layout."""
    late = timed[min(int(len(timed) * (1 - share)), len(timed) - 1):]
    row = {key: statistics.median(r[key] for r in late) for key in ("ms", "tok_s", "tok_s_gpu")}
    row.update({key: cfg[key] for key in ("preset", "world", *LAYOUT[2:9], "micro_batch") if key in cfg})
    row.update(run=name, nodes=cfg.get("nodes", 1), batch=late[-1]["global_batch"], rows=len(late),
               model=" ".join(f"{cfg.get(k)}" for k in MODEL),
               device=cfg.get("machine", {}).get("device", ""))
    row.update(seconds=row["ms"] / 1e3, ms_per_sample=row["ms"] / row["batch"])
    for key in ("mem_gb", "mem_gb_min", "tflops", "loss", "val_loss"):
        found = [r[key] for r in rows if key in r]
        if found:
            row[key] = found[-1]
    if all("mfu" in r for r in late):
        row["mfu"] = 100 * statistics.median(r["mfu"] for r in late)
    times = [sum(r.get(f"t_{k}", 0) for k in ("grad_sync", "param_gather", "pipeline")) / r["ms"]
             for r in late if "t_grad_sync" in r]
    if times:  # --timers
        row["comm"] = 100 * statistics.median(times)
    row["config"] = cfg
    return row


def predict(row, gpu):
    """Add what plan.py predicts for this layout on a kind of GPU, by default the run's own, where known."""
    gpu = gpu or kind_of(row["device"], 0)
    if not gpu:
        return
    import plan  # not at the top: it imports torch
    names = {field.name for field in dataclasses.fields(Config)}
    saved = {key: tuple(value) if isinstance(value, list) else value
             for key, value in row["config"].items() if key in names}
    cfg = Config(**{**saved, "global_batch": row["batch"]})
    predicted = plan.estimate(cfg, row["world"], gpu, row["config"]["vocab_size_used"])
    row.update(planned_seconds=predicted["ms"] / 1e3, planned_memory=predicted["memory"],
               parameters=predicted["parameters"]["total"])


def groups(runs):
    """Return {model: its runs by number of ranks}.

    Each run gets "eff" and "kind", relative to the run with the fewest ranks.
    """
    out = {}
    for r in sorted(runs, key=lambda r: (r["world"], r["run"])):
        out.setdefault(r["model"], []).append(r)
    for same in out.values():
        first = max((r for r in same if r["world"] == same[0]["world"]), key=lambda r: r["tok_s_gpu"])
        for r in same:
            r["eff"] = 100 * r["tok_s_gpu"] / first["tok_s_gpu"]
            if r["world"] == first["world"]:
                r["kind"] = "-"
            elif r["batch"] * first["world"] == first["batch"] * r["world"]:
                r["kind"] = "weak"
            elif r["batch"] == first["batch"]:
                r["kind"] = "strong"
            else:
                r["kind"] = "mixed"
    return out


def table(runs):
    """Return the table as text. A column that is the same plain value in all runs is left out."""
    columns = {title: column for title, column in COLUMNS.items()
               if any(r.get(column[0], PLAIN.get(title)) != PLAIN.get(title) for r in runs)}
    lines = [("run", *columns)]
    for r in runs:
        cells = [format(r[key], form) if key in r else "-" for key, form in columns.values()]
        lines.append((r["run"], *cells))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    out = []
    for name, *cells in lines:
        numbers = [f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)]
        out.append("  ".join([f"{name:{widths[0]}}", *numbers]))
    return "\n".join(out)


# Megatron-LM's BERT 345M on A100 40 GB: {GPUs: milliseconds of a step over its sequences}. The batch is not
# known; 4 sequences per GPU are those of Megatron-LM's examples/pretrain_bert.sh.
PUBLISHED = {1: 22.39, 8: 7.25, 32: 2.95, 64: 1.44, 128: 0.87}


def published_table(runs):
    """Return lines with PUBLISHED, what plan.py predicts for it, and the runs of bert-345m.

    Each has the milliseconds per sample, and the efficiency: the speed-up over one GPU / the number of GPUs.
    """
    import plan  # not at the top: it imports torch
    cfg, counts = plan.arguments(["bert-345m", "--micro-batch=4",
                                  f"--scaling={','.join(map(str, PUBLISHED))}"])
    predicted = {p["layout"]["gpus"]: p["ms"] / p["layout"]["global_batch"]
                 for p in plan.scaling(cfg, counts, "a100-40", cfg.vocab_size)}
    measured = {r["world"]: r["ms"] / r["batch"] for r in runs if r["preset"] == "bert-345m"}
    lines = ["BERT 345M, ms per sample and efficiency: published for A100 40 GB, predicted for it by plan.py",
             "with 4 sequences per GPU, and runs of bert-345m",
             "GPUs" + "".join(f"{head:>18}" for head in ("published", "predicted", "run here"))]
    for n in sorted({*PUBLISHED, *measured}):
        cells = [f"{ms[n]:.2f} {100 * ms[min(ms)] * min(ms) / (ms[n] * n):6.1f} %" if n in ms else "-"
                 for ms in (PUBLISHED, predicted, measured)]
        lines.append(f"{n:4}" + "".join(f"{cell:>18}" for cell in cells))
    return lines


def plot(runs, title):
    """Return a plot of tokens per second by ranks with the ideal, or None if all runs have the same ranks."""
    if len({r["world"] for r in runs}) < 2:
        return None
    import plotext as plt
    best = {n: max(r["tok_s"] for r in runs if r["world"] == n) for n in sorted({r["world"] for r in runs})}
    first = min(best)
    plt.clear_figure()
    plt.theme("clear")
    plt.plot_size(80, 20)
    plt.plot(list(best), [best[first] * n / first for n in best], marker=".", label="ideal")
    plt.plot(list(best), list(best.values()), marker="braille", label="measured, best run")
    plt.scatter([r["world"] for r in runs], [r["tok_s"] for r in runs], marker="x")
    plt.xticks(list(best))
    plt.ylim(0, None)
    plt.title(f"{title}: tok/s by ranks")
    return plt.uncolorize(plt.build())


@dataclass(frozen=True)
class Flags:
    runs: Positional[tuple[str, ...]]  # folders of runs, or their metrics.jsonl
    gpu: Literal[("", *GPUS)] = ""  # kind for which plan.py predicts; default: the one that a run names
    last: float = 0.5  # share of the timed rows that counts, from the end
    published: bool = False  # print a published table of BERT 345M, with what is predicted and what ran
    json: bool = False  # print the rows as JSON, no table and no plot

    RANGES = {"last": (0, 1)}


def main(argv=None):
    with wrong_input():
        flags = command_line(Flags, sys.argv[1:] if argv is None else argv, "scaling.py RUN...",
                             "Table and plot of the speed of several runs, from their metrics.jsonl.")
        if not flags.runs and not flags.published:
            raise ValueError("name at least one run's folder; scaling.py --help lists all flags")
    sys.stdout.reconfigure(errors="replace")  # plots are unicode; an ascii terminal gets question marks
    found = []
    for path in flags.runs:
        try:
            if not Path(path).exists():
                raise ValueError(f"it is not there; {meant_run(path, GIVE_RUN)}")
            found += read(path, flags.last)
        # A run that ended early does not hide the other runs.
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            warn(f"{path}: {type(e).__name__}: {e}; left out")
    if flags.published and not flags.json:
        print("\n".join(published_table(found)))
    if not found and (flags.runs or not flags.published):
        raise SystemExit(Outcome.WRONG_INPUT)
    for row in found:
        predict(row, flags.gpu)
        del row["config"]
    for runs in groups(found).values():
        if flags.json:
            print("\n".join(map(json.dumps, runs)))
        else:
            size = f", {runs[0]['parameters'] / 1e9:.3g} B parameters" if "parameters" in runs[0] else ""
            drawing = plot(runs, runs[0]["preset"])
            print(f"{runs[0]['preset']}{size}\n{table(runs)}\n" + (f"{drawing}\n" if drawing else ""), end="")


if __name__ == "__main__":
    start(main)
