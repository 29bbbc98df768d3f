"""Every flag of train.py, its help and its default; the command line of all programs; their exit codes.

    Outcome         how a run ends: its exit code
    Config          the flags of train.py; PRESETS are sets of values for them
    command_line    argv -> a frozen dataclass, by tyro, for every program; wrong flags give one line
    wrong_input     turns a program's wrong input into one line on stderr and exit code 2
    check_schema    refuses JSON of other types and ranges than a program reads
    check           refuses values that no run can have; check_ranks: that this number of ranks cannot have

A configuration is never changed after it was parsed.
"""
import contextlib
import dataclasses
import difflib
import enum
import io
import itertools
import json
import os
import re
import reprlib
import sys
import typing
from dataclasses import dataclass, field
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
    """The flags of train.py: --n-layer is n_layer. The comment beside or above a field is its help text."""
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
    bias: bool = False  # biases in linear layers and LayerNorm
    tied: bool = False  # the output head is the token embedding's matrix
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
    init_from: str = ""  # start from a dense checkpoint: its MLP goes into every expert, routers are random
    # layout (dp = world / (tp * pp) is derived)
    tp: int = 1  # tensor parallelism: ranks that split each layer, and the sequence between the blocks
    pp: int = 1  # pipeline parallelism: stages, which hold different layers
    ep: int = 1  # expert parallelism: ranks that split the experts; divides dp * tp
    # dropless with ep > 1 under a CUDA graph: receive buffers hold this many times the balanced number of
    # rows; a step that needs more is computed again with all_to_all; 0 turns the graph off
    ep_slack: float = 2.5
    pp_layers: str = ""  # a,b,c: blocks of each stage; default: balanced, embedding and head count as a block
    zero: Literal[0, 1] = 0  # 1: each replica keeps and updates only its share of the optimizer state
    recompute: Literal["none", "full"] = "none"  # full: keep a block's input only, run it again in backward
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
    resume: str = "none"  # auto (newest in --out), a checkpoint's path, or none
    resume_changed: str = ""  # NAME[,NAME]: flags that a resume may change although the model or data changes
    max_minutes: float = 0.0  # save and exit 85 before this much wall time has passed; 0 is no limit
    timeout: float = 600.0  # seconds without progress that end the run; x 2 in start, compilation, saving
    check_every: int = 500  # steps between comparisons of the replicas' weights; 0 never compares
    # skip
    train_range_to_skip: tuple[int, ...] = ()  # A B [C D ...]: drop these steps' data, 1-based, inclusive
    # SIGMA: skip a step whose loss or gradient norm is more than SIGMA deviations above the median of the
    # last steps; 0 is off
    skip_spikes: float = 0.0
    # at this step every target is token 0, which makes a spike; --clip 0 shows the damage; 0 is never
    inject_spike: int = 0
    # look
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
    preset: str = field(default="tiny")  # the preset whose values are the defaults


