"""One-line mutants of the house: does a test notice when one operator, constant or call is another?

    python tests/mutants.py --count 600 --workers 2        goes on where it stopped, prints the table
    python tests/mutants.py --only moe.py --count 50       one file
    python tests/mutants.py --again                        the survivors once more, after a new test
    python tests/mutants.py --gpu                          the files that only a GPU's tests can judge

1) The syntax tree of each file gives its mutants: a comparison, an arithmetic or boolean operator, a
   number, True or False, a condition or min/max becomes another, or a call is left out. HAND below adds
   mutants that were written by hand. What only changes the speed or a distant bound is no mutant: see walk.
2) `--count` of them are chosen, in proportion to the sizes of the files. The choice depends on the
   lines alone: the rest stays the same when a file changes.
3) Each worker has a copy of the tree. It changes one line, runs the tests that TESTS names for the file,
   without the long sweeps, and stops at the first failure. A test that fails without a mutant does not count.
4) caught: a test failed, or the tests hang: they take more than SLOWEST seconds and HANGS times as long as
   without a mutant. survived: all passed. undecided: the tests that could have noticed did not run. So it is
   without --gpu for the files of GPU, and for those of ALONE where their tests fail without a mutant.
   tests/mutants.json says why a survivor is no fault: {mutant: reason}. "equivalent: ...": no input makes
   another result. "bound: ...": a distant bound is one further or nearer, and would do as well.

The exit code is 1 if more than 3 % of the decided mutants survived without a reason.
"""
import argparse
import ast
import contextlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REASONS = ROOT / "tests/mutants.json"
ROOMS = ("corpus", "cost", "fast", "interface", "ops", "runtime")
MOST_SURVIVORS = 0.03  # of the decided mutants, without a reason
SLOWEST = 200  # seconds that the tests of one mutant may take in any case
WHY = ("equivalent: ", "bound: ")  # how a reason begins
HANGS = 3      # times as long as without a mutant: the tests hang

