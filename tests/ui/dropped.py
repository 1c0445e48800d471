"""One file of every kind that the page takes, as their users write them."""

from __future__ import annotations

import json
from typing import Any

from shardwise.interop.frameworks import TARGETS
from shardwise.spec.job import Job
from shardwise.ui.given import job_of
from ui.serving import JOB

# What `export` writes is what is read of these.
_EXPORTED: Job = job_of(
    {"model": "llama3-8b", "cluster": "dgx-h100:2", "tp": 2, "zero": 1, "global_batch": 64, "seq": 4096}
)[0]
_PLAIN: Job = job_of({"model": "llama3-8b", "cluster": "dgx-h100", "zero": 2, "global_batch": 64, "seq": 4096})[0]


def _exported(name: str, job: Job) -> str:
    (text,) = TARGETS[name].export(job).files.values()
    return text


_DEEPSPEED = """{
  // 1024 sequences of 64 ranks
  "train_batch_size": 1024, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}}, "bf16": {"enabled": true},
  "zero_optimization": {"stage": 3, "overlap_comm": true, "reduce_bucket_size": 5e8,},
}"""
_SCRIPT = r"""#!/bin/bash
TP=4
PP=${PP:-4}
ARGS=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
  --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
  --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256)
torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py "${ARGS[@]}" --tensor-model-parallel-size $TP \
  --pipeline-model-parallel-size $PP --sequence-parallel --use-distributed-optimizer --micro-batch-size 1 \
  --global-batch-size 256 --bf16 --overlap-grad-reduce --recompute-activations --lr 3e-4 --data-path my-data
"""
_OPTIONS = """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048
--max-position-embeddings 2048 --vocab-size 50304 --micro-batch-size 2 --global-batch-size 128 --bf16
"""
_YAML_CFG = """
language_model: {num_layers: 24, hidden_size: 1024, num_attention_heads: 16, add_bias_linear: False,
  activation_func: swiglu, attention_dropout: 0.0, hidden_dropout: 0.0}
model_parallel: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 2, sequence_parallel: True, bf16: True}
micro_batch_size: 2
global_batch_size: 128
position_embedding_type: rope
max_position_embeddings: 4096
seq_length: 4096
vocab_size: 32000
"""
_MODEL_CONFIG = """
ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
TEST_TYPE: regular
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --micro-batch-size: 4
  --global-batch-size: 128
  --seq-length: 1024
  --max-position-embeddings: 1024
  --vocab-size: 50304
  --tensor-model-parallel-size: 2
  --bf16: true
"""
_TORCHTITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
tensor_parallel_degree = 8
[optimizer]
implementation = "fused"
"""
_TORCHTITAN_JSON = json.dumps(
    {"model": {"name": "llama3", "flavor": "8B"}, "training": {"local_batch_size": 1, "seq_len": 8192},
     "parallelism": {"tensor_parallel_degree": 4}}
)  # fmt: skip
_ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 16
num_machines: 2
fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_offload_params: false}
"""
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "_name_or_path": "own/llama",
}  # fmt: skip

# By the name of the file: what it is, its text, and what the command line is told beside it.
FILES: dict[str, tuple[str, str, dict[str, str]]] = {
    "ds_config.json": ("deepspeed", _DEEPSPEED, {"--model": JOB["model"]}),
    "pretrain.sh": ("megatron", _SCRIPT, {}),
    "options.args": ("megatron", _OPTIONS, {}),
    "gpt_config.yaml": ("megatron", _YAML_CFG, {}),
    "model_config.yaml": ("megatron", _MODEL_CONFIG, {}),
    "train.toml": ("torchtitan", _TORCHTITAN, {}),
    "run.json": ("torchtitan", _TORCHTITAN_JSON, {}),
    "accelerate.yaml": ("accelerate", _ACCELERATE, {"--model": JOB["model"], "--cluster": "dgx-h100:2"}),
    "nanotron.yaml": ("nanotron", _exported("nanotron", _EXPORTED), {"--cluster": "dgx-h100:2"}),
    "colossal.json": ("colossalai", _exported("colossalai", _PLAIN), {"--model": JOB["model"]}),
    "job.yaml": ("job", _EXPORTED.to_yaml() + "run: {steps: 10}\n", {"--cluster": "dgx-h100:2"}),
    "job.json": ("job", json.dumps(_PLAIN.to_dict()), {"--cluster": "dgx-h100"}),
}
