"""Every flag of train.py, its help and its default; exit codes; values that no run can have.

    Outcome         how a run ends: its exit code
    Config          the flags of train.py; PRESETS are sets of values for them
    check           refuses values that no run can have; check_ranks: that this number of ranks cannot have

interface/command_line.py reads a command line into a Config, which is never changed after that.
"""
import dataclasses
import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


class Outcome(enum.IntEnum):
    """How a run ends: its exit code."""
    DONE = 0
    FAILED = 1            # an exception, or the last save was not written
    WRONG_INPUT = 2       # flags, data, checkpoint or layout: one line from one rank
    GAVE_UP = 42          # too many steps in a row were skipped or not finite
    HUNG = 43             # nothing moved for --timeout seconds; every rank's stack was written
    REPLICAS_DIFFER = 44  # ranks that must hold equal weights do not
    STOPPED = 85          # by a signal or --max-minutes, after a complete save; a job script requeues on it


@dataclass(frozen=True)
class Config:
    """The flags of train.py: --n-layer is n_layer. The comment beside a field, or above it if none is beside
    it, is its help text; one above a field that has its own begins a group."""
    # model
    n_layer: int = 4  # transformer blocks
    n_head: int = 4  # query heads
    n_kv_head: int = 2  # key/value heads, each shared by n-head / n-kv-head query heads
    n_embd: int = 128  # width of the model
    ffn_hidden: int = 384  # hidden width of the MLP, and of each expert
    vocab_size: int = 0  # tokens in the vocabulary; 0 takes their number from the data's meta.json
    seq_len: int = 128  # tokens in a sequence
    dropout: float = 0.0  # probability, in attention, residual branches and embedding; 0 is off
    norm: Literal["rms", "layer"] = "rms"  # RMSNorm or LayerNorm
    mlp: Literal["swiglu", "gelu"] = "swiglu"  # SwiGLU (three matrices) or GELU (two)
    pos: Literal["rope", "learned"] = "rope"  # rotary or learned absolute positions
    rope_base: float = 10000.0  # RoPE base (theta); long sequences need a larger one
    norm_eps: float = 1e-5  # added to the variance (mean square) under the norm's root
    bias: bool = False  # biases in linear layers and LayerNorm
    tied: bool = False  # the output head is the token embedding's matrix
    # causal predicts the next token; mlm is BERT's masked language model: 15 % of the tokens, from both sides
    objective: Literal["causal", "mlm"] = "causal"
    # mixture of experts
    n_experts: int = 0  # experts that replace each MLP; 0 is a dense model
    top_k: int = 2  # experts that each token is sent to
    # each expert takes at most ceil(capacity-factor * tokens * top-k / n-experts) rows of a rank's tokens in
    # a micro-batch, and the rest is dropped; 0 drops none (dropless)
    capacity_factor: float = 0.0
    drop_policy: Literal["probs", "position"] = "probs"  # over capacity: keep largest gates, or first rows
    aux_coef: float = 1e-2  # weight of the load-balancing loss
    z_coef: float = 0.0  # weight of the router's z-loss, which keeps its logits small
    # the experts' gates: softmax over all experts, softmax-topk over the chosen ones, sigmoid for each alone
    router: Literal["softmax", "softmax-topk", "sigmoid"] = "softmax"
    router_bias_rate: float = 0.0  # sigmoid only: step of the bias that balances experts; 0 is no bias
    n_shared_experts: int = 0  # experts that every token visits, beside its top-k
    # start from the weights of another run (or its step_N), with a fresh optimizer; of a dense model every
    # expert gets the MLP
    init_from: str = ""
    # layout (dp = world / (tp * cp * pp) is derived)
    tp: int = 1  # tensor parallelism: ranks that split each layer, and the sequence between the blocks
    cp: int = 1  # context parallelism: ranks that split each sequence; seq-len divides by 2 * cp
    pp: int = 1  # pipeline parallelism: stages, which hold different layers
    ep: int = 1  # expert parallelism: ranks that split the experts; divides dp * cp * tp
    # dropless with ep > 1 under a CUDA graph: receive buffers, between nodes messages, hold this many times
    # the balanced number of rows; a step that needs more is computed again without; 0 turns the graph off
    ep_slack: float = 2.5
    pp_layers: str = ""  # a,b,c: blocks of each stage; default: balanced, embedding and head count as a block
    pp_chunks: int = 1  # interleaved 1F1B: a rank holds this many stages, chunks of layers that lie pp apart
    zero: Literal[0, 1, 2, 3] = 0  # replicas share out 1: optimizer state, 2: gradients too, 3: weights too
    # what backward runs again: full, whole blocks; selective, norms, rotation and the dense MLP's activation
    recompute: Literal["none", "selective", "full"] = "none"
    # batch
    micro_batch: int = 8  # sequences per data-parallel replica and micro-step
    global_batch: int = 0  # sequences per optimizer step; 0 is micro-batch * dp
    # START INCREMENT SAMPLES: the batch starts at START sequences and grows in steps of INCREMENT up to
    # global-batch, while the first SAMPLES sequences are consumed
    rampup_batch_size: tuple[int, ...] = ()
    # optimiser
    steps: int = 400  # optimizer steps in total, also after a resume
    lr: float = 2e-3  # peak learning rate
    min_lr: float | None = None  # learning rate at the end of the cosine; default lr / 10
    warmup: int = 40  # steps in which the learning rate rises from 0 to lr
    decay_steps: int = 0  # step at which the cosine reaches min-lr; 0 is steps
    weight_decay: float = 0.1  # of matrices only
    beta1: float = 0.9  # Adam: decay of the mean of gradients
    beta2: float = 0.95  # Adam: decay of the mean of squared gradients
    clip: float = 1.0  # gradients are scaled down to this global norm at most; 0 never clips
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"  # of weights, activations; sums at least fp32
    compile: bool = False  # torch.compile each block
    cuda_graph: bool = True  # on a GPU, replay forward and backward as one CUDA graph where shapes are static
    # run
    data: str = "data/stdlib"  # directory that prepare.py made, several by weight (A:0.7,B:0.3), "synthetic"
    out: str = ""  # directory of the run's files; default out/PRESET
    seed: int = 1337  # of weights, data order and dropout
    log_every: int = 20  # steps between logged steps
    eval_every: int = 100  # steps between evaluations; 0 never evaluates
    eval_iters: int = 20  # global batches per evaluation
    save_every: int = 200  # steps between checkpoints; 0 never saves
    keep: int = 3  # newest checkpoints to keep; 0 keeps all
    # an evaluation that finds the lowest validation loss so far also saves, and that checkpoint is kept
    keep_best: bool = True
    resume: str = "none"  # auto (newest in --out), a checkpoint's path, or none
    resume_changed: str = ""  # NAME[,NAME]: flags that a resume may change although the model or data changes
    max_minutes: float = 0.0  # save and exit 85 before this much wall time has passed; 0 is no limit
    timeout: float = 600.0  # seconds without progress that end the run; x 2 in start, compilation, saving
    check_every: int = 500  # steps between comparisons of the replicas' weights; 0 never compares
    # skipping data
    train_range_to_skip: tuple[int, ...] = ()  # A B [C D ...]: drop these steps' data, 1-based, inclusive
    # SIGMA: skip a step whose loss or gradient norm is more than SIGMA deviations above the median of the
    # last steps; 0 is off
    skip_spikes: float = 0.0
    # at this step every target is token 0, which makes a spike; --clip 0 shows the damage; 0 is never
    inject_spike: int = 0
    # looking at a run
    profile: bool = False  # pyinstrument, as profile.html and profile.txt
    trace: bool = False  # torch profiler over steps 3 to 5, as trace.json
    timers: bool = False  # log the milliseconds of each phase; to measure them synchronises the device
    plot: bool = True  # print loss and experts' loads as plots at the end; the files are always written
    prompt: str = ""  # continue this text at each evaluation
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases, from rank 0
    # debug
    deterministic: bool = False  # on a GPU use only kernels that give the same bits in every run
    pdb: int = -1  # RANK that stops in the debugger before the first step; nothing times out; -1 is none
    dump_grads: str = ""  # FILE.safetensors: weights before and gradients of the first step, at full size
    preset: str = "tiny"  # no flag, the first word: the preset whose values are the defaults


