"""JSON from a file, read and checked: it may be cut, foreign, or made to do harm."""
import itertools
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