TESTS = {  # file or room: the test files that must notice a mutant, the quickest first
    "model.py": "details model bert sample dropout layouts",
    "vocab.py": "model fp16 layouts",
    "layers.py": "model sample fp8 layouts norms early gelu_mlp",
    "lora.py": "lora",
    "attention.py": "model sample flex doc_mask model_flags layouts",
    "moe.py": "moe moe_run layouts",
    "parallel.py": "details parallel ddp symm_mem shard layouts",
    "ddp.py": "details ddp zero kernels shard layouts",
    "zero.py": "details zero symm_mem layouts",
    "pipeline.py": "details pipeline ddp dropout layouts",
    "generate.py": "sample model chat",
    "optim.py": "details optim moments_dtype fp16 metrics kernels layouts",
    "muon.py": "optim muon",
    "skip.py": "details guard fp16 metrics",
    "train.py": "details report metrics validation guard rampup resume cli layouts",
    "config.py": "printed estimates details cli rampup plan resume new_flag",
    "checkpoint.py": "details checkpoint resume malformed",
    "prepare.py": "details data corpus chat malformed",
    "sample.py": "sample chat bert malformed",
    "plan.py": "printed estimates details plan cli rampup",
    "plot.py": "printed details plot report malformed",
    "convert.py": "export gguf import lora convert",
    "corpus": "corpus data blend chat malformed",
    "corpus/batches.py": "data blend bert chat doc_mask",
    "corpus/build.py": "corpus data",
    "corpus/chat.py": "chat convert",
    "corpus/config_json.py": "import export convert",
    "corpus/documents.py": "doc_mask data chat",
    "corpus/folder.py": "details corpus data convert import",
    "corpus/hugging_face.py": "export import convert",
    "corpus/gguf_file.py": "gguf",
    "corpus/tokenizer_json.py": "export gguf convert",
    "corpus/masked.py": "bert",
    "corpus/order.py": "data blend resume",
    "corpus/peft_files.py": "lora",
    "corpus/rampup.py": "rampup",
    "corpus/safetensors_files.py": "import export convert",
    "corpus/shards.py": "data blend malformed bert chat doc_mask",
    "corpus/synthetic.py": "data bert",
    "corpus/text.py": "details corpus data blend",
    "corpus/tokenizer.py": "data corpus convert",
    "cost": "estimates details plan",
    "cost/communication_time.py": "estimates plan plan_rows",
    "cost/fits.py": "details cli plan",
    "cost/gpus.py": "estimates planner_page plan",
    "cost/memory.py": "estimates details lora plan plan_rows",
    "cost/meshes.py": "estimates plan",
    "cost/muon.py": "estimates muon plan",
    "cost/parameters.py": "estimates details model plan new_flag",
    "cost/plan_flags.py": "printed screen cli wrong_commands plan",
    "cost/plan_tables.py": "printed screen details pipeline plan",
    "cost/step_time.py": "estimates details lora plan plan_rows",
    "cost/traffic.py": "estimates details parallel plan shard",
    "fast": "details accelerator symm_mem moe graph",
    "fast/compile.py": "compile details graph accelerator moe",
    "fast/choose.py": "estimates details accelerator graph symm_mem flash experts_library",
    "fast/flash.py": "flash compile",
    "fast/experts.py": "experts_library moe",
    "fast/libraries.py": "flash experts_library accelerator",
    "fast/flex.py": "flex doc_mask model_flags",
    "fast/graph.py": "details graph",
    "fast/host_buffers.py": "details accelerator graph",
    "fast/padded.py": "moe symm_mem plan",
    "fast/peer.py": "symm_mem zero",
    "interface": "cli wrong_commands checkpoint malformed",
    "interface/checkpoint_report.py": "printed checkpoint",
    "interface/command_line.py": "cli wrong_commands streams malformed",
    "interface/console.py": "borders chat",
    "interface/files.py": "details files report guard checkpoint malformed plot",
    "interface/half.py": "export gguf",
    "interface/layout.py": "details rampup plan cli shard layouts",
    "interface/nearest.py": "details wrong_commands cli plan",
    "interface/packages.py": "screen",
    "interface/paths.py": "details wrong_commands",
    "interface/report.py": "report",
    "interface/schema.py": "cli import malformed",
    "interface/serve.py": "serve",
    "interface/streams.py": "streams serve chat",
    "interface/svg.py": "report",
    "interface/tensor_file.py": "details checkpoint",
    "interface/terminal.py": "printed screen cli streams",
    "interface/tree.py": "tree launch",
    "interface/words.py": "wrong_commands cli",
    "ops": "model moe kernels",
    "ops/accelerator.py": "accelerator launch",
    "ops/activations.py": "model moe bert kernels",
    "ops/backend.py": "accelerator kernels",
    "ops/checksum.py": "details checkpoint guard watch",
    "ops/cross_entropy.py": "model bert kernels",
    "ops/embedding.py": "embedding",
    "ops/flat.py": "ddp zero optim checkpoint layouts",
    "ops/fp8.py": "fp8",
    "ops/grouped_mm.py": "details moe kernels product_kernels",
    "ops/product_kernels.py": "kernels product_kernels",
    "ops/tiles.py": "product_kernels early details kernels",
    "ops/tma_kernels.py": "product_kernels",
    "ops/matrix_norms.py": "muon kernels",
    "ops/norms.py": "kernels norms early",
    "ops/gelu_mlp.py": "gelu_mlp", "ops/cublas_lt.py": "gelu_mlp products",
    "ops/products.py": "products", "fast/products.py": "products",
    "ops/permute.py": "details moe symm_mem kernels",
    "ops/routed_experts.py": "kernels",
    "ops/split_master.py": "split_master",
    "ops/symmetric_mm.py": "muon kernels",
    "ops/wide_product.py": "kernels",
    "runtime": "details launch guard watch resume",
    "runtime/abort.py": "launch watch",
    "runtime/adapters.py": "lora",
    "runtime/address.py": "launch doctor",
    "runtime/agree.py": "details launch cli resume",
    "runtime/base_weights.py": "lora",
    "runtime/calls.py": "launch doctor guard",
    "runtime/debugger.py": "pdb",
    "runtime/ending.py": "printed screen guard",
    "runtime/guardian.py": "watch launch",
    "runtime/layer_norms.py": "metrics",
    "runtime/log.py": "printed details metrics guard cli",
    "runtime/model_card.py": "export convert",
    "runtime/model_tensors.py": "export gguf convert",
    "runtime/mpi.py": "launch",
    "runtime/other_data.py": "borders data resume",
    "runtime/parts.py": "details guard watch resume",
    "runtime/peft_adapters.py": "lora",
    "runtime/profiles.py": "guard full_disk",
    "runtime/progress.py": "printed screen details metrics cli",
    "runtime/read_checkpoint.py": "details checkpoint lora resume malformed",
    "runtime/resume.py": "details resume ddp moe_run checkpoint",
    "runtime/changed_flags.py": "resume doc_mask convert new_flag",
    "runtime/saver.py": "checkpoint resume metrics",
    "runtime/session.py": "files metrics guard launch sample",
    "runtime/timing.py": "printed details fp16 metrics watch",
    "runtime/tracker.py": "guard",
    "runtime/visible.py": "accelerator launch doctor",
    "runtime/watch.py": "watch",
}
QUICK = {  # file or room: what comes before those of TESTS, seconds for many mutants
    "checkpoint.py": "small_inputs",
    "convert.py": "small_inputs",
    "prepare.py": "small_inputs",
    "sample.py": "surroundings",
    "corpus": "small_inputs",
    "interface": "small_inputs surroundings",
    "runtime": "surroundings",
}
GPU = {"fast/graph.py", "fast/host_buffers.py", "fast/peer.py", "fast/symm_mem.py", "fast/compile.py",
       "ops/grouped_mm.py", "ops/kernels.py", "ops/product_kernels.py", "ops/tma_kernels.py",
       "bench/gpu_matrix.py"}
