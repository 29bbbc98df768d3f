"""The words of nanoGPT, wordplay, Hugging Face, Megatron-LM and torchrun, and what is typed here for them.

A word is looked up without its dashes and dotted prefixes, with _ for -: model.block-size=64 is block_size.
"""
import dataclasses
import re
import shlex
import sys
from pathlib import Path

from config import Config, typed

# words : --flag         the flag takes the value that was typed
#         --flag value   this is typed in their place, or nothing where false was typed
#         first word     the value is typed first, without a flag
#         anything else  is said, and nothing is typed in their place
TRAIN = """
block_size seq_length max_seq_len max_seq_length max_length context_length sequence_length : --seq-len
max_position_embeddings n_positions n_ctx : --seq-len
num_layers n_layers num_hidden_layers depth : --n-layer
hidden_size d_model dim embed_dim : --n-embd
num_attention_heads n_heads num_heads : --n-head
num_query_groups num_key_value_heads n_kv_heads : --n-kv-head
ffn_hidden_size intermediate_size d_ff : --ffn-hidden
kv_channels : --head-dim
norm_epsilon layernorm_epsilon rms_norm_eps layer_norm_eps : --norm-eps
normalization norm_type : give --norm rms or --norm layer
position_embedding_type : give --pos rope or --pos learned
activation hidden_act : give --mlp swiglu, geglu, gelu or relu2
swiglu : --mlp swiglu
squared_relu : --mlp relu2
rotary_base rope_theta theta : --rope-base
add_qkv_bias attention_bias : --qkv-bias true
disable_bias_linear untie_embeddings_and_output_weights : leave it out, it is so without a flag
hidden_dropout attention_dropout resid_pdrop attn_pdrop : --dropout
sliding_window window_size : --window
tie_word_embeddings : --tied
group_query_attention : leave it out, --n-kv-head is the number of groups
qk_layernorm : --qk-norm head
embed_layernorm : leave it out, no norm follows the embedding here
init_method_std : leave it out, docs/change-it.md shows how to change what initial_weights draws
vocab_file merge_file tokenizer tokenizer_type tokenizer_model tokenizer_path append_eod
    : it belongs to the data, python prepare.py FILE... --name NAME --tokenizer TOKENIZER
split valid_data_path val_ratio : it belongs to the data, python prepare.py FILE... --val-fraction 0.1
num_experts num_local_experts n_routed_experts : --n-experts
moe use_moe : the preset tiny-moe has experts, or give --n-experts 8
moe_router_topk num_experts_per_tok topk : --top-k
moe_aux_loss_coeff router_aux_loss_coef : --aux-coef
moe_z_loss_coeff : --z-coef
moe_expert_capacity_factor : --capacity-factor
moe_router_pre_softmax : --router softmax
moe_router_load_balancing_type : give --aux-coef, or --router sigmoid with --router-bias-rate
tensor_model_parallel_size tensor_parallel_size tp_size : --tp
pipeline_model_parallel_size pipeline_parallel_size pp_size : --pp
context_parallel_size cp_size : --cp
expert_model_parallel_size expert_parallel_size ep_size : --ep
data_parallel_size dp dp_size : leave it out, the replicas are what is left of the ranks
virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage : give --pp-chunks
pp_partition_method : give --pp-layers, the blocks of each stage
zero_stage zero_optimization deepspeed deepspeed_config ds_config_path : give --zero 1, 2 or 3
use_distributed_optimizer : --zero 1
fsdp fully_shard use_fsdp : --zero 3
strategy : replicas sum their gradients without a flag (ddp), and --zero 3 is fsdp
recompute_granularity : --recompute
gradient_checkpointing activation_checkpointing checkpoint_activations recompute_activations
    : --recompute full
batch_size micro_batch_size mbs train_batch_size per_device_train_batch_size device_batch_size : --micro-batch
global_batch_size gbs : --global-batch
gradient_accumulation_steps grad_accum_steps gas : give --global-batch, micro-batch * dp * those steps
total_batch_size : give --global-batch, in sequences, those tokens / --seq-len
max_iters max_steps train_iters num_iterations iterations num_steps num_train_steps total_steps : --steps
epochs num_train_epochs num_epochs max_epochs train_samples
    : give --steps, an epoch is training samples / global batch
learning_rate max_lr : --lr
min_learning_rate : --min-lr
warmup_iters warmup_steps lr_warmup_iters num_warmup_steps : --warmup
warmup_ratio lr_warmup_fraction : give --warmup, that share of --steps
lr_decay_iters lr_decay_steps : --decay-steps
lr_decay_style lr_scheduler_type scheduler : give --lr-schedule cosine or wsd
decay_lr : --min-lr equal to --lr keeps it constant
grad_clip clip_grad max_grad_norm gradient_clipping : --clip
adam_beta1 : --beta1
adam_beta2 : --beta2
optim optimizer_type : give --optimizer adamw or muon
muon use_muon : --optimizer muon
matrix_lr embedding_lr unembedding_lr : give --lr, and --muon-lr-factor for the matrices of muon
fp16 half dtype=float16 dtype=half : --dtype fp16
bf16 amp dtype=bfloat16 : --dtype bf16
fp32 dtype=float32 : --dtype fp32
torch_dtype precision mixed_precision : give --dtype fp32, bf16 or fp16
torch_compile : --compile
dataset dataset_name data_path train_data_path data_dir train_file : --data
out_dir output_dir save save_dir : --out
load resume_from_checkpoint resume_from : --resume
no_load_optim no_load_rng : --init-from takes the weights of a run alone
init_from=resume resume= : --resume auto
init_from=scratch : leave it out, a run starts so
model_name_or_path pretrained checkpoint ckpt : --init-from
model preset config_name : first word
random_seed : --seed
eval_interval eval_steps : --eval-every
eval_only do_eval : python sample.py RUN --score FILE.txt prints how well a run predicts a text
log_interval logging_steps : --log-every
save_interval save_steps : --save-every
save_total_limit : --keep
load_best_model_at_end : --keep-best
wandb_log use_wandb report_to : --wandb online
wandb_project wandb_run_name wandb_exp_name run_name run : --wandb online logs a run under the name of --out
tensorboard_dir tensorboard_log_interval logging_dir log_throughput log_progress log_memory_to_tensorboard
    log_validation_ppl_to_tensorboard log_world_size_to_tensorboard
    : leave it out, OUT/metrics.jsonl and report.html have it, and --wandb online logs it
log_timers_to_tensorboard : --timers true
log_params_norm log_num_zeros_in_grad : --log-layers true
exit_duration_in_mins : --max-minutes
deterministic_mode : --deterministic
start : --prompt
kernels : leave it out, flash-attn-4 attends where it is installed (pip uninstall flash-attn-4 does without)
num_samples max_new_tokens temperature : sample.py writes text, python sample.py RUN --prompt TEXT
device accelerator no_cuda use_cpu : a GPU is taken if there is one, CUDA_VISIBLE_DEVICES=-1 in front hides it
backend distributed_backend ddp framework sequence_parallel overlap_grad_reduce overlap_param_gather
    accumulate_allreduce_grads_in_fp32 gradient_accumulation_fusion use_flash_attn flash_attn moe_grouped_gemm
    moe_token_dispatcher_type use_dist_ckpt dist_ckpt_format auto_detect_ckpt_format ckpt_fully_parallel_save
    use_checkpoint_opt_param_scheduler attn_implementation use_cache always_save_checkpoint do_train
    overwrite_output_dir eval_strategy save_strategy dataloader_num_workers per_device_eval_batch_size
    : leave it out, it is done or chosen without a flag
nproc_per_node nproc np n ntasks num_processes devices ngpus : mpiexec
nnodes num_nodes node_rank local_rank master_addr master_port standalone rdzv_backend rdzv_endpoint hostfile
    : it belongs to the launcher, before the program
"""
# Of programs that train nothing
OTHERS = {
    "sample.py": """
out_dir out init_from checkpoint ckpt model load run : first word
start text p : --prompt
num_samples num_return_sequences : --n
temp : --temperature
max_tokens max_length : --max-new-tokens
interactive : --chat
top_p num_beams do_sample min_p : --temperature and --top-k say how tokens are drawn
device dtype compile use_cache stream : leave it out
""",
    "prepare.py": """
input input_dir input_file dataset train_file files : first word
output_prefix output_file_name : --name
tokenizer_type tokenizer_model tokenizer_name merge_file vocab_file : --tokenizer
valid_file_name : --val-fraction says which share is for validation
json_keys text_column : --text-key
num_proc : --workers
append_eod : leave it out, each document ends so
block_size seq_length : train.py has --seq-len, and text is prepared without a length
""",
    "plot.py": "out_dir out run : first word",
    "plan.py": "num_gpus ngpus nnodes nodes num_nodes : give --gpus, the number of all GPUs",
    "convert.py": """
model_name_or_path input checkpoint : python convert.py import MODEL_DIR --out DIR
output output_dir outfile : --out
""",
}
NONE = ("false", "none", "0")  # values that turn off