GPT2 = dict(norm="layer", mlp="gelu", pos="learned", bias=True, tied=True, dropout=0.0)
LLAMA = dict(norm="rms", mlp="swiglu", pos="rope", bias=False, tied=False, dropout=0.0)
LARGE = dict(dtype="bf16", log_every=10, eval_every=500, save_every=1000)
GPT2_SMALL = dict(GPT2, n_layer=12, n_head=12, n_kv_head=12, n_embd=768, ffn_hidden=3072, seq_len=1024,
                  lr=6e-4, compile=True, **LARGE)
LARGE_LLAMA = dict(LLAMA, seq_len=2048, steps=20_000, compile=True, **LARGE)
DENSE_210M = dict(LARGE_LLAMA, n_layer=24, n_head=4, n_kv_head=1, n_embd=512, ffn_hidden=1792,
                  rope_base=100000.0, vocab_size=128256, micro_batch=8, lr=1e-3, warmup=200)
PRESETS = {
    "tiny": dict(), "tiny-moe": dict(n_experts=8, top_k=2),
    "shakespeare-char": dict(GPT2, n_layer=6, n_head=6, n_kv_head=6, n_embd=384, ffn_hidden=1536, seq_len=256,
                             bias=False, dropout=0.2, micro_batch=64, steps=5000, lr=1e-3, min_lr=1e-4,
                             warmup=100, beta2=0.99, dtype="bf16", log_every=10, eval_every=250,
                             eval_iters=20, save_every=1000),
    "wordplay": dict(GPT2_SMALL, bias=False, micro_batch=64, steps=2000, warmup=100),
    "gpt2": dict(GPT2_SMALL, micro_batch=32, global_batch=480, steps=100_000, warmup=2000),
    "dense-210m": DENSE_210M,
    "moe-4b": dict(DENSE_210M, n_experts=64, top_k=1),
    "smol-1.7b": dict(LARGE_LLAMA, n_layer=24, n_head=32, n_kv_head=32, n_embd=2048, ffn_hidden=8192,
                      vocab_size=49152, micro_batch=4, lr=5e-4, warmup=500),
    "bert-345m": dict(GPT2, objective="mlm", n_layer=24, n_head=16, n_kv_head=16, n_embd=1024,
                      ffn_hidden=4096, seq_len=512, vocab_size=30592, micro_batch=64, steps=100_000, lr=1e-4,
                      min_lr=1e-5, warmup=1000, weight_decay=0.01, beta2=0.999, compile=True, **LARGE),
    "llama-7b": dict(LARGE_LLAMA, n_layer=32, n_head=32, n_kv_head=32, n_embd=4096, ffn_hidden=11008,
                     vocab_size=32000, micro_batch=1, lr=3e-4, warmup=2000),
    "bloom-176b": dict(GPT2, n_layer=70, n_head=112, n_kv_head=112, n_embd=14336, ffn_hidden=57344,
                       seq_len=2048, vocab_size=250880, micro_batch=2, global_batch=2048, steps=100_000,
                       lr=6e-5, warmup=375, **LARGE),
}
SIZE, COUNT, FACTOR = (1, 2**20), (0, 10**12), (0, 10**9)
RANGES = {  # flag, of any program: the least and the largest value it may have
    **dict.fromkeys(("n_head", "n_kv_head", "n_embd", "ffn_hidden", "top_k", "tp", "cp", "pp", "ep",
                     "pp_chunks", "micro_batch"), SIZE),
    **dict.fromkeys(("n_experts", "n_shared_experts", "global_batch"), (0, 2**20)),
    **dict.fromkeys(("vocab_size", "eval_iters"), (0, 2**24)), "n_layer": (1, 2**12), "seq_len": (1, 2**24),
    **dict.fromkeys(("steps", "log_every"), (1, 10**12)),
    **dict.fromkeys(("warmup", "decay_steps", "eval_every", "save_every", "check_every", "keep",
                     "inject_spike", "train_range_to_skip", "rampup_batch_size"), COUNT),
    **dict.fromkeys(("lr", "min_lr", "weight_decay", "clip", "aux_coef", "z_coef", "router_bias_rate",
                     "capacity_factor", "ep_slack", "max_minutes", "skip_spikes"), FACTOR),
    "rope_base": (1, 10**12), "timeout": (1, 30 * 86400), "pdb": (-1, 2**20), "seed": (0, 2**63 - 1),
    **dict.fromkeys(("dropout", "beta1", "beta2", "norm_eps"), (0, 1))}
