"""The command line of every program: a frozen dataclass whose fields are the flags, its comments their help.

    parse           [PRESET] [flags] -> config.Config, or a dataclass derived from it
    read_run_config a run's config.json -> config.Config; read_flags: its flags, for --config
    command_line    argv -> any frozen dataclass, by tyro; wrong flags give one line that says what is wrong
    format_help     what --help prints: it is read from the comments beside the flags
    wrong_input     turns a program's wrong input into one line on stderr and exit code 2
    as_program      calls a program's main(), and ends the process
"""
import contextlib
import dataclasses
import difflib
import errno
import inspect
import io
import itertools
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import typing
from pathlib import Path
from typing import Literal

from config import (
    COMMON,
    REMOVED,
    SHAPE,
    Config,
    Outcome,
    as_typed,
    check,
    check_numbers,
    flags_of_kind,
    unknown_flags,
)
from interface import nearest, paths, words
from interface.presets import PRESETS
from interface.schema import Range, check_schema, load_json
from interface.terminal import complain, drop_what_fails, open_streams

ALIKE = 0.75  # the least ratio of difflib at which a word is perhaps a flag of ours that is misspelt
NEARLY_EQUAL = 0.9  # and a flag of others
LEAST_BEGUN = 3  # letters of a word with which a flag of ours perhaps begins


def parse(argv, cls=Config, prog="train.py", about="Train a GPT; --list [DIR]: show all runs.", **defaults):
    """Return [PRESET] [flags] (list of str) as a cls, which is Config or a dataclass derived from it.

    defaults: values that replace the preset's.
    ValueError: one line that says what is wrong, with a suggestion.
    """
    argv = list(argv)
    typed = list(argv)
    preset = ""
    if argv and not argv[0].startswith("-"):
        preset = argv.pop(0)
    if preset and preset not in PRESETS:
        raise ValueError(words.answer_stray(preset, PRESETS, help_comments(Config), argv))
    refuse_words_of_launchers(typed, cls, prog)
    file = given(argv, "config")
    if file and preset:
        raise ValueError(f"{preset} and --config {file} both set the flags; give one of them")
    values = {**PRESETS[preset or "tiny"], "preset": preset or "tiny"}
    if file:
        values = read_flags(file)
        if given(argv, "resume") not in ("", "auto", "none") and not values.get("lora"):
            values["init_from"] = ""  # where that run started, which is behind it
    if source := given(argv, "init_from"):
        values.update(model_of(source, values))
    about = (f"{about.strip()}\n\nPresets: {', '.join(PRESETS)}. Defaults below are those of "
             f"{file or values['preset']}.")
    default = cls(**{**values, **defaults})
    cfg = command_line(cls, argv, f"{prog} [PRESET]", about, default)
    with nearest.with_fix(cfg, argv=typed if prog == "train.py" else None):
        check(cfg)
    return cfg


def command_line(cls, argv, prog, about, default=None):
    """Return the flags argv (list of str) as a cls, a dataclass whose fields are the flags.

    --help and --help-all print and exit with 0.
    ValueError: one line that says what is wrong, with the flag that an unknown one resembles.
    """
    if {"-h", "--help", "--help-all"} & set(argv):
        sys.stdout.write(format_help(cls, prog, about, default, "--help-all" in argv))
        raise SystemExit(Outcome.DONE)
    refuse_words_of_others(argv, cls, prog.split()[0])
    import tyro
    kwargs = {} if default is None else {"default": default}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            flags = tyro.cli(cls, args=plain_switches(argv, cls), prog=prog, **kwargs)
    except SystemExit:
        raise ValueError(format_tyro_error(said.getvalue(), cls, prog.split()[0])) from None
    check_numbers(flags)
    return flags


# -----------------------------------------------------------------------------
# The config.json of a run

# What a run writes there beside its flags. Earlier versions also wrote `products`.
OF_THE_RUN = ("vocab_size_used", "mask_token", "git", "argv", "world", "nodes", "launcher", "dp", "torch",
              "machine", "attention", "products")
TUPLES = {field.name: [typing.get_args(field.type)[0]] for field in dataclasses.fields(Config)
          if typing.get_origin(field.type) is tuple}  # flags of several numbers: the schema of their JSON