GPT2 = dict(norm="layer", mlp="gelu", pos="learned", bias=True, tied=True, dropout=0.0)
LLAMA = dict(norm="rms", mlp="swiglu", pos="rope", bias=False, tied=False, dropout=0.0)
REPORTING = dict(log_every=10, eval_every=500, save_every=1000)
PRESETS = {
    "tiny": dict(),
    "tiny-moe": dict(n_experts=8, top_k=2),
    "shakespeare-char": dict(GPT2, n_layer=6, n_head=6, n_kv_head=6, n_embd=384, ffn_hidden=1536, seq_len=256,
                             bias=False, dropout=0.2, micro_batch=64, steps=5000, lr=1e-3, min_lr=1e-4,
                             warmup=100, beta2=0.99, dtype="bf16", log_every=10, eval_every=250,
                             eval_iters=20, save_every=1000),
    "wordplay": dict(GPT2, n_layer=12, n_head=12, n_kv_head=12, n_embd=768, ffn_hidden=3072, seq_len=1024,
                     bias=False, micro_batch=64, steps=2000, lr=6e-4, warmup=100, dtype="bf16",
                     compile=True, **REPORTING),
    "gpt2": dict(GPT2, n_layer=12, n_head=12, n_kv_head=12, n_embd=768, ffn_hidden=3072, seq_len=1024,
                 micro_batch=32, global_batch=480, steps=100_000, lr=6e-4, warmup=2000, dtype="bf16",
                 compile=True, **REPORTING),
    "dense-210m": dict(LLAMA, n_layer=24, n_head=4, n_kv_head=1, n_embd=512, ffn_hidden=1792, seq_len=2048,
                       rope_base=100000.0, vocab_size=128256, micro_batch=8, steps=20_000, lr=1e-3,
                       warmup=200, dtype="bf16", compile=True, **REPORTING),
    "moe-4b": dict(LLAMA, n_experts=64, top_k=1, n_layer=24, n_head=4, n_kv_head=1, n_embd=512,
                   ffn_hidden=1792, seq_len=2048, rope_base=100000.0, vocab_size=128256, micro_batch=8,
                   steps=20_000, lr=1e-3, warmup=200, dtype="bf16", compile=True, **REPORTING),
    "smol-1.7b": dict(LLAMA, n_layer=24, n_head=32, n_kv_head=32, n_embd=2048, ffn_hidden=8192, seq_len=2048,
                      vocab_size=49152, micro_batch=4, steps=20_000, lr=5e-4, warmup=500, dtype="bf16",
                      compile=True, **REPORTING),
    "bloom-176b": dict(GPT2, n_layer=70, n_head=112, n_kv_head=112, n_embd=14336, ffn_hidden=57344,
                       seq_len=2048, vocab_size=250880, micro_batch=2, global_batch=2048, steps=100_000,
                       lr=6e-5, warmup=375, dtype="bf16", **REPORTING),
}
SIZE, COUNT, FACTOR = (1, 2**20), (0, 10**12), (0, 10**9)
RANGES = {  # flag, of any program: the least and the largest value it may have
    **dict.fromkeys(("n_head", "n_kv_head", "n_embd", "ffn_hidden", "top_k", "tp", "pp", "ep", "micro_batch"),
                    SIZE),
    **dict.fromkeys(("n_experts", "n_shared_experts", "global_batch"), (0, 2**20)),
    **dict.fromkeys(("vocab_size", "eval_iters"), (0, 2**24)), "n_layer": (1, 2**12), "seq_len": (1, 2**24),
    **dict.fromkeys(("steps", "log_every"), (1, 10**12)),
    **dict.fromkeys(("warmup", "decay_steps", "eval_every", "save_every", "check_every", "keep",
                     "inject_spike", "train_range_to_skip", "rampup_batch_size"), COUNT),
    **dict.fromkeys(("lr", "min_lr", "weight_decay", "clip", "aux_coef", "z_coef", "router_bias_rate",
                     "capacity_factor", "ep_slack", "max_minutes", "skip_spikes"), FACTOR),
    "rope_base": (1, 10**12), "timeout": (1, 30 * 86400), "pdb": (-1, 2**20), "seed": (0, 2**63 - 1),
    **dict.fromkeys(("dropout", "beta1", "beta2"), (0, 1))}
LARGEST = 10**18  # of all other numbers


# -----------------------------------------------------------------------------
# the command line of every program

def parse(argv, cls=Config, prog="train.py", about="Train a GPT.", **defaults):
    """[PRESET] [flags] (list of str) -> cls, which is Config or a dataclass derived from it. defaults replace
    the preset's values. ValueError: one line that says what is wrong, with a suggestion."""
    argv = list(argv)
    preset = argv.pop(0) if argv and not argv[0].startswith("-") else "tiny"
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r}; the presets are {', '.join(PRESETS)}")
    default = cls(**{**PRESETS[preset], **defaults}, preset=preset)
    cfg = command_line(cls, argv, f"{prog} [PRESET]", default=default,
                       about=f"{about} Presets: {', '.join(PRESETS)}. Defaults below are those of {preset}.")
    check(cfg)
    return cfg


