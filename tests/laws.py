"""How a line of the house reads: a law is a function (tree, lines) -> [(line, what is wrong, instead)].

test_laws.py says which law holds for which files, and counts the exceptions that are left.
"""
import ast
import functools
import io
import re
import textwrap
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUNCTION_LINES, OUTSIDE_LINES, PARAMETERS, ATTRIBUTES, RUN_ATTRIBUTES = 50, 60, 6, 16, 12
COLUMNS, MAINLINE_COLUMNS, FILE_LINES, TEST_LINES = 110, 100, 600, 750
README_LINES, README_COLUMNS = (120, 150), 100  # lines outside code blocks
SHORT_FUNCTION = 15  # a longer function's names are words
LETTERS = {*"BTCtnHDhGgFfVLEKeNR", *"ijxyqkvp_"}  # model.py's legend explains the first ones
GRADIENTS = {"g", "gs", "dx", "dy", "dz", "dw", "dq", "dk", "dv", "do", "db", "da", "dh"}

FUNCTION = ast.FunctionDef, ast.AsyncFunctionDef
COMPREHENSION = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp


def short(node, most=60):
    """The source of a node on one line, cut after `most` characters."""
    text = " ".join((node if isinstance(node, str) else ast.unparse(node)).split())
    return text if len(text) <= most else text[:most] + "..."


def parents_of(tree):
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def inside(node, kinds):
    """The nodes of these kinds below a node, without itself."""
    return [child for child in ast.walk(node) if child is not node and isinstance(child, kinds)]


def leaves(target):
    """The names, attributes and items that a target binds: 3 for `a, (b, *c)`."""
    if isinstance(target, ast.Starred):
        return leaves(target.value)
    if isinstance(target, (ast.Tuple, ast.List)):
        return [leaf for element in target.elts for leaf in leaves(element)]
    return [target]


def last_name(node):
    """`c` of a.b.c, of a.b.c(...) and of c."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def bindings(node):
    """(target, value) of each single binding of an assignment; (target, iterable) of a loop."""
    if isinstance(node, (ast.For, ast.comprehension)):
        yield node.target, node.iter
    for target in getattr(node, "targets", []) if isinstance(node, ast.Assign) else []:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


# -----------------------------------------------------------------------------
# Form, everywhere in the house

def statement(tree, lines):
    """A statement is no conditional expression, no `and` or `or`, no tuple of calls, no comprehension."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr):
            continue
        value = node.value
        if isinstance(value, ast.IfExp):
            instead = f"`if {short(value.test)}:` and `{short(value.body)}` on the next line"
            if not isinstance(value.orelse, ast.Constant):
                instead += f", then `else:` and `{short(value.orelse)}`"
            found.append((node.lineno, "a conditional expression as a statement", instead))
        elif isinstance(value, ast.BoolOp):
            *tests, last = value.values
            test = (" and " if isinstance(value.op, ast.And) else " or ").join(map(ast.unparse, tests))
            test = test if isinstance(value.op, ast.And) else f"not ({test})"
            found.append((node.lineno, "`and` or `or` as a statement",
                          f"`if {short(test)}:` and `{short(last)}` on the next line"))
        elif isinstance(value, (ast.Tuple, ast.List)):
            found.append((node.lineno, "a tuple of calls as a statement",
                          "a line each: " + ", ".join(f"`{short(e, 30)}`" for e in value.elts)))
        elif isinstance(value, COMPREHENSION):
            found.append((node.lineno, "a comprehension as a statement", "a `for` loop"))
    return found


def nested_conditional(tree, lines):
    """A conditional expression holds no other."""
    outer = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            outer.update(dict.fromkeys(inside(node, ast.IfExp), node))
    return [(node.lineno, f"`{short(node, 40)}` is a conditional inside another",
             "a small function with an `if` and a `return` per case, or an `if` statement") for node in outer]


PREDICATES = {"bool", "isinstance", "issubclass", "any", "all", "callable", "hasattr", "startswith",
              "endswith", "isdigit", "exists", "is_file", "is_dir"}


