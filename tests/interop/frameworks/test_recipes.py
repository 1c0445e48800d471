"""Recipes of fine-tuning frameworks: what they say of a job, and that nothing they say is lost in silence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.running import error_line, run
from shardwise.interop.frameworks import READERS, TARGETS, configuration_of, framework_of, read
from shardwise.interop.frameworks.job_fields import Imported
from shardwise.interop.frameworks.torchtune import model_name
from shardwise.spec import presets
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.parameters import parameter_count

EIGHT = cluster_from("dgx-h100")
LLAMA = presets.load("model", Model, "llama3-8b")
AXOLOTL: dict[str, Any] = {
    "base_model": "llama3-8b", "datasets": [{"path": "mine.jsonl", "type": "alpaca"}], "sequence_len": 4096,
    "sample_packing": True, "micro_batch_size": 2, "gradient_accumulation_steps": 4, "adapter": "lora", "lora_r": 32,
    "lora_alpha": 16, "lora_target_linear": True, "bf16": "auto", "optimizer": "adamw_torch_fused",
    "learning_rate": "2e-4", "gradient_checkpointing": True, "wandb_project": None,
}  # fmt: skip
FACTORY: dict[str, Any] = {
    "model_name_or_path": "llama3-8b", "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 8,
    "lora_target": "q_proj,v_proj", "cutoff_len": 2048, "per_device_train_batch_size": 1, "bf16": True,
    "gradient_accumulation_steps": 8, "learning_rate": 1e-4, "optim": "adamw_torch",
}  # fmt: skip
TUNE: dict[str, Any] = {
    "model": {"_component_": "torchtune.models.llama3.lora_llama3_8b", "lora_attn_modules": ["q_proj", "output_proj"],
              "apply_lora_to_mlp": True, "lora_rank": 16, "lora_alpha": 32},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 2048},
    "dataset": {"_component_": "torchtune.datasets.alpaca_dataset", "packed": True}, "batch_size": 2,
    "gradient_accumulation_steps": 4, "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 3e-4},
    "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"}, "dtype": "bf16", "compile": False,
}  # fmt: skip
LIT: dict[str, Any] = {
    "checkpoint_dir": "checkpoints/meta-llama/Meta-Llama-3-8B", "precision": "bf16-true", "devices": 8, "lora_r": 4,
    "train": {"global_batch_size": 32, "micro_batch_size": 2, "max_seq_length": 512},
    "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 2e-4}},
}  # fmt: skip
TRL: dict[str, Any] = {
    "model_name_or_path": "llama3-8b", "dataset_name": "mine", "max_length": 4096, "use_peft": True, "lora_r": 64,
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": True, "learning_rate": 2e-4,
}  # fmt: skip
NEOX: dict[str, Any] = {
    "pipe-parallel-size": 2, "model-parallel-size": 2, "num-layers": 44, "hidden-size": 6144,
    "num-attention-heads": 64, "seq-length": 2048, "max-position-embeddings": 2048, "pos-emb": "rotary",
    "rotary-pct": 0.25, "no-weight-tying": True, "gpt-j-residual": True, "attention-config": [[["flash"], 44]],
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": 1},
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, "checkpoint-activations": True,
    "fp16": {"enabled": True}, "train-iters": 100,
}  # fmt: skip
MAXTEXT: dict[str, Any] = {
    "base_config": "base.yml", "model_name": "llama3-8b", "per_device_batch_size": 2, "max_target_length": 4096,
    "ici_tensor_parallelism": 2, "remat_policy": "minimal", "attention": "flash", "steps": 20,
}  # fmt: skip
AUTOMODEL: dict[str, Any] = {
    "recipe": "TrainFinetuneRecipeForNextTokenPrediction", "packed_sequence": {"packed_sequence_size": 4096},
    "step_scheduler": {"global_batch_size": 64, "local_batch_size": 2, "max_steps": 100},
    "model": {"_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
              "pretrained_model_name_or_path": "llama3-8b", "torch_dtype": "bf16"},
    "distributed": {"strategy": "fsdp2", "tp_size": 1, "cp_size": 1, "activation_checkpointing": True},
    "optimizer": {"_target_": "torch.optim.Adam", "lr": 1e-5, "betas": [0.9, 0.95]},
}  # fmt: skip
VERL: dict[str, Any] = {
    "data": {"train_batch_size": 1024, "max_prompt_length": 512, "max_response_length": 1536},
    "actor_rollout_ref": {
        "model": {"path": "llama3-8b", "enable_gradient_checkpointing": True},
        "actor": {"ppo_mini_batch_size": 256, "ppo_micro_batch_size_per_gpu": 8, "optim": {"lr": 1e-6}},
        "rollout": {"n": 4, "tensor_model_parallel_size": 2},
    },
    "algorithm": {"adv_estimator": "grpo"}, "trainer": {"nnodes": 1, "n_gpus_per_node": 8},
}  # fmt: skip
OPENRLHF: dict[str, Any] = {
    "program": "openrlhf.cli.train_sft", "model": {"model_name_or_path": "llama3-8b",
                                                   "gradient_checkpointing_enable": True},
    "train": {"batch_size": 256, "micro_batch_size": 2}, "data": {"max_len": 4096}, "adam": {"lr": 5e-6},
    "ds": {"zero_stage": 2, "param_dtype": "bf16", "attn_implementation": "flash_attention_2"},
}  # fmt: skip
PRIMUS: dict[str, Any] = {
    "work_group": "mine", "modules": {"pre_trainer": {
        "framework": "megatron", "config": "pre_trainer.yaml", "model": "${PRIMUS_MODEL:llama3_8B}.yaml", "overrides": {
            "micro_batch_size": 2, "global_batch_size": 128, "seq_length": 8192, "train_iters": 50,
            "tensor_model_parallel_size": "${PRIMUS_TP:2}", "overlap_grad_reduce": True, "hidden_dropout": 0.0}}},
}  # fmt: skip
BRIDGE: dict[str, Any] = {
    "recipe": "llama3_8b_pretrain_config", "train": {"train_iters": 100, "global_batch_size": 64},
    "model": {"seq_length": 4096, "tensor_model_parallel_size": 2},
}  # fmt: skip
LEVANTER: dict[str, Any] = {
    "data": {"tokenizer": "meta-llama/Llama-2-7b-hf", "cache_dir": "mine"}, "model": {"type": "llama", "seq_len": 2048},
    "trainer": {"mp": "p=f32,c=bfloat16", "train_batch_size": 64, "num_train_steps": 100, "fsdp_axis": "embed",
                "tensor_parallel_axes": ["mlp", "heads"], "batch_axis": "batch"},
    "optimizer": {"learning_rate": 4e-4, "weight_decay": 0.1},
}  # fmt: skip
RECIPES = {"axolotl": AXOLOTL, "llamafactory": FACTORY, "torchtune": TUNE, "litgpt": LIT, "trl": TRL,
           "gpt-neox": NEOX, "maxtext": MAXTEXT, "automodel": AUTOMODEL, "verl": VERL,
           "openrlhf": OPENRLHF, "primus": PRIMUS, "megatron-bridge": BRIDGE, "levanter": LEVANTER}  # fmt: skip


def changed(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The settings with others, given by dotted path; None leaves one out."""
    result = dict(settings)
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        if rest:
            section = result.get(name)
            value = changed(section if isinstance(section, dict) else {}, {rest: value})
        result[name] = value
    return {key: value for key, value in result.items() if value is not None}


