"""docs/planner.html: plan.py in a browser, made from cost/.   python bench/planner_page.py

The formulas stand in Python only. This command translates the functions that plan.py calls
(planner/translate.py) and puts them into one file that needs no network. planner/runtime.js stands in for
Python's library, planner/plan.js calls the functions, and planner/page.html draws.
tests/test_planner_page.py runs the page's script with node and compares it with plan.py.
"""
import argparse
import ast
import dataclasses
import json
import re
import sys
import typing
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE / "planner")]

from translate import names_of, names_used, translate

from config import RANGES, Config
from interface.command_line import help_comments
from interface.presets import PRESETS
from ops import backend
from parallel import Mesh

PAGE = ROOT / "docs" / "planner.html"

# What is translated of each file (None is all of it), those first whose constants the others use. What these
# functions call besides is in runtime.js: torch's shapes, make_mesh without tables, Python's library.
TRANSLATED = {
    "config.py": "must_divide largest_divisor check_heads check_rope_scaling check_masked_model "
                 "check_experts check_adapters check_sharing check_precision n_masked "
                 "LARGEST_BF16_DECAY ceil_div pad_vocab head_width draws_random_numbers",
    "interface/layout.py": "check_ranks check_shard check_layout check_tensor_parallel check_sequence "
                           "check_batch check_pipeline FP8_MULTIPLE check_fp8 next_multiple "
                           "stage_layers empty_stage balanced_counts",
    "parallel.py": "reduction_axis parameter",
    "ops/flat.py": "ALIGNMENT padded_elements",
    "ops/activations.py": "GATED",
    "ops/symmetric_mm.py": "TILE",
    "optim.py": "VOTES StepStats",
    "muon.py": "STEPS_OF_LONG STEPS_OF_SHORT LONG BATCH_ELEMENTS MOST_FAMILIES Matrix shapes_of matrices_of "
               "owned_matrices assign_owners Batch batches_of joined families received_places "
               "iteration_elements matrices_together length_of iteration_dtype steps_per_gram",
    "ddp.py": "BUCKET_ELEMENTS Contents uses_weight_decay uses_muon block_of "
              "trained_parameters frozen_parameters assign_buckets",
    "zero.py": "uses_slot",
    "pipeline.py": "rank_layers Op schedule existing timetable",
    "moe.py": "MoE Router expert_capacity",
    "layers.py": "Gain Norm ColumnLinear RowLinear",
    "lora.py": "Adapter add_adapters",
    "attention.py": "is_nth Attention",
    "model.py": "DTYPES MLP Block Weight MaskedHead GPT",
    "ops/tiles.py": "NORM_BYTES WGRAD_ROWS next_power_of_2 norm_fits",
    "fast/experts.py": "WIDTHS fits",
    "ops/gelu_mlp.py": "fits",
    "fast/products.py": "fits",
    "fast/choose.py": "Choice choose has_cuda_api static_shapes needs_row_limit grouped_mm_possible "
                      "flex_possible",
    "cost/parameters.py": None,
    "cost/gpus.py": None,
    "cost/bubble.py": None,
    "cost/communication_time.py": None,
    "cost/step_time.py": None,
    "cost/muon.py": None,
    "cost/traffic.py": None,
    "cost/memory.py": None,
    "cost/idle.py": None,
    "cost/meshes.py": None,
    "plan.py": "LAYOUT MOST_OPERATIONS check_gpus _groups_of_stages estimate "
               "uneven_ms _largest_traffic warnings SHORTEST_SHARE divisors layouts _ep_sizes "
               "_micro_batch_sizes _shares _chunk_counts"}
# It asks torch for the name of a device; and a key of a cache, which runtime.js makes in another way.
NOT_TRANSLATED = {"peak_flops", "_flags_of_any_layout"}
# Names that another of these files has, too
RENAMED = {"plan.py": {"LAYOUT": "LAYOUT_OF_PLAN"}, "fast/experts.py": {"fits": "fits_quack"},
           "ops/gelu_mlp.py": {"fits": "fits_gelu"}, "fast/products.py": {"fits": "fits_products"}}

