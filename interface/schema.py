"""JSON from a file, read and checked: it may be cut, foreign, or made to do harm."""
import errno
import json
import os
import reprlib
import stat
import sys
import typing
from dataclasses import dataclass
from typing import Literal

WORDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", list: "a list",
         dict: "an object", type(None): "null"}
NUMBERS = {int: "a whole number", float: "a number"}  # of a Range, which names its bounds


@dataclass(frozen=True)
class Range:
    """For check_schema: a number from low to high; a whole one where both are whole."""
    low: float = 0
    high: float = 2**63 - 1  # what fits into 8 bytes


class ChangedFile(ValueError):
    """Somebody cut or changed a file while a run reads it: one rank learns of it, in the middle of a step."""


def open_file(path):
    """Open a file for reading bytes. OSError: it cannot be read, or is a directory; the line names it.

    ValueError: it is a pipe or a device, which may have no end.

    It does not wait until somebody writes into a pipe, as open() does.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ValueError(f"{path} is a pipe or a device, not a file")


def read_file(path):
    """Return the bytes of a file; see open_file."""
    with open_file(path) as f:
        return f.read()


def load_json(path):
    """Return what a UTF-8 JSON file holds.

    OSError: it cannot be read. ValueError: it is no JSON, or no file; the line names it.
    """
    def refuse(word):
        raise ValueError(f"{word} is no number in JSON")

    data = read_file(path)
    try:
        return json.loads(data.decode(), parse_constant=refuse)
    except RecursionError:
        raise ValueError(f"{path} holds no sound JSON: it is nested too deep") from None
    except ValueError as e:
        raise ValueError(f"{path} holds no sound JSON: {e}") from None


def load_json_of_others(path, most):
    """Return what a JSON file of others holds: see load_json. ValueError: it has more than `most` bytes."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is a pipe, a device or a directory, not a file")
    if found.st_size > most:
        raise ValueError(f"{path} has {found.st_size:,} bytes, more than {most:,}: it is no such file")
    return load_json(path)


def check_schema(value, schema, where, path="the content"):
    """Raise ValueError, one line that starts with `where`, unless a value from JSON is as the schema says.

    A schema is
        a type, or a tuple of types    a value of one of them; float takes an int, too
        a Range                        a number
        a Literal                      one of its values
        {key: schema}                  an object: "key?" may be missing, "*" is every key, others are free
        [schema], [a, b]               a list of any length; one of exactly these
        a predicate                    what its docstring says
    """
    wrong = mismatch(value, schema)
    if wrong:
        below, text = wrong
        if path == "the content" and below.startswith("."):
            path = below[1:]
        else:
            path += below
        raise ValueError(f"{where}: {path} {text}")


def mismatch(value, schema):
    """Return None, or (the path from value to the first wrong one in it, what is wrong there).

    The path is built on the way back, only if something is wrong: an index.json may have a million values.
    """
    if isinstance(schema, dict):
        return mismatch_of_object(value, schema)
    if isinstance(schema, list):
        return mismatch_of_list(value, schema)
    if isinstance(schema, Range):
        kind = int if type(schema.low) is type(schema.high) is int else float
        if type(value) not in (int, kind) or not schema.low <= value <= schema.high:
            bounds = f"{schema.low} to {schema.high}" if kind is int else f"{schema.low:g} to {schema.high:g}"
            return unlike(value, f"{NUMBERS[kind]} from {bounds}")
    elif isinstance(schema, (type, tuple)):
        kinds = schema if isinstance(schema, tuple) else (schema,)
        if not any(is_a(value, kind) for kind in kinds):
            return unlike(value, " or ".join(WORDS[kind] for kind in kinds))
    elif typing.get_origin(schema) is Literal:
        choices = typing.get_args(schema)
        if value not in choices:
            return unlike(value, f"one of {', '.join(map(str, choices))}")
    elif not schema(value):
        return unlike(value, " ".join(schema.__doc__.split()))
    return None


def mismatch_of_object(value, schema):
    """Return mismatch() for a schema {key: schema}."""
    if not isinstance(value, dict):
        return unlike(value, WORDS[dict])
    for key, inner in schema.items():
        name = key.removesuffix("?")
        if key == "*":
            keys = value
        elif name in value:
            keys = [name]
        elif name == key:
            return "", f"lacks {name}"
        else:
            keys = []
        for k in keys:
            wrong = mismatch(value[k], inner)
            if wrong:
                return f".{k}{wrong[0]}", wrong[1]
    return None


def mismatch_of_list(value, schema):
    """Return mismatch() for a schema [schema] or [a, b]."""
    if not isinstance(value, list) or len(schema) not in (1, len(value)):
        length = f" of {len(schema)}" if len(schema) > 1 else ""
        return unlike(value, WORDS[list] + length)
    for i, element in enumerate(value):
        wrong = mismatch(element, schema[0] if len(schema) == 1 else schema[i])
        if wrong:
            return f"[{i}]{wrong[0]}", wrong[1]
    return None


def is_a(value, kind):
    """Whether a value is of a type of WORDS: true is no number, 1 is a finite number, 1e400 is none."""
    if kind is int or kind is float:
        return type(value) in (int, kind) and abs(value) <= sys.float_info.max
    return isinstance(value, kind)


def unlike(value, what):
    """Return mismatch() for a value that is itself the wrong one."""
    return "", f"is {reprlib.repr(value)[:60]}, not {what}"