def command_line(cls, argv, prog, about, default=None):
    """Flags argv (list of str) -> an instance of the dataclass cls: its fields are the flags, its comments
    their help. --help prints and exits with 0, also if its reader leaves early (| head). ValueError: one line
    that says what is wrong, with the flag that an unknown one resembles."""
    import tyro
    said, printed = io.StringIO(), io.StringIO()
    try:
        with contextlib.ExitStack() as captured:
            captured.enter_context(contextlib.redirect_stderr(said))
            if {"-h", "--help"} & set(argv):  # only then: tyro's frames depend on stdout
                captured.enter_context(contextlib.redirect_stdout(printed))
            kwargs = {} if default is None else {"default": default}
            flags = tyro.cli(cls, args=_booleans(argv, cls), prog=prog, description=about, **kwargs)
        check_numbers(flags)
        return flags
    except SystemExit as e:
        if e.code == 0:
            print_quietly(printed.getvalue())
            raise
        raise ValueError(_format_tyro_error(said.getvalue(), cls, prog.split()[0])) from None


def print_quietly(text):
    """Print text; it is no error if the reader has closed the pipe (| head)."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()


def _discard_stdout():
    """The reader of stdout has left: what is still buffered goes to /dev/null when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


@contextlib.contextmanager
def wrong_input(quiet=False):
    """For a program's body, also as decorator of its main(): a ValueError or OSError means wrong input. Its
    message becomes one line on stderr (quiet: another rank says it), the exit code 2. If the reader of stdout
    leaves (| head), it is 0."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        raise SystemExit(Outcome.DONE) from None
    except (ValueError, OSError) as e:
        if not quiet:
            print(f"nanoshard: {one_line(e)}", file=sys.stderr, flush=True)
        raise SystemExit(Outcome.WRONG_INPUT) from None


def one_line(text):
    """A message -> the same in one line, and printable."""
    return printable(" ".join(str(text).split()))


def printable(text):
    """text, which may come from a file -> the same with what a terminal would obey escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _booleans(argv, cls):
    """argv -> argv as tyro expects it. It knows --x and --no-x; --x True, --x False and --x=true are ours."""
    switches = {f.name for f in dataclasses.fields(cls) if f.type in (bool, "bool")}
    out, i = [], 0
    while i < len(argv):
        name, eq, value = argv[i].partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and key in switches:
            if not eq and i + 1 < len(argv) and argv[i + 1].lower() in ("true", "false"):
                i, value = i + 1, argv[i + 1]
            if value.lower() not in ("", "true", "false"):
                raise ValueError(f"{name} is a switch: {name}, --no-{key.replace('_', '-')} or {name} True; "
                                 f"not {value!r}")
            out.append(f"--no-{key}" if value.lower() == "false" else f"--{key}")
        else:
            out.append(argv[i])
        i += 1
    return out