ALONE = {"runtime/debugger.py": "pdb", "runtime/mpi.py": "launch"}  # the one test file that runs the file

HAND = [  # (file, piece of text that stands there once, what replaces it)
    ("skip.py", "self.world.tree.any(found is not None)", "(found is not None)"),
    ("skip.py", "y.clamp(max=0)", "y.clamp(min=0, max=0)"),
    ("skip.py", "[-WINDOW:]", "[:WINDOW]"),
    ("corpus/chat.py", "(ids[:width], trained[:width])", "(ids[:width - 1], trained[:width])"),
    ("corpus/chat.py", "pairs[split_of(conversations[i], val_fraction)]",
     "pairs[SPLITS[i < val_fraction * len(conversations)]]"),
    ("corpus/chat.py", "json.dumps(said).encode()", "json.dumps(len(said)).encode()"),
    ("corpus/chat.py", 'message["role"] == "assistant" and', 'message["role"] != "user" and'),
    ("corpus/chat.py", 'message.get("weight", 1) == 1', "True"),
    ("checkpoint.py", "sorted(files)[rank::size]", "sorted(files)[rank::size + 1]"),
    ("checkpoint.py", "if not file.is_file():", "if False:"),
    ("corpus/shards.py", '"masks": dict.fromkeys(SPLITS, [SHARD]),', '"masks": dict,'),
    ("corpus/shards.py", '"seq_len": Range(1, 1 << 24),', '"seq_len": Range(0, 1 << 62),'),
]

COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
               ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//"}
CALLS = {"min": "max", "max": "min", "all": "any", "any": "all", "sum": "max"}
NAMES = {"SUM": "MAX", "MAX": "SUM"}
# Arguments that leave the results of a right program as they are: they make it faster, or check it.
SILENT = ("flush", "non_blocking", "num_warps", "num_stages", "BLOCK", "daemon", "strict")


