"""The words that people bring from nanoGPT, nanochat, the Trainer of Hugging Face, Megatron-LM and torchrun.

    answer_flag     a flag of another trainer, or of another program of ours: what to type here
    answer_value    a value that another trainer has for a flag of ours
    answer_number   a value that is no number
    answer_stray    a first word that is no preset: a file, a preset that is meant, name=value
    OF_LAUNCHERS    the flags that start ranks; interface/nearest.py writes the line that does it here

A flag is looked up with _ in the place of -. Programs are named by their file.
"""
import contextlib
import difflib
import re
import shlex
from pathlib import Path

import config
from interface import paths

# The flags of our programs beside those of config.Config, which train.py and plan.py have.
PROGRAMS = {
    "prepare.py": ("name out tokenizer vocab_size text_key shuffle no_shuffle seed shard_tokens val_fraction "
                   "seq_len workers with_tests replace verify"),
    "sample.py": "prompt fill n max_new_tokens temperature top_k seed score chat system tp ep",
    "plot.py": "metric log steps follow every png html width height",
    "convert.py": "out dtype shard_gb seq_len",
    "plan.py": "gpus gpu tokens search scaling json",
}


def table(*rows):
    """Return {word: answer} of rows ("word word ...", answer)."""
    return {word: answer for words, answer in rows for word in words.split()}


# Their flags, and ours.
FLAGS = table(
    ("block_size max_seq_len max_seq_length context_length seq_length max_length sequence_length "
     "max_position_embeddings n_positions n_ctx ctx_len",
     "seq_len"),
    ("num_layers n_layers num_hidden_layers depth layers", "n_layer"),
    ("hidden_size d_model dim model_dim embed_dim width", "n_embd"),
    ("num_attention_heads n_heads num_heads heads", "n_head"),
    ("num_query_groups num_key_value_heads n_kv_heads num_kv_heads", "n_kv_head"),
    ("ffn_hidden_size intermediate_size d_ff mlp_dim", "ffn_hidden"),
    ("kv_channels", "head_dim"),
    ("normalization norm_type", "norm"),
    ("norm_epsilon layernorm_epsilon rms_norm_eps layer_norm_eps", "norm_eps"),
    ("position_embedding_type pos_emb", "pos"),
    ("activation hidden_act", "mlp"),
    ("rotary_base rope_theta theta", "rope_base"),
    ("add_qkv_bias", "qkv_bias"),
    ("hidden_dropout attention_dropout resid_pdrop attn_pdrop", "dropout"),
    ("sliding_window window_size", "window"),
    ("tie_word_embeddings", "tied"),
    ("qk_layernorm", "qk_norm"),
    ("num_experts num_local_experts n_routed_experts experts", "n_experts"),
    ("moe_router_topk num_experts_per_tok num_experts_per_token topk", "top_k"),
    ("moe_aux_loss_coeff router_aux_loss_coef", "aux_coef"),
    ("moe_z_loss_coeff", "z_coef"),
    ("moe_expert_capacity_factor expert_capacity", "capacity_factor"),
    ("tensor_model_parallel_size tensor_parallel_size tp_size", "tp"),
    ("pipeline_model_parallel_size pipeline_parallel_size pp_size", "pp"),
    ("context_parallel_size cp_size", "cp"),
    ("expert_model_parallel_size expert_parallel_size ep_size", "ep"),
    ("zero_stage sharding_stage", "zero"),
    ("virtual_pipeline_model_parallel_size", "pp_chunks"),
    ("recompute_granularity activation_checkpointing", "recompute"),
    ("batch_size per_device_train_batch_size device_batch_size micro_batch_size train_batch_size mbs "
     "train_micro_batch_size_per_gpu",
     "micro_batch"),
    ("global_batch_size gbs", "global_batch"),
    ("max_iters max_steps train_iters num_iterations iterations iters num_steps n_steps total_steps "
     "num_train_steps",
     "steps"),
    ("learning_rate max_lr peak_lr", "lr"),
    ("min_learning_rate", "min_lr"),
    ("warmup_iters warmup_steps lr_warmup_iters num_warmup_steps", "warmup"),
    ("lr_decay_iters lr_decay_steps", "decay_steps"),
    ("lr_scheduler_type lr_decay_style scheduler", "lr_schedule"),
    ("warmdown_ratio", "decay_ratio"),
    ("grad_clip clip_grad max_grad_norm gradient_clipping", "clip"),
    ("adam_beta1 beta_1", "beta1"),
    ("adam_beta2 beta_2", "beta2"),
    ("optim optimizer_type", "optimizer"),
    ("wd", "weight_decay"),
    ("torch_dtype precision mixed_precision outtype", "dtype"),
    ("torch_compile", "compile"),
    ("dataset dataset_name data_path data_dir train_file train_data data_root dataset_dir", "data"),
    ("out_dir output_dir save save_dir checkpoint_dir outdir", "out"),
    ("resume_from_checkpoint resume_from load", "resume"),
    ("random_seed", "seed"),
    ("eval_interval eval_steps val_interval val_every", "eval_every"),
    ("log_interval logging_steps", "log_every"),
    ("save_interval save_steps checkpoint_every", "save_every"),
    ("save_total_limit keep_last", "keep"),
    ("load_best_model_at_end", "keep_best"),
    ("wandb_log report_to use_wandb", "wandb"),
    ("exit_duration_in_mins max_time", "max_minutes"),
    ("model_name_or_path pretrained checkpoint ckpt from_pretrained", "init_from"),
    ("deterministic_mode", "deterministic"),
    ("use_torch_profiler", "trace"),
    ("num_samples num_return_sequences samples n_samples", "n"),
    ("start text input", "prompt"),
    ("temp t", "temperature"),
    ("max_tokens num_tokens max_gen_len n_predict length", "max_new_tokens"),
    ("system_prompt", "system"),
    ("json_keys text_column text_column_name", "text_key"),
    ("num_proc num_workers preprocessing_num_workers", "workers"),
    ("tokenizer_name tokenizer_type encoding", "tokenizer"),
    ("overwrite", "replace"),
    ("test_size val_split validation_split_percentage", "val_fraction"),
    ("output_prefix", "name"),
    ("shard_size", "shard_tokens"),
    ("max_shard_size", "shard_gb"),
    ("num_gpus ngpus n_gpus world_size", "gpus"),
    ("num_tokens_total", "tokens"),
)

