"""What of a layout leaves a GPU idle: the warnings that plan.py prints, a line for each."""
from config import ceil_div, head_width
from cost.parameters import micro_batches
from cost.step_time import bubble, matmul_shapes, waves


def idle_warnings(rank, gpu, vocab, stage_ms):
    """Return all warnings. gpu: a cost.gpus.Gpu. vocab: before padding. stage_ms: of each stage."""
    return [*shape_warnings(rank, gpu, vocab), *pipeline_warnings(rank.cfg, rank.mesh, stage_ms),
            *network_warnings(rank.cfg, gpu.node)]


def shape_warnings(rank, gpu, vocab):
    cfg = rank.cfg
    lines = []
    for name, n in {"n-embd": cfg.n_embd, f"ffn-hidden / tp {cfg.tp}": cfg.ffn_hidden // cfg.tp}.items():
        for multiple, why in ((8, "slower kernels"), (64, "partly empty tiles"), (128, "the edge of a tile")):
            if n % multiple:
                better = ceil_div(n, multiple) * multiple
                lines.append(f"{name} is {n}, no multiple of {multiple}: {why}; try {better}")
                break
    head_dim = head_width(cfg)
    if head_dim % 64:
        lines.append(f"head dim {head_dim}: attention kernels pad it to {ceil_div(head_dim, 64) * 64}")
    if vocab % 128:
        lines.append(f"the vocabulary {vocab} is padded to {ceil_div(vocab, 128) * 128} rows")
    dense, experts = matmul_shapes(rank)
    for m, n, count in dict.fromkeys((m, n, count) for m, n, _, count in dense + experts):
        used, whole = waves(m, n, count, gpu)
        if used / whole < 0.8:
            lines.append(f"wave quantisation: {count} x ({m}, {n}) fill {used:.2f} of {whole} waves of "
                         f"{gpu.sms} multiprocessors: {100 * (1 - used / whole):.0f} % idle")
    if cfg.n_kv_head % cfg.tp:
        lines.append(f"tp {cfg.tp} exceeds n-kv-head {cfg.n_kv_head}: key/value weights are replicated, "
                     f"{cfg.tp // cfg.n_kv_head} ranks compute each head")
    return lines


def pipeline_warnings(cfg, mesh, stage_ms):
    lines = []
    mean = sum(stage_ms) / len(stage_ms)
    if max(stage_ms) > 1.05 * mean:
        each = ", ".join(f"{ms:.0f}" for ms in stage_ms)
        lines.append(f"stages of unequal work: the slowest takes {max(stage_ms) / mean:.2f} times the mean "
                     f"({each} ms)")
    num_micro_batches = micro_batches(cfg, mesh)
    idle = bubble(cfg.pp, cfg.pp_chunks, num_micro_batches)
    if idle >= 1 / 4:
        line = (f"{num_micro_batches} micro-batches over {cfg.pp} ranks: the pipeline idles "
                f"{100 * idle / (1 + idle):.1f} % of the step")
        chunks = 2 * cfg.pp_chunks
        lines.append(f"{line}; try --pp-chunks {chunks}" if cfg.n_layer >= chunks * cfg.pp else line)
    return lines


def network_warnings(cfg, node):
    lines = []
    if cfg.ep > node:
        lines.append(f"ep {cfg.ep} reaches over the node's {node} GPUs: rows travel by all_to_all on the "
                     f"slow network, not through symmetric memory; try --ep {node}")
    if cfg.cp * cfg.tp > node:
        lines.append(f"cp {cfg.cp} * tp {cfg.tp} reaches over the node's {node} GPUs, on the slow network")
    return lines