def given(argv, flag):
    """Return the value of a flag in argv, or ""."""
    found = ""
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        _, equals, value = word.partition("=")
        if word.startswith("--") and words.key_of(word) == flag:
            found = value if equals else following
    return found


def model_of(source, values):
    """Return {flag: value} of the model of a run, or of its step_N, for --init-from; {} if none is told.

    values: the preset's. If it has experts and the run has none, its experts stay: they start as that MLP.
    The vocabulary is the data's, and so is the length of a sequence, unless the model has learned positions.
    """
    folder = Path(source)
    for path in (folder / "config.json", folder.parent / "config.json"):
        if path.is_file() and (path.parent == folder or folder.name.startswith("step_")):
            break
    else:
        return {}
    found = read_flags(path)
    left_out = {"vocab_size"}
    if found.get("pos", Config.pos) == "rope":
        left_out.add("seq_len")
    if not found.get("n_experts") and values.get("n_experts"):
        left_out |= {"n_experts", "n_shared_experts", "top_k"}
    return {name: value for name, value in found.items()
            if name in (*SHAPE, *flags_of_kind("meaning")) and name not in left_out}


def read_flags(path):
    """Return {flag: value} from a run's config.json, for --config, without those that say how it began.

    path: the file, or the directory of the run.
    ValueError: there is a key that no run writes, or a value that no flag has.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        raise ValueError(f"--config {path} is not there; {paths.meant_run(path)}")
    try:
        saved = load_json(path)
    except ValueError as e:
        raise ValueError(f"{e}; give the config.json of a run of train.py, or its --out directory") from None
    if isinstance(saved, dict) and "model_type" in saved and "preset" not in saved:
        raise ValueError(f"{path} is of a model of Hugging Face, and of no run: python convert.py import "
                         f"{path.parent} --out out/NAME makes a run of it, then --init-from out/NAME")
    types = {field.name: field.type for field in dataclasses.fields(Config)}
    types.update(TUPLES)
    types["min_lr"] = (float, type(None))
    check_schema(saved, {f"{name}?": kind for name, kind in types.items()}, path)
    for key in saved:
        if key not in types and key not in OF_THE_RUN and key not in REMOVED:
            close = difflib.get_close_matches(key, types, 1, ALIKE)
            hint = f"; perhaps {close[0]} is meant" if close else ""
            raise ValueError(f"{path}: {key} is no flag{hint or of_other_code(saved)}")
    if saved.get("preset", "tiny") not in PRESETS:
        raise ValueError(f"{path}: no preset {saved['preset']!r}; the presets are {', '.join(PRESETS)}")
    left_out = ("config", "resume", "resume_changed")
    values = {name: value for name, value in saved.items() if name in types and name not in left_out}
    for name in TUPLES.keys() & values.keys():
        values[name] = tuple(values[name])
    return values


def read_run_config(path):
    """Return (Config, vocabulary size) from a run's config.json.

    ValueError: it is none that train.py writes.
    """
    # Flags that say nothing about the model are left out: they may have been changed, or their files moved.
    left_out = ("min_lr", "init_from", "resume", "resume_changed", "dump_grads")
    types = {field.name: field.type for field in dataclasses.fields(Config) if field.name not in left_out}
    schema = {f"{name}?": TUPLES.get(name, kind) for name, kind in types.items()}
    schema["vocab_size_used"] = Range(1, 2**24)
    saved = {}
    try:
        saved = load_json(path)
        check_schema(saved, schema, "flags")
        values = {name: value for name, value in saved.items() if name in types}
        for name in TUPLES.keys() & values.keys():
            values[name] = tuple(values[name])
        cfg = Config(**values)
        check(cfg)
    except ValueError as e:
        code = of_other_code(saved) if isinstance(saved, dict) else ""
        raise ValueError(f"{path} is no run's ({e}); give train.py's --out{code}") from None
    unknown = unknown_flags(saved, OF_THE_RUN)
    if unknown:
        raise ValueError(f"{path} has {as_typed(unknown)}, which this code does not know, so its model may "
                         f"be another one{of_other_code(saved)}; or take it out of that file, if it changes "
                         "nothing")
    return cfg, saved["vocab_size_used"]


def of_other_code(saved):
    """Return what to do about a run that another version of the code may have written; or ""."""
    code = saved.get("git")
    return f"; use the code that wrote it, git {code}" if isinstance(code, str) and code else ""


# -----------------------------------------------------------------------------
# Words of the command line that are not ours

def refuse_words_of_others(argv, cls, prog):
    """Raise ValueError for flags and values of other trainers, each with ours or with what to do instead."""
    ours = {field.name for field in dataclasses.fields(cls)} - {"preset"}
    said = []
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if not re.match("--|-[A-Za-z](=|$)", word):
            continue
        _, equals, value = word.partition("=")
        if not equals and not following.startswith("-"):
            value = following
        answer = words.answer_flag(word, value, ours, prog, issubclass(cls, Config))
        if answer and answer not in said:
            said.append(answer)
        key = words.key_of(word)
        if not answer and key not in ours and key.removeprefix("no_") not in ours and key:
            name = word.partition("=")[0]
            said.append(f"Unrecognized options: {name}{hint_of(name, cls)}; {prog} --help lists all flags")
    if said:
        raise ValueError("; ".join(said))


def refuse_words_of_launchers(argv, cls, prog):
    """Raise ValueError for flags of mpiexec and torchrun behind the program, with the right command."""
    ours = {field.name for field in dataclasses.fields(cls)}
    found, ranks, rest = words.without_launcher(argv, prog, ours)
    if not found:
        return
    wrong = ""
    rest = words.in_our_words(rest, ours)
    program = program_of(prog)
    try:
        cfg = parse(rest, cls, prog)
        ranks = ranks or nearest.needed(cfg)
        if not nearest.fits(cfg, ranks):
            rest = nearest.change_words(rest, nearest.search(cfg, ranks))
    except ValueError as e:
        wrong = f"; and {e}"
    if "ranks" in ours:
        rest = nearest.change_words(rest, {"ranks": ranks}) if ranks else rest
        raise ValueError(f"{', '.join(found)} starts ranks, and {prog} starts none: "
                         f"{shlex.join(['python', program, *rest])}{wrong}")
    raise ValueError(f"{', '.join(found)} starts the ranks, before the program: "
                     f"{nearest.command(ranks or 'N', rest, program=program)}{wrong}")


def program_of(prog):
    """Return how a program was typed, such as bench/one_step.py; else its name."""
    return sys.argv[0] if Path(sys.argv[0]).name == prog else prog


def plain_switches(argv, cls):
    """Return argv as tyro expects it: it knows --x and --no-x; --x True, --x False and --x=true are ours."""
    ours = switches(cls)
    out = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and key in ours:
            if not equals and words and words[0].lower() in ("true", "false"):
                value = words.pop(0)
            word = f"--no-{key}" if is_off(name, key, value) else f"--{key}"
        out.append(word)
    return out


def switches(cls):
    """Return the names of the flags that are turned on by --x and off by --no-x."""
    return [field.name for field in dataclasses.fields(cls) if field.type in (bool, "bool")]


def is_off(name, key, value):
    """Whether the value of a switch is false. ValueError: it is neither true nor false, nor missing."""
    if value.lower() not in ("", "true", "false"):
        raise ValueError(f"{name} is a switch: {name}, --no-{key.replace('_', '-')} or {name} True; "
                         f"not {value!r}")
    return value.lower() == "false"


def format_tyro_error(box, cls, prog):
    """Return tyro's framed message as one line.

    It is the first paragraph, and the flag of ours that an unknown one resembles. Where a word without a
    flag is missing, it is the MISSING of the class.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip("│ ─╭╮╰╯") for line in box.splitlines()]
    lines = ["" if set(line) == {"-"} else line for line in lines]  # rules, where the terminal has only ASCII
    body = itertools.dropwhile(lambda line: not line, lines[1:])  # below the title
    what = " ".join(itertools.takewhile(bool, body)).rstrip(".") or "wrong flags"
    if what.startswith("Missing ") and hasattr(cls, "MISSING") and "'--" not in what:
        return f"{cls.MISSING}; {prog} --help lists all flags"
    number = re.match(r"Error parsing (--\S+): (invalid literal for int|could not convert).*'(.*)'$", what)
    if number:
        return words.answer_number(number[1], number[3], is_whole="int" in number[2])
    choice = re.search(r"invalid choice '(.*?)'.*one of \((.*)\)", what)
    if choice:
        close = difflib.get_close_matches(choice[1], re.findall("'(.*?)'", choice[2]), 1)
        what += f"; perhaps {close[0]} is meant" if close else ""
    unknown = re.search(r"nrecognized[^:]*: ([^,\s]+)", what)
    hint = hint_of(unknown[1], cls) if unknown else ""
    return f"{what}{hint}; {prog} --help lists all flags"


