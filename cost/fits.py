"""Whether these ranks can train a model: train.py refuses a layout that cannot, plan.py leaves it out."""
from config import largest_divisor, must_divide
from optim import check_ramp
from pipeline import stage_layers


def check_layout(cfg, mesh, batch):
    """ValueError, with the fix, for values that are wrong on this mesh. batch: sequences per step."""
    tp, dp = mesh.tp.size, mesh.dp.size
    if cfg.n_experts % mesh.ep.size:
        fit = largest_divisor(mesh.ep.size, cfg.n_experts, dp * tp)
        raise ValueError(f"n-experts {cfg.n_experts} do not divide by ep {mesh.ep.size}; try --ep {fit}")
    must_divide("n-head", cfg.n_head, "tp", tp)
    if cfg.n_kv_head % tp and tp % cfg.n_kv_head:
        raise ValueError(f"n-kv-head {cfg.n_kv_head} neither divides by tp {tp} nor divides it; "
                         f"try --tp {cfg.n_kv_head}")
    if cfg.ffn_hidden % tp:
        raise ValueError(f"ffn-hidden {cfg.ffn_hidden} does not divide by tp {tp}; "
                         f"try --ffn-hidden {-(-cfg.ffn_hidden // tp) * tp}")
    if 128 % tp:
        raise ValueError(f"the vocabulary is padded to a multiple of 128, which tp {tp} does not divide; "
                         "try --tp 2 or 4")
    if cfg.micro_batch * cfg.seq_len % tp:
        raise ValueError(f"micro-batch {cfg.micro_batch} * seq-len {cfg.seq_len} tokens do not divide by "
                         f"tp {tp}; try --micro-batch {tp}")
    if batch % (cfg.micro_batch * dp):
        whole = max(1, round(batch / (cfg.micro_batch * dp))) * cfg.micro_batch * dp
        raise ValueError(f"global-batch {batch} does not divide by micro-batch {cfg.micro_batch} * dp {dp}; "
                         f"try --global-batch {whole}")
    check_ramp(batch, cfg.rampup_batch_size, cfg.micro_batch * dp)
    stage_layers(cfg, mesh.pp.size)