class Mutant(NamedTuple):
    file: str
    row: int  # the first line is 0
    line: str
    mutated: str
    place: str  # the function or class

    @property
    def key(self):
        return f"{self.file} {self.place}: {self.line.strip()} => {self.mutated.strip()}"


def between(left, right, operator, lines):
    """(row, start, stop, operator) that replaces what stands between two expressions on one line."""
    if left.end_lineno == right.lineno:
        text = lines[left.end_lineno - 1].encode()[left.end_col_offset:right.col_offset].decode()
        if re.fullmatch(r"\s*(?:[-+*/%<>=!]+|is not|not in|is|in|and|or)\s*", text):
            yield left.end_lineno - 1, left.end_col_offset, right.col_offset, f" {operator} "


def replaced(node, text):
    if node.lineno == node.end_lineno:
        yield node.lineno - 1, node.col_offset, node.end_col_offset, text


def edits(node, lines):
    """Yield (row, first byte, byte behind the last, new text) for each mutant that a node has itself."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield from between(node.left, node.comparators[0], COMPARISONS[type(node.ops[0])], lines)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield from between(node.left, node.right, OPERATORS[type(node.op)], lines)
    if isinstance(node, ast.BoolOp):
        other = "or" if isinstance(node.op, ast.And) else "and"
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from between(left, right, other, lines)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield from replaced(node, ast.unparse(node.operand))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield from replaced(node, str(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield from replaced(node, str(node.value + 1))
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield from replaced(node.test, f"(not ({ast.unparse(node.test)}))")
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield from replaced(node, "pass")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield from replaced(node.func, CALLS[node.func.id])
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in NAMES:
        yield from replaced(node, NAMES[node.id])


def walk(node, place=""):
    """Yield (node, name of its function) of all that computes: no text, no error message, no annotation.

    Left out as well are the arguments of SILENT, tables of TILES, and powers such as 2**20, whose neighbours
    are as good a bound.
    """
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        place = f"{place}.{node.name}".strip(".")
    yield node, place
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not is_left_out(child):
                yield from walk(child, place)


def is_left_out(node):
    if isinstance(node, ast.keyword):
        return node.arg in SILENT
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Name) and node.targets[0].id.startswith("TILES")
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.LShift)):
        return isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant)
    return isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert))


def mutants_of(path):
    """Return the mutants of a file, each once, in the order of their keys' checksums."""
    text = path.read_text()
    lines = text.splitlines()
    file = str(path.relative_to(ROOT))
    found = {}
    for node, place in walk(ast.parse(text)):
        for row, start, stop, new in edits(node, lines):
            line = lines[row].encode()
            mutated = (line[:start] + new.encode() + line[stop:]).decode()
            mutant = Mutant(file, row, lines[row], mutated, place)
            if mutated != lines[row] and "tl.constexpr" not in lines[row]:
                found.setdefault(mutant.key, mutant)
    return sorted(found.values(), key=lambda mutant: zlib.crc32(mutant.key.encode()))


def by_hand():
    for file, old, new in HAND:
        lines = (ROOT / file).read_text().splitlines()
        rows = [row for row, line in enumerate(lines) if old in line and "import" not in line]
        assert len(rows) == 1, f"{file} has {old!r} in {len(rows)} lines: rewrite this mutant"
        line = lines[rows[0]]
        yield Mutant(file, rows[0], line, line.replace(old, new), "by hand")


def house():
    return sorted([*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).glob("*.py"))])


def choose(count, only, gpu):
    """Return about `count` mutants: of each file in proportion to what it has, at least two."""
    files = {path: str(path.relative_to(ROOT)) for path in house()}
    if gpu:
        files = {path: file for path, file in files.items() if file in GPU}
    if only:
        files = {path: file for path, file in files.items() if file in only}
    found = [mutants for mutants in map(mutants_of, files) if mutants]
    total = sum(map(len, found))
    chosen = [mutant for mutants in found for mutant in mutants[:max(2, round(count * len(mutants) / total))]]
    return chosen + [mutant for mutant in by_hand() if mutant.file in files.values()]


