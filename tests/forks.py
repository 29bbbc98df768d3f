"""Programs in forks of one process, which imports torch once: python [-I -O] tests/forks.py MODULE ... < JSON

The process imports the modules. The JSON is a list of jobs [words, stdin, stdout, stderr]: the command line
of a program, and a path for each stream, "" for a closed one. A fork ends as a process of its own does: its
exit code is a real one, and so is what the interpreter does with its streams at the end. The list of exit
codes is printed.
"""
import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path


def run_forks(jobs, switches=(), modules=("torch",)):
    """Return the exit codes of the jobs, run by a process that python starts with these switches."""
    command = [sys.executable, *switches, __file__, *modules]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def become(words, streams):
    """In a fork: run a program until it ends, with other streams."""
    for descriptor, path in enumerate(streams):
        os.dup2(os.open(path or os.devnull, os.O_RDWR | os.O_CREAT), descriptor)
    os.closerange(3, 99)
    for descriptor, (name, path) in enumerate(zip(("stdin", "stdout", "stderr"), streams, strict=True)):
        if not path:
            os.close(descriptor)
        stream = open(descriptor, "w" if descriptor else "r", closefd=False) if path else None
        if name != "stderr" or not path:
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    sys.argv = words
    if not sys.flags.safe_path:  # python -I leaves out the program's own folder
        sys.path[0] = str(Path(words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")
    sys.exit()


def main():
    if not sys.flags.safe_path:
        sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
    for name in sys.argv[1:]:
        importlib.import_module(name)
    codes = []
    for words, *streams in json.load(sys.stdin):
        sys.stdout.flush()
        child = os.fork()
        if not child:
            become(words, streams)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(codes)


if __name__ == "__main__":
    main()