COMMON = ("n_layer", "n_head", "n_embd", "seq_len", "n_experts", "top_k", "tp", "pp", "ep", "zero",
          "micro_batch", "global_batch", "steps", "lr", "dtype", "data", "out", "eval_every", "save_every",
          "resume")  # what --help shows of Config; --help-all shows all
ELSEWHERE = {  # flags of other trainers: the name of ours, or what to do instead
    **dict.fromkeys(("block_size", "max_seq_len", "context_length"), "seq_len"), "num_layers": "n_layer",
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "lr_decay_iters": "decay_steps",
    **dict.fromkeys(("batch_size", "per_device_train_batch_size"), "micro_batch"), "learning_rate": "lr",
    **dict.fromkeys(("max_iters", "max_steps"), "steps"), "out_dir": "out", "output_dir": "out",
    **dict.fromkeys(("warmup_iters", "warmup_steps"), "warmup"), "grad_clip": "clip", "dataset": "data",
    "eval_interval": "eval_every", "log_interval": "log_every", "save_interval": "save_every",
    **dict.fromkeys(("model", "preset"), "is the first word here, without dashes: train.py gpt2"),
    "device": "is no flag: a GPU is taken if there is one; CUDA_VISIBLE_DEVICES=-1 in front hides it",
    "epochs": "is no flag: give --steps; an epoch is training samples / global batch",
    "gradient_accumulation_steps": "is no flag: give --global-batch, micro-batch * dp * those steps"}


