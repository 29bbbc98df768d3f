"""Questions about the standard library, from its docstrings: python tutorial/questions.py FILE.jsonl

Each public function and class at a module's top level that has a docstring gives two conversations: what it
does, and where it is. They are written in the form that python prepare.py chat reads.
"""
import ast
import json
import re
import sys
import sysconfig
from pathlib import Path

SKIP = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings", "pydoc_data"}
SHORTEST = 15
LONGEST = 120  # characters of an answer: about 40 tokens


def modules(root):
    """Yield (name, path) of each public module below root, in order."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        is_private = any(part.startswith("_") for part in parts)
        if parts and not is_private and not SKIP & set(parts):
            yield ".".join(parts), path


def first_sentence(docstring):
    """Return the first sentence of a docstring on one line, or "" if it is too short or too long."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[a-z)\]'`])\.(?:\s|$)", paragraph)[0].rstrip(".") + "."
    if SHORTEST <= len(sentence) <= LONGEST and sentence[0].isalpha():
        return sentence
    return ""


def definitions(path):
    """Yield the public functions and classes at the top level of a module, none if its syntax is wrong."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):  # Some files of the standard library are wrong on purpose.
        return
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node


def conversation(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def conversations(root):
    """Yield two conversations, [message, message], of each function and class with a docstring."""
    for module, path in modules(root):
        for node in definitions(path):
            summary = first_sentence(ast.get_docstring(node) or "")
            if summary:
                name = f"{module}.{node.name}"
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                yield conversation(f"What does {name} do?", summary)
                yield conversation(f"Where is {name}?", f"It is a {kind} of the module {module}.")


def write(path, text):
    """Write a file whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def main(argv):
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return
    if len(argv) != 1 or argv[0].startswith("-"):
        print("nanoshard: give the file to write: python tutorial/questions.py FILE.jsonl", file=sys.stderr)
        raise SystemExit(2)
    stdlib = Path(sysconfig.get_path("stdlib"))
    lines = [json.dumps({"messages": messages}) for messages in conversations(stdlib)]
    try:
        write(Path(argv[0]), "\n".join(lines) + "\n")
    except OSError as e:
        print(f"nanoshard: {argv[0]} cannot be written: {e.strerror}; give another file", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{argv[0]}: {len(lines):,} questions and answers")


if __name__ == "__main__":
    main(sys.argv[1:])
