"""fast/flex.py: windows and documents in a flash kernel, which only GPUs compile with gradients.

Here a stand-in for flex_attention asks the rule for every pair, and reads no lists of blocks. So the rule is
compared through outputs and gradients, and the lists with the mask itself. The oracle is the mask of
attention.py.
"""
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from faults import planted, run_with_faults
from runs import TINY, rows, session
from shared import Documents
from test_graph import graphed_session
from test_layouts import flags_of
from test_masks import check_against_documents_alone
from test_model import MESH, random_model

import attention
from config import Config
from corpus import samples
from corpus.samples import document_places
from fast import choose, flex
from fast.flex import FlexAttention
from model import GPT
from runtime.launch import World

CUDA = torch.device("cuda")


def unfused(q, k, v, block_mask, enable_gqa):
    """Ask the rule for every pair."""
    sequence = torch.arange(q.size(0)).view(-1, 1, 1, 1)
    query = torch.arange(q.size(2)).unsqueeze(1)
    sees = block_mask.mask_mod(sequence, 0, query, torch.arange(k.size(2)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=enable_gqa)


def unfused_kernel(original):
    return unfused


def yes(original, *args):
    return True


ON_A_CPU = ("fast.flex.make_kernel", unfused_kernel)
CHOSEN = [ON_A_CPU, ("fast.choose.flex_possible", yes)]  # faults.planted: a run on a CPU as on a GPU


def cpu_flex():
    with planted(*ON_A_CPU):
        made = FlexAttention()
        made.prepare()
        return made


def random_places(n, length, mean):
    """Return the places of tokens in documents of `mean` tokens: (n, length)."""
    is_first = torch.rand(n, length) < 1 / mean
    return document_places((~is_first).long(), 0)


# -----------------------------------------------------------------------------
# Outputs and gradients

CASES = {  # name: (sequences, query heads, key heads, queries, keys, window, mean length of a document)
    "window": (1, 2, 2, 300, 300, 40, 0), "documents": (2, 4, 2, 260, 260, 0, 50),
    "both": (2, 2, 1, 256, 256, 150, 90), "segment": (2, 2, 2, 130, 300, 60, 70),
    "short": (2, 4, 4, 9, 9, 4, 3)}


def check_case(case, dtype, tolerance):
    torch.manual_seed(5)
    n, h, g, n_queries, n_keys, window, mean = CASES[case]
    q = torch.randn(n, h, n_queries, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(n, g, n_keys, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    places = random_places(n, n_keys, mean)[:, -n_queries:] if mean else None
    weights = torch.randn_like(q)
    results = []
    for each in (cpu_flex(), None):
        y = attention.attend(q, k, v, Config(), window, places, flex=each)
        results.append([y, *torch.autograd.grad((y * weights).sum(), [q, k, v])])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance * want.abs().max().item())


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_the_mask(case):
    check_case(case, torch.float64, 1e-12)
    if case == "both":
        check_case(case, torch.float32, 1e-5)


def wider_window(original, n_queries, n_keys, window, places):
    return original(n_queries, n_keys, window + 50, places)


def test_a_fault_in_the_rule_is_found():
    with planted("fast.flex.pair_rule", wider_window), pytest.raises(AssertionError):
        check_case("window", torch.float64, 1e-12)


@pytest.mark.long
def test_the_compiled_kernel_reads_the_lists():
    """torch compiles it for a CPU, too, without gradients."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(2, 4, 400, 16) for _ in range(3))  # torch 2.8 refuses one tensor as all three
    places = random_places(2, 400, 90)
    kernel = FlexAttention()
    for window in (0, 200):
        with torch.no_grad():
            got = attention.attend(q, k, v, Config(), window, places, flex=kernel)
            want = attention.attend(q, k, v, Config(), window, places)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.long
def test_the_kernel_inside_a_compiled_graph():
    """--compile traces the lists and the kernel into the graph of a block, with rotated queries and keys."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(2, 400, 4, 16) for _ in range(3))
    angles = torch.arange(400).unsqueeze(1) * torch.rand(8)
    places = random_places(2, 400, 90)
    kernel = FlexAttention()
    kernel.prepare()

    def attend(flex):
        turned = [attention.rotate(x, angles.cos(), angles.sin()).transpose(1, 2) for x in (q, k)]
        values = v.transpose(1, 2)
        return attention.attend(*turned, values, Config(), 200, places, flex=flex)
    with torch.no_grad():
        got = torch.compile(attend, fullgraph=True, dynamic=False)(kernel)
        torch.testing.assert_close(got, attend(None), rtol=0, atol=1e-4)


# -----------------------------------------------------------------------------
# The lists of blocks

def expanded(counts, columns, n_columns):
    """Return the blocks that a list names, (B, rows, columns) bool."""
    blocks = torch.zeros(*counts.shape, n_columns + 1, dtype=torch.bool)
    listed = torch.arange(columns.size(-1)) < counts.unsqueeze(-1)
    blocks.scatter_(-1, columns.long().where(listed, n_columns), True)
    return blocks[:, 0, :, :n_columns]


def check_lists(n_queries, n_keys, window, mean):
    q = torch.empty(2, 1, n_queries, 8)
    k = torch.empty(2, 1, n_keys, 8)
    places = random_places(2, n_keys, mean)[:, -n_queries:] if mean else None
    found = flex.block_mask(q, k, window, places)
    with mock.patch.object(attention.F, "scaled_dot_product_attention", lambda q, k, v, mask, **_: mask):
        mask = attention.attend(q, k, k, Config(), window, places)
    if mask is None:  # one query, which sees all keys of its window
        mask = torch.ones(1, window, dtype=torch.bool)
    mask = F.pad(mask, (n_keys - mask.size(-1), 0))  # attend leaves out what no query's window reaches
    mask = mask.expand(2, 1, n_queries, n_keys)[:, 0]
    n_rows, n_columns = -(-n_queries // flex.BLOCK), -(-n_keys // flex.BLOCK)
    whole = torch.zeros(2, n_rows * flex.BLOCK, n_columns * flex.BLOCK, dtype=torch.bool)
    whole[:, :n_queries, :n_keys] = mask
    pairs = whole.view(2, n_rows, flex.BLOCK, n_columns, flex.BLOCK).sum((2, 4))
    some = (pairs > 0) & (pairs < flex.BLOCK**2)
    every = pairs == flex.BLOCK**2
    for want, listed, transposed in (
            (some, (found.kv_num_blocks, found.kv_indices), (found.q_num_blocks, found.q_indices)),
            (every, (found.full_kv_num_blocks, found.full_kv_indices),
             (found.full_q_num_blocks, found.full_q_indices))):
        assert torch.equal(expanded(*listed, n_columns), want)
        assert torch.equal(expanded(*transposed, n_rows), want.mT)


SIZES = [(640, 640, 0, 90), (1024, 1024, 200, 0), (1024, 1024, 384, 300), (700, 700, 130, 250),
         (300, 900, 0, 400), (256, 640, 300, 150), (5, 5, 2, 3), (1, 300, 200, 0)]


def test_the_lists_name_the_blocks_of_the_mask():
    torch.manual_seed(6)
    for sizes in SIZES:
        check_lists(*sizes)


# -----------------------------------------------------------------------------
# Models

def gradients(model, x, places):
    loss, _ = model(x, x, places)
    return torch.autograd.grad(loss, list(model.parameters()))


def check_model(family, **flags):
    """Compare a model's gradients with the mask's, for changing documents, and its evaluation."""
    cfg = Config(**dict(flags_of(family), seq_len=24, **flags))
    plain = random_model(cfg)
    model = GPT(cfg, MESH, cfg.vocab_size).double()
    flex = cpu_flex()
    for block in model.blocks.values():
        block.attn.flex = flex
    model.load_state_dict(plain.state_dict())
    places = torch.empty(3, 24, dtype=torch.int64)
    for number in range(3):  # the same memory, as in a captured graph; the last has no documents
        x, *_ = Documents(cfg.vocab_size, 24, 1).batch(number, 3)
        documents = places.copy_(document_places(x, 0)) if number < 2 else None
        for got, want in zip(gradients(model, x, documents), gradients(plain, x, documents), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-10 * max(want.abs().max().item(), 1e-4))
        with torch.no_grad():
            torch.testing.assert_close(model(x, x, documents)[0], plain(x, x, documents)[0])


@pytest.mark.parametrize("family,flags", [
    ("windows", {}), ("llama", dict(recompute="full")), pytest.param("dropless", {}, marks=pytest.mark.long)])
def test_a_model_has_the_gradients_of_the_mask(family, flags):
    check_model(family, **flags)


def test_documents_alone_through_the_kernel():
    """The oracle of test_masks.py: each document alone through the model."""
    def with_flex(original, layer, *args):
        original(layer, *args)
        layer.flex = cpu_flex()

    with planted("attention.Attention.__init__", with_flex):
        check_against_documents_alone("windows-documents")


LAYOUTS = [((2, dict(cp=2)), []), ((4, dict(tp=2, cp=2, recompute="full")), [pytest.mark.long]),
           ((4, dict(cp=2, pp=2)), [pytest.mark.long]), ((4, dict(tp=2, zero=3)), [pytest.mark.long])]


@pytest.mark.parametrize("place", [
    pytest.param(place, marks=marks, id=str(place)) for place, marks in LAYOUTS])
def test_a_layout_equals_the_mask_on_one_rank(place):
    run_with_faults("windows-documents", place, *CHOSEN)()


# -----------------------------------------------------------------------------
# Runs

@pytest.mark.parametrize("changed, possible", [
    ({}, True), (dict(dtype="fp64"), False), (dict(dropout=0.1), False), (dict(recompute="full"), True),
    (dict(recompute="selective"), False), (dict(head_dim=8), False), (dict(head_dim=256), True)], ids=str)
def test_when_the_kernel_is_chosen(changed, possible):
    cfg = Config(**dict(dict(n_embd=256, n_head=4, n_kv_head=4, dtype="bf16"), **changed))
    assert choose.flex_possible(cfg, CUDA) == possible
    assert not choose.flex_possible(cfg, torch.device("cpu"))


def test_a_graph_reads_the_documents_of_each_step(tmp_path):
    flags = [*TINY, "--window=6", "--full-every=2", "--steps=5"]
    with mock.patch.object(samples, "Synthetic", Documents):
        said = session(World(), [*flags, f"--out={tmp_path}/mask"])
        assert said["code"] == 0, said
        with planted(*CHOSEN[0]), planted(*CHOSEN[1]):
            said, seen = graphed_session(World(), [*flags, f"--out={tmp_path}/flex"])
    assert said["code"] == 0 and seen["captures"] == 1, said["err"]
    assert "each document attends to itself alone" in said["out"]
    for got, want in zip(rows(tmp_path / "flex"), rows(tmp_path / "mask"), strict=True):
        assert got == pytest.approx(want, rel=1e-6)
