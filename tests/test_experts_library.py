"""fast/experts.py: experts' products by quack-kernels, whose kernels only GPUs run.

Here a loop over the experts computes what the library's function gives, in the library's shapes, and counts
its calls. So everything but the kernels themselves runs: the dispatcher, the products that the library takes
and those that it leaves.
"""
import dataclasses
import importlib.metadata
from types import SimpleNamespace
from unittest import mock

import pytest
import test_flash
import torch
from faults import replaced as planted
from runs import TINY, rows, session
from test_flash import CUDA, HOPPER, broken, missing
from test_model import MESH

import moe
from config import Config
from fast import experts, padded, symm_mem
from fast.choose import OURS, choose
from fast.experts import QUACK
from fast.flash import FLASH_ATTN
from interface.command_line import parse, read_flags
from interface.schema import load_json
from ops import grouped_mm, routed_experts
from ops.backend import is_hopper
from parallel import Axis
from runtime import log
from runtime.launch import World

WIDE = Config(n_experts=4, n_embd=128, ffn_hidden=192, n_head=2, n_kv_head=2, dtype="bf16", top_k=2)


def pieces(bounds):
    """[(expert, its rows)] of bounds (E+1,)."""
    assert bounds.dtype == torch.int32 and bounds[0] == 0
    places = bounds.tolist()
    return [(i, slice(places[i], places[i + 1])) for i in range(len(places) - 1)]


def product(a, b, out, cu_seqlens_m=None, cu_seqlens_k=None, config=None):
    """The library's gemm_tuned.fn: (R, I) times (E, I, O), or (O, R) times (R, I) for each expert's rows."""
    assert config is not None and (cu_seqlens_m is None) != (cu_seqlens_k is None)
    LIBRARY.calls += 1
    if cu_seqlens_m is not None:
        assert a.is_contiguous()
        assert cu_seqlens_m.numel() == b.size(0) + 1 and out.shape == (a.size(0), b.size(2))
        for i, part in pieces(cu_seqlens_m):
            out[part] = a[part] @ b[i]
    else:
        assert out.shape == (cu_seqlens_k.numel() - 1, a.size(0), b.size(1))
        for i, part in pieces(cu_seqlens_k):
            out[i] = a[:, part] @ b[part]


def our_product(x, w, ends, plus=None, out=None):
    y = grouped_mm.grouped_mm_loop(x, w.mT, ends)
    if plus is not None:
        y += grouped_mm.grouped_mm_loop(plus[0], plus[1].mT, ends)
    return y if out is None else grouped_mm.copy_rows(y, out, ends[-1])


def our_gradient(grad, x, ends):
    bounds = torch.nn.functional.pad(ends, (1, 0))
    return torch.stack([grad[part].mT @ x[part] for _, part in pieces(bounds)])


def takes_quack(original, library, cfg, device):
    return library is QUACK or original(library, cfg, device)


LIBRARY = SimpleNamespace(gemm_tuned=SimpleNamespace(fn=product), calls=0)
ON_A_CPU = [("fast.experts.library", lambda original: LIBRARY),
            ("fast.experts.config", lambda original, *tile: tile)]
CHOSEN = ("fast.libraries.Library.is_taken", takes_quack)
OURS_ON_A_CPU = [("ops.grouped_mm.experts_mm", lambda original, *args, **out: our_product(*args, **out)),
                 ("ops.grouped_mm.experts_wgrad", lambda original, *args: our_gradient(*args)),
                 ("moe.use_grouped_mm", lambda original, x, w: True)]


@pytest.fixture(autouse=True)
def library():
    with planted(*ON_A_CPU[0]), planted(*ON_A_CPU[1]):
        yield
    forget()


def forget():
    experts.library.cache_clear()
    experts.config.cache_clear()
    vars(QUACK).pop("problem", None)


# -----------------------------------------------------------------------------
# Products

