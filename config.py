"""Every flag of train.py, its help and its default; exit codes; values that no run can have.

interface/command_line.py reads them, interface/layout.py refuses what does not fit the number of ranks.
"""
import dataclasses
import enum
from dataclasses import dataclass
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


# The flags

# The least and the largest value of a number, for a flag's `within`.
SIZE = (1, 2**20)
COUNT = (0, 10**12)
FACTOR = (0, 10**9)
SHARE = (0, 1)
BELOW_1 = (0, 0.99999)
# Rounding errors of a moment in bf16 add up over 1 / (1 - beta) steps. Up to this beta they stay near 1 %.
# With 0.99 they are 5 %, and above 0.996 a moment can round to itself for ever.
LARGEST_BF16_DECAY = 0.98


def flag(default, kind, within=None, *, needs="", common=False):
    """Declare a field of Config. kind: what another value means to a checkpoint.

        shape     the weights have other names, sizes or uses: a resume refuses it
        meaning   the same weights compute something else: refused unless --resume-changed names it
        data      the data differ, or come in another order: likewise
        free      training goes on in another way: the resume prints the change
        silent    it says nothing about the training
        "shape or meaning" is a shape, but the tensors of some of its values fit each other. The default of a
        flag of these kinds is the model as it was before the flag existed.
    within: the least and the largest value of a number, or of each number of a tuple.
    needs: the flag without which this one has no effect, or flag=value.
    common: whether --help shows it; --help-all shows every flag.
    """
    said = {"kind": kind, "within": within, "needs": needs, "common": common}
    return dataclasses.field(default=default, metadata=said)


