"""The words of nanoGPT, wordplay, Hugging Face, Megatron-LM and torchrun, and what is typed here for them."""
import re
import shlex

from config import Config, typed

# word:flag          the flag takes the value that was typed
# word:flag=value    this is typed instead, or nothing where false was typed
# word:FIRST         the value is typed first, without a flag
TRAIN = """
block_size:seq-len seq_length:seq-len max_position_embeddings:seq-len num_layers:n-layer
num_hidden_layers:n-layer hidden_size:n-embd num_attention_heads:n-head num_query_groups:n-kv-head
num_key_value_heads:n-kv-head kv_channels:head-dim ffn_hidden_size:ffn-hidden intermediate_size:ffn-hidden
swiglu:mlp=swiglu norm_epsilon:norm-eps layernorm_epsilon:norm-eps rms_norm_eps:norm-eps
rotary_base:rope-base rope_theta:rope-base add_qkv_bias:qkv-bias attention_bias:qkv-bias
qk_layernorm:qk-norm=head hidden_dropout:dropout attention_dropout:dropout tie_word_embeddings:tied
squared_relu:mlp=relu2 sliding_window:window max_seq_length:seq-len n_layers:n-layer n_heads:n-head
normalization=RMSNorm:norm=rms normalization:norm position_embedding_type:pos activation:mlp hidden_act:mlp

num_experts:n-experts num_local_experts:n-experts moe_router_topk:top-k num_experts_per_tok:top-k
moe_aux_loss_coeff:aux-coef router_aux_loss_coef:aux-coef moe_z_loss_coeff:z-coef
moe_expert_capacity_factor:capacity-factor moe_router_pre_softmax:router=softmax

tensor_model_parallel_size:tp pipeline_model_parallel_size:pp context_parallel_size:cp zero_stage:zero
virtual_pipeline_model_parallel_size:pp-chunks expert_model_parallel_size:ep
use_distributed_optimizer:zero=1 fsdp:zero=3 recompute_granularity:recompute
gradient_checkpointing:recompute=full checkpoint_activations:recompute=full
recompute_activations:recompute=full

batch_size:micro-batch micro_batch_size:micro-batch per_device_train_batch_size:micro-batch
global_batch_size:global-batch max_iters:steps max_steps:steps train_iters:steps learning_rate:lr
warmup_iters:warmup warmup_steps:warmup lr_warmup_iters:warmup lr_decay_iters:decay-steps grad_clip:clip
clip_grad:clip max_grad_norm:clip adam_beta1:beta1 adam_beta2:beta2 fp16:dtype=fp16
dtype=float16:dtype=fp16 bf16:dtype=bf16 dtype=bfloat16:dtype=bf16 dtype=float32:dtype=fp32
torch_dtype=bfloat16:dtype=bf16 torch_dtype:dtype precision:dtype torch_compile:compile optim:optimizer
lr_decay_style:lr-schedule lr_scheduler_type:lr-schedule

data_dir:data dataset:data dataset_name:data data_path:data train_data_path:data out_dir:out output_dir:out
save:out load:resume resume_from_checkpoint:resume init_from=resume:resume=auto model_name_or_path:init-from
model:FIRST random_seed:seed eval_interval:eval-every eval_steps:eval-every log_interval:log-every
logging_steps:log-every save_interval:save-every save_steps:save-every save_total_limit:keep
load_best_model_at_end:keep-best wandb_log:wandb=online use_wandb:wandb=online report_to:wandb=online
log_timers_to_tensorboard:timers log_params_norm:log-layers log_num_zeros_in_grad:log-layers
exit_duration_in_mins:max-minutes deterministic_mode:deterministic
"""
OTHERS = {
    "sample.py": "out_dir:FIRST out:FIRST checkpoint:FIRST model:FIRST start:prompt num_samples:n "
                 "max_length:max-new-tokens",
    "prepare.py": "input:FIRST input_dir:FIRST dataset:FIRST output_prefix:name output_file_name:name "
                  "tokenizer_type:tokenizer tokenizer_model:tokenizer merge_file:tokenizer "
                  "vocab_file:tokenizer json_keys:text-key"}