def hint_of(unknown, cls):
    """Return what an unknown word is perhaps meant for, after a semicolon, or ""."""
    ours = [field.name for field in dataclasses.fields(cls)]
    if not unknown.startswith("-"):
        if issubclass(cls, Config):
            return f"; {words.answer_word(unknown, PRESETS, ours)}"
        return f"; {unknown} is no flag, and its place is taken"
    others = {other: flag for other, flag in words.FLAGS.items() if flag in ours}
    key = words.key_of(unknown)
    alike = ours
    if key.startswith("no_"):
        alike = [f"no_{name}" for name in switches(cls)] + [name for name in ours if name.startswith("no_")]
    flags = [field.name for field in dataclasses.fields(cls) if not positional_word(field)]
    begun = [name for name in flags if len(key) >= LEAST_BEGUN and name.startswith(key)]
    close = (difflib.get_close_matches(key, alike, 2, ALIKE)
             or difflib.get_close_matches(key, flags, 2, ALIKE)
             or begun[:2]
             or difflib.get_close_matches(key, others, 1, NEARLY_EQUAL))
    meant = list(dict.fromkeys(words.typed(others.get(name, name)) for name in close))
    return f"; perhaps you meant {' or '.join(meant)}" if meant else ""


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
    flag = f"--{field.name.replace('_', '-')}"
    if positional_word(field):
        flag = positional_word(field)
    elif value is True:
        flag = f"--no-{field.name.replace('_', '-')}"
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