@dataclass(frozen=True)
class Config:
    """The flags of train.py: --n-layer is n_layer. A comment beside or above a field is its help text; one
    that begins with "--" is the title of a group."""
    # -- model
    n_layer: int = flag(4, "shape", (1, 2**12), common=True)  # transformer blocks
    n_head: int = flag(4, "shape", SIZE, common=True)  # query heads
    n_kv_head: int = flag(2, "shape", SIZE)  # key/value heads, each shared by n-head / n-kv-head query heads
    n_embd: int = flag(128, "shape", SIZE, common=True)  # width of the model
    head_dim: int = flag(0, "shape", (0, 2**16))  # width of a head; 0 is n-embd / n-head
    ffn_hidden: int = flag(384, "shape", SIZE)  # hidden width of the MLP, and of each expert
    vocab_size: int = flag(0, "meaning", (0, 2**24))  # tokens in the vocabulary; 0: those of the data
    seq_len: int = flag(128, "shape or meaning", (1, 2**24), common=True)  # tokens in a sequence
    dropout: float = flag(0.0, "free", BELOW_1)  # probability, in attention, branches and embedding; 0 is off
    # RMSNorm or LayerNorm; rms1p is RMSNorm with the factor 1 + offset, also of queries and keys (Gemma 3)
    norm: Literal["rms", "layer", "rms1p"] = flag("rms", "shape or meaning")
    # where a block's norms are: before attention and MLP, after them (OLMo 2), or both (Gemma 3)
    norm_place: Literal["before", "after", "both"] = flag("before", "shape or meaning")
    # RMSNorm of queries and keys before they turn: of each head (Qwen 3), or over all heads (OLMo 2)
    qk_norm: Literal["none", "head", "all"] = flag("none", "shape")
    # SwiGLU or GEGLU (three matrices), GELU or squared ReLU (two)
    mlp: Literal["swiglu", "geglu", "gelu", "relu2"] = flag("swiglu", "shape")
    pos: Literal["rope", "learned"] = flag("rope", "shape")  # rotary or learned absolute positions
    # RoPE base (theta); long sequences need a larger one
    rope_base: float = flag(10000.0, "meaning", (1, 10**12), needs="pos=rope")
    # FACTOR LOW HIGH LENGTH: Llama 3's rotation, for sequences longer than LENGTH: pairs that turn LOW times
    # within it turn FACTOR times more slowly, those of HIGH as before
    rope_scaling: tuple[float, ...] = flag((), "meaning", FACTOR, needs="pos=rope")
    # every N-th layer has no rotation (SmolLM3: 4); 0 is none
    no_rope_every: int = flag(0, "meaning", COUNT, needs="pos=rope")
    window: int = flag(0, "meaning", (0, 2**24))  # keys that a query sees, its own included; 0 is all
    # every N-th layer sees all keys in spite of the window (Gemma 3: 6); 0 is none
    full_every: int = flag(0, "meaning", COUNT, needs="window")
    # RoPE base of the layers with a window (Gemma 3: 10000); 0 is rope-base, and rope-scaling holds for them
    window_rope_base: float = flag(0.0, "meaning", (0, 10**12), needs="window")
    embed_scale: bool = flag(False, "meaning")  # the token embedding times sqrt(n-embd) (Gemma 3)
    logit_softcap: float = flag(0.0, "meaning", FACTOR)  # C * tanh(logits / C) replaces the logits; 0 is off
    norm_eps: float = flag(1e-5, "shape", SHARE)  # added to the variance (mean square) under the norm's root
    bias: bool = flag(False, "shape")  # biases in linear layers and LayerNorm; experts and routers have none
    qkv_bias: bool = flag(False, "shape")  # biases of queries, keys and values alone (Qwen 2)
    tied: bool = flag(False, "shape")  # the output head is the token embedding's matrix
    # causal predicts the next token; mlm is BERT's masked language model: 15 % of the tokens, from both sides
    objective: Literal["causal", "mlm"] = flag("causal", "shape")

    # -- mixture of experts
    n_experts: int = flag(0, "shape", (0, 2**20), common=True)  # experts in the place of each MLP; 0 is dense
    top_k: int = flag(2, "meaning", SIZE, needs="n_experts", common=True)  # experts that a token is sent to
    # each expert takes ceil(capacity-factor * tokens * top-k / n-experts) rows of a rank's micro-batch at
    # most, and the rest is dropped; 0 drops none (dropless)
    capacity_factor: float = flag(0.0, "meaning", FACTOR, needs="n_experts")
    # over capacity: keep largest gates, or first rows
    drop_policy: Literal["probs", "position"] = flag("probs", "meaning", needs="capacity_factor")
    aux_coef: float = flag(1e-2, "free", FACTOR, needs="n_experts")  # weight of the balance loss
    z_coef: float = flag(0.0, "free", FACTOR, needs="n_experts")  # weight of the z-loss: small router logits
    # the experts' gates: softmax over all experts, softmax-topk over the chosen ones, sigmoid for each alone
    router: Literal["softmax", "softmax-topk", "sigmoid"] = flag("softmax", "meaning", needs="n_experts")
    # sigmoid only: step of the bias that balances experts; 0 is no bias
    router_bias_rate: float = flag(0.0, "meaning", FACTOR, needs="n_experts")
    n_shared_experts: int = flag(0, "shape", (0, 2**20))  # experts that every token visits, beside its top-k
    # start from the weights and the model's flags of another run (or its step_N), with a fresh optimizer; of
    # a dense model every expert gets the MLP
    init_from: str = flag("", "silent")

    # -- fine-tuning by adapters (LoRA)
    # rank of the adapters: two narrow matrices beside each one of attention and MLP; only they train, on
    # top of the weights of --init-from; 0 trains all weights
    lora: int = flag(0, "shape", (0, 2**16))
    # the adapters' part of the output is multiplied by lora-alpha / lora
    lora_alpha: float = flag(16.0, "meaning", (1e-3, 10**9), needs="lora")

    # -- layout (dp = world / (tp * cp * pp) is derived)
    # tensor parallelism: ranks that split each layer, and the sequence between the blocks
    tp: int = flag(1, "free", SIZE, common=True)
    cp: int = flag(1, "free", SIZE)  # context parallelism: ranks that split each sequence, in 2 * cp segments
    pp: int = flag(1, "free", SIZE, common=True)  # pipeline parallelism: stages, which hold different layers
    # expert parallelism: ranks that split the experts; divides dp * cp * tp
    ep: int = flag(1, "free", SIZE, common=True)
    # dropless with ep > 1 under a CUDA graph: receive buffers begin with this many times the balanced number
    # of rows, and grow where a step needs more; 0 turns the graph off
    ep_slack: float = flag(2.5, "free", FACTOR, needs="n_experts")
    pp_layers: str = flag("", "free")  # a,b,c: blocks of each stage; default: balanced, with embedding, head
    pp_chunks: int = flag(1, "free", SIZE)  # interleaved 1F1B: chunks of layers that a rank holds, pp apart
    # replicas share out 1: optimizer state, 2: gradients too, 3: weights too
    zero: Literal[0, 1, 2, 3] = flag(0, "free", common=True)
    # --zero shares within groups of this many neighbours, such as those of a node; 0: all share
    shard: int = flag(0, "free", (0, 2**20), needs="zero")
    # what backward runs again: full, whole blocks; selective, norms, rotation and the dense MLP's activation
    recompute: Literal["none", "selective", "full"] = flag("none", "free")

    # -- batch
    micro_batch: int = flag(8, "free", SIZE, common=True)  # sequences per data-parallel replica and forward
    global_batch: int = flag(0, "free", (0, 2**20), common=True)  # sequences per step; 0 is micro-batch * dp
    # START INCREMENT SAMPLES: the batch starts at START sequences and grows in steps of INCREMENT up to
    # global-batch, while the first SAMPLES sequences are consumed
    rampup_batch_size: tuple[int, ...] = flag((), "free", COUNT)

    # -- optimiser
    # muon: matrices inside blocks move along their orthogonalised momentum, and AdamW does the rest
    optimizer: Literal["adamw", "muon"] = flag("adamw", "free")
    steps: int = flag(400, "free", (1, 10**12), common=True)  # optimizer steps in total, also after a resume
    lr: float = flag(2e-3, "free", FACTOR, common=True)  # peak learning rate
    # after the warm-up, cosine falls at once; wsd stays at lr (stable) and falls on a line at the end (decay)
    lr_schedule: Literal["cosine", "wsd"] = flag("cosine", "free")
    min_lr: float | None = flag(None, "free", FACTOR)  # learning rate at the end; default lr / 10
    warmup: int = flag(40, "free", COUNT)  # steps in which the learning rate rises from 0 to lr
    decay_steps: int = flag(0, "free", COUNT)  # step at which the schedule reaches min-lr; 0 is steps
    # wsd: the decay takes this share of the steps; 0 keeps lr, and 1 is a line from the warm-up on
    decay_ratio: float = flag(0.2, "free", SHARE, needs="lr_schedule=wsd")
    weight_decay: float = flag(0.1, "free", FACTOR)  # of matrices only
    beta1: float = flag(0.9, "free", BELOW_1)  # Adam: decay of the mean of gradients
    beta2: float = flag(0.95, "free", BELOW_1)  # Adam: decay of the mean of squared gradients
    # Muon's learning rate, and min-lr, over AdamW's
    muon_lr_factor: float = flag(1.0, "free", FACTOR, needs="optimizer=muon")
    momentum: float = flag(0.95, "free", BELOW_1, needs="optimizer=muon")  # Muon: decay of its mean gradient
    clip: float = flag(1.0, "free", FACTOR)  # gradients are scaled down to this norm at most; 0 never clips
    # of weights, activations; sums at least fp32
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] = flag("fp32", "free", common=True)
    compile: bool = flag(False, "free")  # torch.compile each block
    fp8: bool = flag(False, "free")  # 8-bit numbers in the products of attention and of the dense MLP
    # of AdamW's two moments; bf16 rounds them after each update, which saves 4 bytes per weight
    moments_dtype: Literal["fp32", "bf16"] = flag("fp32", "free")
    cuda_graph: bool = flag(True, "free")  # on a GPU, forward and backward as one CUDA graph where possible

    # -- run
    # directory that prepare.py made, several by weight (A:0.7,B:0.3), "synthetic"
    data: str = flag("data/stdlib", "data", common=True)
    config: str = flag("", "silent")  # the config.json of a run, whose flags but --resume are the defaults
    out: str = flag("", "silent", common=True)  # directory of the run's files; default out/PRESET
    # a token attends to its own document alone; auto: on for conversations, off for text
    doc_mask: Literal["auto", "on", "off"] = flag("auto", "data")
    seed: int = flag(1337, "data", (0, 2**63 - 1))  # of weights, data order and dropout
    log_every: int = flag(20, "silent", (1, 10**12))  # steps between logged steps
    eval_every: int = flag(100, "silent", COUNT, common=True)  # steps between evaluations; 0 never evaluates
    eval_iters: int = flag(20, "silent", (0, 2**24))  # global batches per evaluation, at most all there are
    save_every: int = flag(200, "silent", COUNT, common=True)  # steps between checkpoints; 0 never saves
    keep: int = flag(3, "silent", COUNT)  # newest checkpoints to keep; 0 keeps all
    keep_best: bool = flag(True, "silent")  # save at the lowest validation loss, and keep that checkpoint
    resume: str = flag("none", "silent", common=True)  # auto (newest in --out), a checkpoint's path, or none
    resume_changed: str = flag("", "silent")  # NAME[,NAME]: flags of model or data that a resume may change
    max_minutes: float = flag(0.0, "silent", FACTOR)  # save and exit 85 before this much time; 0 is no limit
    timeout: float = flag(600.0, "silent", (1, 30 * 86400))  # seconds without progress that end the run
    check_every: int = flag(500, "silent", COUNT)  # steps between comparisons of the replicas; 0 never

    # -- skipping data
    # A B [C D ...]: drop these steps' data, 1-based, inclusive
    train_range_to_skip: tuple[int, ...] = flag((), "silent", COUNT)
    # SIGMA: skip a step whose loss or gradient norm is more than SIGMA deviations above the median of the
    # last steps, of which there must be 64; 0 is off
    skip_spikes: float = flag(0.0, "free", FACTOR)
    inject_spike: int = flag(0, "free", COUNT)  # at this step all targets are token 0: a spike; 0 is never

    # -- looking at a run
    profile: bool = flag(False, "silent")  # pyinstrument, as profile.html and profile.txt
    trace: bool = flag(False, "silent")  # torch profiler over steps 3 to 5, as trace.json
    timers: bool = flag(False, "silent")  # log the milliseconds of each phase, which synchronises the device
    log_layers: bool = flag(False, "silent")  # log the norm of each layer's gradient, before clipping
    plot: bool = flag(True, "silent")  # print plots of loss and loads at the end; files are always written
    report: bool = flag(True, "silent")  # write report.html at the end: curves, samples, flags, how to resume
    prompt: str = flag("", "silent")  # continue this text at each evaluation
    wandb: Literal["off", "offline", "online"] = flag("off", "silent")  # Weights & Biases, from rank 0

    # -- debug
    deterministic: bool = flag(False, "free")  # on a GPU use only kernels that give the same bits in each run
    pdb: int = flag(-1, "silent", (-1, 2**20))  # RANK that stops in the debugger before step 1; -1 is none
    dump_grads: str = flag("", "silent")  # FILE.safetensors: weights before and gradients of the first step
    preset: str = flag("tiny", "silent")  # no flag, the first word: the preset whose values are the defaults


