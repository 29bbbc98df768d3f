"""How many layouts and planted faults the tests have, as README.md, bench/README.md and docs/ say it."""
import inspect
import re

import test_convert
import test_doc_mask
import test_faults
import test_layouts
import test_lora
import test_model_flags
import test_muon
import test_shard
from faults import BERT
from pool import ROOT
from test_laws import ROOMS

PAGE = (ROOT / "docs/faults.md").read_text()
BENCH = (ROOT / "bench/README.md").read_text()


def parameters_of(test, name):
    """Return how many values of a parameter a test is run with."""
    return next(len(mark.args[1]) for mark in test.pytestmark
                if mark.name == "parametrize" and name in mark.args[0])


def comparisons(*tests):
    """Return how many layouts these tests compare, one after the other."""
    return sum(inspect.getsource(test).count("compare(") for test in tests)


def layouts_of_test_layouts():
    """Return (dense, expert, BERT, masked layouts), each with a family, of tests/test_layouts.py."""
    t = test_layouts
    dense_cp = sum(family in ("llama", "gpt2") for family, *_ in t.CP_LAYOUTS)
    dense = 2 * len(t.LAYOUTS) + dense_cp + comparisons(
        t.test_pp_layers_and_recompute_equal_one_rank, t.test_one_kv_head_under_tp_equals_one_rank)
    eight_ranks = t.test_moe_on_eight_ranks_equals_one_rank
    experts = 2 * len(t.MOE_LAYOUTS) + len(t.CP_LAYOUTS) - dense_cp + comparisons(
        t.test_moe_variants_equal_one_rank)
    experts += parameters_of(eight_ranks, "base") * parameters_of(eight_ranks, "layout")
    return dense, experts, len(t.BERT_LAYOUTS), len(t.MASKED_LAYOUTS)


def test_the_readme_counts_the_layouts():
    found = layouts_of_test_layouts()
    assert f"in {sum(found)} comparisons" in " ".join((ROOT / "README.md").read_text().split())
    row = "| {} dense, {} expert, {} BERT, {} masked layouts |".format(*found)
    assert row in BENCH, f"say: {row}"
    experts = (ROOT / "docs/experts.md").read_text()
    assert f"compares {found[1]} layouts of models with experts" in experts, f"docs/experts.md: {found[1]}"


def test_what_equals_what():
    """Each row of bench/README.md about layouts says how many its test has."""
    said = [f"{len(test_model_flags.LAYOUTS)} layouts of seven forms of today's models, two of them also",
            f"{len(test_shard.LAYOUTS)} layouts with `--shard`",
            f"{len(test_doc_mask.LAYOUTS)} layouts with `--doc-mask on`",
            f"{len(test_muon.EVERY_LAYOUT)} layouts with Muon",
            f"{sum(ranks > 1 for _, ranks, *_ in test_lora.LAYOUTS)} layouts with LoRA, and one process",
            f"{len(test_convert.OUT)} exported runs of nine layouts, {len(test_convert.IN)} imported models"]
    assert [row for row in said if f"| {row}" not in BENCH] == []
    assert (len(test_model_flags.FORMS), len(test_model_flags.WITH_EXPERTS)) == (7, 2)


def test_the_page_counts_the_faults():
    merges = parameters_of(test_lora.test_wrong_merges_are_caught, "old,new")
    starts = parameters_of(test_shard.test_a_start_without_the_broadcast_is_seen, "where,words")
    counted = {
        "Documents": len(test_doc_mask.FAULTS) + len(test_doc_mask.LAYOUT_FAULTS),
        "Flags of today's models": len(test_model_flags.FAULTS) + len(test_model_flags.PLAIN_FAULTS),
        "Groups of ZeRO": len(test_shard.FAULTS) + starts,
        "LoRA": len(test_lora.FAULTS) + merges,
        "Muon": len(test_muon.FAULTS)}
    headings = {name: int(n) for name, n in re.findall(r"^## (.+): (\d+)$", PAGE, re.MULTILINE)}
    assert {name: headings.get(name) for name in counted} == counted
    for name, n in headings.items():
        anchor = name.lower().replace("'", "").replace(" ", "-")
        assert f"[{name}: {n}](#{anchor}-{n})" in PAGE, f"the list at the top of docs/faults.md: {name}"
    total = sum(headings.values()) + 15  # those of masks and the one division
    assert "tests/test_chat.py plants 15 faults" in PAGE
    assert f"| {total} planted faults;" in BENCH, f"say: {total}"