def check_utf8(flag, text):
    """Raise ValueError if the text of a flag had bytes that are not UTF-8. Python gives each a surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"{flag} is not UTF-8: behind {e.start:,} characters is the byte "
                         f"0x{ord(text[e.start]) & 0xFF:02x}; type it in a terminal of UTF-8, or convert it: "
                         f"{flag} \"$(iconv -f LATIN1 -t UTF-8 FILE)\"") from None


# 128 + SIGINT. Nothing was saved after this Ctrl-C, in a run the second, so no job script may requeue on it.
INTERRUPTED = 130
NO_READER = 141  # 128 + SIGPIPE


def given_flags(flags, names):
    """Return those of the flags with these names, as they are typed, whose value is not the default."""
    return [f"--{name.replace('_', '-')}" for name in sorted(names)
            if getattr(flags, name) != getattr(type(flags), name)]


@contextlib.contextmanager
def wrong_input(quiet=False):
    """Turn a ValueError or OSError of a program's body, its wrong input, into one line and exit code 2.

    It is also a decorator of main(). The line goes to stderr; quiet: another rank says it. If the reader of
    stdout leaves (| head), the exit code is that of SIGPIPE. Ctrl-C is one line, too, and exit code 130.
    """
    open_streams()
    try:
        if sys.flags.optimize > 1:
            raise ValueError("python -OO drops the texts that --help prints; leave it out, or use -O")
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


def as_program(main):
    """Call main(), and end the process with the exit code that it returns.

    What was to be done is done then. A Ctrl-C while Python ends its threads would print a traceback of
    theirs: here it ends the process without a word.
    """
    try:
        code = main()
    finally:
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # of nohup, or of a script's &
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(code)


def one_line(text):
    """Return a message, a text or an error, as one line that is printable."""
    if isinstance(text, OSError) and text.errno == errno.ENAMETOOLONG:
        path = os.fsdecode(text.filename or "")
        text = (f"{path[:60]}... is too long, with {len(os.fsencode(path)):,} bytes: most disks take names "
                "of at most 255, and paths of 4,095; give a shorter one")
    return printable(" ".join(str(text).split()))


def printable(text):
    """Return text, which may come from a file, with what a terminal would obey escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
