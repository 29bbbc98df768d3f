"""The command line of every program: a frozen dataclass whose fields are the flags, its comments their help.

    parse           [PRESET] [flags] -> config.Config, or a dataclass derived from it
    read_flags      a run's config.json -> its flags; read_run_config: -> config.Config
    command_line    argv -> any frozen dataclass, by tyro; wrong flags give one line that says what is wrong
    change_words    argv with other values of some flags
    format_help     what --help prints: it is read from the comments beside the flags
    wrong_input     turns a program's wrong input into one line on stderr and exit code 2
"""
import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import os
import re
import shutil
import sys
import textwrap
import typing
from pathlib import Path
from typing import Literal

from config import (
    COMMON,
    SHAPE,
    Config,
    Outcome,
    as_typed,
    check,
    check_numbers,
    flags_of_kind,
    typed,
    unknown_flags,
)
from interface import paths, words
from interface.files import Range, check_schema, load_json
from interface.presets import PRESETS
from interface.terminal import complain, drop_what_fails, one_line, open_streams, printable


def parse(argv, cls=Config, prog="train.py", about="Train a GPT; --list [DIR]: show all runs.", **defaults):
    """Return [PRESET] [flags] (list of str) as a cls, which is Config or a dataclass derived from it.

    defaults: values that replace the preset's.
    ValueError: one line that says what is wrong, with a suggestion.
    """
    argv = expand_home(argv)
    preset = ""
    if argv and not argv[0].startswith("-") and "=" not in argv[0]:
        preset = argv.pop(0)
    if preset and preset not in PRESETS:
        raise ValueError(no_preset(preset))
    words.refuse_foreign([preset, *argv] if preset else argv, cls, prog)
    file = given(argv, "config")
    if file and preset:
        raise ValueError(f"{preset} and --config {file} both set the flags; give one of them")
    values = {**PRESETS[preset or "tiny"], "preset": preset or "tiny"}
    if file:
        left_out = ("config", "resume", "resume_changed")
        values = {name: value for name, value in read_flags(file).items() if name not in left_out}
        if given(argv, "resume") not in ("", "auto", "none") and not values.get("lora"):
            values["init_from"] = ""  # where that run started, which is behind it
    if source := given(argv, "init_from"):
        values.update(model_of(source, values))
    about = (f"{about.strip()}\n\nPresets: {', '.join(PRESETS)}. Defaults below are those of "
             f"{file or values['preset']}.")
    default = cls(**{**values, **defaults})
    cfg = command_line(cls, argv, f"{prog} [PRESET]", about, default)
    check(cfg)
    return cfg


def no_preset(word):
    """Return what to say of the first word of a command line, which is no preset."""
    path = Path(word)
    if path.suffix == ".json" or (path / "config.json").is_file():
        return f"{word} holds flags: --config {word}"
    if path.suffix != ".py" and path.exists():
        meant = f"--data {word}" if paths.is_data(path) else paths.meant_data(word)
        return f"{word} is no preset; {meant}"
    close = difflib.get_close_matches(word, PRESETS, 1)
    hint = f"perhaps {close[0]} is meant, of " if close else "the first word is one of "
    return f"no preset {word!r}; {hint}{', '.join(PRESETS)}"


def command_line(cls, argv, prog, about, default=None):
    """Return the flags argv (list of str) as a cls, a dataclass whose fields are the flags.

    --help and --help-all print and exit with 0.
    ValueError: one line that says what is wrong, with the flag that an unknown one resembles.
    """
    if {"-h", "--help", "--help-all"} & set(argv):
        sys.stdout.write(format_help(cls, prog, about, default, "--help-all" in argv))
        raise SystemExit(Outcome.DONE)
    argv = expand_home(argv)
    program = prog.split()[0]
    words.refuse_foreign(argv, cls, program)
    import tyro
    kwargs = {} if default is None else {"default": default}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            flags = tyro.cli(cls, args=plain_switches(argv, cls), prog=prog, **kwargs)
    except SystemExit:
        raise ValueError(format_tyro_error(said.getvalue(), cls, program)) from None
    check_numbers(flags)
    return flags


def expand_home(argv):
    """Return argv with ~ as the home folder, which no shell makes of it in --out=~/run."""
    home = os.path.expanduser("~")
    return [re.sub("^(--[a-z_-]+=)?~(?=/|$)", rf"\g<1>{home}", word) for word in argv]


# -----------------------------------------------------------------------------
# The config.json of a run

# What a run writes there beside its flags. The last two are of earlier versions.
OF_THE_RUN = ("vocab_size_used", "mask_token", "git", "argv", "world", "nodes", "launcher", "dp", "torch",
              "machine", "attention", "products", "split_masters")


def given(argv, flag):
    """Return the value of a flag in argv, or ""."""
    found = ""
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if word.startswith("--") and words.key_of(name) == flag:
            found = value if equals else following
    return found