def imported(name: str, changes: Mapping[str, Any] | None = None) -> Imported:
    return READERS[name].read(yaml.safe_dump(changed(RECIPES[name], dict(changes or {}))), None, EIGHT)


def job_of(name: str, changes: Mapping[str, Any] | None = None) -> Job:
    return imported(name, changes).job(EIGHT)


RANKS = {"axolotl": 32, "llamafactory": 8, "torchtune": 16, "litgpt": 4, "trl": 64}


def analyzed(file: Path, *flags: str) -> Any:
    done = run("analyze", str(file), "--cluster", "dgx-h100", "--json", *flags)
    assert done.status in (0, 1), done.err
    return json.loads(done.out)


def test_they_are_read_and_not_written() -> None:
    assert set(READERS) - set(TARGETS) == set(RECIPES)


@pytest.mark.parametrize("name", RANKS)
def test_a_recipe_is_known_by_its_content_and_priced(tmp_path: Path, name: str) -> None:
    file = tmp_path / "recipe.yml"
    file.write_text(yaml.safe_dump(RECIPES[name]))
    assert framework_of(file) == name
    assert analyzed(file)["job"]["training"]["adapters"].get("rank", 16) == RANKS[name]
    assert read(file, cluster=EIGHT).job(EIGHT).model == LLAMA


def test_an_axolotl_recipe_is_the_job_that_it_says() -> None:
    job = job_of("axolotl")
    assert (job.sequences, job.strategy.microbatch, job.training.seq) == (2 * 4 * 8, 2, 4096)
    assert job.strategy.recompute == "full" and job.strategy.zero == 0
    adapters = job.training.adapters
    assert adapters is not None and (adapters.rank, adapters.alpha, adapters.targets) == (32, 16.0, ("all-linear",))
    assert job.training.optimization.learning_rate == 2e-4


def test_a_recipe_of_llamafactory_is_the_job_that_it_says() -> None:
    job = job_of("llamafactory")
    assert (job.sequences, job.training.seq, job.strategy.recompute) == (64, 2048, "full")
    adapters = job.training.adapters
    assert adapters is not None and (adapters.alpha, adapters.targets) == (16.0, ("q_proj", "v_proj"))
    new = {"model": "llama3-8b", "cutoff_len": 2048, "max_steps": 10, "dist_config": {"name": "fsdp2"},
           "peft_config": {"name": "lora", "r": 16, "lora_alpha": 32, "target_modules": "all"},
           "quant_config": {"name": "bnb", "quantization_bit": 4}}  # fmt: skip
    second = READERS["llamafactory"].read(yaml.safe_dump(new), None, EIGHT).job(EIGHT)
    assert (second.strategy.zero, second.training.base_precision, second.training.precision) == (
        3,
        "nf4-double",
        "bf16",
    )


def test_a_recipe_of_torchtune_is_the_job_that_it_says() -> None:
    job = job_of("torchtune")
    assert (job.sequences, job.training.seq, job.strategy.zero, job.stack.base) == (64, 2048, 3, "pytorch")
    adapters = job.training.adapters
    assert adapters is not None and (adapters.rank, adapters.targets) == (16, ("q_proj", "o_proj", "mlp"))
    assert job.training.optimizer == "adamw-bf16-moments"


