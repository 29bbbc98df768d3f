"""qsub and qstat without PBS, for tests/test_scripts.py: what a real OpenPBS 23.06.06 did, as far as scripts/
depend on it (docs/cluster.md says how to repeat it). $PBS_JOBS holds a file N.json per job; none is started.

    qsub -v "ARGS=--data A:0.7,B:0.3"   "cannot send environment with the job": behind a comma stands a name
    qsub -v ARGS                        the value in qsub's environment; commas and blanks arrive
    qsub -v 'ARGS=--prompt "a b"'       each quote becomes a backslash
    #PBS lines                          hold where the command line says nothing
    qstat -f N                          lines folded at 79 columns, the next begins with a tab; a comma of a
                                        value has a backslash in Variable_List; Submit_arguments has no quotes
    qstat -f N[1]                       a job of an array has no Submit_arguments, the array N[] has
"""
import json
import os
import re
import sys
from pathlib import Path

JOBS = Path(os.environ["PBS_JOBS"])
ATTRIBUTES = {"A": "Account_Name", "N": "Job_Name", "p": "Priority", "m": "Mail_Points", "r": "Rerunable",
              "j": "Join_Path", "o": "Output_Path", "q": "queue", "W": "umask"}


def variables(text):
    """{name: value} of -v."""
    found = {}
    for part in text.split(","):
        name, given, value = part.partition("=")
        if not given and name not in os.environ:
            sys.exit("qsub: cannot send environment with the job")
        value = value if given else os.environ[name]
        found[name] = re.sub("[\"']", r"\\\\", value)
    return found


def read_options(words):
    """[(letter, value)], and the words that are no option."""
    options, rest, words = [], [], list(words)
    while words:
        word = words.pop(0)
        if word.startswith("-"):
            options.append((word[1], word[2:] or words.pop(0)))
        else:
            rest.append(word)
    return options, rest


def qsub(words):
    typed, (script,) = read_options(words)
    lines = re.findall(r"^#PBS (.*)", Path(script).read_text(), re.M)
    job = {"Job_Name": Path(script).name, "queue": "workq", "Variable_List": {},
           "Submit_arguments": " ".join(words)}
    for letter, value in [o for line in lines for o in read_options(line.split())[0]] + typed:
        if letter == "l":
            name, value = value.split("=", 1)
            job[f"Resource_List.{name}"] = value
        elif letter == "v":
            job["Variable_List"] = variables(value)
        elif letter == "J":
            job["array"] = value
        elif not value.startswith("depend="):
            job[ATTRIBUTES[letter]] = value
    number = len(list(JOBS.glob("*.json"))) + 1
    (JOBS / f"{number}.json").write_text(json.dumps(job))
    print(f"{number}.stand-in")


def qstat(words):
    number, subjob = re.fullmatch(r"(\d+)(\[\d*\])?\.stand-in", words[-1]).groups()
    job = json.loads((JOBS / f"{number}.json").read_text())
    if (subjob and subjob != "[]") or "PBS_HIDES" in os.environ:  # the latter was not seen, a site may do it
        del job["Submit_arguments"]
    job["Variable_List"] = ",".join(f"{name}={value}".replace(",", "\\,")
                                    for name, value in {"PBS_O_HOST": "x", **job["Variable_List"]}.items())
    print(f"Job Id: {words[-1]}")
    for name, value in job.items():
        line = f"    {name} = {value}"
        print("\n\t".join([line[:79], *re.findall(".{1,71}", line[79:])]))


if __name__ == "__main__":
    {"qsub": qsub, "qstat": qstat}[sys.argv[1]](sys.argv[2:])
