"""Python to JavaScript, for the part of Python in which cost/ and plan.py are written.

    translate   the JavaScript of some functions, classes and constants of a file
    names_used  the names that these load, all of which must be defined somewhere

It knows no types. What Python decides by type, such as + or `in`, becomes a call of bench/planner/runtime.js:
$add, $has. A construct that it does not know is an error and never something similar.
"""
import ast
import json
from pathlib import Path

RESERVED = {"new", "default", "function", "var", "let", "const", "this", "switch", "case", "delete", "typeof",
            "void", "super", "export", "enum", "null"}
BINARY = {ast.Add: "$add", ast.Sub: "$sub", ast.Mult: "$mul", ast.Div: "$div", ast.FloorDiv: "$floordiv",
          ast.Mod: "$mod", ast.Pow: "$pow"}
COMPARE = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
FUNCTION_NODES = ast.FunctionDef, ast.Lambda
# What is cached in Python is cached in the browser, too.
CACHES = {"cache", "functools.cache"}


class Unknown(ValueError):
    """A construct of Python that is not translated."""


def translate(path, names, renamed=None):
    """Return the JavaScript of the names that a file of Python defines, in the order of the file.

    renamed: {name: another}, for a name that two files define.
    """
    written = []
    tree = ast.parse(Path(path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and renamed:
            node.id = renamed.get(node.id, node.id)
        if isinstance(node, ast.FunctionDef) and renamed:
            node.name = renamed.get(node.name, node.name)
    wanted = {(renamed or {}).get(name, name) for name in names}
    for node in tree.body:
        defined = names_of(node)
        if not wanted & defined:
            continue
        wanted -= defined
        written.append(statement(node))
    if wanted:
        raise Unknown(f"{path} does not define {', '.join(sorted(wanted))}")
    return "\n".join(written)


def names_used(path, names):
    """Return the names that the translated parts of a file load and do not bind themselves."""
    used = set()
    for node in ast.parse(Path(path).read_text()).body:
        if not names_of(node) & set(names):
            continue
        if isinstance(node, ast.ClassDef):  # of a class of modules only __init__ is translated
            parts = [part for part in node.body if getattr(part, "name", "") == "__init__"]
        else:
            parts = [node]
        for part in parts:
            used |= loaded(part)
    return used


def loaded(node):
    """Return the names that a statement loads, without its local ones and annotations."""
    loads = set()
    binds = set()
    decorators = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and id(part) not in decorators:
            (loads if isinstance(part.ctx, ast.Load) else binds).add(part.id)
        if isinstance(part, ast.arg):
            binds.add(part.arg)
        if isinstance(part, ast.FunctionDef):
            binds.add(part.name)
            decorators |= {id(name) for decorator in part.decorator_list for name in ast.walk(decorator)}
    return loads - binds


def names_of(node):
    """Return the names that a statement of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return set()


def safe(name):
    return f"{name}$" if name in RESERVED else name


# -----------------------------------------------------------------------------
# Statements

def statement(node, at_top=True):
    """Return a statement as JavaScript. at_top: it belongs to a module, so its names are declared here."""
    kind = type(node).__name__
    handler = globals().get(f"write_{kind}")
    if handler is None:
        raise Unknown(f"line {node.lineno}: {kind}")
    if kind == "Assign":
        return handler(node, declares=at_top)
    return handler(node)


def block(nodes):
    return "\n".join(text for text in (statement(node, at_top=False) for node in nodes) if text)


def write_FunctionDef(node):
    text = function(node, node.name)
    names = json.dumps(parameters(node.args)[0])
    text += f"\n{safe(node.name)}.$p = {names};"
    if node.args.kwarg:
        text += f"\n{safe(node.name)}.$kw = true;"
    if any(ast.unparse(decorator) in CACHES for decorator in node.decorator_list):
        text += f"\n{safe(node.name)} = $cache({safe(node.name)});"
    return text


def function(node, name=""):
    """Return a function as JavaScript, whose local names are declared in its first line."""
    known, text = parameters(node.args)
    is_generator = any(isinstance(part, (ast.Yield, ast.YieldFrom)) for part in own_nodes(node))
    star = "*" if is_generator else ""
    local = sorted({part.id for part in own_nodes(node)
                    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)} - set(known))
    declared = f"let {', '.join(map(safe, local))};\n" if local else ""
    return f"function{star} {safe(name)}({text}) {{\n{declared}{block(node.body)}\n}}"


def parameters(arguments):
    """Return (names of the parameters, their text in JavaScript)."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    names = []
    written = []
    for parameter, default in zip([*positional, *arguments.kwonlyargs], [*defaults, *arguments.kw_defaults],
                                  strict=True):
        names.append(parameter.arg)
        written.append(safe(parameter.arg) + (f" = {expression(default)}" if default is not None else ""))
    if arguments.vararg:
        written.append(f"...{arguments.vararg.arg}")
    if arguments.kwarg:
        written.append(f"{arguments.kwarg.arg} = new Dict()")
    return names, ", ".join(written)


def own_nodes(node):
    """Yield the nodes of a function that are not inside an inner function or a comprehension."""
    inner = (*FUNCTION_NODES, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    waiting = list(node.body) if isinstance(node.body, list) else [node.body]
    while waiting:
        part = waiting.pop()
        yield part
        if not isinstance(part, inner):
            waiting.extend(ast.iter_child_nodes(part))


def write_ClassDef(node):
    """A NamedTuple with its fields, or a class of modules with its __init__; other methods are left out."""
    base = ast.unparse(node.bases[0]) if node.bases else ""
    if base == "NamedTuple":
        fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        names = json.dumps([part.target.id for part in fields])
        defaults = ", ".join(f"{part.target.id}: {expression(part.value)}" for part in fields if part.value)
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef)
                   and [ast.unparse(decorator) for decorator in part.decorator_list] == ["property"]]
        written = ", ".join(f"{part.name}: {function(part)}" for part in methods)
        return f"const {node.name} = $namedtuple({names}, {{{defaults}}}, {{{written}}});"
    if base == "nn.Module":
        start = next(part for part in node.body if getattr(part, "name", "") == "__init__")
        names = json.dumps(parameters(start.args)[0][1:])
        keywords = ", true" if start.args.kwarg else ""
        return f"const {node.name} = $module({function(start)}, {names}{keywords});"
    raise Unknown(f"line {node.lineno}: class {node.name}({base})")


def write_Assign(node, declares=False):
    value = expression(node.value)
    if declares:
        target, = node.targets
        return f"const {destructured(target)} = {value};"
    if len(node.targets) > 1:
        inner = [assign(target, "$value") for target in node.targets]
        return f"{{ const $value = {value}; {' '.join(inner)} }}"
    return assign(node.targets[0], value)


def assign(target, value):
    """Return `target = value;`, for a name, an item, an attribute, or a tuple of them."""
    if isinstance(target, ast.Name):
        return f"{safe(target.id)} = {value};"
    if isinstance(target, ast.Attribute):
        return f"$set({expression(target.value)}, {json.dumps(target.attr)}, {value});"
    if isinstance(target, ast.Subscript):
        return f"$setitem({expression(target.value)}, {index(target.slice)}, {value});"
    if isinstance(target, (ast.Tuple, ast.List)):
        if all(isinstance(part, (ast.Name, ast.Tuple, ast.Starred)) for part in target.elts):
            return f"({destructured(target)} = [...$it({value})]);"
        parts = " ".join(assign(part, f"$parts[{i}]") for i, part in enumerate(target.elts))
        return f"{{ const $parts = [...$it({value})]; {parts} }}"
    raise Unknown(f"line {target.lineno}: a target {type(target).__name__}")


def destructured(target):
    """Return a pattern of names: a name, or [a, [b, c]]."""
    if isinstance(target, ast.Name):
        return safe(target.id)
    if isinstance(target, ast.Starred):
        return f"...{destructured(target.value)}"
    if isinstance(target, (ast.Tuple, ast.List)):
        # JavaScript allows a name once in a pattern, and a gap where a value is not wanted.
        parts = ["" if ast.unparse(part) == "_" else destructured(part) for part in target.elts]
        return f"[{', '.join(parts)}]"
    raise Unknown(f"line {target.lineno}: a target {type(target).__name__}")


def write_AugAssign(node):
    operation = BINARY[type(node.op)]
    value = expression(node.value)
    if isinstance(node.target, ast.Subscript):
        holder, key = expression(node.target.value), index(node.target.slice)
        return f"$setitem({holder}, {key}, {operation}($item({holder}, {key}), {value}));"
    return assign(node.target, f"{operation}({expression(node.target)}, {value})")


def write_Return(node):
    return f"return {expression(node.value)};" if node.value else "return null;"


def write_Expr(node):
    if isinstance(node.value, ast.Constant):  # a docstring
        return ""
    if ast.unparse(node.value) == "super().__init__()":
        return ""
    return f"{expression(node.value)};"


def write_If(node):
    text = f"if ({test(node.test)}) {{\n{block(node.body)}\n}}"
    return f"{text} else {{\n{block(node.orelse)}\n}}" if node.orelse else text


def write_For(node):
    if node.orelse:
        raise Unknown(f"line {node.lineno}: for with else")
    return f"for ({destructured(node.target)} of $it({expression(node.iter)})) {{\n{block(node.body)}\n}}"


def write_While(node):
    return f"while ({test(node.test)}) {{\n{block(node.body)}\n}}"


def write_With(node):
    if ast.unparse(node.items[0].context_expr) != "torch.device('meta')":
        raise Unknown(f"line {node.lineno}: with")
    return block(node.body)


def write_Try(node):
    handler, = node.handlers
    return (f"try {{\n{block(node.body)}\n}} catch ($error) {{\n"
            f"if (!{ast.unparse(handler.type)}.is($error)) throw $error;\n{block(handler.body)}\n}}")


def write_Raise(node):
    return f"throw {expression(node.exc)};"


def write_Assert(node):
    return ""


def write_Pass(node):
    return ""


def write_Continue(node):
    return "continue;"


def write_Break(node):
    return "break;"


# -----------------------------------------------------------------------------
# Expressions

def test(node):
    """Return an expression whose truth JavaScript sees as Python does."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"!{test(node.operand)}"
    if isinstance(node, ast.BoolOp):
        word = " && " if isinstance(node.op, ast.And) else " || "
        return f"({word.join(map(test, node.values))})"
    if isinstance(node, ast.Compare):
        return expression(node)
    return f"$t({expression(node)})"


def expression(node):
    kind = type(node).__name__
    handler = globals().get(f"value_{kind}")
    if handler is None:
        raise Unknown(f"line {node.lineno}: {kind}")
    return handler(node)


def value_Constant(node):
    if isinstance(node.value, float):
        return repr(node.value)
    return json.dumps(node.value)


def value_Name(node):
    return safe(node.id)


def value_Attribute(node):
    return f"{expression(node.value)}.{node.attr}"


def value_BinOp(node):
    return f"{BINARY[type(node.op)]}({expression(node.left)}, {expression(node.right)})"


def value_UnaryOp(node):
    if isinstance(node.op, ast.Not):
        return f"!{test(node.operand)}"
    if isinstance(node.op, ast.USub):
        return f"(-{expression(node.operand)})"
    raise Unknown(f"line {node.lineno}: {ast.unparse(node)}")


def value_BoolOp(node):
    name = "$and" if isinstance(node.op, ast.And) else "$or"
    first, *others = node.values
    text = expression(first)
    for other in others:
        text = f"{name}({text}, () => {expression(other)})"
    return text


def value_Compare(node):
    sides = [expression(part) for part in (node.left, *node.comparators)]
    parts = [comparison(op, left, right)
             for op, left, right in zip(node.ops, sides, sides[1:], strict=False)]
    return f"({' && '.join(parts)})"


def comparison(op, left, right):
    if type(op) in COMPARE:
        return f"{left} {COMPARE[type(op)]} {right}"
    name = {ast.Eq: "$eq", ast.NotEq: "!$eq", ast.Is: "$is", ast.IsNot: "!$is"}.get(type(op))
    if name:
        return f"{name}({left}, {right})"
    return f"{'!' if isinstance(op, ast.NotIn) else ''}$has({right}, {left})"


def value_IfExp(node):
    return f"({test(node.test)} ? {expression(node.body)} : {expression(node.orelse)})"


def value_Call(node):
    given = elements(node.args)
    named = []
    for part in node.keywords:
        value = expression(part.value)
        named.append(f"...$named({value})" if part.arg is None else f"{json.dumps(part.arg)}: {value}")
    keywords = ", ".join(named)
    if isinstance(node.func, ast.Attribute):
        holder = expression(node.func.value)
        return f"$method({holder}, {json.dumps(node.func.attr)}, [{given}], {{{keywords}}})"
    name = expression(node.func)
    if keywords:
        return f"$call({name}, [{given}], {{{keywords}}})"
    return f"{name}({given})"


def index(node):
    if isinstance(node, ast.Slice):
        parts = [expression(part) if part else "null" for part in (node.lower, node.upper, node.step)]
        return f"new Slice({', '.join(parts)})"
    return expression(node)


def value_Subscript(node):
    return f"$item({expression(node.value)}, {index(node.slice)})"


def elements(nodes):
    return ", ".join(map(element, nodes))


def element(node):
    """Return one element of a list or of a call's arguments."""
    if isinstance(node, ast.Starred):
        return f"...$it({expression(node.value)})"
    return expression(node)


def value_List(node):
    return f"[{elements(node.elts)}]"


value_Tuple = value_List


def value_Set(node):
    return f"set([{elements(node.elts)}])"


def value_Dict(node):
    parts = [f"...$pairs({expression(value)})" if key is None else f"[{expression(key)}, {expression(value)}]"
             for key, value in zip(node.keys, node.values, strict=True)]
    return f"new Dict([{', '.join(parts)}])"


def comprehension(node, result):
    """Return a generator of JavaScript that yields `result` for each round of the loops."""
    text = f"yield {result};"
    for loop in reversed(node.generators):
        for condition in reversed(loop.ifs):
            text = f"if ({test(condition)}) {{ {text} }}"
        text = f"for (const {destructured(loop.target)} of $it({expression(loop.iter)})) {{ {text} }}"
    return f"(function* () {{ {text} }})()"


def value_ListComp(node):
    return f"[...{comprehension(node, expression(node.elt))}]"


def value_GeneratorExp(node):
    return comprehension(node, expression(node.elt))


def value_SetComp(node):
    return f"set({comprehension(node, expression(node.elt))})"


def value_DictComp(node):
    return f"new Dict({comprehension(node, f'[{expression(node.key)}, {expression(node.value)}]')})"


def value_Lambda(node):
    names, text = parameters(node.args)
    return f"(({text}) => {expression(node.body)})"


def value_Yield(node):
    return f"(yield {expression(node.value)})"


def value_JoinedStr(node):
    parts = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(json.dumps(part.value))
        else:
            spec = expression(part.format_spec) if part.format_spec else '""'
            parts.append(f"$format({expression(part.value)}, {spec})")
    return f"[{', '.join(parts)}].join(\"\")"
