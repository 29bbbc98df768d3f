"""The command line of every program: a frozen dataclass whose fields are the flags, its comments their help.

    parse           [PRESET] [flags] -> config.Config, or a dataclass derived from it
    read_run_config a run's config.json -> config.Config
    command_line    argv -> any frozen dataclass, by tyro; wrong flags give one line that says what is wrong
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
from typing import Literal

from config import COMMON, ELSEWHERE, PRESETS, Config, Outcome, check, check_numbers
from interface.schema import Range, check_schema, load_json


def parse(argv, cls=Config, prog="train.py", about="Train a GPT; --list [DIR]: show all runs.", **defaults):
    """[PRESET] [flags] (list of str) -> cls, which is Config or a dataclass derived from it. defaults replace
    the preset's values. ValueError: one line that says what is wrong, with a suggestion."""
    argv = list(argv)
    preset = argv.pop(0) if argv and not argv[0].startswith("-") else "tiny"
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r}; the presets are {', '.join(PRESETS)}")
    about = f"{about.strip()}\n\nPresets: {', '.join(PRESETS)}. Defaults below are those of {preset}."
    default = cls(**{**PRESETS[preset], **defaults}, preset=preset)
    cfg = command_line(cls, argv, f"{prog} [PRESET]", about, default)
    check(cfg)
    return cfg


def command_line(cls, argv, prog, about, default=None):
    """Flags argv (list of str) -> an instance of the dataclass cls: its fields are the flags, its comments
    their help. --help and --help-all print and exit with 0, also if the reader leaves early (| head).
    ValueError: one line that says what is wrong, with the flag that an unknown one resembles."""
    if {"-h", "--help", "--help-all"} & set(argv):
        print_quietly(format_help(cls, prog, about, default, "--help-all" in argv))
        raise SystemExit(Outcome.DONE)
    _refuse_names_of_others(argv, cls)
    import tyro
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            kwargs = {} if default is None else {"default": default}
            flags = tyro.cli(cls, args=_booleans(argv, cls), prog=prog, **kwargs)
    except SystemExit:
        raise ValueError(_format_tyro_error(said.getvalue(), cls, prog.split()[0])) from None
    check_numbers(flags)
    return flags


def read_run_config(path):
    """A run's config.json -> (Config, vocabulary size). ValueError: it is none that train.py writes."""
    # not what says nothing about the model, and may have been changed or moved since
    types = {f.name: f.type for f in dataclasses.fields(Config)
             if f.name not in ("min_lr", "init_from", "resume", "dump_grads")}
    tuples = {k for k, t in types.items() if typing.get_origin(t) is tuple}
    try:
        saved = load_json(path)
        schema = {f"{k}?": [int] if k in tuples else t for k, t in types.items()}
        check_schema(saved, {**schema, "vocab_size_used": Range(1, 2**24)}, "flags")
        cfg = Config(**{k: tuple(v) if k in tuples else v for k, v in saved.items() if k in types})
        check(cfg)
    except ValueError as e:
        raise ValueError(f"{path} is no run's ({e}); give train.py's --out") from None
    return cfg, saved["vocab_size_used"]


def _refuse_names_of_others(argv, cls):
    """ValueError: flags that other trainers have, each with ours or with what to do instead."""
    ours, said = {f.name for f in dataclasses.fields(cls)} - {"preset"}, []
    for name in (word.partition("=")[0] for word in argv if word.startswith("--")):
        key = name[2:].replace("-", "_")
        text = ELSEWHERE.get(key, "") if key not in ours else ""
        if text in ours:
            said.append(f"{name} is --{text.replace('_', '-')} here")
        elif " " in text and issubclass(cls, Config):
            said.append(f"{name} {text}")
    if said:
        raise ValueError("; ".join(said))


def _comments(cls):
    """-> {field: (its group, its help)} from the comments in the source of a dataclass."""
    found, group, above = {}, "", []
    for line in inspect.getsource(cls).splitlines():
        name, beside = re.match(r"    (\w+): ", line), line.partition("  # ")[2]
        if name:
            group = " ".join(above) if above and beside else group
            found[name[1]] = group, beside or " ".join(above)
        above = [*above, line[6:]] if line.startswith("    # ") else []
    return found


def format_help(cls, prog, about, default, everything):
    """-> what a program does, its flags and their defaults; of Config's those of COMMON, or everything."""
    lines = [f"usage: {prog} [flags]", "", wrap(about)]
    notes, last = {k: v for c in cls.__mro__[-2::-1] for k, v in _comments(c).items()}, None
    # its own flags first, then those that it has from Config
    for f in sorted(dataclasses.fields(cls), key=lambda f: f.name not in cls.__annotations__):
        hidden = issubclass(cls, Config) and f.name in Config.__annotations__ and f.name not in COMMON
        if f.name == "preset" or hidden and not everything:
            continue
        (group, text), value = notes[f.name], f.default if default is None else getattr(default, f.name)
        if group != last:
            lines, last = [*lines, "", group or f"flags of {prog.split()[0]}"], group
        flag = f"--{f.name.replace('_', '-')}"
        if "Positional" in str(f.type):
            flag = f.name.upper()
        elif value is True:
            flag, text = f"--no-{flag[2:]}", f"turns off: {text}"
        elif value is not False:
            value = " ".join(map(str, value)) if isinstance(value, tuple) else value
            flag += f" {'...' if value in (None, '') else value}"
        if typing.get_origin(f.type) is Literal:
            text += f" [{' | '.join(map(str, typing.get_args(f.type))).strip(' |')}]"
        lines.append(wrap(text, initial_indent=f"  {printable(flag):25} ", subsequent_indent=28 * " "))
    more = "\n--help-all lists all flags, --no-NAME turns a switch off.\n"
    return "\n".join(lines) + "\n" + more * (issubclass(cls, Config) and not everything)


def wrap(text, **indents):
    """text -> the same in lines of the terminal's width, 80 to 100; indented or numbered ones stay."""
    width = min(max(shutil.get_terminal_size().columns, 80), 100)
    return "\n\n".join(p if re.search(r"^( |\d\))", p, re.M) else
                       textwrap.fill(p, width, break_on_hyphens=False, **indents)
                       for p in text.strip().split("\n\n"))


def print_quietly(text):
    """Print text; it is no error if the reader has closed the pipe (| head)."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_stdout()


def discard_stdout():
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
        discard_stdout()
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
    out, words = [], list(argv)
    while words:
        word = words.pop(0)
        name, eq, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and key in switches:
            if not eq and words and words[0].lower() in ("true", "false"):
                value = words.pop(0)
            if value.lower() not in ("", "true", "false"):
                raise ValueError(f"{name} is a switch: {name}, --no-{key.replace('_', '-')} or {name} True; "
                                 f"not {value!r}")
            word = f"--no-{key}" if value.lower() == "false" else f"--{key}"
        out.append(word)
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