def _format_tyro_error(box, cls, prog):
    """tyro's framed message -> one line: its first paragraph, and the flag that an unknown one resembles."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│ ─╭╮╰╯") for line in box.splitlines()]
    lines = ["" if set(line) == {"-"} else line for line in lines]  # rules, where the terminal has only ASCII
    body = itertools.dropwhile(lambda line: not line, lines[1:])  # below the title
    what = " ".join(itertools.takewhile(bool, body)).rstrip(".") or "wrong flags"
    unknown = re.search(r"nrecognized.*? --([\w-]+)", what)
    flags = [f.name.replace("_", "-") for f in dataclasses.fields(cls)]
    close = unknown and difflib.get_close_matches(unknown[1].replace("_", "-"), flags, 2)
    hint = f"; perhaps you meant --{' or --'.join(close)}" if close else ""
    return f"{what}{hint} ({prog} --help lists all flags)"


# -----------------------------------------------------------------------------
# JSON from a file: it may be cut, foreign, or made to do harm

WORDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", list: "a list",
         dict: "an object", type(None): "null"}


@dataclass(frozen=True)
class Range:
    """For check_schema: a number from low to high; a whole one where both are whole."""
    low: float = 0
    high: float = 2**63 - 1  # what fits into 8 bytes


def load_json(path):
    """-> what a UTF-8 JSON file holds. OSError: it cannot be read; ValueError: a line that names the file."""
    def refuse(word):
        raise ValueError(f"{word} is no number in JSON")
    try:
        return json.loads(Path(path).read_bytes().decode(), parse_constant=refuse)
    except RecursionError:
        raise ValueError(f"{path} holds no sound JSON: it is nested too deep") from None
    except ValueError as e:
        raise ValueError(f"{path} holds no sound JSON: {e}") from None


def check_schema(value, schema, where, path="the content"):
    """ValueError, one line that starts with `where`, unless a value from JSON is as schema says: a type or a
    tuple of types (float takes an int, too); a Range; a Literal; {key: schema}, where "key?" may be missing,
    "*" stands for every key, and other keys are free; [schema] for a list of such, [a, b] for a pair; or a
    predicate whose docstring says what is expected."""
    def expect(right, what):
        if not right:
            raise ValueError(f"{where}: {path} is {reprlib.repr(value)[:60]}, not {what}")

    def is_a(kind):
        number = not isinstance(value, bool) and (
            isinstance(value, (int, float)) and abs(value) <= sys.float_info.max)
        return (number if kind is float else number and isinstance(value, int) if kind is int else
                isinstance(value, kind))

    if isinstance(schema, dict):
        expect(is_a(dict), WORDS[dict])
        for key, inner in schema.items():
            name = key.removesuffix("?")
            if name == key != "*" and name not in value:
                raise ValueError(f"{where}: {path} lacks {name}")
            for k in value if key == "*" else {name} & value.keys():
                check_schema(value[k], inner, where, k if path == "the content" else f"{path}.{k}")
    elif isinstance(schema, list):
        length = f" of {len(schema)}" * (len(schema) > 1)
        expect(is_a(list) and (not length or len(value) == len(schema)), WORDS[list] + length)
        for i, (v, inner) in enumerate(zip(value, itertools.cycle(schema), strict=False)):
            check_schema(v, inner, where, f"{path}[{i}]")
    elif isinstance(schema, Range):
        kind = int if type(schema.low) is type(schema.high) is int else float
        expect(is_a(kind) and schema.low <= value <= schema.high,
               f"{WORDS[kind]} from {schema.low} to {schema.high}")
    elif typing.get_origin(schema) is Literal:
        values = typing.get_args(schema)
        expect(value in values, f"one of {', '.join(map(str, values))}")
    elif isinstance(schema, (type, tuple)):
        kinds = schema if isinstance(schema, tuple) else (schema,)
        expect(any(map(is_a, kinds)), " or ".join(WORDS[kind] for kind in kinds))
    else:
        expect(schema(value), " ".join(schema.__doc__.split()))


# -----------------------------------------------------------------------------
# values that are refused

def check_numbers(flags):
    """ValueError unless every number among a program's flags is finite and within its range. A class of flags
    may have RANGES of its own."""
    ranges = {**RANGES, **getattr(flags, "RANGES", {})}
    for f in dataclasses.fields(flags):
        values, (low, high) = getattr(flags, f.name), ranges.get(f.name, (-LARGEST, LARGEST))
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
        raise ValueError(f"head dim {cfg.n_embd // cfg.n_head} is odd, RoPE turns pairs; "
                         "try another --n-head or --pos learned")
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


def must_divide(what, n, flag, parts):
    """ValueError, with the number to give, where n does not divide by --flag."""
    if n % parts:
        raise ValueError(f"{what} {n} does not divide by {flag} {parts}; "
                         f"try --{flag} {largest_divisor(parts, n)}")


def check_ranks(n, tp, pp, ep, n_experts=0):
    """n ranks as a mesh -> dp. ValueError: they do not divide. n_experts: for a hint that divides it, too."""
    if n % (tp * pp):
        hint = (f"start a multiple of {tp * pp} ranks" if n % pp else
                f"try --tp {largest_divisor(tp, n // pp)}")
        raise ValueError(f"{n} ranks do not divide by tp {tp} * pp {pp}; {hint}")
    dp = n // (tp * pp)
    if (dp * tp) % ep:
        raise ValueError(f"ep {ep} does not divide dp {dp} * tp {tp} = {dp * tp} ranks of a stage; "
                         f"try --ep {largest_divisor(ep, dp * tp, n_experts)}")
    return dp


def pad_vocab(vocab_size):
    """The vocabulary rounded up to a multiple of 128, whatever the layout: tiles like it, tp divides it."""
    return -(-vocab_size // 128) * 128