@pytest.mark.parametrize("sizes", [[3, 0, 9, 4], [0, 0, 16, 0]], ids=str)
def test_the_products_of_a_layer(sizes):
    """RoutedSwiGLU with the library's products and with ours: output and gradients, in fp64. Of nine products
    the library makes seven, and one of ours makes the sum of two."""
    K, C, width = 2, 8, 12
    expert = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))[torch.randperm(16)]
    cfg = Config(n_experts=4, top_k=K)
    leaves = [torch.randn(*shape, dtype=torch.float64)
              for shape in ((8, C), (8, K), (4, width, C), (4, width, C), (4, C, width))]
    grad = torch.randn(8, C, dtype=torch.float64)
    found = []
    for kind in (moe.Local, experts.by_quack(moe.Local)):
        dispatcher = kind(cfg, MESH)
        plan = dispatcher.plan(expert.view(8, K), None)
        multiplier = dispatcher.multiplier(plan.ends)
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        before = LIBRARY.calls
        with planted(*OURS_ON_A_CPU[0]), planted(*OURS_ON_A_CPU[1]):
            y = routed_experts.RoutedSwiGLU.apply(*inputs, *plan, multiplier)
            found.append([y.detach(), *torch.autograd.grad(y, inputs, grad)])
        assert LIBRARY.calls - before == (0 if kind is moe.Local else 7)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("many_rows", [False, True])
@pytest.mark.parametrize("has_buffer", [False, True])
def test_the_products_of_rows_that_came_from_other_ranks(has_buffer, many_rows, monkeypatch):
    """SwiGLUExperts likewise: the last rows belong to no expert, and results go where the dispatcher says."""
    C, width = 8, 12
    monkeypatch.setattr(grouped_mm, "has_many_rows", lambda x, ends: many_rows)
    ends = torch.tensor([3, 3, 9], dtype=torch.int32)
    leaves = [torch.randn(*shape, dtype=torch.float64)
              for shape in ((11, C), (3, width, C), (3, width, C), (3, C, width))]
    grad = torch.randn(11, C, dtype=torch.float64)
    found = []
    for multiplier in (None, experts.QuackProductsOverRanks(ends, balanced=4)):
        before = LIBRARY.calls
        out = torch.full((16, C), 7.0, dtype=torch.float64) if has_buffer else None
        inputs = [leaf.clone().requires_grad_() for leaf in leaves]
        with planted(*OURS_ON_A_CPU[0]), planted(*OURS_ON_A_CPU[1]):
            y = grouped_mm.SwiGLUExperts.apply(*inputs, ends, out, multiplier)
            assert (out is not None and y.data_ptr() == out.data_ptr()) == has_buffer
            kept = y[:9].clone()  # backward writes the rows' gradients there
            assert not has_buffer or (out[9:] == 7).all(), "other rows of the buffer stay as they are"
            grad_x, *grads = torch.autograd.grad(y, inputs, grad)
            assert (out is not None and grad_x.data_ptr() == out.data_ptr()) == has_buffer
            found.append([kept, grad_x[:9].clone(), *grads])
        by_library = 4 if many_rows else 7
        assert LIBRARY.calls - before == (0 if multiplier is None else by_library)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_what_is_left_to_our_kernels(monkeypatch):
    """The sum of two products, and where rows come from other ranks the weight gradient from many rows. All
    else is the library's."""
    ends = torch.tensor([3, 8], dtype=torch.int32)
    x, w, grad = torch.randn(8, 4), torch.randn(2, 4, 6), torch.randn(8, 6)
    products = experts.QuackProducts(ends, balanced=8)

    def refuse(*args):
        raise AssertionError("ours was called")
    monkeypatch.setattr(grouped_mm, "experts_mm", refuse)
    monkeypatch.setattr(grouped_mm, "experts_wgrad", refuse)
    turned = x.mT.contiguous().mT
    torch.testing.assert_close(products.experts_mm(turned, w, ends), our_product(x, w, ends))
    torch.testing.assert_close(products.experts_wgrad(grad, x, ends), our_gradient(grad, x, ends))
    seen = []

    def note(a, b, out, **options):
        seen.append((a.mT.is_contiguous(), b.is_contiguous()))
    with mock.patch.object(LIBRARY.gemm_tuned, "fn", note):
        products.experts_wgrad(grad.mT.contiguous().mT, x.mT.contiguous().mT, ends)
    assert seen == [(True, True)], "rows that lie otherwise are copied"
    with pytest.raises(AssertionError, match="ours"):
        products.experts_mm(x, w, ends, (x, w))
    monkeypatch.setattr(grouped_mm, "has_many_rows", lambda x, ends: True)
    products.experts_wgrad(grad, x, ends)
    with pytest.raises(AssertionError, match="ours"):
        experts.QuackProductsOverRanks(ends, balanced=8).experts_wgrad(grad, x, ends)