# The flags that the page asks for, in groups.
ASKED = {
    "model": ("n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "ffn_hidden", "vocab_size", "seq_len",
              "norm", "norm_place", "qk_norm", "mlp", "pos", "bias", "qkv_bias", "tied", "objective",
              "window", "full_every", "doc_mask", "logit_softcap", "dropout"),
    "experts": ("n_experts", "top_k", "n_shared_experts", "capacity_factor", "ep_slack"),
    "layout": ("tp", "cp", "pp", "pp_chunks", "ep", "zero", "shard"),
    "training": ("micro_batch", "global_batch", "recompute", "dtype", "fp8", "split_masters", "moments_dtype",
                 "kernels", "compile", "cuda_graph", "optimizer", "lora")}


def all_names(path):
    """Return the functions, classes and constants of a file."""
    nodes = ast.parse(path.read_text()).body
    return [name for node in nodes for name in sorted(names_of(node)) if name not in NOT_TRANSLATED]


def script():
    """Return the script of the page without what draws: `planner`, an object with plan(), search() and more.

    ValueError: a translated function calls what is neither translated nor in runtime.js.
    """
    parts = [(HERE / "planner" / "runtime.js").read_text()]
    used = {}
    dtypes = ", ".join(f"torch.{str(dtype).removeprefix('torch.')}" for dtype in backend.DTYPES)
    parts.append(f"const backend = {{ TRITON_DEVICES: [], DTYPES: [{dtypes}] }};\n"
                 "const ACTIVATIONS = new Counting();\n"
                 "const QUACK = { is_taken: (cfg, device) => false };  // plan.py's device takes none\n"
                 "const FLASH_ATTN = QUACK;\n"
                 "const _gives_memory = { get: () => true };  // shapes have none to give\n"
                 "const quack = { fits: (cfg) => fits_quack(cfg) };\n"
                 "const gelu_mlp = { fits: (cfg) => fits_gelu(cfg), is_possible: (cfg, device) => false };\n"
                 "const products = { fits: (cfg) => fits_products(cfg), is_possible: () => false };")
    for name, names in TRANSLATED.items():
        path = ROOT / name
        wanted = all_names(path) if names is None else names.split()
        parts.append(f"// -- {name}\n{translate(path, wanted, RENAMED.get(name))}")
        used.update(dict.fromkeys(names_used(path, wanted), name))
    declared = re.findall(r"^(?:const|class|function\*?) (\w+|\[[\w, ]+\])", "\n".join(parts), re.M)
    defined = {"super", *re.findall(r"\w+", " ".join(declared))}
    if len(declared) > len(set(declared)):
        twice = sorted({one for one in declared if declared.count(one) > 1})
        raise ValueError(f"two files define {', '.join(twice)}: add one of them to RENAMED")
    unknown = [f"{name} of {file}" for name, file in sorted(used.items()) if name not in defined]
    if unknown:
        raise ValueError(f"neither translated nor in runtime.js: {', '.join(unknown)}")
    parts.append((HERE / "planner" / "plan.js").read_text())
    axes = json.dumps([*Mesh.__annotations__])
    code = "\n".join(parts)
    data = json.dumps(data_of_page(code))
    return f"const planner = (() => {{\nconst MESH_AXES = {axes};\nconst DATA = {data};\n{code}\n}})();\n"


def data_of_page(code):
    """Return what the page knows of the flags that its code reads: values, presets, help, ranges."""
    asked = {name for names in ASKED.values() for name in names}
    read = asked | set(re.findall(r"\bcfg\.(\w+)", code))
    comments = help_comments(Config)
    flags = {}
    for field in dataclasses.fields(Config):
        if field.name not in read:
            continue
        choices = typing.get_args(field.type) if typing.get_origin(field.type) is typing.Literal else ()
        _, text = comments[field.name]
        flags[field.name] = {"help": text if field.name in asked else "", "choices": choices,
                             "value": field.default, "range": RANGES.get(field.name, ())}
    presets = {preset: {name: value for name, value in values.items() if name in read}
               for preset, values in PRESETS.items()}
    return {"flags": flags, "presets": presets, "asked": ASKED}


def page():
    """Return docs/planner.html."""
    template = (HERE / "planner" / "page.html").read_text()
    return template.replace("/*SCRIPT*/", script().replace("</", "<\\/"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.parse_args()
    text = page()
    PAGE.write_text(text)
    print(f"{PAGE.relative_to(ROOT)}: {len(text):,} bytes")


if __name__ == "__main__":
    main()
