"""One cell of peers.py: one trainer, ours or another project's, on one workload in processes of its own.

    python bench/peer_cell.py W1 hf                        (torchrun for several GPUs)
    python bench/peer_cell.py G2 nanogpt --path nanoGPT

A peer brings its own model class, and its own optimizer and compilation where its train.py has some. The step
is the one of its own train.py, in our words. All trainers get the same batches from train.py's loader, the
same learning rates, and one measurement: speed.measure.
"""
import contextlib
import importlib.util
import json
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

from common import read_flags, start
from runtime.launch import launch, shutdown

import torch
import torch.distributed as dist
from speed import LAYOUTS, WORKLOADS, join_value, measure
from torch.nn.parallel import DistributedDataParallel
from training import Training
from tyro.conf import Positional

from config import pad_vocab
from cost.parameters import count_parameters
from optim import learning_rate

GPT2 = ("G2", "G2-32", "WP", "SC")
LLAMA = ("W1", "W3", "W3-8192")
ON_ONE_GPU = (*GPT2, *LLAMA, "W2b", "BERT")  # a GPU holds them without recomputation
NAMES = (*ON_ONE_GPU, "7B", "8B")
UNSCALED = (1.0, 1.0, 4.0, 8192)  # torchtitan always scales RoPE's frequencies: a factor of 1 changes nothing


# -----------------------------------------------------------------------------
# What every peer shares

class Peer:
    """A trainer of another project on this rank.

    beside: {words: parameters} that this model has, and ours of the same shape has not. Each trainer below
    has build(path) -> model, prepare(), which makes the optimizer and wraps the model, and loss(x, y).
    step() trains on this rank's micro-batches [(x, y)], both (B, T) int64, and returns their mean loss, ().
    """
    optimizer = None
    clip = 1.0
    recomputes = False  # whether the class below has the recomputation of its own train.py

    def __init__(self, cfg, world, vocab, path):
        self.cfg, self.world = cfg, world
        self.vocab = pad_vocab(vocab)
        self.beside = {}
        if cfg.recompute != "none" and not self.recomputes:
            raise ValueError(f"--recompute {cfg.recompute}: {type(self).__name__} keeps all activations "
                             "here; leave out --recompute")
        torch.set_float32_matmul_precision("high")
        if path:
            sys.path.insert(0, str(Path(path).resolve()))
        self.model = self.build(path).train()
        self.count = numbers_of(self.model, "")
        theirs = self.count - sum(self.beside.values())
        ours = count_parameters(cfg, self.vocab)["total"]
        if theirs != ours:
            raise ValueError(f"{type(self).__name__} has {theirs:,} parameters where ours has {ours:,}: its "
                             "config is not the workload's")
        self.prepare()

    def compiled(self, function):
        """Return torch.compile of a model or function; in fp32, itself."""
        return torch.compile(function) if self.cfg.dtype != "fp32" else function

    def autocast(self):
        """The context of a forward in bf16 on fp32 weights; no context in fp32."""
        if self.cfg.dtype == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, torch.bfloat16)

    def replicate(self, model):
        """Return the model in torch's DDP if there are several ranks."""
        if self.world.size == 1:
            return model
        device = self.world.device
        return DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device.index])

    def adamw(self, parameters):
        """Return torch's AdamW, fused on a GPU; as train.py does, it decays matrices only."""
        cfg = self.cfg
        parameters = list(parameters)
        groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": cfg.weight_decay},
                  {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2),
                                 fused=self.world.device.type != "cpu")

    def set_rate(self, rate):
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def step(self, batches):
        total = 0
        for i, (x, y, *_) in enumerate(batches):
            self.model.require_backward_grad_sync = i == len(batches) - 1  # DDP sums with the last one
            with self.autocast():
                loss = self.loss(x, y) / len(batches)
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def numbers_of(model, ending):
    """Return the number of parameters in the tensors whose names end so."""
    return sum(p.numel() for name, p in model.named_parameters() if name.endswith(ending))