def is_condition(node, flags=()):
    """Whether an expression is true or false, as far as it shows."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool)
    if isinstance(node, (ast.Call, ast.Name, ast.Attribute)):
        name = last_name(node)
        if name == "int" and isinstance(node, ast.Call) and node.args:
            return is_condition(node.args[0], flags)
        known = name in PREDICATES if isinstance(node, ast.Call) else key(node) in flags
        return known or name.startswith(("is_", "has_"))
    if isinstance(node, ast.BoolOp):
        return any(is_condition(value, flags) for value in node.values)
    return isinstance(node, ast.Compare)


@functools.cache
def config_flags():
    """`.name` of each field of Config that is true or false."""
    source = ast.parse((ROOT / "config.py").read_text())
    return {name for node in source.body if isinstance(node, ast.ClassDef) for name in fields(node)}


def fields(node):
    """`.name` of each field of a class that is declared as bool."""
    return {f".{part.target.id}" for part in node.body
            if isinstance(part, ast.AnnAssign) and ast.unparse(part.annotation) == "bool"}


def conditional_properties(node):
    """`.name` of each property of a class that returns a condition and nothing else."""
    found = set()
    for part in node.body:
        if isinstance(part, FUNCTION) and any(last_name(m) in ("property", "cached_property")
                                              for m in part.decorator_list):
            returned = [line.value for line in ast.walk(part) if isinstance(line, ast.Return)]
            if returned and all(value is not None and is_condition(value) for value in returned):
                found.add(f".{part.name}")
    return found


def key(node):
    """`name` of a variable, `.name` of an attribute."""
    return f".{node.attr}" if isinstance(node, ast.Attribute) else last_name(node)


def bool_arguments(node):
    """The arguments whose default is True or False."""
    positional = node.posonlyargs + node.args
    pairs = [*zip(positional[::-1], node.defaults[::-1], strict=False),
             *zip(node.kwonlyargs, node.kw_defaults, strict=True)]
    return {argument.arg for argument, default in pairs
            if isinstance(default, ast.Constant) and isinstance(default.value, bool)}


def names_of_conditions(tree):
    """What a file or function binds to conditions and to nothing else, or declares as bool."""
    flags, others = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target, value in bindings(node):
                (flags if is_condition(value) else others).update(key(leaf) for leaf in leaves(target))
        elif isinstance(node, ast.ClassDef):
            flags |= fields(node) | conditional_properties(node)
        elif isinstance(node, ast.arguments):
            flags |= bool_arguments(node)
    return flags - others | config_flags()


def product(tree, lines):
    """A condition does not multiply a text or a list, and does not choose from a literal."""
    found, parents = [], parents_of(tree)
    attributes = {flag for flag in names_of_conditions(tree) if flag.startswith(".")}
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right), (node.right, node.left)
        elif isinstance(node, ast.Subscript):
            sides = [(node.value, node.slice)]
        else:
            continue
        scope = node
        while scope in parents and not isinstance(scope, FUNCTION):
            scope = parents[scope]
        flags = attributes | names_of_conditions(scope)
        for thing, factor in sides:
            is_text = isinstance(thing, ast.JoinedStr) or (
                isinstance(thing, ast.Constant) and isinstance(thing.value, (str, bytes)))
            if not is_condition(factor, flags):
                continue
            test = factor.args[0] if isinstance(factor, ast.Call) and last_name(factor) == "bool" else factor
            if is_text:
                instead = f"`{short(thing, 30)} if {short(test, 40)} else \"\"`, or an `if` statement"
            elif isinstance(thing, (ast.List, ast.Tuple, ast.ListComp)):
                instead = f"`if {short(test, 40)}:`, which extends the list"
            else:
                continue
            found.append((node.lineno, f"`{short(node)}` makes a number of a condition", instead))
    return found


def holds_a_tuple(value):
    """Whether the right side is written as several values, also in a branch of a conditional."""
    if isinstance(value, ast.IfExp):
        return holds_a_tuple(value.body) or holds_a_tuple(value.orelse)
    return isinstance(value, (ast.Tuple, ast.List))


def tuple_assignments(tree):
    """(node, targets, value) of each assignment with a tuple on the left."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, (ast.Tuple, ast.List)):
                    yield node, target, node.value


def one_per_line(target, value):
    if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
        pairs = zip(target.elts, value.elts, strict=True)
        return "a line each: " + ", ".join(f"`{short(a, 20)} = {short(b, 25)}`" for a, b in pairs)
    return "an assignment per line, or an `if` statement"


def tuple_assignment(tree, lines):
    """Three targets and more only unpack one value."""
    return [(node.lineno, f"{len(leaves(target))} targets get a value each", one_per_line(target, value))
            for node, target, value in tuple_assignments(tree)
            if holds_a_tuple(value) and len(leaves(target)) > 2]


