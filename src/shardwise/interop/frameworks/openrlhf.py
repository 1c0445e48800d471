"""OpenRLHF: scripts that start its trainers, on DeepSpeed. They are read, not written.

Of reinforcement learning the actor's update is priced, as training: what generates, judges and compares is not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.interop.frameworks import recipes
from shardwise.interop.frameworks.documents import Names, Settings
from shardwise.interop.frameworks.target import Reading, product_of

# Names of before 2026, when its options got sections.
_OLD = {
    "pretrain": "model.model_name_or_path", "max_len": "data.max_len", "zero_stage": "ds.zero_stage",
    "micro_train_batch_size": "train.micro_batch_size", "train_batch_size": "train.batch_size", "lora_rank":
    "ds.lora.rank", "lora_alpha": "ds.lora.alpha", "lora_dropout": "ds.lora.dropout", "target_modules":
    "ds.lora.target_modules", "load_in_4bit": "ds.load_in_4bit", "adam_offload": "ds.adam_offload", "zpg": "ds.zpg",
    "gradient_checkpointing": "model.gradient_checkpointing_enable", "packing_samples": "ds.packing_samples",
    "ring_attn_size": "ds.ring_attn_size", "ds_tensor_parallel_size": "ds.tensor_parallel_size", "learning_rate":
    "adam.lr", "actor_learning_rate": "adam.lr", "l2": "adam.weight_decay", "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node", "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt", "use_liger_kernel": "ds.use_liger_kernel",
    "overlap_comm": "ds.overlap_comm", "grad_accum_dtype": "ds.grad_accum_dtype", "max_epochs": "train.max_epochs",
    "advantage_estimator": "algo.advantage.estimator", "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu", "critic_pretrain": "critic.model_name_or_path",
    "prompt_max_len": "data.max_prompt_len", "generate_max_len": "rollout.max_new_tokens", "param_dtype":
    "ds.param_dtype", "attn_implementation": "ds.attn_implementation",
}  # fmt: skip
_TRAINERS = ("train_sft", "train_dpo", "train_rm", "train_ppo_ray")
_SAME_OF_ACTOR = ("model_name_or_path", "gradient_checkpointing_enable")
_LEARNING = {"learning_rate": "adam.lr", "decay": "adam.weight_decay", "epsilon": "adam.eps", "clip_norm": "max_norm",
             "kind": "lr_scheduler"}  # fmt: skip
_UNPRICED = {
    "ds.zpg": "a second copy of the weights in each node takes more memory and less time than is priced",
    "ref.offload": "the reference is priced on the device, which takes more memory",
    "train.enable_ema": "an average of the weights is not priced, which takes memory",
    "actor.freeze_visual_encoder": "only the language model is priced",
}


def _parse(text: str, what: str, names: Names) -> Settings:
    settings = recipes.RECIPE.parse(text, what, names)
    renamed = {_OLD.get(key, key): value for key, value in settings.items()}
    for name in _SAME_OF_ACTOR:
        if f"actor.{name}" in renamed:
            renamed[f"model.{name}"] = renamed.pop(f"actor.{name}")
    return {(f"adam.{key[11:]}" if key.startswith("actor.adam.") else key): value for key, value in renamed.items()}


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    recipes.read_model(reading, fields, "model.model_name_or_path")
    trainer = str(reading.value("program", "")).rpartition(".")[2]
    learns = "ppo" in trainer or reading.section("actor")
    if trainer and trainer not in _TRAINERS:
        reading.notes.append(f"{trainer}: priced as supervised training")
    tp, cp = reading.count("ds.tensor_parallel_size", 1), reading.count("ds.ring_attn_size", 1)
    zero = reading.zero("ds.zero_stage", 3, 2)
    fields.update({"strategy.tp": tp, "strategy.cp": cp, "strategy.zero": zero, "strategy.sequence_parallel": False})
    fields["strategy.overlap.dp"] = reading.flag("ds.overlap_comm", zero == 3)
    if cp > 1:
        fields["strategy.context_method"] = "ring"
    if reading.flag("ds.adam_offload"):
        fields.update({"strategy.offload.optimizer": 1.0, "strategy.offload.gradients": 1.0})
    _read_task(reading, fields, trainer, learns=learns)
    _read_kernels(reading, fields)
    recipes.read_optimizer(reading, fields, "optim", "adam")
    recipes.read_learning(reading, fields, _LEARNING)
    _read_adapters(reading, fields)
    recipes.note(reading, _UNPRICED)


def _read_task(reading: Reading, fields: dict[str, Any], trainer: str, *, learns: bool) -> None:
    usual = 512 if trainer in ("train_dpo", "train_rm") else 2048
    length = reading.count("data.max_len", usual)
    parts = reading.count("data.max_prompt_len", None), reading.count("rollout.max_new_tokens", None)
    if parts[0] is not None and parts[1] is not None:
        length = sum(parts)  # of before 2026
    fields["training.seq"] = length
    size, batch = reading.count("train.micro_batch_size", 8 if trainer == "train_sft" else 1), reading.count(
        "train.batch_size", 128)  # fmt: skip
    fields["training.task"] = "dpo" if trainer == "train_dpo" else "sft"
    if trainer == "train_rm":
        size, batch = 2 * size, 2 * batch
        reading.notes.append(
            "both answers of a pair are in the batch; a head with one output is priced as a language-model head"
        )
    if learns:
        size = _read_update(reading, fields, size, batch)
    fields.update({"strategy.microbatch": size, "training.global_batch": batch})
    reading.used.add("ds.packing_samples")
    recipes.note_lengths(reading, packed=False, tokens=length)


def _read_update(reading: Reading, fields: dict[str, Any], size: int, batch: int) -> int:
    nodes, each = reading.count("actor.num_nodes", 1), reading.count("actor.num_gpus_per_node", 8)
    reading.devices = nodes * each
    whole = reading.count("rollout.batch_size", 1024) * reading.count("rollout.n_samples_per_prompt", 1)
    times = max(1, whole // batch) * reading.count("train.max_epochs", 1)
    reading.notes.append(
        f"priced is one update of the actor, of {times} in a step; generation, rewards, log-probabilities come on top"
    )
    if reading.text("algo.advantage.estimator", "gae") == "gae":
        reading.notes.append("critic: its weights and updates are not priced, which take more memory and time")
    tokens = reading.count("train.max_tokens_per_gpu", 16_192)
    if reading.flag("train.dynamic_batch_enable"):
        size = max(1, tokens * int(fields["strategy.cp"]) // fields["training.seq"])
        ranks = max(1, (reading.cluster.devices if reading.cluster else nodes * each) // product_of(fields, "tp", "cp"))
        size = recipes.dividing(batch // ranks, size)
        reading.notes.append(f"train.dynamic_batch_enable: {size} whole sequences at a time are priced")
    return size


def _read_kernels(reading: Reading, fields: dict[str, Any]) -> None:
    recipes.read_attention(reading, fields, "ds.attn_implementation")
    if not reading.has("ds.attn_implementation"):
        fields["training.attention"] = "flash"
    if reading.flag("model.gradient_checkpointing_enable"):
        fields["strategy.recompute"] = "full"
    if reading.flag("ds.use_liger_kernel"):
        fields.update({**recipes.LIGER, **recipes.LOSS_IN_PIECES})
    else:
        fields["stack.loss"] = "plain"  # on fp32 logits (models/actor.py)
    fields["training.precision"] = reading.choice("ds.param_dtype", {"bf16": "bf16", "fp16": "fp16"}, "bf16")
    if reading.text("ds.grad_accum_dtype", None) == "fp32" and fields["training.precision"] == "bf16":
        fields["training.precision"] = "bf16-fp32-grads"


def _read_adapters(reading: Reading, fields: dict[str, Any]) -> None:
    rank, four = reading.integer("ds.lora.rank", 0), reading.flag("ds.load_in_4bit")
    named = reading.value("ds.lora.target_modules", "all-linear")
    alpha, dropout = reading.number("ds.lora.alpha", 16), reading.number("ds.lora.dropout", 0.0)
    if rank <= 0:
        if four:
            reading.notes.append("weights in few bits are trained only by adapters: the base is priced in 16 bits")
        return
    fields.update({
        "training.adapters.rank": rank, "training.adapters.alpha": float(alpha),
        "training.adapters.dropout": float(dropout),
        "training.adapters.targets": recipes.targets_of(reading, "ds.lora.target_modules", named),
    })  # fmt: skip
    recipes.read_base(fields, bits=4 if four else 16, double=True)


OPENRLHF = recipes.reader(
    "openrlhf", "OpenRLHF", _interpret, format=replace(recipes.RECIPE, parse=_parse), programs=("openrlhf",),
    signature=("ds.zero_stage", "rollout.n_samples_per_prompt", "micro_train_batch_size"), stacks=("deepspeed",),
    learning=("adam.", "max_norm", "lr_scheduler"),
)  # fmt: skip
