"""The command line of every program: a dataclass whose fields are the flags, its comments their help."""
import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import os
import re
import sys
import textwrap
import typing
from pathlib import Path
from typing import Literal

import config
from config import Config, Outcome, typed
from interface import paths, words
from interface.files import check_schema, load_json
from interface.presets import PRESETS
from interface.terminal import drop_what_fails, printable, warn

# 128 + SIGINT. Nothing was saved after this Ctrl-C, in a run the second, so no job script may requeue on it.
INTERRUPTED = 130


def parse(argv, cls=Config, prog="train.py", about="Train a GPT; --list [DIR]: show all runs.", **defaults):
    """Return [PRESET] [flags] as a cls, Config or derived from it. defaults: replace the preset's values."""
    words.refuse_foreign(argv, cls, prog)
    preset = "tiny"
    has_preset = bool(argv) and not argv[0].startswith("-")
    if has_preset:
        preset, *argv = argv
    if preset not in PRESETS:
        nearest = ", ".join(difflib.get_close_matches(Path(preset).stem.lower(), PRESETS, len(PRESETS), 0))
        raise ValueError(f"no preset {preset!r}; the first word is one of these, nearest first: {nearest}")
    file = given(argv, "config")
    if file and has_preset:
        raise ValueError(f"{preset} and --config {file} both set the flags; give one of them")
    values = {**PRESETS[preset], "preset": preset}
    if file:
        values = read_flags(file)
        for name in ("config", "resume", "resume_changed"):
            values.pop(name, None)
    if source := given(argv, "init_from"):
        values.update(model_of(source, values))
    about += f" Presets: {', '.join(PRESETS)}. Defaults below are those of {file or preset}."
    cfg = command_line(cls, argv, f"{prog} [PRESET]", about, cls(**{**values, **defaults}))
    config.check(cfg)
    return cfg


def command_line(cls, argv, prog, about, default=None):
    """Return argv as a cls. ValueError: one line that says what is wrong. SystemExit(0): --help."""
    if issubclass(cls, Config) and {"-h", "--help", "--help-all"} & set(argv):
        sys.stdout.write(format_help(cls, prog, about, default, "--help-all" in argv))
        raise SystemExit(Outcome.DONE)
    program = prog.split()[0]
    words.refuse_foreign(argv, cls, program)
    import tyro
    kwargs = {} if default is None else {"default": default}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            flags = tyro.cli(cls, args=plain(argv, cls), prog=prog, description=about, **kwargs)
    except SystemExit as leaving:
        if not leaving.code:  # --help
            raise
        what = format_tyro_error(said.getvalue())
        raise ValueError(f"{what}; {program} --help lists all flags") from None
    config.check_numbers(flags)
    return flags


@contextlib.contextmanager
def wrong_input(quiet=False):
    """Turn a ValueError or OSError of the body, wrong input, into one line (quiet: none) and exit code 2."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # of stdout: | head
        raise SystemExit(141) from None  # 128 + SIGPIPE
    except (ValueError, OSError) as e:
        if not quiet:
            warn(e)
        raise SystemExit(Outcome.WRONG_INPUT) from None
    except KeyboardInterrupt:
        if not quiet:
            warn("interrupted by Ctrl-C")
        raise SystemExit(INTERRUPTED) from None
    finally:
        drop_what_fails(sys.stdout)


# The config.json of a run

# What a run writes there beside its flags. The last two are of earlier versions.
OF_THE_RUN = ("vocab_size_used", "mask_token", "git", "argv", "world", "nodes", "launcher", "job", "dp",
              "torch", "machine", "attention", "products", "split_masters")


def model_of(source, values):
    """Return {flag: value} of the model of a run, or of its step_N, for --init-from; {} if none is told."""
    folder = Path(source)
    if folder.name.startswith("step_"):
        folder = folder.parent
    if not (paths.is_run(folder) and (folder / "config.json").is_file()):
        return {}
    found = read_flags(folder)
    left_out = {"vocab_size"}  # it is the data's
    if found.get("pos", Config.pos) == "rope":
        left_out.add("seq_len")
    if not found.get("n_experts") and values.get("n_experts"):
        left_out |= {"n_experts", "n_shared_experts", "top_k"}  # the preset's experts start as its MLP
    return {name: value for name, value in found.items()
            if name in (*config.SHAPE, *config.flags_of_kind("meaning")) and name not in left_out}


def read_flags(path):
    """Return {flag: value} from a run's config.json, or that of a directory. ValueError: no run writes it."""
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    saved = load_json(path)
    check_schema(saved, {f"{field.name}?": field.type for field in dataclasses.fields(Config)}, path)
    unknown = config.unknown_flags(saved, OF_THE_RUN)
    if unknown:
        raise ValueError(f"{path} has {config.as_typed(unknown)}, which this code does not know; "
                         f"use the code that wrote it, git {saved.get('git')}")
    values = {name: saved[name] for name in Config.__annotations__ if name in saved}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def read_run_config(path):
    """Return (Config, vocabulary size) from a run's config.json. ValueError: it is none of train.py."""
    cfg = Config(**read_flags(path))
    config.check(cfg)
    saved = load_json(path)
    check_schema(saved, {"vocab_size_used": int}, path)
    return cfg, saved["vocab_size_used"]