def comprehension(tree, lines):
    """A comprehension has two `for` at most."""
    return [(node.lineno, f"{len(node.generators)} `for` in a comprehension", "a loop, or a generator")
            for node in ast.walk(tree) if isinstance(node, COMPREHENSION) and len(node.generators) > 2]


def held_lambdas(value):
    """The lambdas that an assignment binds: the value, its elements, its branches."""
    if isinstance(value, ast.IfExp):
        return held_lambdas(value.body) + held_lambdas(value.orelse)
    if isinstance(value, (ast.Tuple, ast.List)):
        return [held for element in value.elts for held in held_lambdas(element)]
    if isinstance(value, ast.BoolOp):
        return [held for element in value.values for held in held_lambdas(element)]
    return [value] if isinstance(value, ast.Lambda) else []


def lambda_(tree, lines):
    """A lambda is not assigned; it holds no conditional, no comprehension and no lambda."""
    found = []
    for node in ast.walk(tree):
        pairs = [(node.target, node.value)] if isinstance(node, (ast.AnnAssign, ast.NamedExpr)) else []
        for target, value in pairs or (bindings(node) if isinstance(node, ast.Assign) else ()):
            for held in held_lambdas(value):
                head = f"def {last_name(target) or 'name'}({short(held.args, 30)}):"
                found.append((held.lineno, f"a lambda is assigned to `{short(target, 30)}`",
                              f"`{head}` and `return {short(held.body, 40)}`"))
        if isinstance(node, ast.Lambda):
            for kinds, what in ((ast.IfExp, "conditional"), (COMPREHENSION, "comprehension"),
                                (ast.Lambda, "lambda")):
                if inside(node, kinds):
                    found.append((node.lineno, f"a lambda holds a {what}", "a function with a name"))
    return found


def walrus(tree, lines):
    """`:=` is the whole test of an `if` or `while`, or `(x := f()) is not None` there."""
    found, parents = [], parents_of(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.NamedExpr):
            continue
        test, parent = node, parents[node]
        if (isinstance(parent, ast.Compare) and parent.left is node and isinstance(parent.ops[0], ast.IsNot)
                and len(parent.ops) == 1 and ast.unparse(parent.comparators[0]) == "None"):
            test, parent = parent, parents[parent]
        if not (isinstance(parent, (ast.If, ast.While)) and parent.test is test):
            found.append((node.lineno, f"`{short(node, 40)}` inside an expression",
                          f"`{short(node.target)} = {short(node.value, 40)}` on a line of its own before it"))
    return found


def is_kernel(node):
    """Whether Triton compiles this function."""
    return any(last_name(mark) in ("jit", "autotune", "heuristics") for mark in node.decorator_list)


def functions(tree):
    """The functions, without Triton's kernels and without forward and backward of autograd Functions."""
    fixed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(last_name(base) == "Function" for base in node.bases):
            fixed |= {part for part in node.body if getattr(part, "name", "") in ("forward", "backward")}
    return [node for node in ast.walk(tree)
            if isinstance(node, FUNCTION) and node not in fixed and not is_kernel(node)]


def length(node):
    return node.end_lineno - node.lineno + 1


def function_length(tree, lines, most=FUNCTION_LINES):
    """A function has 50 lines at most, its decorators not counted."""
    return [(node.lineno, f"{node.name} has {length(node)} lines, {most} are allowed",
             "functions of one thought each, with names that say it")
            for node in functions(tree) if length(node) > most]


def outside_function_length(tree, lines):
    """A function of a measurement, a test or the tutorial has 60 lines at most."""
    return function_length(tree, lines, OUTSIDE_LINES)


def arguments_of(node):
    """The names of the parameters that can be given by position, without self, cls and ctx."""
    names = [argument.arg for argument in node.args.posonlyargs + node.args.args]
    return names[1:] if names[:1] in (["self"], ["cls"], ["ctx"]) else names


def arguments_in_all(tree, lines):
    """metrics_row and checkpoint.save have six parameters in all, by name or not."""
    found = []
    for node in tree.body:
        if isinstance(node, FUNCTION) and node.name in ("metrics_row", "save"):
            number = len(arguments_of(node)) + len(node.args.kwonlyargs)
            if number > PARAMETERS:
                found.append((node.lineno, f"{node.name} has {number} parameters, {PARAMETERS} are allowed",
                              "an object for what belongs together"))
    return found


