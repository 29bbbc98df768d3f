"""Compare what an exercise answers with the right answers, and name the mistake if it is a known one.

    check(yours, name, cases)              a function without ranks; cases: (arguments, right answer)
    grade(yours, name, ask, asked, right)  any function; ask(function) returns its answers to all questions

A mistake of mistakes.py is named if it gives the same answers as your function to all questions of the test,
also to those that both answer right. If no mistake does, the first wrong answer is shown.
"""
import copy
import functools
import math
import reprlib

import pytest
import torch

from tutorial import more_mistakes  # noqa: F401 it adds to the table
from tutorial.mistakes import MISTAKES

LONGEST = 200  # characters that are shown of one answer
SHORT = reprlib.Repr()
SHORT.maxstring = 60
SHORT.maxother = LONGEST
SHORT.maxlist = 8
SHORT.maxtuple = 8


def equal(a, b):
    """Return whether two answers are the same but for rounding. A list and a tuple can be the same."""
    if isinstance(a, Exception):
        return type(a) is type(b)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a.detach(), b.detach().to(a.dtype), equal_nan=True)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, float) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-9)
    return type(a == b) is bool and a == b


def answer(function, arguments):
    """Return what the function returns for a copy of the arguments, or the exception that it raises."""
    try:
        return function(*copy.deepcopy(arguments))
    except NotImplementedError:  # The exercise is not filled in yet.
        raise
    except Exception as error:
        return error


def check(yours, name, cases):
    """Test the function `name` of the module `yours` with cases, [(its arguments, the right answer)]."""
    def ask(some_function):
        return [answer(some_function, arguments) for arguments, _ in cases]

    asked = [f"{name}({', '.join(map(shown, arguments))})" for arguments, _ in cases]
    grade(yours, name, ask, asked, [right for _, right in cases])


def grade(yours, name, ask, asked, right):
    """Fail if the answers of the function `name` are not the right ones. A known mistake is named.

    ask(function) returns the function's answers. asked: [str], the questions. right: the right answers.
    """
    got = ask(getattr(yours, name))
    if equal(got, right):
        return
    first = [equal(a, b) for a, b in zip(got, right, strict=True)].index(False)
    wrong = f"{asked[first]} -> {shown(got[first])}; right is {shown(right[first])}"
    for mistake, sentence in MISTAKES[name]:
        if equal(got, answers_of(ask, mistake)):
            pytest.fail(f"{sentence}\n  ({mistake.__name__}) {wrong}", pytrace=False)
    if isinstance(got[first], Exception):
        raise got[first]
    pytest.fail(wrong, pytrace=False)


@functools.cache
def answers_of(ask, mistake):
    return ask(mistake)


def shown(value):
    """Return the value as text, at most LONGEST characters and on one line."""
    if isinstance(value, ValueError):
        return "a ValueError"
    if isinstance(value, torch.Tensor) and value.dim() > 1:
        last = [round(x, 4) for x in value[-1].tolist()]
        return f"{tuple(value.shape)} with the last row {SHORT.repr(last)}"
    text = " ".join(SHORT.repr(value).split())
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."