@pytest.mark.parametrize(
    ("builder", "expected"),
    [
        ("llama3_1.qlora_llama3_1_405b", ("qlora", "llama3.1-405b")),
        ("qwen2_5.lora_qwen2_5_1_5b_instruct", ("lora", "qwen2.5-1.5b")),
        ("qwen2.qwen2_0_5b", ("", "qwen2-0.5b")),
        ("gemma2.gemma2_9b", ("", "gemma2-9b")),
        ("phi3.lora_phi3_mini", ("lora", "phi3-mini")),
    ],
)
def test_a_builder_of_torchtune_names_a_model(builder: str, expected: tuple[str, str]) -> None:
    assert model_name(f"torchtune.models.{builder}") == expected


def test_a_recipe_of_litgpt_is_the_job_that_it_says() -> None:
    job = job_of("litgpt")
    assert (job.sequences, job.strategy.microbatch, job.training.seq, job.strategy.zero) == (32, 2, 512, 3)
    assert job.strategy.recompute == "full" and job.model == LLAMA
    adapters = job.training.adapters
    assert adapters is not None and (adapters.dropout, adapters.targets) == (0.05, ("q_proj", "v_proj"))


def test_a_recipe_of_trl_is_the_job_that_it_says() -> None:
    job = job_of("trl")
    assert (job.sequences, job.training.seq, job.strategy.recompute, job.stack.version) == (32, 4096, "full", "trl")
    adapters = job.training.adapters
    assert adapters is not None and (adapters.alpha, adapters.dropout) == (32, 0.05)
    assert adapters.targets == ("q_proj", "v_proj"), "PEFT's own choice"


def test_a_file_of_gpt_neox_is_the_job_that_it_says(tmp_path: Path) -> None:
    file = tmp_path / "20B.yml"
    file.write_text(yaml.safe_dump(NEOX))
    assert framework_of(file) == "gpt-neox"
    job = job_of("gpt-neox")
    assert parameter_count(job.model) == 20_554_567_680  # as published (Black et al. 2022, arXiv 2204.06745)
    assert (job.strategy.tp, job.strategy.pp, job.strategy.zero, job.sequences) == (2, 2, 1, 4 * 8 * 2)
    assert (job.strategy.recompute, job.training.precision, job.training.attention) == ("full", "fp16", "flash")
    underscores = {key.replace("-", "_"): value for key, value in NEOX.items()}
    assert READERS["gpt-neox"].read(yaml.safe_dump(underscores), None, EIGHT).job(EIGHT) == job