# -----------------------------------------------------------------------------
# values that are refused

def check_numbers(flags):
    """ValueError unless every number among a program's flags is finite and within its range. A class of flags
    may have RANGES of its own."""
    ranges = {**RANGES, **getattr(flags, "RANGES", {})}
    for f in dataclasses.fields(flags):
        values, (low, high) = getattr(flags, f.name), ranges.get(f.name, (-10**18, 10**18))
        for v in values if isinstance(values, tuple) else [values]:
            if isinstance(v, (int, float)) and not low <= v <= high:  # nan is in no range
                raise ValueError(f"--{f.name.replace('_', '-')} {v} must be at least {low}, at most {high}")


def check(cfg):
    """ValueError, with the fix, for values that are wrong whatever the number of ranks and the data."""
    check_numbers(cfg)
    for name in ("dropout", "beta1", "beta2"):
        if getattr(cfg, name) == 1:
            raise ValueError(f"--{name} {getattr(cfg, name)} must be in [0, 1)")
    if cfg.min_lr is not None and cfg.min_lr > cfg.lr:
        raise ValueError(f"--min-lr {cfg.min_lr} is above --lr {cfg.lr}; try --min-lr {cfg.lr / 10:g}")
    must_divide("n-embd", cfg.n_embd, "n-head", cfg.n_head)
    must_divide("n-head", cfg.n_head, "n-kv-head", cfg.n_kv_head)
    if cfg.pos == "rope" and cfg.n_embd // cfg.n_head % 2:
        raise ValueError(f"head dim {cfg.n_embd // cfg.n_head} is odd, RoPE turns pairs; try --pos learned")
    if cfg.objective == "mlm" and n_masked(cfg.seq_len) < 1:
        raise ValueError(f"--objective mlm masks 15 % of a sequence, of --seq-len {cfg.seq_len} no token; "
                         "try --seq-len 128")
    if cfg.objective == "mlm" and cfg.vocab_size == 1:
        raise ValueError("--vocab-size 1 is [MASK] alone with --objective mlm; try --vocab-size 65")
    if cfg.objective == "mlm" and cfg.prompt:
        raise ValueError("--prompt continues a text, --objective mlm predicts masked tokens from both sides; "
                         "try sample.py RUN --fill 'a [MASK] text'")
    if cfg.n_experts:
        if cfg.top_k > cfg.n_experts:
            raise ValueError(f"top-k {cfg.top_k} exceeds n-experts {cfg.n_experts}; "
                             f"try --top-k {cfg.n_experts}")
        if cfg.router == "softmax-topk" and cfg.top_k == 1:
            raise ValueError("--router softmax-topk with --top-k 1 has the constant gate 1, the router would "
                             "learn nothing from the text; try --router softmax")
        if cfg.router_bias_rate and cfg.router != "sigmoid":
            raise ValueError(f"--router-bias-rate steers sigmoid routers, not {cfg.router}; "
                             "try --router sigmoid")
    elif cfg.ep > 1 or cfg.n_shared_experts:
        raise ValueError(f"--ep {cfg.ep} and --n-shared-experts {cfg.n_shared_experts} need experts; "
                         "try --n-experts 8")
    if cfg.ep_slack and cfg.ep_slack < 1:
        raise ValueError(f"--ep-slack {cfg.ep_slack} is less than the balanced share; try --ep-slack 2")
    dump = Path(cfg.dump_grads)
    if cfg.dump_grads and (not dump.name or dump.is_dir() or any(p.is_file() for p in dump.parents)):
        raise ValueError(f"--dump-grads {cfg.dump_grads} is a folder or lies in a file; give the path of a "
                         "new file, such as out/grads.safetensors")
    if cfg.init_from and cfg.resume != "none":
        raise ValueError("--init-from starts a run and --resume goes on with one; give one of them")
    if len(cfg.rampup_batch_size) not in (0, 3) or min(cfg.rampup_batch_size, default=1) < 1:
        raise ValueError(f"--rampup-batch-size takes START INCREMENT SAMPLES, all at least 1, got "
                         f"{' '.join(map(str, cfg.rampup_batch_size))}; for example 16 16 100000")
    if len(cfg.train_range_to_skip) % 2:
        raise ValueError(f"--train-range-to-skip takes pairs A B, got {len(cfg.train_range_to_skip)} "
                         "numbers; give the last step of every range")