FLAGS = {field.name: field.metadata for field in dataclasses.fields(Config)}


def flags_of_kind(kind):
    """Return the names of the flags of a kind; those of "shape or meaning" are of both kinds."""
    return tuple(name for name, said in FLAGS.items() if kind in said["kind"].split(" or "))


RANGES = {name: said["within"] for name, said in FLAGS.items() if said["within"]}
SHAPE = flags_of_kind("shape")
MEANING = flags_of_kind("data") + flags_of_kind("meaning")  # what --resume-changed can allow
REMOVED = ("kernels",)  # of earlier versions: it changed no model, so files that hold it are read


def has_effect(name, cfg):
    """Whether a flag has an effect in this Config: some have none without another flag."""
    needed, _, value = FLAGS[name]["needs"].partition("=")
    if value:
        return getattr(cfg, needed) == value
    return not needed or bool(getattr(cfg, needed))


def draws_random_numbers(cfg):
    """Whether a step draws random numbers, so that pipeline.py seeds each micro-batch. If you add a draw to
    the model, name its flag here."""
    return cfg.dropout > 0


def unknown_flags(saved, beside=()):
    """Return {name: value} of flags in a run's files that this code does not have, and that are on there: the
    model may be another one. beside: names of no flags."""
    names = saved.keys() - FLAGS.keys() - {*REMOVED, *beside}
    off = (None, False, 0, "", [], "none")
    return {name: saved[name] for name in sorted(names) if saved[name] not in off}