def parameters(tree, lines):
    """A function has six parameters at most that can be given without their name."""
    found = []
    for node in functions(tree):
        names = arguments_of(node)
        if len(names) > PARAMETERS:
            found.append((node.lineno, f"{node.name} has {len(names)} parameters that can be given by "
                          f"position, {PARAMETERS} are allowed",
                          f"a `*` before `{names[PARAMETERS]}` or earlier"))
    return found


def modules_of(tree):
    """The classes of a file that are an nn.Module, by their bases in this file."""
    names = {"Module"}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for _ in classes:
        names |= {node.name for node in classes if any(last_name(base) in names for base in node.bases)}
    return [node for node in classes if node.name in names]


def is_layer(value):
    """Whether a value of an nn.Module's attribute is a layer or a parameter."""
    if isinstance(value, ast.IfExp):
        return is_layer(value.body) or is_layer(value.orelse)
    if not isinstance(value, ast.Call):
        return False
    name = last_name(value)
    return name == "parameter" or name[:1].isupper() or ast.unparse(value).startswith("nn.")


def attributes_of(node, is_module):
    """The names that a class's methods set on self."""
    layers = set()
    for part in ast.walk(node):
        if is_module and isinstance(part, ast.Assign) and is_layer(part.value):
            layers |= set(part.targets)
    return {part.attr for part in ast.walk(node)
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and part not in layers
            and ast.unparse(part.value) == "self"}


def is_record(node):
    """Whether a class is a dataclass or a NamedTuple."""
    marks = [last_name(mark) for mark in node.decorator_list + node.bases]
    return "dataclass" in marks or "NamedTuple" in marks


def too_many(node, names, most):
    listed = ", ".join(sorted(names))
    return (node.lineno, f"{node.name} sets {len(names)} attributes, {most} are allowed: {listed}",
            "smaller objects, and local variables")


def attributes(tree, lines):
    """A class sets 16 attributes at most: dataclasses, NamedTuples and the layers of a module aside."""
    modules = modules_of(tree)
    sets = {node: attributes_of(node, node in modules) for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef) and not is_record(node)}
    return [too_many(node, names, ATTRIBUTES) for node, names in sets.items() if len(names) > ATTRIBUTES]


def run_attributes(tree, lines):
    """Run, and each object of train.py that it makes, has twelve attributes at most: fields count, too."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names = attributes_of(node, False) | {
                part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
            if len(names) > RUN_ATTRIBUTES:
                found.append(too_many(node, names, RUN_ATTRIBUTES))
    return found


def columns(tree, lines, most=COLUMNS):
    """A line has 110 columns at most."""
    return [(number, f"{len(line)} columns, {most} are allowed", "two lines, or shorter: a name for a part")
            for number, line in enumerate(lines, 1) if len(line) > most]


# -----------------------------------------------------------------------------
# Form, in the mainline besides

def mainline_columns(tree, lines):
    """A line of the mainline has 100 columns at most."""
    return columns(tree, lines, MAINLINE_COLUMNS)


def is_shape(value):
    """Whether a value is `x.shape`, `x.size()`, or a piece of one."""
    if isinstance(value, ast.Subscript):
        return is_shape(value.value)
    return last_name(value) in ("shape", "size")


def swaps_or_shifts(target, value):
    """Whether all targets but one get the value of another target: `a, b = b, a`; `last, x = x, new`."""
    if not isinstance(value, (ast.Tuple, ast.List)) or len(value.elts) != len(target.elts):
        return False
    names = [ast.unparse(element) for element in target.elts]
    values = [ast.unparse(element) for element in value.elts]
    moved = [new for old, new in zip(names, values, strict=True) if new in names and new != old]
    return len(moved) >= len(names) - 1 > 0


def mainline_tuple(tree, lines):
    """A tuple on the left unpacks one value, swaps or shifts."""
    found = []
    for node, target, value in tuple_assignments(tree):
        bound = len(leaves(target))
        if holds_a_tuple(value):
            if not swaps_or_shifts(target, value):
                found.append((node.lineno, f"{bound} targets get a value each", one_per_line(target, value)))
        elif bound > 3 and not is_shape(value):
            found.append((node.lineno, f"`{short(value, 40)}` is unpacked into {bound} names, 3 are allowed",
                          "a NamedTuple with names for its fields"))
    return found


def mainline_comprehension(tree, lines):
    """A comprehension has one `for`, and holds no other comprehension."""
    found, nested = [], set()
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSION):
            nested |= set(inside(node, COMPREHENSION))
            if len(node.generators) > 1:
                found.append((node.lineno, f"{len(node.generators)} `for` in a comprehension",
                              "a loop, or a function that yields"))
    return found + [(node.lineno, f"`{short(node, 40)}` inside another comprehension",
                     "a name for the inner one, on a line before, or a loop") for node in nested]


def bound_names(node):
    """(line, name) of each parameter and variable that a function binds, also in functions inside it."""
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            yield part.lineno, part.arg
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.lineno, part.id
        elif isinstance(part, ast.ExceptHandler) and part.name:
            yield part.lineno, {"e": "e (an exception)"}.get(part.name, part.name)


def names(tree, lines):
    """Names are words in a function of more than 15 lines."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, FUNCTION) and length(node) > SHORT_FUNCTION:
            found |= {(line, name) for line, name in bound_names(node)
                      if re.fullmatch(r"\w\d*( .*)?", name) and name.rstrip("0123456789") not in LETTERS}
    instead = "a word; one letter only of model.py's legend, i j, x y, q k v, p"
    return [(line, f"`{name}` is not a word", instead) for line, name in sorted(found)]