W2, TOP_8, NANOCHAT = (16384, 512, 1792), (131072, 2048, 1408), (65536, 1152, 1024)  # R, C, F


@pytest.mark.parametrize("shape, up, down, grad_of_h", [
    (W2, (128, 256, False, 1, 1), (128, 128, True, 2, 1), (128, 256, False, 1, 1)),
    (TOP_8, (128, 176, True, 2, 1), (128, 256, False, 1, 1), (256, 128, False, 1, 2)),
    (NANOCHAT, (128, 256, False, 1, 1), (128, 192, True, 2, 1), (128, 256, False, 1, 1))])
def test_tiles_of_products(shape, up, down, grad_of_h):
    R, C, F = shape
    assert experts.product_tile(R, C, F, by_column=True) == up
    assert experts.product_tile(R, F, C, by_column=True) == down
    assert experts.product_tile(R, C, F, by_column=False) == grad_of_h


def test_sums_of_many_terms_get_large_tiles():
    assert experts.product_tile(4096, 4096, 1024, by_column=True) == (128, 256, False, 1, 1)
    assert experts.product_tile(4096, 2047, 1024, by_column=True) == (128, 128, True, 2, 1)
    assert experts.gradient_tile(65536, 8, 1152, 1152) == (128, 192, True, 2, 1), "odd, of 192 columns"


@pytest.mark.parametrize("shape, e, of_up, of_down", [
    (W2, 64, (128, 256, False, 2, 1), (128, 256, False, 2, 1)),
    (W2, 16, (128, 128, True, 2, 1), (128, 128, True, 2, 1)),
    (TOP_8, 64, (128, 256, False, 1, 2), (256, 128, False, 2, 1)),
    (NANOCHAT, 8, (128, 192, True, 2, 1), (128, 256, False, 1, 2))])
def test_tiles_of_gradients(shape, e, of_up, of_down):
    R, C, F = shape
    assert experts.gradient_tile(R, e, F, C) == of_up
    assert experts.gradient_tile(R, e, C, F) == of_down


def test_products_get_their_tiles(monkeypatch):
    """They follow from the balanced load, 6 rows. The second of two matrices lies the other way round."""
    ends = torch.tensor([3, 8], dtype=torch.int32)
    x, w, grad = torch.randn(8, 4), torch.randn(2, 6, 4), torch.randn(8, 6)
    asked = []
    monkeypatch.setattr(experts, "product_tile", lambda *a, by_column: asked.append((*a, by_column)) or (1,))
    monkeypatch.setattr(experts, "gradient_tile", lambda *a: asked.append(a) or (1,))
    products = experts.QuackProducts(ends, balanced=6)
    products.experts_mm(x, w.mT, ends)
    products.experts_mm(grad, w, ends)
    products.experts_wgrad(grad, x, ends)
    assert asked == [(6, 4, 6, True), (6, 6, 4, False), (6, 2, 6, 4)]