def flags_beyond(known, cfg):
    """Return {name: value} of the flags that change the model and are not among the names `known`."""
    of_model = {*SHAPE, *flags_of_kind("meaning")} - set(known)
    return {name: getattr(cfg, name) for name in FLAGS
            if name in of_model and has_effect(name, cfg) and getattr(cfg, name) != getattr(Config, name)}


def typed(name):
    """Return the flag of a field as it is typed: --n-layer of n_layer."""
    return "--" + name.replace("_", "-")


def as_typed(flags):
    """Return flags, {name: value}, as they are given on the command line."""
    return ", ".join(f"{typed(name)} {value}" for name, value in flags.items())


# Values that are refused

def check_numbers(flags):
    """Raise ValueError unless every number of a program's flags is within RANGES, its own or these."""
    ranges = {**RANGES, **getattr(flags, "RANGES", {})}
    for field in dataclasses.fields(flags):
        low, high = ranges.get(field.name, (-10**18, 10**18))
        values = getattr(flags, field.name)
        for value in values if isinstance(values, tuple) else [values]:
            if isinstance(value, (int, float)) and not low <= value <= high:  # nan is in no range
                raise ValueError(f"{typed(field.name)} {value} must be at least {low}, at most {high}")


def check(cfg):
    """Raise ValueError, with the fix, for values that are wrong with any number of ranks and any data."""
    check_numbers(cfg)
    if not cfg.head_dim:
        must_divide("n-embd", cfg.n_embd, "n-head", cfg.n_head)
    must_divide("n-head", cfg.n_head, "n-kv-head", cfg.n_kv_head)
    is_mlm = cfg.objective == "mlm"
    scaling = cfg.rope_scaling
    can_scale = len(scaling) == 4 and scaling[0] >= 1 and scaling[1] < scaling[2] and scaling[3] >= 1
    ramp = cfg.rampup_batch_size
    skipped = cfg.train_range_to_skip
    pairs = zip(skipped[::2], skipped[1::2], strict=False)
    has_pairs = len(skipped) % 2 == 0 and all(1 <= first <= last for first, last in pairs)
    largest_decay = max(cfg.beta1, cfg.beta2)
    wrong = [  # (whether it is so, what is wrong)
        # the model
        (cfg.pos == "rope" and head_width(cfg) % 2, "RoPE turns pairs: the head dim must be even"),
        (scaling and not can_scale, "--rope-scaling is FACTOR LOW HIGH LENGTH, such as 8 1 4 8192"),
        (is_mlm and cfg.window, "--objective mlm looks to both sides; leave out --window"),
        (is_mlm and cfg.doc_mask == "on", "--objective mlm looks to both sides; leave out --doc-mask"),
        (is_mlm and n_masked(cfg.seq_len) < 1, "--objective mlm masks 15 % of the tokens; try --seq-len 128"),
        (is_mlm and cfg.prompt, "--objective mlm does not continue a text; leave out --prompt"),
        (cfg.ep > 1 and not cfg.n_experts, f"--ep {cfg.ep} needs experts; try --n-experts 8"),
        (cfg.n_shared_experts and not cfg.n_experts, "--n-shared-experts needs others; try --n-experts 8"),
        (0 < cfg.n_experts < cfg.top_k, f"--top-k exceeds --n-experts; try --top-k {cfg.n_experts}"),
        (cfg.n_experts and cfg.router == "softmax-topk" and cfg.top_k == 1,
         "--router softmax-topk with --top-k 1 learns nothing, its gate is 1; try --router softmax"),
        (cfg.n_experts and cfg.router_bias_rate and cfg.router != "sigmoid",
         "--router-bias-rate is for sigmoid routers; try --router sigmoid"),
        (cfg.lora and cfg.n_experts, "--lora has no adapters for the matrices of experts"),
        # the optimizer, its numbers and the data
        (cfg.min_lr is not None and cfg.min_lr > cfg.lr, f"--min-lr {cfg.min_lr} is above --lr {cfg.lr}"),
        (cfg.lora and cfg.optimizer != "adamw", "--lora trains narrow matrices; leave out --optimizer"),
        (cfg.shard and not cfg.zero, f"--shard {cfg.shard} is a group of --zero, which is 0; add --zero 1"),
        (cfg.fp8 and cfg.dtype == "fp16", "--fp8 does not go with --dtype fp16; try --dtype bf16"),
        (cfg.moments_dtype == "bf16" and largest_decay > LARGEST_BF16_DECAY,
         f"--moments-dtype bf16 needs --beta1 and --beta2 of at most {LARGEST_BF16_DECAY}"),
        (len(ramp) not in (0, 3) or min(ramp, default=1) < 1,
         "--rampup-batch-size is START INCREMENT SAMPLES, each at least 1"),
        (not has_pairs, "--train-range-to-skip must be pairs of steps from 1, low to high"),
        (cfg.dump_grads and 1 in skipped[::2], "--dump-grads writes step 1, which is skipped")]
    for is_wrong, message in wrong:
        if is_wrong:
            raise ValueError(message)


def must_divide(what, n, flag, parts):
    """Raise ValueError unless `parts`, the value of --flag, divides n."""
    if n % parts:
        smaller = next(value for value in range(parts, 0, -1) if n % value == 0)
        raise ValueError(f"{what} {n} does not divide by {flag} {parts}; try --{flag} {smaller}")


# Numbers that follow from a flag, whatever the layout

def n_masked(seq_len):
    """Return how many tokens --objective mlm masks: 15 % of each sequence, so that all ranks know it."""
    return round(0.15 * seq_len)


def head_width(cfg):
    return cfg.head_dim or cfg.n_embd // cfg.n_head


def ceil_div(a, b):
    """Return a / b, rounded up, in integers: a float would lose the last digits of a large count."""
    return -(-a // b)


def pad_vocab(vocab_size):
    """Return the vocabulary rounded up to a multiple of 128, which suits matrix kernels and tp."""
    return ceil_div(vocab_size, 128) * 128