IS_VALUE = "is a value here: "  # so begins a sentence that ends with flags to type

# Their flags, and what to do instead. These are answers of train.py and of what has its flags.
SENTENCES = table(
    ("model preset config_name model_name", "is the first word here, without dashes: python train.py gpt2"),
    ("device", "is no flag: a GPU is taken if there is one; CUDA_VISIBLE_DEVICES=-1 in front hides it"),
    ("accelerator", "is no flag: a GPU is taken if there is one; CUDA_VISIBLE_DEVICES=-1 in front hides it"),
    ("no_cuda use_cpu cpu", "is no flag: CUDA_VISIBLE_DEVICES=-1 in front hides the GPUs"),
    ("epochs num_train_epochs num_epochs n_epochs max_epochs train_samples",
     "is no flag: give --steps; an epoch is training samples / global batch"),
    ("gradient_accumulation_steps grad_accum_steps accumulate_grad_batches grad_accum",
     "is no flag: give --global-batch, micro-batch * dp * those steps"),
    ("total_batch_size", "is no flag: give --global-batch, in sequences: those tokens / --seq-len"),
    ("warmup_ratio lr_warmup_fraction warmup_frac", "is no flag: give --warmup, that share of --steps"),
    ("fp16 half", "is a value here: --dtype fp16"),
    ("bf16 amp", "is a value here: --dtype bf16"),
    ("fp32", "is a value here: --dtype fp32"),
    ("gradient_checkpointing checkpoint_activations recompute_activations use_gradient_checkpointing",
     "is a value here: --recompute full"),
    ("decay_lr", "is no flag: --lr-schedule says how it falls; --min-lr equal to --lr keeps it constant"),
    ("muon use_muon", "is a value here: --optimizer muon"),
    ("moe use_moe", "is a preset here: python train.py tiny-moe; or give --n-experts 8"),
    ("attention_bias", "is no flag: give --qkv-bias for queries, keys and values alone, or --bias for all"),
    ("use_cache", "is no flag: leave it out, sample.py keeps keys and values by itself"),
    ("dataloader_num_workers num_workers pin_memory dataloader_pin_memory prefetch_factor",
     "is no flag: leave it out, tokens are read from mapped files, without workers"),
    ("zero_optimization zero_optimizer", "is no flag: give --zero 1, 2 or 3"),
    ("strategy", "is no flag: replicas sum their gradients by themselves (ddp); --zero 3 is fsdp"),
    ("use_distributed_optimizer distributed_optimizer", "is a value here: --zero 1"),
    ("fsdp fully_shard use_fsdp", "is a value here: --zero 3"),
    ("deepspeed deepspeed_config", "is no flag: give --zero 1, 2 or 3"),
    ("use_flash_attn flash_attn attn_implementation flash",
     "is no flag: leave it out; flash-attn-4 attends where it is installed and the GPU can run it"),
    ("sequence_parallel tp_comm_overlap overlap_grad_reduce overlap_param_gather "
     "ddp ddp_find_unused_parameters backend distributed_backend",
     "is no flag: leave it out, it is done or chosen without one"),
    ("data_parallel_size dp dp_size",
     "is no flag: dp is what is left of the ranks, mpiexec -n N / (tp * cp * pp)"),
    ("num_layers_per_virtual_pipeline_stage", "is no flag: give --pp-chunks, the chunks of a rank"),
    ("swiglu", "is a value here: --mlp swiglu"),
    ("squared_relu", "is a value here: --mlp relu2"),
    ("disable_bias_linear", "is the default here: --bias turns biases on"),
    ("untie_embeddings_and_output_weights", "is the default here: --tied ties them"),
    ("group_query_attention", "is no flag: give --n-kv-head, the number of groups"),
    ("multiple_of", "is no flag: give --ffn-hidden"),
    ("init_method_std", "is no flag: docs/change-it.md shows how to change what initial_weights draws"),
    ("vocab_file merge_file tokenizer tokenizer_model tokenizer_path",
     "belongs to the data: python prepare.py FILE... --name NAME --tokenizer TOKENIZER, then --data "
     "data/NAME"),
    ("split val_ratio", "belongs to the data: python prepare.py FILE... --val-fraction 0.1"),
    ("per_device_eval_batch_size eval_batch_size",
     "is no flag: leave it out; --eval-iters says how many batches are evaluated, of the global batch"),
    ("do_eval eval_only evaluate evaluate_only",
     "is no flag: python sample.py RUN --score FILE.txt prints how well a run predicts a text"),
    ("always_save_checkpoint overwrite_output_dir do_train evaluation_strategy "
     "eval_strategy save_strategy logging_strategy",
     "is no flag: leave it out; --eval-every and --save-every say when, and an --out that holds a run is "
     "moved aside"),
    ("wandb_project wandb_run_name wandb_name run_name run",
     "is no flag: --wandb online logs, and the run has the name of --out"),
    ("tensorboard_dir logging_dir",
     "is no flag: OUT/report.html has the curves, and --wandb offline logs for Weights & Biases"),
    ("push_to_hub hub_model_id", "is another program here: python convert.py export RUN --out DIR"),
    ("embedding_lr unembedding_lr matrix_lr scalar_lr",
     "is no flag: --lr is AdamW's, and with --optimizer muon --muon-lr-factor is the matrices' over it"),
    ("target_param_data_ratio", "is no flag: give --steps; python plan.py --tokens N counts them"),
    ("sample_every core_metric_every sample_interval",
     "is no flag: --prompt TEXT continues a text at each evaluation, every --eval-every steps"),
    ("verbose debug quiet", "is no flag: --log-every says how often a line comes"),
    ("num_samples max_new_tokens temperature start",
     "is for sample.py, which writes text: python sample.py RUN --prompt TEXT"),
)
# Answers of all programs.
OF_ALL = table(
    ("list list_runs", "shows the runs of a folder, by train.py alone: type python train.py --list out"),
    ("version", "is no flag: git log -1 names this version, python bench/doctor.py those of the packages"),
)
# Answers that only one program gives: they come first. A path that was typed and is there takes the place of
# RUN, FILE... or MODEL_DIR.
OF_PROGRAM = {
    "sample.py": table(
        ("out_dir out init_from checkpoint ckpt model model_tag resume model_path load checkpoint_path "
         "run",
         "is the first word here, without dashes: python sample.py RUN"),
        ("p text", "is --prompt here"),
        ("top_p repetition_penalty do_sample num_beams beam_size penalty_alpha typical_p min_p",
         "is no flag: --temperature and --top-k say how tokens are drawn"),
        ("device devices accelerator dtype compile",
         "is no flag: leave it out, the model and the machine say it"),
        ("use_cache kv_cache", "is no flag: leave it out, keys and values are kept"),
        ("stream streaming", "is no flag: --chat and --serve print each word as it comes"),
        ("interactive", "is --chat here"),
    ),
    "prepare.py": table(
        ("input data dataset input_file file train_file files",
         "is the first word here, without dashes: python prepare.py FILE... --name NAME"),
        ("block_size", "is for train.py: --seq-len; text is prepared without a length"),
        ("force f", "is --replace here"),
    ),
    "plot.py": table(
        ("out out_dir run logdir input", "is the first word here, without dashes: python plot.py RUN"),
        ("output save savefig o", "is --png FILE here"),
        ("y key metrics", "is --metric here"),
        ("logy", "is --log here"),
        ("xlim", "is --steps A B here"),
        ("title", "is no flag: leave it out, the title of a plot is its metric"),
        ("smooth smoothing ema window rolling",
         "is no flag: leave it out, the values are drawn as they were logged"),
        ("format ext type", "is --png FILE here, which ends with .png, .svg or .pdf"),
    ),
    "convert.py": table(
        ("model_name_or_path pretrained model_path model input hf_dir checkpoint",
         "is the word after import or export: python convert.py import MODEL_DIR --out DIR"),
        ("export import gguf", "is the first word here, without dashes"),
        ("output output_dir outfile save o", "is --out here"),
        ("format outtype_format safetensors safe_serialization",
         "is no flag: export writes safetensors; python convert.py gguf RUN --out MODEL.gguf writes GGUF"),
        ("quantize", "is llama.cpp's: python convert.py gguf RUN --out MODEL.gguf, then llama-quantize"),
    ),
    "plan.py": table(
        ("nodes num_nodes nnodes nproc_per_node devices", "is no flag: --gpus counts all GPUs"),
        ("gpus_per_node", "is part of --gpu here: a100-40x4 and h100x4 have four to a node, others eight"),
        ("gpu_type hardware device", "is --gpu here: a100-40, a100-40x4, a100-80, h100, h100x4, h200"),
        ("num_tokens", "is --tokens here"),
    ),
}