def largest_divisor(most, *numbers):
    """-> the largest number up to `most` that divides all of `numbers`."""
    return next(d for d in range(min(most, *filter(None, numbers)), 0, -1) if not any(n % d for n in numbers))


def must_divide(what, n, flag, parts, also=0):
    """ValueError where n does not divide by --flag, with the number to give, which divides `also`, too."""
    if n % parts:
        raise ValueError(f"{what} {n} does not divide by {flag} {parts}; "
                         f"try --{flag} {largest_divisor(parts, n, also)}")


def check_ranks(n, tp, pp, ep, n_experts=0, cp=1):
    """n ranks as a mesh -> dp. ValueError: they do not divide. n_experts: for a hint that divides it, too."""
    if n % (tp * cp * pp):
        hint = (f"start a multiple of {tp * cp * pp} ranks" if n % (cp * pp) else
                f"try --tp {largest_divisor(tp, n // (cp * pp))}")
        raise ValueError(f"{n} ranks do not divide by tp {tp} *{f' cp {cp} *' * (cp > 1)} pp {pp}; {hint}")
    if (stage := n // pp) % ep:
        raise ValueError(f"ep {ep} does not divide the {stage} ranks of a stage, {n} / pp {pp}; "
                         f"try --ep {largest_divisor(ep, stage, n_experts)}")
    return stage // (tp * cp)


def n_masked(seq_len):
    """Tokens of a sequence that --objective mlm masks: 15 %, in each sequence equally many, so that all ranks
    know their number."""
    return round(0.15 * seq_len)


def pad_vocab(vocab_size):
    """The vocabulary rounded up to a multiple of 128, whatever the layout: tiles like it, tp divides it."""
    return -(-vocab_size // 128) * 128
