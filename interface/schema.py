"""JSON from a file, read and checked: it may be cut, or of another program."""
import json
import os
import reprlib
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

KINDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", list: "a list",
         dict: "an object", type(None): "null"}


@dataclass(frozen=True)
class Range:
    """For check_schema: a number from low to high; a whole one where both are whole."""
    low: float = 0
    high: float = 2**63 - 1  # what fits into 8 bytes


class ChangedFile(ValueError):
    """Somebody cut or changed a file while a run reads it: one rank learns of it, in the middle of a step."""


def load_json(path):
    """Return what a UTF-8 JSON file holds. ValueError: it is no JSON; the line names it."""
    data = Path(path).read_bytes()
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} holds no sound JSON: {e}") from None


def load_json_of_others(path, most):
    """Return what a JSON file of others holds: see load_json. ValueError: it has more than `most` bytes."""
    size = os.path.getsize(path)
    if size > most:
        raise ValueError(f"{path} has {size:,} bytes, more than {most:,}: it is no such file")
    return load_json(path)


def check_schema(value, schema, where, path=""):
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
        raise ValueError(f"{where}: {(path + below).removeprefix('.') or 'the content'} {text}")


def mismatch(value, schema):
    """Return None, or (the path from a value to the first wrong one in it, what is wrong there).

    The path is built on the way back, only if something is wrong: an index.json may have a million values.
    """
    wanted = unlike(value, schema)
    if wanted:
        return "", f"is {reprlib.repr(value)[:60]}, not {wanted}"
    if isinstance(schema, list):
        for i, element in enumerate(value):
            wrong = mismatch(element, schema[i if len(schema) > 1 else 0])
            if wrong:
                return f"[{i}]{wrong[0]}", wrong[1]
    elif isinstance(schema, dict):
        for key, inner in schema.items():
            name = key.removesuffix("?")
            if name == key != "*" and name not in value:
                return "", f"lacks {name}"
            for found in value if key == "*" else [name]:
                wrong = mismatch(value[found], inner) if found in value else None
                if wrong:
                    return f".{found}{wrong[0]}", wrong[1]
    return None


def unlike(value, schema):
    """Return what a value should be, or "" if it is that, but for what is inside a list or an object."""
    if isinstance(schema, type):
        is_right = is_a(value, schema)
        wanted = KINDS[schema]
    elif isinstance(schema, dict):
        is_right = isinstance(value, dict)
        wanted = "an object"
    elif isinstance(schema, list):
        is_right = isinstance(value, list) and len(schema) in (1, len(value))
        wanted = "a list" if len(schema) == 1 else f"a list of {len(schema)}"
    elif isinstance(schema, Range):
        kind = type(schema.low) if type(schema.low) is type(schema.high) else float
        is_right = is_a(value, kind) and schema.low <= value <= schema.high
        wanted = "" if is_right else f"{KINDS[kind]} from {schema.low} to {schema.high}"
    elif isinstance(schema, tuple):
        is_right = any(is_a(value, kind) for kind in schema)
        wanted = " or ".join(KINDS[kind] for kind in schema)
    elif typing.get_origin(schema) is Literal:
        choices = typing.get_args(schema)
        is_right = value in choices
        wanted = "" if is_right else f"one of {', '.join(map(str, choices))}"
    else:
        is_right = schema(value)
        wanted = schema.__doc__
    return "" if is_right else wanted


def is_a(value, kind):
    """Whether a value is of a type of KINDS: true is no number, 1 is a finite number, 1e400 is none."""
    if kind is int or kind is float:
        return type(value) in (int, kind) and abs(value) <= sys.float_info.max
    return isinstance(value, kind)
