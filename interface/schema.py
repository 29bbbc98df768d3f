"""JSON from a file, read and checked: it may be cut, foreign, or made to do harm."""
import json
import reprlib
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
    if wrong := mismatch(value, schema):
        below, text = wrong
        path = below[1:] if path == "the content" and below.startswith(".") else path + below
        raise ValueError(f"{where}: {path} {text}")


def mismatch(value, schema):
    """-> None, or (the path from value to the first wrong one in it, what is wrong there). It is built on the
    way back, only if something is wrong: an index.json may have a million values."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return unlike(value, WORDS[dict])
        for key, inner in schema.items():
            name = key.removesuffix("?")
            if name == key != "*" and name not in value:
                return "", f"lacks {name}"
            for k in value if key == "*" else [name] * (name in value):
                if wrong := mismatch(value[k], inner):
                    return f".{k}{wrong[0]}", wrong[1]
    elif isinstance(schema, list):
        if not isinstance(value, list) or len(schema) not in (1, len(value)):
            return unlike(value, WORDS[list] + f" of {len(schema)}" * (len(schema) > 1))
        for i, inner in enumerate(schema * len(value) if len(schema) == 1 else schema):
            if wrong := mismatch(value[i], inner):
                return f"[{i}]{wrong[0]}", wrong[1]
    elif isinstance(schema, Range):
        kind = int if type(schema.low) is type(schema.high) is int else float
        if type(value) not in (int, kind) or not schema.low <= value <= schema.high:
            return unlike(value, f"{WORDS[kind]} from {schema.low} to {schema.high}")
    elif isinstance(schema, (type, tuple)):
        kinds = schema if isinstance(schema, tuple) else (schema,)
        if not any(is_a(value, kind) for kind in kinds):
            return unlike(value, " or ".join(WORDS[kind] for kind in kinds))
    elif typing.get_origin(schema) is Literal:
        if value not in (values := typing.get_args(schema)):
            return unlike(value, f"one of {', '.join(map(str, values))}")
    elif not schema(value):
        return unlike(value, " ".join(schema.__doc__.split()))


def is_a(value, kind):
    """Whether a value is of a type of WORDS: true is no number, 1 is a finite number, 1e400 is none."""
    if kind is int or kind is float:
        return type(value) in (int, kind) and abs(value) <= sys.float_info.max
    return isinstance(value, kind)


def unlike(value, what):
    return "", f"is {reprlib.repr(value)[:60]}, not {what}"