def model_of(source, values):
    """Return {flag: value} of the model of a run, or of its step_N, for --init-from; {} if none is told.

    values: the preset's. If it has experts and the run has none, its experts stay: they start as that MLP.
    The vocabulary is the data's, and so is the length of a sequence, unless the model has learned positions.
    """
    folder = Path(source)
    if folder.name.startswith("step_"):
        folder = folder.parent
    if not (folder / "config.json").is_file():
        return {}
    found = read_flags(folder)
    left_out = {"vocab_size"}
    if found.get("pos", Config.pos) == "rope":
        left_out.add("seq_len")
    if not found.get("n_experts") and values.get("n_experts"):
        left_out |= {"n_experts", "n_shared_experts", "top_k"}
    return {name: value for name, value in found.items()
            if name in (*SHAPE, *flags_of_kind("meaning")) and name not in left_out}


def read_flags(path):
    """Return {flag: value} from a run's config.json. path: the file, or the directory of the run.

    ValueError: there is a key that no run writes, or a value that no flag has.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise ValueError(f"{path} is not there; {paths.meant_run(path.parent)}")
    saved = load_json(path)
    if isinstance(saved, dict) and "model_type" in saved and "preset" not in saved:
        raise ValueError(f"{path} is of a model of Hugging Face; make a run of it: python convert.py import "
                         f"{path.parent} --out out/NAME, then --init-from out/NAME")
    check_schema(saved, {f"{field.name}?": schema_of(field) for field in dataclasses.fields(Config)}, path)
    unknown = unknown_flags(saved, OF_THE_RUN)
    if unknown:
        raise ValueError(f"{path} has {as_typed(unknown)}, which this code does not know: its model may be "
                         f"another one; use the code that wrote it, git {saved.get('git')}")
    if saved.get("preset", "tiny") not in PRESETS:
        raise ValueError(f"{path}: no preset {saved['preset']!r}; the presets are {', '.join(PRESETS)}")
    values = {name: saved[name] for name in Config.__annotations__ if name in saved}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def schema_of(field):
    """Return what a flag is in JSON, for check_schema."""
    if typing.get_origin(field.type) is tuple:
        return [typing.get_args(field.type)[0]]
    return typing.get_args(field.type) if field.name == "min_lr" else field.type


def read_run_config(path):
    """Return (Config, vocabulary size) from a run's config.json.

    ValueError: it is none that train.py writes.
    """
    # Flags that say nothing about the model are left out: they may have been changed, or their files moved.
    left_out = ("min_lr", "init_from", "resume", "resume_changed", "dump_grads")
    try:
        cfg = Config(**{name: value for name, value in read_flags(path).items() if name not in left_out})
        saved = load_json(path)
        check_schema(saved, {"vocab_size_used": Range(1, 2**24)}, "flags")
        check(cfg)
    except ValueError as e:
        raise ValueError(f"{path} is no run's ({e}); give train.py's --out") from None
    return cfg, saved["vocab_size_used"]


# -----------------------------------------------------------------------------
# Words

def change_words(argv, changes):
    """Return argv with the values of {flag: value} in the place of its own. None: without the flag."""
    kept = []
    is_kept = True
    for word in argv:
        if word.startswith("--"):
            key = words.key_of(word)
            is_kept = key not in changes and key.removeprefix("no_") not in changes
        if is_kept:
            kept.append(word)
    for name, value in changes.items():
        if value is not None:
            kept += [typed(name), str(value)]
    return kept


def plain_switches(argv, cls):
    """Return argv as tyro expects it: it knows --x and --no-x; --x True, --x False and --x=true are ours."""
    switches = {typed(field.name) for field in dataclasses.fields(cls) if field.type in (bool, "bool")}
    plain = []
    for word in argv:
        name, equals, value = word.partition("=")
        if typed(words.key_of(name)) in switches and name.startswith("--"):
            plain.append(typed(words.key_of(name)))
            if not equals:
                continue
            word = value
        is_switch = bool(plain) and plain[-1] in switches
        if is_switch and word.lower() == "false":
            plain[-1] = plain[-1].replace("--", "--no-", 1)
        elif not is_switch or word.lower() != "true":
            plain.append(word)
    return plain


def format_tyro_error(box, cls, program):
    """Return tyro's framed message as one line: its first paragraph, and flags that unknown ones resemble.

    Where a word without a flag is missing, it is the MISSING of the class.
    """
    lines = re.sub("\x1b\\[[0-9;]*m|[│╭╮╰╯─]", "", box).splitlines()[1:]  # below the title
    lines = itertools.dropwhile(lambda line: not line.strip(" -"), lines)
    what = " ".join(" ".join(itertools.takewhile(lambda line: line.strip(" -"), lines)).split()).rstrip(".")
    if what.startswith("Missing ") and "'--" not in what:
        what = getattr(cls, "MISSING", what)
    if what.startswith("Unrecognized"):
        words = re.findall(r"[^\s,=]+", what)
        flags = [typed(field.name) for field in dataclasses.fields(cls)]
        meant = []
        for word in words:
            if word.startswith("--"):
                meant += difflib.get_close_matches(word, flags, 1)
        if meant:
            what += f"; perhaps you meant {' '.join(meant)}"
        if set(words) & PRESETS.keys():
            what += "; a preset is the first word"
    return f"{what}; {program} --help lists all flags"


# -----------------------------------------------------------------------------
# --help

def help_comments(cls):
    """Return {field: (its group, its help)} from the comments in the source of a dataclass.

    The help stands beside the field or, if nothing stands there, above it. A comment above an empty line
    begins a group.
    """
    found = {}
    group = ""
    above = []
    for line in inspect.getsource(cls).splitlines():
        field = re.match(r"    (\w+): ", line)
        if line.startswith("    # "):
            above.append(line.removeprefix("    # "))
            continue
        if field:
            beside = line.partition("  # ")[2]
            found[field[1]] = group, beside or " ".join(above)
        elif above and not line:
            group = " ".join(above)
        above = []
    return found


def format_help(cls, prog, about, default, everything):
    """Return what a program does, its flags and their defaults.

    Of Config's flags it has the common ones, or everything.
    """
    comments = {}
    for base in cls.__mro__[-2::-1]:  # from the one below object up to cls
        comments.update(help_comments(base))
    is_train = issubclass(cls, Config)
    words = [prog]
    if " " not in prog:  # else it says itself which words follow the program
        words += filter(None, map(positional_word, dataclasses.fields(cls)))
    lines = [f"usage: {' '.join(words)} [flags]", "", wrap(about)]
    last = None
    # A program's own flags come first, then those that it has from Config.
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.name not in cls.__annotations__):
        name = field.name
        is_rare = is_train and name in Config.__annotations__ and name not in COMMON
        if name == "preset" or is_rare and not everything:
            continue
        group, text = comments[name]
        if group != last:
            lines += ["", group or f"flags of {prog.split()[0]}"]
            last = group
        lines.append(help_of_flag(field, text, field.default if default is None else getattr(default, name)))
    if is_train and not everything:
        lines.append("\n--help-all lists all flags, --no-NAME turns a switch off.")
    return "\n".join(lines) + "\n"


def positional_word(field):
    """Return what stands in --help for a word without a flag, such as RUN_DIR; "" if the field is a flag."""
    if "Positional" not in str(field.type):
        return ""
    names = [getattr(said, "metavar", None) for said in typing.get_args(field.type)]
    return next(filter(None, names), field.name.upper())


def help_of_flag(field, text, value):
    """Return the lines of --help for a field of a dataclass: the flag, its value, its help text."""
    flag = typed(field.name)
    if positional_word(field):
        flag = positional_word(field)
    elif value is True:
        flag = typed(f"no_{field.name}")
        text = f"turns off: {text}"
    elif value is not False:
        if isinstance(value, tuple):
            value = " ".join(map(str, value))
        flag += " ..." if value in (None, "") else f" {value}"
    if typing.get_origin(field.type) is Literal:
        choices = " | ".join(map(str, typing.get_args(field.type)))
        text += f" [{choices.strip(' |')}]"  # one of them may be empty
    return wrap(text, initial_indent=f"  {printable(flag):25} ", subsequent_indent=28 * " ")


# -----------------------------------------------------------------------------
# Text in a terminal

def wrap(text, **indents):
    """Return text in lines of the terminal's width, 80 to 100 columns; indented or numbered ones stay."""
    width = min(max(shutil.get_terminal_size().columns, 80), 100)
    paragraphs = text.strip().split("\n\n")
    for i, paragraph in enumerate(paragraphs):
        if not re.search(r"^( |\d\))", paragraph, re.M):
            paragraphs[i] = textwrap.fill(paragraph, width, break_on_hyphens=False, **indents)
    return "\n\n".join(paragraphs)


# 128 + SIGINT. Nothing was saved after this Ctrl-C, in a run the second, so no job script may requeue on it.
INTERRUPTED = 130
NO_READER = 141  # 128 + SIGPIPE


def given_flags(flags, names):
    """Return those of the flags with these names, as they are typed, whose value is not the default."""
    return [typed(name) for name in sorted(names) if getattr(flags, name) != getattr(type(flags), name)]


@contextlib.contextmanager
def wrong_input(quiet=False):
    """Turn a ValueError or OSError of a program's body, its wrong input, into one line and exit code 2.

    It is also a decorator of main(). The line goes to stderr; quiet: another rank says it. If the reader of
    stdout leaves (| head), the exit code is that of SIGPIPE. Ctrl-C is one line, too, and exit code 130.
    """
    open_streams()
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise SystemExit(NO_READER) from None
    except (ValueError, OSError) as e:
        if not quiet:
            complain(f"nanoshard: {one_line(e)}")
        raise SystemExit(Outcome.WRONG_INPUT) from None
    except KeyboardInterrupt:
        if not quiet:
            complain("nanoshard: interrupted by Ctrl-C")
        raise SystemExit(INTERRUPTED) from None
    finally:
        drop_what_fails(sys.stdout)
