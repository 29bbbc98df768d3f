"""What of a layout leaves a GPU idle: the warnings that plan.py prints, a line for each."""
from config import ceil_div, head_width
from cost.step_time import matmul_shapes, waves


def idle_warnings(rank, gpu, stage_ms):
    """Return all warnings. gpu: a cost.gpus.Gpu. stage_ms: of each stage."""
    cfg = rank.cfg
    widths = {"n-embd": cfg.n_embd, f"ffn-hidden / tp {cfg.tp}": cfg.ffn_hidden // cfg.tp,
              "head dim": head_width(cfg)}
    lines = [f"{name} is {n}, no multiple of 64: slower kernels; try {ceil_div(n, 64) * 64}"
             for name, n in widths.items() if n % 64]
    dense, experts = matmul_shapes(rank)
    for m, n, count in dict.fromkeys((m, n, count) for m, n, _, count in dense + experts):
        used, whole = waves(m, n, count, gpu)
        if used / whole < 0.8:
            lines.append(f"wave quantisation: {count} x ({m}, {n}) fill {used:.2f} of {whole} waves of "
                         f"{gpu.sms} multiprocessors: {100 * (1 - used / whole):.0f} % idle")
    if cfg.n_kv_head % cfg.tp:
        lines.append(f"tp {cfg.tp} exceeds n-kv-head {cfg.n_kv_head}: key/value weights are replicated, "
                     f"{cfg.tp // cfg.n_kv_head} ranks compute each head")
    for name, ranks in ((f"ep {cfg.ep}", cfg.ep), (f"cp {cfg.cp} * tp {cfg.tp}", cfg.cp * cfg.tp)):
        if ranks > gpu.node:
            lines.append(f"{name} reaches over the node's {gpu.node} GPUs, on the slow network")
    slowest = max(stage_ms) * len(stage_ms) / sum(stage_ms)
    if slowest > 1.05:
        lines.append(f"stages of unequal work: the slowest takes {slowest:.2f} times the mean")
    return lines