def tests_for(file):
    room = file.split("/")[0]
    names = f"{QUICK.get(room, '')} {TESTS.get(file) or TESTS[room]}"
    return [f"tests/test_{name}.py" for name in names.split()]


NOTHING_RAN = 5  # pytest's exit code where all tests were left out; where all were skipped it is 0


class Worker:
    """A copy of the tree in which one mutant at a time stands and its tests run."""

    def __init__(self, folder):
        self.tree = Path(folder) / "nanoshard"
        files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                               capture_output=True, text=True).stdout.split("\n")
        for file in filter(None, files):
            if (ROOT / file).is_file():
                (self.tree / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / file, self.tree / file)
        for name, place in (("shared", ROOT.parent / "shared"), ("nanoshard/.venv", ROOT / ".venv")):
            if place.exists():
                (Path(folder) / name).symlink_to(place)

    def pytest(self, files, deselect, seconds):
        """Return (exit code, or None: too slow; what pytest printed)."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "-rf"]
        command += ["-m", "not long", *files]
        command += [f"--deselect={test}" for test in deselect]
        process = subprocess.Popen(command, cwd=self.tree, text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            said = process.communicate(timeout=seconds)[0]
            return process.returncode, said
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def judge(self, mutant, broken, took):
        """Return what became of a mutant, and the test that caught it.

        broken: {test file: its tests that fail without a mutant}. took: {test file: its seconds without one}.
        """
        path = self.tree / mutant.file
        source = path.read_text()
        lines = source.split("\n")
        assert lines[mutant.row] == mutant.line, f"{mutant.file} changed: start again"
        lines[mutant.row] = mutant.mutated
        path.write_text("\n".join(lines))
        files = [file for file in tests_for(mutant.file) if file not in broken.get(file, [])]
        deselect = [test for failed in broken.values() for test in failed]
        limit = max(SLOWEST, HANGS * sum(took[file] for file in files))
        try:
            code, said = self.pytest(["-x", *files], deselect, limit) if files else (NOTHING_RAN, "")
        finally:
            path.write_text(source)
        failed = failed_tests(said)
        return verdict_of(code, said), failed[0] if failed else "a hang" if code is None else ""


def failed_tests(said):
    """Return the names of the tests that failed by what pytest printed. A name may have spaces."""
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.M)


def verdict_of(code, said):
    """Return what pytest's exit code says of a mutant (None: a hang). said: what pytest printed."""
    if code == 0 and re.search(r"\b[0-9]+ passed", said):
        return "survived"
    return "undecided" if code in (0, NOTHING_RAN) else "caught"


def decides(file, broken, gpu):
    """Whether the tests that can notice a mutant of a file run here. Else a survivor is undecided."""
    if file in ALONE:
        return not broken.get(f"tests/test_{ALONE[file]}.py")
    return gpu or file not in GPU