# Words

def given(argv, flag):
    """Return the value of a flag in argv, or ""."""
    found = ""
    for word, following in itertools.pairwise([*argv, ""]):
        if word.startswith("--") and words.key_of(word) == flag:
            _, equals, value = word.partition("=")
            found = value if equals else following
    return os.path.expanduser(found)


def refuse_unread(flags, mode, reads):
    """Raise ValueError if a flag is given that only other modes read. reads: {mode: its flags}."""
    names = set().union(*reads.values()) - reads[mode]
    unread = [typed(name) for name in sorted(names) if getattr(flags, name) != getattr(type(flags), name)]
    if unread:
        raise ValueError(f"{mode} does not read {', '.join(unread)}; leave it out")


def plain(argv, cls):
    """Return argv as tyro reads it: --x V for --x=V, and --x or --no-x for --x True or False."""
    switches = {typed(field.name) for field in dataclasses.fields(cls) if field.type is bool}
    found = [""]
    for word in argv:
        flag, equals, value = word.partition("=")
        parts = [word]
        if equals and flag.startswith("--") and not value.startswith("-"):
            parts = [flag, value]
        found += map(os.path.expanduser, parts)  # no shell does it in --out=~/run
        switch = found[-2].replace("_", "-")
        if switch in switches and found[-1].lower() in ("true", "false"):
            value = found.pop().lower()
            if value == "false":
                found[-1] = switch.replace("--", "--no-", 1)
    return found[1:]


def format_tyro_error(box):
    """Return what tyro says in a frame as one line: its first paragraph, and the flags that it proposes."""
    parts = re.split("[-─]{6,}", re.sub("\x1b\\[[0-9;]*m|[│╭╮╰╯]", "", box))
    what = " ".join(parts[1].split()).rstrip(" .")  # below the title
    meant = re.findall("^ +(--[a-z0-9-]+)", "".join(parts[2:]), re.M)
    if meant and what.startswith("Unrecognized"):
        what += f"; perhaps you meant {' or '.join(meant)}"
    return what


# --help

def format_help(cls, prog, about, default, everything):
    """Return the text of --help: a program's own flags, and of Config's the common ones, or everything.

    The help of a field is the comment beside it or above it. "# -- " begins a group.
    """
    lines = [f"usage: {prog} [flags]", "", textwrap.fill(about, 100, replace_whitespace=False)]
    sources = "".join(map(inspect.getsource, dict.fromkeys((cls, Config))))
    group = f"flags of {prog.split()[0]}"
    above = []
    for line in sources.splitlines():
        if line.startswith("    # -- "):
            group = line.removeprefix("    # -- ")
        elif line.startswith("    # "):
            above.append(line.removeprefix("    # "))
            continue
        field = re.match(r"    (\w+): ", line)
        name = field[1] if field else ""
        is_common = name not in config.FLAGS or config.FLAGS[name]["common"]
        if name and name != "preset" and (everything or is_common):
            if group:
                lines += ["", group]
                group = ""
            text = line.partition("  # ")[2] or " ".join(above)
            kind = cls.__dataclass_fields__[name].type
            if typing.get_origin(kind) is Literal:
                text += f" [{' | '.join(map(str, typing.get_args(kind)))}]"
            value = getattr(default, name)
            if isinstance(value, tuple):
                value = " ".join(map(str, value))
            flag = f"{typed(name)} {'...' if value in (None, '') else value}"
            lines.append(textwrap.fill(text, 100, initial_indent=f"  {printable(flag):25} ",
                                       subsequent_indent=28 * " ", break_on_hyphens=False))
        above = []
    if not everything:
        lines.append("\n--help-all lists all flags; a switch is --NAME or --no-NAME.")
    return "\n".join(lines) + "\n"
