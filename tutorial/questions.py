"""Questions about the standard library, from its docstrings: python tutorial/questions.py FILE.jsonl

Each public function and class of a module's top level that has a docstring gives two conversations, what it
does and where it is, in the form that python prepare.py chat reads.
"""
import ast
import json
import re
import sys
import sysconfig
from pathlib import Path

SKIP = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings", "pydoc_data"}
LONGEST = 120  # characters of an answer: about 40 tokens


def modules(root):
    """Yield (module's name, path) of the public modules below root, in order."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts and not SKIP & {*parts} and not any(part.startswith("_") for part in parts):
            yield ".".join(parts), path


def first_sentence(docstring):
    """-> the docstring's first sentence in one line, or "" where there is none of a fair length."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[a-z)\]'`])\.(?:\s|$)", paragraph)[0].rstrip(".") + "."
    return sentence if 15 <= len(sentence) <= LONGEST and sentence[0].isalpha() else ""


def conversations(root):
    """Yield [message, message] of each function and class with a docstring."""
    for module, path in modules(root):
        try:
            body = ast.parse(path.read_bytes()).body
        except (SyntaxError, ValueError):  # some are made to be wrong
            continue
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            if answer := first_sentence(ast.get_docstring(node) or ""):
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                where = f"It is a {kind} of the module {module}."
                for asked, said in (("What does {} do?", answer), ("Where is {}?", where)):
                    question = asked.format(f"{module}.{node.name}")
                    yield [{"role": "user", "content": question}, {"role": "assistant", "content": said}]


def main(argv):
    if len(argv) != 1:
        print("nanoshard: give the file to write: python tutorial/questions.py FILE.jsonl", file=sys.stderr)
        raise SystemExit(2)
    stdlib = Path(sysconfig.get_path("stdlib"))
    lines = [json.dumps({"messages": messages}) for messages in conversations(stdlib)]
    Path(argv[0]).write_text("\n".join(lines) + "\n")
    print(f"{argv[0]}: {len(lines):,} questions and answers")


if __name__ == "__main__":
    main(sys.argv[1:])