def in_parallel(workers, items, work):
    """Call work(worker, item) for all items, one thread per worker."""
    todo = queue.SimpleQueue()
    for item in items:
        todo.put(item)

    def loop(worker):
        while not todo.empty():
            try:
                item = todo.get_nowait()
            except queue.Empty:
                return
            work(worker, item)

    threads = [threading.Thread(target=loop, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run(mutants, n_workers, results, gpu):
    """Judge the mutants, and append a line to `results` for each as soon as it is judged.

    gpu: the tests have a GPU.
    """
    lock = threading.Lock()
    broken, took = read_tests(results)
    with tempfile.TemporaryDirectory() as folder:
        workers = [Worker(f"{folder}/{i}") for i in range(n_workers)]

        def find_broken(worker, file):
            start = time.monotonic()
            code, said = worker.pytest([file], [], 3 * SLOWEST)
            failed = [file] if code is None else failed_tests(said)
            seconds = round(time.monotonic() - start, 1)
            with lock, open(results, "a") as out:
                broken[file], took[file] = failed, seconds
                print(json.dumps({"tests": file, "fail": failed, "seconds": seconds}), file=out)
                print(f"{file}: {'too slow' if code is None else said.strip().splitlines()[-1]}", flush=True)

        files = {file for mutant in mutants for file in tests_for(mutant.file)}
        in_parallel(workers, sorted(files - set(broken)), find_broken)
        n_broken = sum(map(len, broken.values()))
        print(f"{n_broken} tests fail without a mutant and do not count", flush=True)

        def judge(worker, mutant):
            start = time.monotonic()
            verdict, test = worker.judge(mutant, broken, took)
            if verdict == "survived" and not decides(mutant.file, broken, gpu):
                verdict = "undecided"
            row = {"mutant": mutant.key, "file": mutant.file, "verdict": verdict, "test": test,
                   "seconds": round(time.monotonic() - start, 1)}
            with lock, open(results, "a") as out:
                print(json.dumps(row), file=out)
                print(f"{verdict:9} {row['seconds']:5} s  {mutant.key}", flush=True)

        in_parallel(workers, mutants, judge)


def report(mutants, verdicts, reasons):
    """Print the table per file and the survivors; return the share that survived without a reason."""
    print(f"\n{'file':32} caught survived reason undecided")
    table = {}
    for mutant in mutants:
        counts = table.setdefault(mutant.file, {"caught": 0, "survived": 0, "reason": 0, "undecided": 0})
        verdict = verdicts.get(mutant.key, "undecided")
        counts["reason" if verdict == "survived" and mutant.key in reasons else verdict] += 1
    table["all"] = {name: sum(row[name] for row in table.values()) for name in next(iter(table.values()))}
    for file, counts in table.items():
        print(f"{file:32} " + " ".join(f"{n:{len(name)}}" for name, n in counts.items()))
    for mutant in mutants:
        if verdicts.get(mutant.key) == "survived":
            print(f"survived: {mutant.key}\n          {reasons.get(mutant.key, 'NO REASON')}")
    counts = table["all"]
    return counts["survived"] / max(1, counts["caught"] + counts["survived"] + counts["reason"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=600, help="mutants")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="mutants judged at a time")
    parser.add_argument("--only", nargs="*", default=[], help="files, as moe.py or corpus/chat.py")
    parser.add_argument("--gpu", action="store_true", help="only files whose tests want a GPU")
    parser.add_argument("--again", action="store_true", help="judge survivors and undecided ones again")
    parser.add_argument("--results", default=str(ROOT / "out/mutants.jsonl"), help="what was judged so far")
    flags = parser.parse_args()

    results = Path(flags.results)
    results.parent.mkdir(parents=True, exist_ok=True)
    mutants = choose(flags.count, flags.only, flags.gpu)
    verdicts = read_verdicts(results)
    done = {key for key, verdict in verdicts.items() if verdict == "caught" or not flags.again}
    todo = [mutant for mutant in mutants if mutant.key not in done]
    # So a part of the run is a sample of all files.
    todo.sort(key=lambda mutant: zlib.crc32(mutant.key.encode()))
    print(f"{len(mutants)} mutants, {len(mutants) - len(todo)} of them judged before", flush=True)
    if todo:
        run(todo, flags.workers, results, flags.gpu)
    reasons = json.loads(REASONS.read_text())
    share = report(mutants, read_verdicts(results), reasons)
    print(f"{share:.1%} survived without a reason; at most {MOST_SURVIVORS:.0%} may")
    return int(share > MOST_SURVIVORS)


def read_rows(results, kind):
    rows = map(json.loads, results.read_text().splitlines()) if results.exists() else []
    return [row for row in rows if kind in row]


def read_verdicts(results):
    return {row["mutant"]: row["verdict"] for row in read_rows(results, "mutant")}


def read_tests(results):
    """Return {test file: its tests that fail without a mutant on this machine}, {test file: its seconds}."""
    rows = [row for row in read_rows(results, "tests") if "seconds" in row]  # older rows have none
    return {row["tests"]: row["fail"] for row in rows}, {row["tests"]: row["seconds"] for row in rows}


if __name__ == "__main__":
    sys.exit(main())