def sizes(cfg, vocab):
    """Return the shape of a Llama in the names of transformers' configs."""
    return dict(vocab_size=vocab, hidden_size=cfg.n_embd, intermediate_size=cfg.ffn_hidden,
                num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head,
                num_key_value_heads=cfg.n_kv_head, max_position_embeddings=cfg.seq_len,
                rms_norm_eps=cfg.norm_eps)


# -----------------------------------------------------------------------------
# The peers

class NanoGPT(Peer):
    """karpathy/nanoGPT's GPT and AdamW: autocast, the whole model compiled, DDP."""

    def build(self, path):
        # Its file is called model.py, as one of ours is.
        spec = importlib.util.spec_from_file_location("nanogpt_model", Path(path, "model.py"))
        theirs = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(theirs)
        cfg = self.cfg
        shape = theirs.GPTConfig(block_size=cfg.seq_len, vocab_size=self.vocab, n_layer=cfg.n_layer,
                                 n_head=cfg.n_head, n_embd=cfg.n_embd, dropout=cfg.dropout, bias=cfg.bias)
        return theirs.GPT(shape).to(self.world.device)

    def prepare(self):
        cfg = self.cfg
        self.optimizer = self.model.configure_optimizers(cfg.weight_decay, cfg.lr, (cfg.beta1, cfg.beta2),
                                                         self.world.device.type)
        self.model = self.replicate(self.compiled(self.model))

    def loss(self, x, y):
        return self.model(x, y)[1]


class Transformers(Peer):
    """transformers' own models, the whole model compiled, DDP: bf16 by autocast, fp32 weights."""

    def build(self, path):
        with self.world.device:  # the weights are drawn there: a CPU takes minutes for 4 billion
            return self.model_of_shape()

    def model_of_shape(self):
        import transformers
        cfg = self.cfg
        if cfg.objective == "mlm":
            shape = transformers.BertConfig(
                vocab_size=self.vocab, hidden_size=cfg.n_embd, num_hidden_layers=cfg.n_layer,
                num_attention_heads=cfg.n_head, intermediate_size=cfg.ffn_hidden,
                max_position_embeddings=cfg.seq_len, hidden_dropout_prob=cfg.dropout,
                attention_probs_dropout_prob=cfg.dropout, layer_norm_eps=cfg.norm_eps)
            model = transformers.BertForMaskedLM(shape)
            self.beside = {"token types": numbers_of(model, "token_type_embeddings.weight")}
        elif cfg.pos == "learned":
            shape = transformers.GPT2Config(
                vocab_size=self.vocab, n_positions=cfg.seq_len, n_embd=cfg.n_embd, n_layer=cfg.n_layer,
                n_head=cfg.n_head, n_inner=cfg.ffn_hidden, resid_pdrop=cfg.dropout, embd_pdrop=cfg.dropout,
                attn_pdrop=cfg.dropout, use_cache=False)
            model = transformers.GPT2LMHeadModel(shape)
            self.beside = {"biases": numbers_of(model, ".bias")}
        elif cfg.n_experts:
            shape = transformers.MixtralConfig(
                **sizes(cfg, self.vocab), num_local_experts=cfg.n_experts, num_experts_per_tok=cfg.top_k,
                output_router_logits=True, router_aux_loss_coef=cfg.aux_coef, use_cache=False,
                sliding_window=None)
            model = transformers.MixtralForCausalLM(shape)
        else:
            shape = transformers.LlamaConfig(**sizes(cfg, self.vocab), use_cache=False)
            model = transformers.LlamaForCausalLM(shape)
        return model

    def prepare(self):
        self.optimizer = self.adamw(self.model.parameters())
        self.model = self.replicate(self.compiled(self.model))

    def loss(self, x, y):
        if self.cfg.objective == "mlm":
            return self.model(input_ids=x, labels=y).loss
        return self.model(input_ids=x, labels=y, shift_labels=y).loss


