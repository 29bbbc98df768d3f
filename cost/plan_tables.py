"""What plan.py prints: tables, and the picture of a pipeline's schedule.

    print_plan       one layout: parameters, memory, bytes, milliseconds, and more
    print_search     the fastest of many layouts
    print_scaling    one layout on more and more GPUs
    draw_schedule    what each rank of a pipeline does when

A plan is what estimate() of plan.py returns.
"""
import string
import textwrap

from cost.gpus import GPUS
from cost.parameters import micro_batches, stage_mesh
from cost.step_time import bubble
from interface.terminal import columns, say
from pipeline import timetable


def page_width():
    """Return the columns of what is printed: those of the terminal, at most 100."""
    return min(100, columns())


def print_table(title, rows):
    """Print a table: the first column is aligned left, the others right. rows: lists of strings.

    The columns move together where the terminal is narrow.
    """
    print(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = 2 if sum(widths) + 2 * len(widths) <= page_width() else 1
    for row in rows:
        first = row[0].ljust(widths[0])
        others = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print((gap * " ").join(["", first, *others]))


def draw_schedule(ranks, chunks, num_micro_batches, width=100):
    """Return one line per pipeline rank, which shows what the rank does when, from left to right.

    F0 and B0 are the forward and the backward of micro-batch 0. With several chunks F0a is its forward
    through chunk a. A backward takes twice as long as a forward.
    """
    table = timetable(ranks, chunks, num_micro_batches)
    unit = len(f"F{num_micro_batches - 1} ")  # columns of a forward
    if chunks > 1:
        unit += 1
    rows = [[" " * unit for _ in range(max(table))] for _ in range(ranks)]
    for end, ops in table.items():
        for row, op in zip(rows, ops, strict=True):
            if op is None:
                continue
            name = f"{op.kind}{op.micro_batch}"
            if chunks > 1:
                name += string.ascii_lowercase[op.chunk % 26]
            row[end - 1] = name.ljust(unit)
            if op.kind == "B":  # its text fills two units
                row[end - 2] = name.ljust(2 * unit - 1, "-") + " "
                row[end - 1] = ""

    lines = [f"  rank {rank:<4}" + "".join(row).rstrip() for rank, row in enumerate(rows)]
    return [line if len(line) <= width else f"{line[:width - 4]} ..." for line in lines]


def print_schedule(cfg, num_micro_batches):
    """Print the picture of one step, with the part of the time in which ranks idle."""
    in_chunks = f" in {cfg.pp_chunks} chunks" if cfg.pp_chunks > 1 else ""
    idle = bubble(cfg.pp, cfg.pp_chunks, num_micro_batches)
    print(f"\nschedule of {num_micro_batches} micro-batches{in_chunks} over {cfg.pp} ranks:")
    print(f"  predicted bubble {100 * idle:.1f} % of the work: the ranks idle "
          f"{100 * idle / (1 + idle):.1f} % of the step")
    for line in draw_schedule(cfg.pp, cfg.pp_chunks, num_micro_batches, page_width()):
        print(line)


def print_plan(cfg, plan):
    """Print one layout as tables. plan: of plan_one() in plan.py."""
    layout = {name: value for name, value in plan["layout"].items() if name != "gpus"}
    if not cfg.shard:
        del layout["shard"]
    flags = ", ".join(f"{name} {value}" for name, value in layout.items())
    title = f"{cfg.preset} on {cfg.gpus} {cfg.gpu}: {flags}"
    print(textwrap.fill(title, page_width(), subsequent_indent="    "))
    print_table("parameters", [(name, f"{n:,}") for name, n in plan["parameters"].items()])

    parts = [(part, f"{gib:.2f}") for part, gib in plan["memory_gib"].items()]
    print_table(f"memory of the fullest rank, GiB of {plan['capacity_gib']:.1f}",
                [*parts, ("sum", f"{plan['memory']:.2f}")])

    sent = [(axis, f"{megabytes:,.1f}") for axis, megabytes in plan["traffic_mb"].items()]
    if cfg.gpus > GPUS[cfg.gpu].node:
        sent.append(("of it to other nodes", f"{plan['between_nodes_mb']:,.1f}"))
    print_table("sent per rank and step, MB", sent or [("none", "0")])

    parts = [(part, f"{ms:,.1f}") for part, ms in plan["ms_parts"].items()]
    sums = [("sum", f"{plan['ms']:,.1f}")]
    if plan["ms_uneven"] is not None:
        sums.append(("sum while routing is uneven", f"{plan['ms_uneven']:,.1f}"))
    print_table("milliseconds per step, expected", [*parts, *sums])

    print_table("work", [("FLOPs per step, full attention", f"{plan['flops']['full']:.4g}"),
                         ("FLOPs per step, causal", f"{plan['flops']['causal']:.4g}"),
                         ("TFLOP/s per GPU", f"{plan['tflops']:.1f}"),
                         ("MFU", f"{100 * plan['mfu']:.1f} %"),
                         ("tokens/s per GPU", f"{plan['tok_s_gpu']:,.0f}")])
    if cfg.pp > 1:
        print_schedule(cfg, micro_batches(cfg, stage_mesh(cfg, cfg.gpus, 0)))
    if cfg.tokens:
        ramp = ", with the ramp" if cfg.rampup_batch_size else ""
        print_table(f"{cfg.tokens:.3g} tokens{ramp}", [("steps", f"{plan['steps']:,}"),
                                                       ("days", f"{plan['days']:,.2f}"),
                                                       ("GPU-hours", f"{plan['gpu_hours']:,.0f}")])
    for line in plan["warnings"]:
        print(textwrap.fill(f"warning: {line}", page_width(), subsequent_indent="    ",
                            break_on_hyphens=False))


def print_search(cfg, plans):
    """Print a table of the plans of search()."""
    first = "; the first 20" if len(plans) > 20 else ""
    print(f"{cfg.preset} on {cfg.gpus} {cfg.gpu}: {len(plans)} layouts fit{first}")
    columns = {"dp": "dp", "cp": "cp", "tp": "tp", "pp": "pp", "pp_chunks": "chunks", "ep": "ep",
               "zero": "zero", "shard": "shard", "micro_batch": "mbs", "recompute": "recompute"}
    if not any(plan["layout"]["shard"] for plan in plans):
        del columns["shard"]
    rows = [("#", *columns.values(), "GiB", "ms", "TFLOP/s/GPU", "days")]
    for i, plan in enumerate(plans[:20], 1):
        flags = [str(plan["layout"][name]) for name in columns]
        days = f"{plan['days']:,.2f}" if cfg.tokens else "-"
        rows.append((str(i), *flags, f"{plan['memory']:.1f}", f"{plan['ms']:,.1f}",
                     f"{plan['tflops']:.1f}", days))
    print_table("fastest first", rows)


def print_scaling(cfg, plans):
    """Print a table of the plans of scaling()."""
    say(f"{cfg.preset}, zero {cfg.zero}, micro-batches of {cfg.micro_batch}: "
        f"predicted for {cfg.gpu}, nodes of {GPUS[cfg.gpu].node}")
    rows = [("GPUs", "dp", "ep", "GiB", "ms", "of it exposed sums", "ms/sample", "tok/s/GPU", "efficiency")]
    for plan in plans:
        layout = plan["layout"]
        gib = f"{plan['memory']:.1f}"
        if not plan["fits"]:
            gib += " too many"
        rows.append((str(layout["gpus"]), str(layout["dp"]), str(layout["ep"]), gib, f"{plan['ms']:.1f}",
                     f"{plan['ms_parts']['reduce']:.1f}", f"{plan['ms'] / layout['global_batch']:.2f}",
                     f"{plan['tok_s_gpu']:,.0f}", f"{100 * plan['efficiency']:.1f} %"))
    print_table("weak scaling", rows)