def is_number(name, function):
    """Whether a function calculates with a name, or counts up to it."""
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp):
            used = [node.left, node.right]
        elif isinstance(node, ast.Call) and last_name(node) == "range":
            used = node.args
        else:
            continue
        if any(isinstance(part, ast.Name) and part.id == name for part in used):
            return True
    return False


def parameter_name(tree, lines):
    """`p` is an nn.Parameter and nothing else."""
    found = []
    for node in ast.walk(tree):
        for target, value in bindings(node):
            text = ast.unparse(value)
            if isinstance(node, ast.Assign):
                is_one = "param" in text.lower() or text.startswith("p.")
            else:
                is_one = not text.startswith(("range(", "enumerate(range("))
            if "p" in [getattr(leaf, "id", "") for leaf in leaves(target)] and not is_one:
                found.append((target.lineno, f"`p = {short(value)}` is no nn.Parameter",
                              "the word for what it is: `size`, `gates`, `path`"))
        if isinstance(node, FUNCTION):
            names = arguments_of(node)
            if "p" in names and (names[0] != "p" or is_number("p", node)):
                found.append((node.lineno, f"the argument `p` of {node.name} is not an nn.Parameter",
                              "the word for what it is: `size`, `gates`, `path`"))
    return found


def gradient(tree, lines):
    """A gradient is called `grad`."""
    heads = {leaf.lineno for node in ast.walk(tree) if isinstance(node, ast.Assign)
             and re.search("head|kv|shape|size", ast.unparse(node.value))
             for target in node.targets for leaf in leaves(target)}
    return [(line, f"a gradient is called `{name}`", "`grad`, or `grad_x` where there are several")
            for line, name in bound_names(tree) if name in GRADIENTS and not (name == "g" and line in heads)]