def read_table(text):
    """Return {word: answer} of rows `words : answer`; an indented line goes on with the one above."""
    known = {}
    for row in text.strip().replace("\n    ", " ").splitlines():
        words, _, answer = row.partition(" : ")
        known.update(dict.fromkeys(words.split(), answer.strip()))
    return known


def key_of(word):
    """Return the flag of a word as the table has it: block_size of --model.block-size=64."""
    return word.partition("=")[0].lstrip("-").rpartition(".")[2].replace("-", "_")


def program_of(prog):
    """Return how a program was typed, such as bench/one_step.py; else its name."""
    return sys.argv[0] if Path(sys.argv[0]).name == prog else prog


def answer_to(word, value, known, ours):
    """Return the table's answer to a word of a command line, or None if the word stays."""
    key = key_of(word)
    if f"{key}={value}" in known:
        return known[f"{key}={value}"]
    if key.removeprefix("no_") in ours:
        is_typed = word.startswith("--") and "." not in word.partition("=")[0]
        return None if is_typed else typed(key)
    return known.get(key, known.get(key.removeprefix("no_")))


def refuse_foreign(argv, cls, prog):
    """Raise ValueError if the command line argv has words of others: with the command in our words.

    cls: the dataclass of the program's flags.
    """
    known = read_table(OTHERS.get(prog, ""))
    if issubclass(cls, Config):
        known = read_table(TRAIN) | known
    ours = {field.name for field in dataclasses.fields(cls)} - {"preset"}  # which is the first word
    command = ["python", program_of(prog)]
    rest = []
    said = []
    left = list(argv)
    while left:
        word = left.pop(0)
        if not re.match("--?[A-Za-z]|[A-Za-z_][A-Za-z_.]*=", word):
            rest.append(word)
            continue
        words = [word]
        value = word.partition("=")[2]
        if "=" not in word and left and not left[0].startswith("-"):
            value = left.pop(0)
            words.append(value)
        answer = answer_to(word, value, known, ours)
        if answer is None:
            rest += words
        elif answer == "first word":
            command.append(value)
        elif answer == "mpiexec":
            command = ["mpiexec", "-n", value or "N", *command]
        elif re.fullmatch("--[a-z0-9-]+", answer):
            rest += filter(None, [answer, value])
        elif re.fullmatch("--[a-z0-9-]+ [a-z0-9]+", answer):
            if value.lower() not in NONE:
                rest += answer.split()
        else:
            said.append(f"{word.partition('=')[0]}: {answer}")
    if said or rest != list(argv):
        raise ValueError("; ".join([*said, f"in our words: {shlex.join([*command, *rest])}"]))