# Flags of mpiexec, srun and torchrun, which are typed before the program and not behind it.
OF_LAUNCHERS = ("nproc_per_node", "nproc", "np", "n", "ntasks", "num_processes", "devices", "nnodes",
                "num_nodes", "num_machines", "node_rank", "local_rank", "master_addr", "master_port",
                "standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "hostfile", "ppn")
COUNTS_RANKS = OF_LAUNCHERS[:7]

# Values that other trainers have for a flag of ours, {flag: {value in small letters: ours}}.
VALUES = {
    "dtype": table(
        ("bfloat16 bf16-true bf16-mixed torch.bfloat16", "bf16"),
        ("float16 half 16 torch.float16", "fp16"),
        ("float32 float 32 torch.float32", "fp32"),
        ("float64 double 64", "fp64"),
    ),
    "norm": table(("rmsnorm", "rms"), ("layernorm", "layer")),
    "mlp": table(("silu", "swiglu"), ("gelu_new gelu_pytorch_tanh", "gelu"), ("relu relu_squared", "relu2")),
    "pos": table(("rotary", "rope"), ("learned_absolute absolute", "learned")),
    "optimizer": table(("adam adamw_torch adamw_torch_fused", "adamw")),
    "recompute": table(("true uniform block on", "full"), ("false", "none")),
    "wandb": table(("true wandb all", "online"), ("false none disabled", "off")),
    "resume": table(("true latest last", "auto"), ("false", "none")),
    "objective": table(("clm gpt", "causal"), ("bert", "mlm")),
    "router": table(("topk", "softmax-topk")),
}
SENTENCES_OF_VALUES = {
    ("init_from", "resume"): "--resume auto goes on with the run in --out",
    ("init_from", "scratch"): "it is what happens without the flag: leave it out",
    ("resume", ""): "--resume auto goes on with the run in --out",
    ("lr_schedule", "constant"): "--min-lr equal to --lr keeps it constant",
    ("lr_schedule", "constant_with_warmup"): "--min-lr equal to --lr keeps it constant after --warmup",
    ("lr_schedule", "linear"): "--lr-schedule wsd --decay-ratio 1 falls in a line",
}
# The text, the name and the tokenizer of the data that nanoGPT trains a preset on
NANOGPT_DATA = {"shakespeare-char": ("input.txt", "shakespeare", "char")}
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


def key_of(word):
    """Return the flag of a word such as --block-size=64, as the tables have it: block_size."""
    return word.partition("=")[0].lstrip("-").replace("-", "_")


def typed(flag):
    """Return a flag as it is typed."""
    return f"--{flag.replace('_', '-')}"


def without_launcher(argv, prog, ours):
    """Return (the flags of a launcher in argv, the number of ranks that they start or None, the other words).

    ours: the names of the program's flags.
    """
    found = []
    rest = []
    ranks = None
    left = list(argv)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        key = key_of(word)
        is_ours = key in ours or key in OF_PROGRAM.get(prog, {})
        if not word.startswith("-") or key not in OF_LAUNCHERS or is_ours:
            rest.append(word)
            continue
        found.append(name)
        if not equals and left and not left[0].startswith("-"):
            value = left.pop(0)
        if key in COUNTS_RANKS and value.isdecimal():
            ranks = max(1, int(value))
    return found, ranks, rest


def in_our_words(argv, ours):
    """Return argv with our flags and values in the place of those of others that have one of ours.

    ours: the names of the program's flags. What needs more than another word stays as it is.
    """
    translated = []
    left = list(argv)
    while left:
        word = left.pop(0)
        if not word.startswith("--") or key_of(word) in ours:
            translated.append(word)
            continue
        name, equals, value = word.partition("=")
        values = [value] if equals else []
        if not equals and left and not left[0].startswith("-"):
            values = [left.pop(0)]
        translated += our_words(name, values, ours)
    return translated


def our_words(name, values, ours):
    """Return a flag of others and its value in our words, or as they are. values: a list of at most one."""
    key = key_of(name)
    flag = FLAGS.get(key)
    sentence = SENTENCES.get(key, "")
    if flag in ours:
        known = VALUES.get(flag, {})
        return [typed(flag), *(known.get(value.lower(), value) for value in values)]
    if sentence.startswith(IS_VALUE) and "false" not in map(str.lower, values):
        return sentence.removeprefix(IS_VALUE).split()
    return [name, *values]


def answer_flag(word, value, ours, prog, is_train):
    """Return what to say about the flag `word` of a command line; "" if nothing is known of it.

    value: what is given for it, or "". ours: the names of the program's flags. is_train: whether they are
    train.py's, and perhaps more.
    """
    key = key_of(word)
    name = word.partition("=")[0]
    if key in ours and not word.startswith("--"):
        return f"{name} is {typed(key)} here"
    if key in ours or key.startswith("no_") and key[3:] in ours:
        return answer_value(name, value, ours) if is_train else ""
    sentence = OF_PROGRAM.get(prog, {}).get(key)
    if sentence is not None and value and Path(value).exists():
        sentence = with_path(sentence, value)
    flag = FLAGS.get(key, "")
    if sentence is None and flag in ours:
        return answer_value(name, value, ours) or f"{name} is {typed(flag)} here"
    if sentence is None and is_train:
        sentence = config.REMOVED.get(key) or SENTENCES.get(key)
    if sentence is None:
        sentence = OF_ALL.get(key)
    if sentence is not None:
        return f"{name} {sentence}"
    home = program_of(flag or key, prog)
    if not home:
        return ""
    if not flag:
        return f"{name} is a flag of {home}, not of {prog}"
    return f"{name} is {typed(flag)}, a flag of {home}, not of {prog}"


def with_path(sentence, path):
    """Return a sentence of OF_PROGRAM with a path in the place of RUN, FILE... or MODEL_DIR."""
    for place in ("RUN", "FILE...", "MODEL_DIR"):
        sentence = sentence.replace(place, shlex.quote(path))
    stem = Path(path).stem
    return sentence.replace("NAME", stem if stem.isidentifier() else "my-text")


def program_of(flag, prog):
    """Return which other program of ours has a flag, or ""."""
    if flag in config.FLAGS and prog not in ("train.py", "plan.py"):
        return "train.py"
    for home, names in PROGRAMS.items():
        if home != prog and flag in names.split():
            return home
    return ""


def answer_value(word, value, ours):
    """Return what to say about the value that follows a flag, which may be ours; "" if nothing is known."""
    key = key_of(word)
    key = FLAGS.get(key, key)
    if key not in ours:
        return ""
    small = value.lower()
    known = VALUES.get(key, {}).get(small)
    if known is not None:
        return f"{word} {value} is {typed(key)} {known} here"
    sentence = SENTENCES_OF_VALUES.get((key, small))
    if sentence is not None:
        return f"{word} {value}".rstrip() + f": {sentence}"
    if key == "init_from":
        imported = paths.imported(value)
        download = paths.download(value, f"python convert.py import {{}} --out {imported}, then {typed(key)} "
                                         f"{imported}")
        return f"{word} {download}" if download else ""
    return ""


def answer_number(word, value, is_whole):
    """Return what to say about the value of a flag that takes a number, and a whole one if is_whole.

    1e3, 1,000 and 10k are numbers to people.
    """
    kind = "a whole number" if is_whole else "a number"
    found = re.fullmatch(r"([0-9]{1,3}(?:,[0-9]{3})+|[0-9.]+(?:e\+?[0-9]{1,2})?)([kmbg]?)", value.lower())
    number = 0.5  # of none that is meant
    if found:
        with contextlib.suppress(ValueError):
            number = float(found[1].replace(",", "")) * UNITS[found[2]]
    if is_whole and number != int(number) or not found:
        return f"{word} {value}: it takes {kind}, for example {word} {1000 if is_whole else 0.001}"
    return f"{word} {value}: it takes {kind}: {word} {int(number) if is_whole else f'{number:g}'}"


def answer_word(word, presets, ours):
    """Return what to say about a word behind the flags of train.py that belongs to none of them."""
    if word in presets:
        return f"a preset is the first word: python train.py {word} --steps 100"
    return answer_stray(word, presets, ours)


def answer_file(word, rest, presets, ours):
    """Return what to say about a file of flags of nanoGPT. rest: the words behind it."""
    preset = Path(word).stem.replace("_", "-").removeprefix("train-")
    if preset not in presets:
        preset = "gpt2"
    text, name, tokenizer = NANOGPT_DATA.get(preset, ("FILE...", "NAME", "gpt2"))
    flags, answers = without_foreign(in_our_words(rest, ours), ours)
    data = "" if any(key_of(flag) == "data" for flag in flags) else f" --data data/{name}"
    return (f"{word} is a file of Python, which is not read; a preset has its flags: "
            f"python prepare.py {text} --name {name} --tokenizer {tokenizer}, then "
            f"{shlex.join(['python', 'train.py', preset, *flags])}{data}; "
            f"{'; '.join(['it wants a GPU, a step takes a minute and more on a CPU', *answers])}")


def without_foreign(argv, ours):
    """Return (argv without the flags that are not ours, what to say about those)."""
    kept = []
    answers = []
    left = list(argv)
    while left:
        word = left.pop(0)
        key = key_of(word)
        if not word.startswith("--") or key in ours or key.removeprefix("no_") in ours:
            kept.append(word)
            continue
        _, equals, value = word.partition("=")
        if not equals and left and not left[0].startswith("-"):
            value = left.pop(0)
        answers.append(answer_flag(word, value, ours, "train.py", is_train=True) or f"{word} is no flag")
    return kept, answers


def answer_stray(word, presets, ours, rest=()):
    """Return what to say about the first word of train.py's command line, which is no preset.

    It is a preset that is meant, a file of another program, or name=value. rest: the words behind it.
    """
    name, equals, value = word.partition("=")
    key = key_of(name)
    flag = FLAGS.get(key, key)
    if equals and flag in ours:
        return f"{word} is {typed(flag)} {value} here"
    path = Path(word)
    same = word.lower().replace("_", "-").removeprefix("train-")
    if path.suffix == ".py":
        return answer_file(word, rest, presets, ours)
    if path.suffix == ".json" or (path / "config.json").is_file():
        return f"{word} holds flags: --config {word}"
    if (path / "meta.json").is_file():
        return f"{word} holds data: --data {word}"
    if path.suffix in (".yaml", ".yml", ".toml"):
        return f"{word} is not read: flags are typed, or come from a run's config.json: --config out/NAME"
    if path.is_file():
        name = path.stem if path.stem.isidentifier() else "my-text"
        return (f"{word} is no preset: make data of it, python prepare.py {word} --name {name}, then --data "
                f"data/{name}")
    if same in presets:
        return f"no preset {word!r}: {same} is meant"
    if Path("data", word, "meta.json").is_file():
        return f"{word} is a data set: --data data/{word}"
    close = presets_like(same, presets)
    if close:
        return f"no preset {word!r}; perhaps {' or '.join(close)} is meant, of {', '.join(presets)}"
    return f"no preset {word!r}; the presets are {', '.join(presets)}"


def presets_like(word, presets):
    """Return the presets that a word is perhaps meant for, a list.

    They begin with the word, its dashes and dots aside; or the word begins with one; or they resemble it.
    """
    def plain(name):
        return name.replace("-", "").replace(".", "")

    longer = [preset for preset in presets if plain(preset).startswith(plain(word))]
    shorter = [preset for preset in presets if word.startswith(f"{preset}-")]
    return longer or shorter or difflib.get_close_matches(word, presets, 1)