def test_the_table_of_dense_models_names_every_fault():
    """Six faults of the table have tests of their own; those of chunks and BERT are in other tables."""
    rows = [fault for fault, *_ in table_below("Dense models") if not fault.startswith("**")]
    chunks = [name for name, (_, (_, layout), *_) in test_faults.FAULTS.items() if "pp_chunks" in layout]
    bert = [name for name, (base, *_) in test_faults.FAULTS.items() if base is BERT]
    dense = test_faults.FAULTS.keys() - {*chunks, *bert}
    assert dense - set(rows) == set()
    assert len(rows) == len(dense) + 6 and f"## Dense models: {len(rows)}\n" in PAGE
    assert (len(chunks), len(bert)) == (6, 5)
    assert f"{len(dense)} of these faults are entries of `FAULTS`, which also has six of" in PAGE


def test_each_table_names_its_faults():
    """A cell names several, with semicolons between them; a row of groups has several levels of ZeRO."""
    flags, groups, lora = (table_below(heading) for heading in (
        "Flags of today's models", "Groups of ZeRO", "LoRA"))
    assert sum(1 + fault.count(";") for fault, *_ in flags) == 24
    assert sum(1 + fault.count(";") for fault, *_ in lora) == 8
    assert sum(max(1 + fault.count(";"), len(re.findall(r"\d", zero))) for fault, zero in groups) == 17


def table_below(heading):
    """Return the cells of the first table of a section, row by row."""
    section = PAGE[PAGE.index(f"## {heading}: "):]
    rows = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)[0].splitlines()
    return [row.strip("| ").split(" | ") for row in rows[2:]]


def test_the_list_of_measurements_has_every_section():
    contents = BENCH.partition("\n## ")[0]
    for heading in re.findall("^## (.+)$", BENCH, re.MULTILINE):
        anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        assert f"](#{anchor})" in contents, f"the list at the top of bench/README.md: {heading}"


def test_every_file_of_results_is_named_on_a_page():
    pages = "".join(page.read_text() for page in (*ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")))
    files = (ROOT / "bench/results").iterdir()
    assert [file.name for file in files if file.stem not in pages] == []


def test_the_readme_counts_the_lines_of_today():
    """All of training is in the first thirteen files of its tree, and in two of ops/."""
    readme = (ROOT / "README.md").read_text()
    tree = re.search(r"^train\.py  .*?```", readme, re.DOTALL | re.MULTILINE)[0]
    first = re.findall(r"^(\w+\.py)", tree, re.MULTILINE)[:13]
    training = count_lines([*first, "ops/flat.py", "ops/permute.py"])
    everything = count_lines([*ROOT.glob("*.py"), *(p for room in ROOMS for p in (ROOT / room).glob("*.py"))])
    said = re.search(r"([\d,]+) of ([\d,]+) \|", readme)
    said_training, said_everything = (int(number.replace(",", "")) for number in said.groups())
    assert abs(training - said_training) <= 100, f"README: {said_training}, counted: {training}"
    assert abs(everything - said_everything) <= 500, f"README: {said_everything}, counted: {everything}"
    assert readme.count(said[1]) == 3  # of the list, of the table, of the sentence below


def count_lines(paths):
    return sum(len((ROOT / path).read_text().splitlines()) for path in paths)