class TransformersBf16(Transformers):
    """The same in pure bf16: weights, gradients and AdamW's moments have no fp32 copies."""

    def build(self, path):
        model = super().build(path)
        return model if self.cfg.dtype == "fp32" else model.to(torch.bfloat16)

    def autocast(self):
        return contextlib.nullcontext()


class TorchTitan(Peer):
    """pytorch/torchtitan's Llama 3 (0.2.2), each block compiled: autocast on one GPU, FSDP2 on several."""
    recomputes = True

    def build(self, path):
        from torchtitan.models.llama3 import Transformer, TransformerModelArgs
        from torchtitan.models.llama3.model.args import RoPEScalingArgs
        cfg = self.cfg
        scaling = RoPEScalingArgs(*(cfg.rope_scaling or UNSCALED))
        # The MLP's width is rounded up to a multiple of multiple_of: the factor stays just below it.
        shape = TransformerModelArgs(
            dim=cfg.n_embd, n_layers=cfg.n_layer, n_heads=cfg.n_head, n_kv_heads=cfg.n_kv_head,
            vocab_size=self.vocab, multiple_of=cfg.ffn_hidden, norm_eps=cfg.norm_eps,
            ffn_dim_multiplier=cfg.ffn_hidden / (8 * cfg.n_embd / 3), rope_theta=cfg.rope_base,
            rope_scaling_args=scaling, max_seq_len=cfg.seq_len)
        with torch.device("meta"):
            return Transformer(shape)

    def prepare(self):
        from torchtitan.components.loss import cross_entropy_loss
        from torchtitan.models.llama3.infra.parallelize import apply_compile
        if self.cfg.recompute != "none":
            self.recompute()
        if self.cfg.dtype != "fp32":
            apply_compile(self.model, SimpleNamespace(backend="inductor"))
        self.loss_sum = self.compiled(cross_entropy_loss)
        self.mesh = None
        if self.world.size > 1:
            self.mesh = dist.init_device_mesh(self.world.device.type, (self.world.size,),
                                              mesh_dim_names=("fsdp",))
            self.spread()
        self.model.to_empty(device=self.world.device)
        with torch.no_grad():
            self.model.init_weights(buffer_device=self.world.device)
        self.wrap()
        self.optimizer = self.adamw(self.model.parameters())

    def recompute(self):
        """Let blocks keep less for backward: "selective" is its choice by operation, every second product."""
        from torchtitan.config.job_config import ActivationCheckpoint
        from torchtitan.models.llama3.infra import parallelize
        parallelize.apply_ac(
            self.model, ActivationCheckpoint(mode=self.cfg.recompute, selective_ac_option="op"),
            model_compile_enabled=self.cfg.dtype != "fp32", op_sac_save_list=parallelize._op_sac_save_list)

    def spread(self):
        from torchtitan.models.llama3.infra.parallelize import apply_fsdp
        dtype = torch.float32 if self.cfg.dtype == "fp32" else torch.bfloat16
        apply_fsdp(self.model, self.mesh, param_dtype=dtype, reduce_dtype=torch.float32, pp_enabled=False)

    def wrap(self):
        """FSDP2 has cut the empty model."""

    def autocast(self):
        return super().autocast() if self.world.size == 1 else contextlib.nullcontext()

    def step(self, batches):
        from torchtitan.distributed.utils import clip_grad_norm_
        tokens = sum((y != -100).sum() for _, y, *_ in batches).float()
        if self.mesh is not None:
            dist.all_reduce(tokens)
        total = 0
        for x, y, *_ in batches:
            with self.autocast():
                loss = self.loss_sum(self.model(x), y) / tokens
            loss.backward()
            total = total + loss.detach()
        clip_grad_norm_(list(self.model.parameters()), self.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total * self.world.size


class TorchTitanDDP(TorchTitan):
    """The same with torchtitan's DDP."""

    def spread(self):
        """DDP comes after the weights."""

    def wrap(self):
        from torchtitan.models.llama3.infra.parallelize import apply_ddp
        if self.mesh is not None:
            apply_ddp(self.model, self.mesh, enable_compile=self.cfg.dtype != "fp32")

    def autocast(self):
        return Peer.autocast(self)


# -----------------------------------------------------------------------------
# A cell

PEERS = {  # name: (class, the workloads it has a model for)
    "nanogpt": (NanoGPT, GPT2),
    "hf": (Transformers, ON_ONE_GPU), "hf-bf16": (TransformersBf16, ON_ONE_GPU),
    "torchtitan": (TorchTitan, (*LLAMA, "7B", "8B")), "torchtitan-ddp": (TorchTitanDDP, LLAMA)}


@dataclass(frozen=True)
class Flags:
    workload: Positional[Literal[NAMES]]  # of bench/speed.py
    trainer: Positional[Literal[("ours", *PEERS)]]  # who trains
    path: str = ""  # the peer's repository, where it is not installed
    steps: int = 60  # the last half counts, at most 30
    data: str = "synthetic"  # a folder of prepare.py, or synthetic
    flags: str = ""  # more flags of train.py, for all trainers
    json: str = ""  # file to which the row is appended

    RANGES = {"steps": (4, 10**6)}


class PeerTraining(Training):
    """A peer in the place of train.py's model and step, on the batches that train.py would get."""
    graph, train_step = False, None

    def __init__(self, cfg, world, *, peer, path):
        self.make_peer = partial(peer, path=path)
        super().__init__(cfg, world)

    def build(self, without):
        torch.manual_seed(self.cfg.seed)
        self.peer = self.make_peer(self.cfg, self.world, self.vocab)

    def step(self, batches, full=False):
        self.number += 1
        self.peer.set_rate(learning_rate(self.cfg, self.number))
        return self.peer.step(batches)

    def run(self, steps):
        """Take steps. The losses are the mean over ranks, as ours are; a step has one rank's."""
        times, losses, seconds, paths = super().run(steps)
        total = self.world.axis.all_reduce(torch.tensor(losses, device=self.world.device))
        return times, (total / self.world.size).tolist(), seconds, paths

    def wait(self):
        """A peer's step ends with all weights in place."""


def train_flags(flags, gpus):
    """Return the flags of train.py that say what a cell trains."""
    words = [WORKLOADS[flags.workload]]
    if flags.trainer == "ours" and gpus > 1:
        words.append(LAYOUTS.get(flags.workload, "--zero 1").format(gpus=gpus))
    if flags.data != "synthetic":
        words.append(f"--data {flags.data}")
    return " ".join([*words, flags.flags]).strip()


def run(flags, world):
    """Return the row of a cell, of bench/speed.py's kind."""
    make, peers = Training, []
    if flags.trainer != "ours":
        def make(cfg, world):
            training = PeerTraining(cfg, world, peer=PEERS[flags.trainer][0], path=flags.path)
            peers.append(training.peer)
            return training
    row = measure(world, flags.workload, train_flags(flags, world.size), flags.steps, make=make)
    if math.isnan(row["mfu"]):
        row["mfu"] = None
    row.update(trainer=flags.trainer, beside_ours={})
    for peer in peers:
        row.update(parameters=peer.count, beside_ours=peer.beside)
    return row


def main(argv=None):
    argv = join_value(sys.argv[1:] if argv is None else argv, "--flags")
    flags = read_flags(Flags, argv, "peer_cell.py WORKLOAD TRAINER", "One cell of peers.py: time one trainer "
                       "on one workload.")
    world = launch(timeout=300, quiet=True)
    row = run(flags, world)
    if world.rank == 0:
        line = json.dumps(row)
        print(line, flush=True)
        if flags.json:
            with open(flags.json, "a") as f:
                f.write(line + "\n")
    shutdown(world)


if __name__ == "__main__":
    start(main)