def test_a_layer_takes_its_dispatchers_multiplier():
    """MoE.ffn: rows of other ranks reach the library, with their own ends. It knows the balanced load, 24."""
    cfg = Config(n_experts=4, n_embd=8, ffn_hidden=12, n_head=2, n_kv_head=2, top_k=2, seq_len=6,
                 micro_batch=2)
    layer = moe.MoE(cfg, MESH, None, moe.plain_dispatcher)
    for p in layer.parameters():
        torch.nn.init.normal_(p)
    two = dataclasses.replace(MESH, ep=Axis("ep", size=2))
    layer.dispatcher = experts.by_quack(moe.AllToAll)(cfg, two)
    x, ends = torch.randn(16, 8), torch.tensor([3, 8, 8, 16])
    want = layer.ffn(x, ends)
    before = LIBRARY.calls
    with planted(*OURS_ON_A_CPU[0]), planted(*OURS_ON_A_CPU[1]), planted(*OURS_ON_A_CPU[2]):
        got = layer.ffn(x, ends)
    assert LIBRARY.calls - before == 3
    torch.testing.assert_close(got, want)
    assert layer.dispatcher.multiplier(ends).balanced == 24
    layer.dispatcher = moe.AllToAll(cfg, two)
    with planted(*OURS_ON_A_CPU[0]), planted(*OURS_ON_A_CPU[1]), planted(*OURS_ON_A_CPU[2]):
        layer.ffn(x, ends)
    assert LIBRARY.calls - before == 3


@pytest.mark.parametrize("kind", [symm_mem.SymmMem, padded.PaddedAllToAll])
def test_rows_in_messages_of_their_exact_size_are_ours(kind):
    """The library would keep a plan for each number of rows: in evaluation, and where no buffer is in use."""
    ends = torch.tensor([3, 8], dtype=torch.int32)
    dispatcher = experts.by_quack(kind)(WIDE, dataclasses.replace(MESH, ep=Axis("ep", size=2)))
    assert dispatcher.multiplier(ends) is None
    dispatcher.rows_in_use = 16
    assert isinstance(dispatcher.multiplier(ends), experts.QuackProductsOverRanks)
    with torch.no_grad():
        assert dispatcher.multiplier(ends) is None


# -----------------------------------------------------------------------------
# The choice

@pytest.fixture
def installed(monkeypatch):
    """quack-kernels in the version that was tried."""
    forget()
    monkeypatch.setattr(importlib.metadata, "version", lambda package: QUACK.tested)
    return monkeypatch


@pytest.mark.parametrize("change, is_taken", [
    ({}, True), (dict(n_experts=0), False), (dict(capacity_factor=1.0), False), (dict(dtype="fp16"), False),
    (dict(dtype="fp32"), False), (dict(kernels="plain"), False),
    (dict(deterministic=True), False), (dict(mlp="relu2"), False), (dict(n_embd=96), False),
    (dict(ffn_hidden=200), False), (dict(recompute="full"), True), (dict(n_shared_experts=1), True)], ids=str)
def test_when_it_is_taken(change, is_taken, installed):
    cfg = dataclasses.replace(WIDE, **change)
    with mock.patch.multiple(torch.cuda, **HOPPER):
        assert QUACK.is_taken(cfg, CUDA) == is_taken
        assert not QUACK.is_taken(cfg, torch.device("cpu"))
        assert not QUACK.is_taken(cfg, torch.device("cuda"))  # plan.py's
    with mock.patch.object(torch.cuda, "get_device_capability", lambda device: (8, 0)):
        assert not QUACK.is_taken(cfg, CUDA)


def test_the_choice_gives_layers_their_dispatcher(installed):
    """choose.Choice governs it, so bench/ can turn it off."""
    with mock.patch.multiple(torch.cuda, **HOPPER):
        choice = choose(WIDE, MESH, CUDA)
    dispatcher = choice.dispatcher_maker(WIDE)(WIDE, MESH)
    assert type(dispatcher) is moe.Local and dispatcher.make_multiplier.func is experts.QuackProducts
    assert choice.products_by(WIDE) == f"quack-kernels {QUACK.tested}"
    two = dataclasses.replace(MESH, ep=Axis("ep", size=2))
    over_ranks = choice._replace(symm_mem=True).dispatcher_maker(WIDE)(WIDE, two)
    assert type(over_ranks) is symm_mem.SymmMem
    assert over_ranks.make_multiplier.func is experts.QuackProductsOverRanks
    with mock.patch.multiple(torch.cuda, **HOPPER):
        assert choose(WIDE, two, CUDA, lambda *_: False).quack, "through messages of a fixed size"
        without_graph = dataclasses.replace(WIDE, cuda_graph=False)
        assert not choose(without_graph, two, CUDA, lambda *_: False).quack
        assert choose(without_graph, MESH, CUDA).quack
    without = choice._replace(quack=False)
    assert without.dispatcher_maker(WIDE) is moe.plain_dispatcher and without.products_by(WIDE) == OURS