# What is said of words that have no flag here, and these words
SAID = {
    "give --aux-coef, or --router sigmoid with --router-bias-rate": "moe_router_load_balancing_type",
    "give --pp-chunks, the parts of each rank": "num_layers_per_virtual_pipeline_stage",
    "give --pp-layers, the blocks of each stage": "pp_partition_method",
    "give --zero 1, 2 or 3": "deepspeed deepspeed_config ds_config_path strategy",
    "give --global-batch, micro-batch * dp * those steps": "gradient_accumulation_steps gas",
    "give --steps, samples / global-batch": "epochs num_train_epochs train_samples",
    "give --warmup, that share of --steps": "warmup_ratio lr_warmup_fraction",
    "--min-lr equal to --lr keeps the rate": "decay_lr",
    "--init-from takes the weights alone": "no_load_optim no_load_rng",
    "python sample.py RUN writes text, with --score FILE it prints a loss":
        "eval_only do_eval num_samples max_new_tokens temperature start",
    "a GPU is taken if there is one, CUDA_VISIBLE_DEVICES=-1 in front hides it": "device no_cuda use_cpu",
    "it belongs to the data, see python prepare.py --help": "vocab_file merge_file tokenizer tokenizer_type "
        "tokenizer_model append_eod split valid_data_path valid_file_name",
    "it belongs to the launcher, mpiexec -n N python train.py": "n np nproc_per_node ngpus nnodes node_rank "
        "local_rank master_addr master_port hostfile num_gpus",
    "leave it out, flash-attn-4 attends where it is installed": "kernels",
    "leave it out, it is done, derived or logged without a flag":
        "backend ddp framework sequence_parallel overlap_grad_reduce overlap_param_gather "
        "gradient_accumulation_fusion split_masters data_parallel_size accumulate_allreduce_grads_in_fp32 "
        "init_from=scratch disable_bias_linear embed_layernorm untie_embeddings_and_output_weights "
        "group_query_attention init_method_std use_flash_attn moe_grouped_gemm moe_token_dispatcher_type "
        "use_dist_ckpt dist_ckpt_format auto_detect_ckpt_format ckpt_fully_parallel_save "
        "use_checkpoint_opt_param_scheduler always_save_checkpoint do_train overwrite_output_dir "
        "eval_strategy save_strategy tensorboard_dir tensorboard_log_interval logging_dir log_throughput "
        "log_progress log_memory_to_tensorboard log_validation_ppl_to_tensorboard "
        "log_world_size_to_tensorboard dataloader_num_workers per_device_eval_batch_size wandb_project "
        "wandb_run_name wandb_exp_name run_name"}


def key_of(word):
    """Return the flag of a word as the table has it: block_size of --model.block-size=64."""
    return word.partition("=")[0].lstrip("-").rpartition(".")[2].replace("-", "_")


def refuse_foreign(argv, cls, prog):
    """Raise ValueError, with the command in our words, if argv has words of others. cls: of its flags."""
    pairs = OTHERS.get(prog, "")
    if issubclass(cls, Config):
        pairs = TRAIN + pairs
    known = {word: answer for answer, words in SAID.items() for word in words.split()}
    known.update(pair.split(":") for pair in pairs.split())
    rest = []
    said = []
    left = list(argv)
    while left:
        words = [left.pop(0)]
        flag, equals, value = words[0].partition("=")
        if not re.match("--?[A-Za-z]|[A-Za-z_][A-Za-z_.]*=", words[0]):
            rest += words
            continue
        if not equals and left and not left[0].startswith("-"):
            value = left.pop(0)
            words.append(value)
        key = key_of(flag)
        name = key.removeprefix("no_")
        is_ours = name in cls.__dataclass_fields__ and name != "preset"
        answer = known.get(f"{key}={value}")
        if answer is None and not is_ours:
            answer = known.get(key, known.get(name))
        elif answer is None and ("." in flag or not flag.startswith("--")):
            answer = key  # our flag in the form of others
        if answer is None:
            rest += words
        elif answer == "FIRST":
            rest.insert(0, value)
        elif " " in answer:
            said.append(f"{flag}: {answer}")
        elif "=" not in answer:
            rest += filter(None, [typed(answer), value])
        elif value.lower() not in ("false", "none", "0"):
            rest += typed(answer).split("=")
    if said or rest != list(argv):
        command = shlex.join(["python", prog, *rest])
        raise ValueError("; ".join([*said, f"in our words: {command}"]))