# Changes of one setting, each with the fields that must follow.
CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("axolotl", {"load_in_4bit": True, "adapter": "qlora"}, {"training.base_precision": "nf4-double"}),
    ("axolotl", {}, {"training.base_precision": "bf16"}),
    ("axolotl", {"bf16": False}, {"training.base_precision": "computed", "training.precision": "fp32"}),
    ("llamafactory", {}, {"training.base_precision": "bf16"}),
    ("trl", {}, {"training.base_precision": "computed"}),
    ("trl", {"dtype": "bfloat16"}, {"training.base_precision": "bf16"}),
    ("axolotl", {"load_in_8bit": True}, {"training.base_precision": "int8"}),
    ("axolotl", {"adapter": None}, {"training.adapters": None, "training.optimizer": "adamw-bf16-moments"}),
    ("axolotl", {"adapter": None, "fsdp": ["full_shard", "auto_wrap"]},
     {"strategy.zero": 3, "training.optimizer": "adamw"}),
    ("axolotl", {"fsdp_version": 2, "fsdp_config": {"offload_params": True, "reshard_after_forward": False}},
     {"strategy.zero": 3, "strategy.offload.optimizer": 1.0, "strategy.keep_parameters": True}),
    ("axolotl", {"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"},
     {"strategy.zero": 3, "strategy.offload.weights": 1.0, "stack.base": "deepspeed"}),
    ("axolotl", {"deepspeed": "zero1.json"}, {"strategy.zero": 1, "strategy.offload.any": False}),
    ("axolotl", {"context_parallel_size": 2}, {"strategy.cp": 2, "strategy.context_method": "all-gather"}),
    ("axolotl", {"tensor_parallel_size": 2}, {"strategy.tp": 2, "strategy.sequence_parallel": False}),
    ("axolotl", {"dp_replicate_size": 2, "dp_shard_size": 4}, {"strategy.zero": 3, "strategy.shard_group": 4}),
    ("axolotl", {"lora_target_linear": False, "lora_target_modules": ["q_proj", "model.layers.0.mlp.up_proj"]},
     {"training.adapters.targets": ("q_proj", "up_proj")}),
    ("axolotl", {"lora_target_linear": False, "lora_target_modules": r".*\.(mlp|self_attn)\.(up|q)_proj"},
     {"training.adapters.targets": ("q_proj", "up_proj")}),
    ("axolotl", {"lora_modules_to_save": ["embed_tokens", "lm_head"]}, {"training.trained": ("embedding", "head")}),
    ("axolotl", {"peft_use_dora": True}, {"training.adapters.method": "dora"}),
    ("axolotl", {"gradient_checkpointing": False}, {"strategy.recompute": "none"}),
    ("axolotl", {"gradient_checkpointing": "offload"}, {"strategy.offload.activations": 1.0}),
    ("axolotl", {"optimizer": "adamw_bnb_8bit"}, {"training.optimizer": "adam8bit"}),
    ("axolotl", {"eager_attention": True}, {"training.attention": "unfused"}),
    ("axolotl", {"rl": "dpo"}, {"training.task": "dpo"}),
    ("axolotl", {"liger_fused_linear_cross_entropy": True}, {"stack.loss": "pieces"}),
    ("axolotl", {"torch_compile": True}, {"training.compile": True}),
    ("axolotl", {"bf16": False, "fp16": True}, {"training.precision": "fp16"}),
    ("axolotl", {"max_steps": 20}, {"training.tokens": 20 * 64 * 4096}),
    ("llamafactory", {"finetuning_type": "full"}, {"training.adapters": None, "training.optimizer": "adamw"}),
    ("llamafactory", {"finetuning_type": "full", "pure_bf16": True}, {"training.optimizer": "adamw-bf16-moments"}),
    ("llamafactory", {"finetuning_type": "freeze", "freeze_trainable_layers": 4},
     {"training.trained": ("layers.28-31",), "training.adapters": None}),
    ("llamafactory", {"quantization_bit": 4, "double_quantization": False}, {"training.base_precision": "nf4"}),
    ("llamafactory", {"deepspeed": "examples/deepspeed/ds_z3_config.json"}, {"strategy.zero": 3}),
    ("llamafactory", {"deepspeed": "examples/deepspeed/ds_z0_config.json"}, {"strategy.zero": 0}),
    ("llamafactory", {"disable_gradient_checkpointing": True}, {"strategy.recompute": "none"}),
    ("llamafactory", {"stage": "dpo"}, {"training.task": "dpo"}),
    ("llamafactory", {"stage": "dpo", "pref_loss": "orpo"}, {"training.task": "sft"}),
    ("llamafactory", {"flash_attn": "disabled"}, {"training.attention": "unfused"}),
    ("llamafactory", {"enable_liger_kernel": True}, {"stack.loss": "pieces", "stack.norms": "fused"}),
    ("llamafactory", {"lora_target": "all"}, {"training.adapters.targets": ("all-linear",)}),
    ("torchtune", {"model._component_": "torchtune.models.llama3.qlora_llama3_8b"},
     {"training.base_precision": "nf4-double"}),
    ("torchtune", {"model": {"_component_": "torchtune.models.llama3.llama3_8b"}}, {"training.adapters": None}),
    ("torchtune", {"compile": True}, {"training.compile": True, "stack.base": "pytorch-compiled"}),
    ("torchtune", {"dtype": "fp32"}, {"training.precision": "fp32", "training.optimizer": "adamw"}),
    ("torchtune", {"enable_activation_checkpointing": True}, {"strategy.recompute": "full"}),
    ("torchtune", {"enable_activation_offloading": True}, {"strategy.offload.activations": 1.0}),
    ("torchtune", {"fsdp_cpu_offload": True}, {"strategy.offload.weights": 1.0}),
    ("torchtune", {"tensor_parallel_dim": 2}, {"strategy.tp": 2}),
    ("torchtune", {"data_parallel_replicate_dim": 2, "data_parallel_shard_dim": 4}, {"strategy.shard_group": 4}),
    ("torchtune", {"optimizer._component_": "bitsandbytes.optim.PagedAdamW8bit"}, {"training.optimizer": "adam8bit"}),
    ("torchtune", {"optimizer.fused": True}, {"stack.adamw": "in place"}),
    ("torchtune", {"optimizer.fused": False}, {"stack.adamw": "foreach unsharded"}),
    ("torchtune", {"optimizer._component_": "bitsandbytes.optim.PagedAdamW"}, {"stack.adamw": "in place"}),
    ("torchtune", {"loss._component_": "torchtune.rlhf.loss.DPOLoss"}, {"training.task": "dpo"}),
    ("trl", {"use_peft": None}, {"training.adapters": None, "training.optimizer": "adamw"}),
    ("trl", {"use_peft": None, "dtype": "bfloat16"}, {"training.optimizer": "adamw-bf16-moments"}),
    ("trl", {"load_in_4bit": True}, {"training.base_precision": "nf4"}),
    ("trl", {"load_in_4bit": True, "use_bnb_nested_quant": True}, {"training.base_precision": "nf4-double"}),
    ("trl", {"gradient_checkpointing": False}, {"strategy.recompute": "none"}),
    ("trl", {"max_prompt_length": 512}, {"training.task": "dpo"}),
    ("trl", {"loss_type": "nll"}, {"stack.loss": "plain"}),
    ("trl", {"torch_dtype": "bfloat16"}, {"stack.base": "trl", "stack.loss": "plain"}),
    ("trl", {"use_liger_kernel": True}, {"stack.loss": "pieces", "stack.norms": "fused"}),
    ("gpt-neox", {"activation": "swiglu", "intermediate_size": 32768, "mlp_multiple_of": 256}, {"model.ffn": 11008}),
    ("gpt-neox", {"pipe-parallel-size": 0}, {"strategy.pp": 1}),
    ("gpt-neox", {"attention-config": None}, {"training.attention": "unfused"}),
    ("gpt-neox", {"zero_optimization": {"stage": 2, "cpu_offload": True}, "pipe-parallel-size": 0},
     {"strategy.offload.optimizer": 1.0}),
    ("gpt-neox", {"train_batch_size": 64}, {"training.global_batch": 64}),
    ("gpt-neox", {"hidden_dropout": 0.1}, {"training.dropout": True}),
    ("gpt-neox", {"num_kv_heads": 8}, {"model.kv_heads": 8}),
    ("gpt-neox", {"fp16": None, "precision": "bfloat16"}, {"training.precision": "bf16"}),
    ("levanter", {}, {"model.hidden": 4096, "model.ffn": 11008, "training.precision": "bf16", "strategy.zero": 3,
                      "strategy.microbatch": 8, "strategy.recompute": "full", "stack.base": "maxtext"}),
    ("levanter", {"trainer.model_axis_size": 2, "trainer.per_device_parallelism": 4},
     {"strategy.tp": 2, "strategy.microbatch": 4}),
    ("levanter", {"trainer.mp": "p=bfloat16,c=bfloat16"}, {"training.optimizer": "adamw-bf16-moments"}),
    ("levanter", {"model": {"type": "gpt2"}}, {"model.layers": 12, "model.tied_embeddings": True}),
    ("levanter", {"model": None, "initialize_from_hf": "meta-llama/Meta-Llama-3-8B", "lora": {"r": 16}},
     {"training.adapters.rank": 16, "training.task": "sft"}),
    ("levanter", {"trainer.replica_ici_axis_size": 2}, {"strategy.shard_group": 4}),
    ("primus", {}, {"strategy.tp": 2, "training.global_batch": 128, "training.precision": "bf16-fp32-grads",
                    "strategy.zero": 1, "stack.base": "primus", "training.dropout": False}),
    ("primus", {"modules.pre_trainer.overrides.use_turbo_deepep": True}, {"strategy.dispatch": "deduplicated"}),
    ("primus", {"modules.pre_trainer.overrides.recompute_layer_ids": [0, 1, 2]}, {"strategy.recompute_layers": 3}),
    ("primus", {"modules.pre_trainer": {"framework": "torchtitan", "model": "llama3_8B-fp8.yaml", "overrides": {
        "training": {"local_batch_size": 4, "seq_len": 4096}}}},
     {"training.precision": "fp8", "strategy.microbatch": 4}),
    ("primus", {"modules.pre_trainer": {"framework": "maxtext", "model": "llama3_8B.yaml", "overrides": {
        "per_device_batch_size": 3}}}, {"stack.base": "maxtext", "strategy.microbatch": 3}),
    ("megatron-bridge", {}, {"strategy.tp": 2, "training.global_batch": 64, "training.precision": "bf16-fp32-grads",
                             "training.seq": 4096, "strategy.zero": 1}),
    ("openrlhf", {}, {"training.global_batch": 256, "strategy.microbatch": 2, "strategy.zero": 2,
                      "strategy.recompute": "full", "strategy.overlap.dp": False, "stack.loss": "plain"}),
    ("openrlhf", {"program": "openrlhf.cli.train_dpo"}, {"training.task": "dpo"}),
    ("openrlhf", {"program": "openrlhf.cli.train_rm"}, {"training.global_batch": 512, "strategy.microbatch": 4}),
    ("openrlhf", {"ds.adam_offload": True}, {"strategy.offload.optimizer": 1.0}),
    ("openrlhf", {"ds.lora": {"rank": 64, "alpha": 64}, "ds.load_in_4bit": True},
     {"training.adapters.rank": 64, "training.base_precision": "nf4-double"}),
    ("openrlhf", {"ds.ring_attn_size": 2}, {"strategy.cp": 2, "strategy.context_method": "ring"}),
    ("verl", {}, {"training.seq": 2048, "training.global_batch": 1024, "strategy.microbatch": 8, "strategy.zero": 3,
                  "strategy.recompute": "full", "stack.loss": "fused"}),
    ("verl", {"actor_rollout_ref.actor.use_dynamic_bsz": True}, {"strategy.microbatch": 8}),
    ("verl", {"actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2},
     {"strategy.cp": 2, "strategy.context_method": "ulysses"}),
    ("verl", {"actor_rollout_ref.actor.fsdp_config.param_offload": True}, {"strategy.offload.any": False}),
    ("verl", {"actor_rollout_ref.actor.fsdp_config.offload_policy": True}, {"strategy.offload.weights": 1.0}),
    ("verl", {"actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 4},
     {"strategy.tp": 4, "strategy.zero": 1, "stack.base": "megatron-core", "strategy.recompute": "none"}),
    ("verl", {"actor_rollout_ref.model.lora_rank": 32}, {"training.adapters.targets": ("all-linear",)}),
    ("verl", {"actor_rollout_ref": None, "model": {"partial_pretrain": "llama3-8b"}, "data": {"max_length": 4096}},
     {"training.seq": 4096, "training.global_batch": 256, "strategy.microbatch": 4}),
    ("automodel", {}, {"training.optimizer": "adamw-bf16-moments", "strategy.zero": 3, "strategy.accumulate": "local",
                       "strategy.recompute": "full", "training.task": "sft", "stack.adamw": "foreach unsharded"}),
    ("automodel", {"peft": {"dim": 16, "target_modules": "*_proj"}},
     {"training.adapters.rank": 16, "training.adapters.targets": ("all-linear",), "training.base_precision": "bf16"}),
    ("automodel", {"peft": {"target_modules": ["*.q_proj"]}, "quantization": {"load_in_4bit": True}},
     {"training.adapters.targets": ("q_proj",), "training.base_precision": "nf4"}),
    ("automodel", {"model.torch_dtype": "float32"}, {"training.optimizer": "adamw", "stack.masters": "fp32"}),
    ("automodel", {"optimizer": {"_target_": "transformer_engine.pytorch.optimizers.FusedAdam", "master_weights": True,
                                 "store_param_remainders": True}},
     {"stack.masters": "rest", "stack.adamw": "in place"}),
    ("automodel", {"distributed.pp_size": 2, "distributed.pipeline": {"pp_schedule": "interleaved1f1b",
                                                                      "layers_per_stage": 4}},
     {"strategy.interleave": 4, "strategy.microbatch": 1, "strategy.keep_parameters": True}),
    ("automodel", {"model.pretrained_model_name_or_path": "qwen3-30b-a3b", "distributed.ep_size": 8,
                   "model.backend": {"dispatcher": "deepep"}},
     {"strategy.ep": 8, "strategy.dispatch": "deduplicated", "strategy.keep_parameters": True}),
    ("automodel", {"fp8": {"enabled": True, "recipe_name": "rowwise"}}, {"training.precision": "fp8-rowwise"}),
    ("automodel", {"compile": {"enabled": True}}, {"training.compile": True, "stack.base": "pytorch-compiled"}),
    ("maxtext", {"model_name": None, "base_emb_dim": 6144, "global_parameter_scale": 8},
     {"model.hidden": 12288, "model.layers": 32, "model.heads": 32}),
    ("maxtext", {}, {"strategy.tp": 2, "strategy.microbatch": 4, "training.global_batch": 16, "strategy.zero": 3}),
    ("maxtext", {"remat_policy": "save_qkv_proj"}, {"strategy.recompute": "full"}),
    ("maxtext", {"remat_policy": "minimal_with_context"}, {"strategy.recompute_operators": ("norm", "activation")}),
    ("maxtext", {"remat_policy": "custom", "decoder_layer_input": "offload"}, {"strategy.offload.activations": 1.0}),
    ("maxtext", {"quantization": "int8"}, {"training.precision": "int8"}),
    ("maxtext", {"weight_dtype": "bfloat16"}, {"training.optimizer": "adamw-bf16-moments", "stack.masters": "none"}),
    ("maxtext", {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2}, {"strategy.shard_group": 2}),
    ("maxtext", {"ici_fsdp_parallelism": 1, "ici_data_parallelism": 4}, {"strategy.zero": 0}),
    ("maxtext", {"ici_context_parallelism": 2}, {"strategy.cp": 2, "strategy.context_method": "all-gather"}),
    ("litgpt", {"lora_r": None}, {"training.adapters": None, "stack.adamw": "foreach"}),
    ("litgpt", {"lora_mlp": True, "lora_query": False}, {"training.adapters.targets": ("v_proj", "mlp")}),
    ("litgpt", {"precision": "32-true"}, {"training.precision": "fp32"}),
    ("litgpt", {"train.max_steps": 10}, {"training.tokens": 10 * 32 * 512}),
    ("litgpt", {"checkpoint_dir": None, "model_name": "llama3-8b", "lora_r": None},
     {"training.task": "pretrain", "strategy.recompute": "none", "stack.adamw": "in place"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "expected"), CHANGES, ids=str)
def test_a_setting_is_what_its_framework_makes_of_it(
    name: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    job = job_of(name, changes)
    for path, value in expected.items():
        owner: Any = job
        for part in path.split("."):
            owner = getattr(owner, part)
        assert owner == value, path


# -- nothing is lost in silence


def said(read: Imported) -> tuple[Any, ...]:
    return dict(read.fields), read.notes, read.unused, read.no_model


VALUES = (True, False, 4, "adamw_bnb_8bit", 0.5, [1], "eager", "layers", "nll", "bfloat16", "fp32", "parameters")
# Beside which the settings that the usual recipe makes idle have an effect.
BESIDE: dict[str, tuple[dict[str, Any], ...]] = {
    "axolotl": ({}, {"attn_implementation": "eager", "lora_target_linear": None}),
    "llamafactory": ({},), "torchtune": ({},), "litgpt": ({},),
    "trl": ({},), "gpt-neox": ({}, {"fp16": None, "precision": "bfloat16"}),
    "levanter": ({}, {"model.type": "gpt2"}, {"model.type": "mixtral"}, {"lora.r": 4}, {"model.hidden_dim": 512},
                 {"model": None, "initialize_from_hf": "llama3-8b"}, {"data": None}),
    "openrlhf": ({}, {"ds.lora": {"rank": 4}}, {"actor": {"num_nodes": 1}, "train.dynamic_batch_enable": True},
                 {"rollout": {"max_new_tokens": 2}}, {"data": {"max_prompt_len": 7, "max_len": None}}),
    "verl": ({}, {"actor_rollout_ref.actor.strategy": "megatron"}, {"actor_rollout_ref.model.lora_rank": 4},
             {"actor_rollout_ref": None, "model": {"path": "llama3-8b"}, "engine.strategy": "fsdp2"},
             {"actor_rollout_ref": None, "model": {"path": "llama3-8b"}, "engine.strategy": "megatron"},
             {"actor_rollout_ref": None, "model": {"path": "llama3-8b", "lora_rank": 4}, "data.use_dynamic_bsz": True},
             {"actor_rollout_ref": None, "model": {"partial_pretrain": "llama3-8b"}},
             {"actor_rollout_ref.actor.strategy": "megatron",
              "actor_rollout_ref.actor.megatron": {"pipeline_model_parallel_size": 2,
                                                   "expert_model_parallel_size": 2}}),
    "automodel": ({}, {"distributed.pp_size": 2}, {"peft": {"dim": 8}}, {"packed_sequence": None, "dataset": {"a": 1}},
                  {"fp8": {"enabled": True}, "distributed.activation_checkpointing": None,
                   "model.torch_dtype": None, "optimizer.master_weights": True}),
    "maxtext": ({}, {"lora.enable_lora": True, "lora.lora_rank": 4}, {"model_name": None, "use_sft": True},
                {"model_name": None, "attention_type": "mla", "num_experts": 2, "remat_policy": "custom"},
                {"weight_dtype": "bfloat16", "ici_context_parallelism": 2, "ici_tensor_parallelism": 1}),
}  # fmt: skip


def is_heard(name: str, key: str, value: Any, beside: dict[str, Any], plain: tuple[Any, ...]) -> bool:
    try:
        return said(imported(name, {**beside, key: value})) != plain
    except SpecError:
        return True


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - {"primus", "megatron-bridge"}))  # they have others' settings
def test_every_setting_is_read_named_or_known_to_change_no_price(name: str) -> None:
    """What is not in the list of those without effect changes a field or a note, whatever it is set to."""
    names = READERS[name].names
    keys = [key for key in names.exact if not names.ignores(key) and f"{key}." not in names.open_sections]
    plain = [(beside, said(imported(name, beside))) for beside in BESIDE[name]]
    silent = [
        key for key in sorted(keys)
        if not any(is_heard(name, key, value, *known) for known in plain for value in VALUES)
    ]  # fmt: skip
    assert len(keys) > 10 and not silent


@pytest.mark.parametrize("name", RECIPES)
def test_a_setting_that_nobody_knows_is_a_note(name: str) -> None:
    notes = imported(name, {"some_plugin_depth": 3}).notes
    assert any(note.startswith("some_plugin_depth is not a setting of") for note in notes), notes


def test_an_axis_that_is_set_to_nothing_shards_nothing() -> None:
    text = yaml.safe_dump(LEVANTER).replace("fsdp_axis: embed", "fsdp_axis: null")
    assert READERS["levanter"].read(text, None, EIGHT).job(EIGHT).strategy.zero == 0


def test_a_section_in_another_file_is_read_where_that_is_beside_it(tmp_path: Path) -> None:
    (tmp_path / "optim.yaml").write_text("type: muon\n")
    file = tmp_path / "train.yaml"
    file.write_text("model: {type: gpt2}\ntrainer: {mp: f32}\noptimizer: !include optim.yaml\n")
    assert read(file, "levanter", cluster=EIGHT).job(EIGHT).training.optimizer == "muon"


def test_a_script_of_megatron_deepspeed_is_the_job_that_it_says() -> None:
    """BLOOM 176B (bigscience-workshop/bigscience, train/tr11-176B-ml/tr11-176B-ml.slurm)."""
    script = """
python -u -m torch.distributed.launch --nnodes 48 --nproc_per_node 8 Megatron-DeepSpeed/pretrain_gpt.py \\
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 \\
    --pp-partition-method 'type:transformer|embedding' \\
    --num-layers 70 --hidden-size 14336 --num-attention-heads 112 --seq-length 2048 --max-position-embeddings 2048 \\
    --micro-batch-size 2 --global-batch-size 2048 --bf16 --embed-layernorm --pad-vocab-size-to 250880 \\
    --position-embedding-type alibi --checkpoint-activations --deepspeed --zero-stage 0 --data-path $DATA
"""
    job = READERS["megatron"].read(script, None, EIGHT.with_devices(384)).job(EIGHT.with_devices(384))
    assert parameter_count(job.model) == 176_247_271_424  # the model card of bigscience/bloom
    assert (job.strategy.tp, job.strategy.pp, job.strategy.dp, job.strategy.zero) == (4, 12, 8, 0)
    assert job.strategy.stage_layers == (5, *(6,) * 10, 5) and job.training.attention == "unfused"


@pytest.mark.parametrize("inner", ["megatron", "torchtitan", "maxtext"])
def test_what_a_module_of_primus_overrides_is_judged_by_its_framework(inner: str) -> None:
    overrides = {"some_plugin_depth": 3, **({"training": {"seq_len": 2048}} if inner == "torchtitan" else {})}
    module = {"framework": inner, "model": "llama3_8B.yaml", "overrides": overrides}
    notes = imported("primus", {"modules.pre_trainer": module}).notes
    assert any("some_plugin_depth" in note and "left out" in note for note in notes), notes


def test_a_model_that_is_not_known_is_said_and_another_may_be_given(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**AXOLOTL, "base_model": "nobody/nothing-9b"}))
    refused = run("analyze", str(file), "--cluster", "dgx-h100")
    assert refused.status == 2 and "nobody/nothing-9b" in error_line(refused)
    assert analyzed(file, "--model", "llama3-8b")["job"]["model"] == "llama3-8b"


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("axolotl", {"adapter": "llama-adapter"}, "adapter"),
        ("axolotl", {"sequence_len": -1}, "sequence_len"),
        ("axolotl", {"micro_batch_size": "many"}, "micro_batch_size"),
        ("axolotl", {"lora_target_linear": False, "lora_target_modules": 5}, "lora_target_modules"),
        ("axolotl", {"deepspeed": ["a"]}, "deepspeed"),
        ("axolotl", {"sample_packing": "perhaps"}, "sample_packing"),
        ("llamafactory", {"finetuning_type": "oft"}, "finetuning_type"),
        ("llamafactory", {"stage": "dream"}, "stage"),
        ("llamafactory", {"lora_rank": 0}, "lora_rank"),
        ("llamafactory", {"do_train": False}, "do_train"),
        ("torchtune", {"model._component_": "mine.models.llama"}, "model._component_"),
        ("torchtune", {"model.lora_attn_modules": ["w1"]}, "model.lora_attn_modules"),
        ("torchtune", {"dtype": "int3"}, "dtype"),
        ("gpt-neox", {"attention-config": [[["mamba"], 44]]}, "attention_config"),
        ("gpt-neox", {"hidden-size": None}, "hidden_size"),
        ("gpt-neox", {"zero_optimization": {"stage": 7}}, "zero_optimization.stage"),
        ("litgpt", {"devices": 4}, "devices"),
        ("levanter", {"trainer.mp": "p=int3"}, "trainer.mp"),
        ("levanter", {"trainer.train_batch_size": "many"}, "trainer.train_batch_size"),
        ("primus", {"modules.pre_trainer.framework": "diffusion"}, "modules.pre_trainer.framework"),
        ("primus", {"modules.pre_trainer.overrides.model_type": "flux_schnell"}, "model_type"),
        ("automodel", {"model.torch_dtype": "int3"}, "model.torch_dtype"),
        ("automodel", {"peft": {"target_modules": 5}}, "peft.target_modules"),
        ("maxtext", {"per_device_batch_size": 0.25}, "per_device_batch_size"),
        ("maxtext", {"remat_policy": "most"}, "remat_policy"),
        ("maxtext", {"ici_fsdp_parallelism": 16}, "ici_fsdp_parallelism"),
        ("litgpt", {"quantize": "bnb.nf4"}, "quantize"),
        ("litgpt", {"lora_query": False, "lora_value": False}, "lora_query"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_one_line(name: str, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(SpecError) as refused:
        imported(name, changes).job(EIGHT)
    assert refused.value.field.startswith(word)


LAUNCHES = {
    "openrlhf": """set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \\
   --max_len 4096 --train_batch_size 256 --micro_train_batch_size 2 --pretrain llama3-8b --zero_stage 2 \\
   --ds.param_dtype bf16 --ds.attn_implementation flash_attention_2 --adam.lr 5e-6 --gradient_checkpointing
EOF
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
""",
    "verl": """set -x
length=1536
python3 -m verl.trainer.main_ppo --config-name='ppo_trainer.yaml' algorithm.adv_estimator=grpo \\
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=$((length)) \\
    +actor_rollout_ref.model.path=llama3-8b actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.rollout.n=4 trainer.nnodes=1 trainer.n_gpus_per_node=8 $@
""",
    "maxtext": """#!/bin/bash
EXECUTABLE=train
python3 -m maxtext.trainers.pre_train.$EXECUTABLE "${CONFIGS:-$PWD/configs}"/base.yml model_name=llama3-8b\\
  per_device_batch_size=2 max_target_length=4096 ici_tensor_parallelism=2 remat_policy=minimal steps=20
""",
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_script_that_starts_it_says_the_same_as_its_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(RECIPES[name]))
    started = configuration_of(LAUNCHES[name], "launch.sh")
    assert started is not None and started.framework == name
    assert started.read(cluster=EIGHT).job(EIGHT) == read(file, name, cluster=EIGHT).job(EIGHT)


@pytest.mark.parametrize("text", ["trainer: {nnodes: 2}\nactor: {path: a}\n", "- 1\n", "{}\n"])
def test_a_file_that_is_none_of_these_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(text)
    line = error_line(run("analyze", str(file), "--cluster", "dgx-h100"))
    if "trainer" in text:
        assert "has trainer, actor" in line and all(reader.title in line for reader in READERS.values())


@pytest.mark.parametrize(
    ("script", "started", "named"),
    [
        ("deepspeed finetune.py --model_name_or_path a --deepspeed ds.json --lr 1", "finetune.py", "ds.json"),
        ("torchrun --nproc_per_node 8 train.py --foo 1 --bar 2", "train.py", "a job file"),
        ("#!/bin/bash\naxolotl train config.yml", "axolotl", "config.yml"),
        ("accelerate launch --config_file fsdp.yaml train.py", "train.py", "fsdp.yaml"),
    ],
)
def test_a_script_of_another_tool_is_not_judged_as_megatrons(
    tmp_path: Path, script: str, started: str, named: str
) -> None:
    file = tmp_path / "launch.sh"
    file.write_text(script + "\n")
    line = error_line(run("analyze", str(file), "--cluster", "dgx-h100"))
    assert f"starts '{started}'" in line and named in line, line


def test_a_misspelt_job_file_is_still_one(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("modell: llama3-8b\n")
    assert "model" in error_line(run("analyze", str(file), "--cluster", "dgx-h100"))


def test_a_deepspeed_file_beside_the_recipe_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}')
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**AXOLOTL, "deepspeed": "configs/ds.json"}))
    job = read(file, cluster=EIGHT).job(EIGHT)
    assert job.strategy.zero == 2 and job.strategy.microbatch == 2


def test_experts_in_16_bits_are_said() -> None:
    mixture = replace(presets.load("model", Model, "mixtral-8x7b"), name="mine")
    settings = yaml.safe_dump({**AXOLOTL, "load_in_4bit": True})
    notes = READERS["axolotl"].read(settings, mixture, EIGHT).notes
    assert any("quantize_moe_experts" in note for note in notes)