@pytest.mark.parametrize("version, fault, words", [
    (missing, None, "not installed"), (lambda package: "0.7", None, "version 0.7 was not tried"),
    (None, ("fast.experts.library", broken), "cannot be imported: no cutlass")],
    ids=["none", "another version", "it cannot be imported"])
def test_without_the_version_that_was_tried_ours_multiply(version, fault, words, installed):
    """Where one is installed, the run says why it is not taken, if experts could take it."""
    if version:
        installed.setattr(importlib.metadata, "version", version)
    with planted(*fault or ON_A_CPU[0]), mock.patch.multiple(torch.cuda, **HOPPER):
        assert words in QUACK.problem and not QUACK.is_taken(WIDE, CUDA)
        assert QUACK.why_not(WIDE, CUDA) == ("" if version is missing else QUACK.problem)
        for change in (dict(capacity_factor=1.0), dict(kernels="plain"), dict(n_experts=0)):
            assert QUACK.why_not(dataclasses.replace(WIDE, **change), CUDA) == ""
        assert QUACK.why_not(WIDE, torch.device("cpu")) == ""
    if version:
        assert "pip install quack-kernels==0.6.5" in QUACK.problem


BOTH = [(QUACK, WIDE), (FLASH_ATTN, test_flash.WIDE)]


@pytest.mark.parametrize("library, cfg", BOTH, ids=["quack", "flash"])
def test_without_the_library_no_gpu_is_asked(library, cfg, installed):
    """fast/libraries.py: a torch that was built for CPUs alone cannot answer."""
    installed.setattr(importlib.metadata, "version", missing)
    with planted("ops.backend.is_hopper", asked):
        assert not library.is_taken(cfg, CUDA) and library.why_not(cfg, CUDA) == ""


def asked(original, device):
    raise AssertionError("the GPU was asked")


def test_what_the_libraries_share(installed):
    for library, cfg in BOTH:
        test_without_the_library_no_gpu_is_asked(library, cfg, installed)
    installed.setattr(importlib.metadata, "version", lambda package: QUACK.tested)
    forget()
    for change, is_taken in (({}, True), (dict(kernels="plain"), False), (dict(mlp="relu2"), False)):
        test_when_it_is_taken(change, is_taken, installed)
    forget()
    test_without_the_version_that_was_tried_ours_multiply(
        None, ("fast.experts.library", broken), "no cutlass", installed)


def test_the_workloads_that_were_measured_take_it(installed):
    """W2b of bench/speed.py; not W1, nor W2a, which drops rows."""
    workloads = {"dense-210m": False, "moe-4b --capacity-factor 1.0": False, "moe-4b": True}
    with mock.patch.multiple(torch.cuda, **HOPPER):
        for flags, is_taken in workloads.items():
            cfg = parse(flags.split(), data="synthetic")
            assert QUACK.is_taken(cfg, CUDA) == is_taken


EXPERTS = [*TINY, "--steps=5", "--n-experts=4", "--top-k=2"]


def test_a_run_with_it_is_the_run_without(tmp_path):
    """It says who multiplies, and its config.json names what did."""
    said = session(World(), [*EXPERTS, f"--out={tmp_path}/plain"])
    assert said["code"] == 0 and "quack" not in said["out"], said
    with planted(*CHOSEN), planted("fast.libraries.Library.version", lambda *_: "0.6.5"), \
            planted(*OURS_ON_A_CPU[0]), planted(*OURS_ON_A_CPU[1]), planted(*OURS_ON_A_CPU[2]):
        said = session(World(), [*EXPERTS, f"--out={tmp_path}/quack"])
    assert said["code"] == 0, said["err"]
    assert "experts' products by quack-kernels 0.6.5" in said["out"] and "--kernels plain" in said["out"]
    for got, want in zip(rows(tmp_path / "quack"), rows(tmp_path / "plain"), strict=True):
        assert got == pytest.approx(want, rel=1e-5)
    for folder, words in (("plain", OURS), ("quack", "quack-kernels 0.6.5")):
        assert load_json(tmp_path / folder / "config.json")["products"] == words
        assert read_flags(tmp_path / folder)["n_experts"] == 4, "--config reads it"