def docstrings(tree):
    """(line, text) of each docstring, its indentation taken away."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTION)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) \
                    and isinstance(first.value.value, str):
                yield first.lineno, ast.get_docstring(node)


def docstring(tree, lines):
    """A docstring begins as a sentence; its first paragraph has one or two lines, and an end."""
    found = []
    for line, text in docstrings(tree):
        first = re.split(r"\n\s*\n", text.strip(), maxsplit=1)[0].splitlines() or [""]
        if not re.match(r"[A-Z(\d`]", first[0]):
            found.append((line, f"the docstring begins with `{short(first[0], 30)}`",
                          "a capital letter, or a shape `(n, C)`: \"Return the ...\", \"Whether ...\""))
        if len(first) > 2:
            found.append((line, f"the docstring's first paragraph has {len(first)} lines, 2 are allowed",
                          "one sentence, an empty line, then the rest"))
        if not first[-1].rstrip().endswith((".", ":", "?")):
            found.append((line, f"the docstring's first paragraph ends with `{short(first[-1][-20:])}`",
                          "a full stop"))
    return found


# -----------------------------------------------------------------------------
# Prose

def arrow(tree, lines):
    """A docstring does not begin with an arrow."""
    return [(line, f"the docstring begins with `{short(text, 30)}`", "\"Return ...\", a sentence")
            for line, text in docstrings(tree) if text.strip().startswith("->")]


RULER = re.compile(r"#\s*[-=#*]{4,}.*|#")
PRAGMA = re.compile(r"#(!|\s*(noqa|isort|fmt|type:|ruff|pragma|pylint|coding|-\*-))")
COLLECTIVE = re.compile(
    r"\.(start_)?(all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|all_gather_object|gather_objects|"
    r"broadcast_object|any|isend|irecv|batch_isend_irecv)\b|\b_?(gather|scatter)_(rows|segments)\b|_single\(")
LABEL = re.compile(r"\bover\b|\baxis\b")  # what moves, over which axis
ABBREVIATION = re.compile(r"(\b(e\.g|i\.e|etc|vs|al|cf|approx|resp|eq|fig|sec|no)|\.\.|\b[A-Z])\.$", re.I)


def comments(lines):
    """(first line, text) of each comment on lines of its own; neighbouring lines are one comment."""
    tokens = tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline)
    found = []  # first line, last line, texts
    behind = {}  # column of the comment behind code, by line
    for token in tokens:
        number, column = token.start
        if token.type != tokenize.COMMENT:
            continue
        if lines[number - 1][:column].strip() or behind.get(number - 1) == column:
            behind[number] = column  # it goes on on the next line, at the same column
            continue
        if RULER.fullmatch(token.string.strip()) or PRAGMA.match(token.string):
            continue
        text = token.string.lstrip("#").strip()
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number, found[-1][2] + [text]
        else:
            found.append((number, number, [text]))
    return found


def begins_well(word):
    """Whether a word may begin a sentence: a capital, a number, a flag, a shape, or what looks like code."""
    return not re.match(r"[a-z]", word) or re.search(r"[_(\[=/\d]|\w\.\w|[A-Z]", word) is not None


def help_lines(tree):
    """The lines of the bodies of dataclasses: the comments there are the help of the fields."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and is_record(node):
            found |= set(range(node.lineno, node.end_lineno + 1))
            for part in node.body:
                if isinstance(part, FUNCTION):
                    found -= set(range(part.lineno, part.end_lineno + 1))
    return found


def is_label(text, lines, last):
    """Whether a comment says what the collective on the line before or after it moves."""
    near = lines[last:last + 3]
    return LABEL.search(text) is not None and any(COLLECTIVE.search(line) for line in near)


def comment(tree, lines):
    """A comment on lines of its own is sentences: a capital at the start and after a full stop."""
    found, helps = [], help_lines(tree)
    for line, last, texts in comments(lines):
        text = " ".join(texts)
        words = text.split()
        if len(words) < 4:
            continue
        may_begin_small = line in helps or is_label(text, lines, last)
        if not begins_well(words[0]) and not may_begin_small:
            found.append((line, f"the comment begins with `{short(text, 30)}`",
                          f"`{short(text[0].upper() + text[1:], 40)}` (or `backticks`, if this is code)"))
        for before, word in zip(words, words[1:], strict=False):
            ends = re.search(r"[.?!][)\"'`]*$", before) and not ABBREVIATION.search(before)
            if ends and not begins_well(word):
                found.append((line, f"a sentence of the comment begins with `{short(word, 30)}`",
                              f"`{word[0].upper()}{word[1:]}`, or no full stop before it"))
    return found


# -----------------------------------------------------------------------------
# Size

def size(tree, lines, most=FILE_LINES):
    """A file has 600 lines at most."""
    if len(lines) <= most:
        return []
    return [(most + 1, f"{len(lines)} lines, {most} are allowed", "two files, each with its own subject")]


def tests_size(tree, lines):
    """A file of tests has 750 lines at most."""
    return size(tree, lines, TEST_LINES)


def readme(tree, lines):
    """The README has 120 to 150 lines outside its code blocks, of 100 columns at most."""
    found, counted, is_code = [], 0, False
    for line in lines:
        fence = line.lstrip().startswith("```")
        counted += not (is_code or fence)
        is_code = is_code != fence
    least, most = README_LINES
    if not least <= counted <= most:
        found.append((1, f"{counted} lines outside the code blocks, {least} to {most} are allowed",
                      "what a newcomer needs; the rest is a page of docs/ and a link"))
    return found + columns(tree, lines, README_COLUMNS)


def parse(code):
    return ast.parse(textwrap.dedent(code))