def test_a_run_says_why_ours_multiply(tmp_path):
    def why_not(original, library, cfg, device):
        return "version 0.7 was not tried" if library is QUACK else ""
    with planted("fast.libraries.Library.why_not", why_not):
        said = session(World(), [*EXPERTS, f"--out={tmp_path}"])
    assert said["code"] == 0, said["err"]
    assert "products by ours: quack-kernels is installed, but version 0.7 was not tried" in said["out"]


def test_a_dense_model_has_no_experts(capsys, tmp_path):
    log.say_who_multiplies(WIDE, torch.nn.Linear(2, 2))
    assert capsys.readouterr().out == ""
    assert session(World(), [*TINY, "--steps=1", f"--out={tmp_path}"])["code"] == 0
    assert load_json(tmp_path / "config.json")["products"] is None


# -----------------------------------------------------------------------------
# The library itself

SHAPES = (  # (e, rows in use, rows, I, O) that take each of the tiles
    (4, 512, 512, 192, 320), (2, 4400, 5000, 2048, 256), (2, 4400, 4400, 256, 2048),
    (2, 4400, 4400, 256, 384), (2, 4400, 5000, 2112, 192), (2, 4400, 4400, 192, 2112),
    (2, 4400, 4400, 2176, 176), (2, 4400, 5000, 2176, 208), (2, 4400, 4400, 208, 2176))


def test_the_librarys_own_kernels():
    """In bf16, by each tile, also with an expert that has no row and with rows that no expert has: the very
    bits of torch's products."""
    forget()
    if not torch.cuda.is_available() or not is_hopper(CUDA) or QUACK.version() != QUACK.tested:
        pytest.skip(f"quack-kernels {QUACK.tested} is not installed here, or there is no Hopper GPU")
    from quack import gemm_interface
    from quack.gemm_config import GemmConfig

    def config(original, rows, columns, pingpong, cluster_rows, cluster_columns):
        return GemmConfig(tile_m=rows, tile_n=columns, pingpong=pingpong, cluster_m=cluster_rows,
                          cluster_n=cluster_columns, is_dynamic_persistent=False, device_capacity=9)
    with planted("fast.experts.library", lambda original: gemm_interface), \
            planted("fast.experts.config", config):
        for shape in SHAPES:
            check_kernels(*shape, device="cuda")


def test_the_check_of_the_kernels_takes_each_tile():
    """The test above, rehearsed with the loop."""
    taken = set()
    with planted("fast.experts.config", lambda original, *tile: taken.add(tile) or tile):
        for shape in SHAPES:
            check_kernels(*shape, device="cpu")
    assert taken == {
        experts.SMALL_TILE, *experts.PRODUCT_TILES, experts.COLUMN_TILE, experts.ANY_PRODUCT_TILE,
        *experts.GRADIENT_TILES, experts.ODD_GRADIENT_TILE, experts.ANY_GRADIENT_TILE}


def check_kernels(e, used, R, I, O, device):
    sizes = [used // e] * e
    sizes[:2] = [0, 2 * (used // e)]
    ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    x, grad = (torch.randn(R, n, device=device, dtype=torch.bfloat16) for n in (I, O))
    w = torch.randn(e, O, I, device=device, dtype=torch.bfloat16)
    products = experts.QuackProducts(ends, balanced=used)
    y, back = (torch.zeros(R + 8, n, device=device, dtype=torch.bfloat16) for n in (O, I))
    products.experts_mm(x, w.mT, ends, out=y)
    products.experts_mm(grad, w, ends, out=back)
    assert not y[used:].any() and not back[used:].any(), "rows that no expert has stay as they are"
    got = [y[:used], back[:used], products.experts_wgrad(grad, x, ends)]
    x, grad = x[:used], grad[:used]
    want = [our_product(x, w.mT, ends), our_product(grad, w, ends), our_gradient(grad, x, ends)]
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs), (e, used, R, I, O, mine.shape)
