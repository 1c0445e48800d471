"""verl: the YAML of its trainers, and scripts that start them with ``key=value``. They are read, not written.

Of reinforcement learning the actor's update is priced, as training: what generates, judges and compares is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.interop.frameworks import recipes
from shardwise.interop.frameworks.documents import Names, Settings
from shardwise.interop.frameworks.target import Reading, product_of
from shardwise.spec.schedules import PLAIN, chosen_chunks_schedules

_UNPRICED = {
    "distillation": "a teacher is not priced, which takes memory and time",
    "actor_rollout_ref.model.mtp.enable_train": "prediction layers are not priced, which take memory and time",
    "actor_rollout_ref.model.tiled_mlp.enabled": "an MLP in tiles takes less memory than is priced",
    "actor_rollout_ref.actor.entropy_checkpointing": "the entropy is made again: less memory than is priced",
}


@dataclass(frozen=True)
class _Sections:
    """Where a trainer has its settings."""

    model: str
    path: str
    engine: str
    optim: str
    degree: str  # of Ulysses

    def has(self, reading: Reading) -> bool:
        return reading.has(self.path)


_ACTOR = "actor_rollout_ref.actor."
_RL = _Sections("actor_rollout_ref.model.", "actor_rollout_ref.model.path", _ACTOR + "fsdp_config.", _ACTOR + "optim.",
                _ACTOR + "ulysses_sequence_parallel_size")  # fmt: skip
_OLD_SFT = _Sections("model.", "model.partial_pretrain", "model.fsdp_config.", "optim.",
                     "ulysses_sequence_parallel_size")  # fmt: skip
_SFT = _Sections("model.", "model.path", "engine.", "optim.", "engine.ulysses_sequence_parallel_size")


def _parse(text: str, what: str, names: Names) -> Settings:
    return recipes.interpolated(recipes.RECIPE.parse(text, what, names))


def _interpret(reading: Reading, fields: dict[str, Any]) -> None:
    learns = reading.section("actor_rollout_ref")
    at = _RL if learns else _OLD_SFT if _OLD_SFT.has(reading) else _SFT
    recipes.read_model(reading, fields, at.path)
    if not at.has(reading):
        reading.no_model = f"{at.path} is not given, or is set outside the script"
    megatron = _ACTOR + "megatron." if learns else "engine."
    word = reading.text(_ACTOR + "strategy" if learns else "engine.strategy", "")
    key = megatron + "tensor_model_parallel_size"
    runs_megatron = word == "megatron" or (word == "" and reading.has(key))
    if runs_megatron:
        _read_megatron(reading, fields, megatron)
    else:
        _read_fsdp(reading, fields, at)
    nodes, each = reading.count("trainer.nnodes", 1), reading.count("trainer.n_gpus_per_node", 8)
    reading.devices = nodes * each
    if learns:
        _read_update(reading, fields)
    else:
        _read_sft(reading, fields)
    _read_kernels(reading, fields, at, compiled=runs_megatron)
    _read_learning(reading, fields, at)
    _read_adapters(reading, fields, at)
    recipes.note(reading, _UNPRICED)


# -- the step ------------------------------------------------------------------------------------------------------


def _ranks(reading: Reading, fields: Mapping[str, Any]) -> int:
    devices = reading.cluster.devices if reading.cluster is not None else reading.devices or 1
    return max(1, devices // product_of(fields, "tp", "cp", "pp"))


def _read_update(reading: Reading, fields: dict[str, Any]) -> None:
    """One update of the actor: a mini-batch of prompts, each with its answers (workers/fsdp_workers.py)."""
    prompt, answer = reading.count("data.max_prompt_length", 512), reading.count("data.max_response_length", 512)
    fields.update({"training.seq": prompt + answer, "training.task": "sft"})
    answers = reading.count("actor_rollout_ref.rollout.n", 1)
    prompts, whole = reading.count(_ACTOR + "ppo_mini_batch_size", 256), reading.count("data.train_batch_size", 1024)
    fields["training.global_batch"] = prompts * answers
    times = max(1, whole // prompts) * reading.count(_ACTOR + "ppo_epochs", 1)
    reading.notes.append(
        f"priced is one update of the actor, of {times} in a step; generation, rewards, log-probabilities come on top"
    )
    recipes.note_lengths(reading, packed=False, tokens=prompt + answer)
    estimator = reading.text("algorithm.adv_estimator", "gae")
    if reading.flag("critic.enable", estimator == "gae"):
        reading.notes.append("critic: its weights and updates are not priced, which take more memory and time")
    keys = (_ACTOR + "use_kl_loss", "algorithm.use_kl_in_reward")
    if any([reading.flag(key) for key in keys]):  # noqa: C419 (each is read)
        reading.notes.append("a reference compares the answers: its passes are not priced, which take longer")
    size = reading.count(_ACTOR + "ppo_micro_batch_size_per_gpu", None)
    together = reading.count(_ACTOR + "ppo_micro_batch_size", None)
    if together is not None and size is None:
        size = max(1, together // _ranks(reading, fields))
    tokens = reading.count(_ACTOR + "ppo_max_token_len_per_gpu", 16_384)
    if reading.flag(_ACTOR + "use_dynamic_bsz"):
        size = max(1, tokens * int(fields["strategy.cp"]) // (prompt + answer))
        reading.notes.append(f"use_dynamic_bsz: {size} whole sequences at a time, as many as ppo_max_token_len allows")
    _keep_dividing(reading, fields, size or 1)


def _keep_dividing(reading: Reading, fields: dict[str, Any], size: int) -> None:
    """Microbatches that the batch is a whole number of: what is left over is in smaller ones."""
    each = fields["training.global_batch"] // _ranks(reading, fields)
    whole, size = size, recipes.dividing(each, size)
    if size < whole:
        reading.notes.append(f"microbatches of {whole} do not divide the {each} sequences of a rank: {size} are priced")
    fields["strategy.microbatch"] = size


def _read_sft(reading: Reading, fields: dict[str, Any]) -> None:
    fields.update({"training.seq": reading.count("data.max_length", 1024), "training.task": "sft"})
    fields["training.global_batch"] = reading.count("data.train_batch_size", 256)
    size = reading.count("data.micro_batch_size_per_gpu", 4)
    together = reading.count("data.micro_batch_size", None)
    if together is not None:
        size = max(1, together // _ranks(reading, fields))
    if reading.flag("data.use_dynamic_bsz", not reading.has("model.partial_pretrain")):
        tokens = reading.count("data.max_token_len_per_gpu", 8192)
        size = max(1, tokens * int(fields["strategy.cp"]) // fields["training.seq"])
    _keep_dividing(reading, fields, size)
    recipes.note_lengths(reading, packed=False, tokens=fields["training.seq"])


# -- the layout ----------------------------------------------------------------------------------------------------


def _read_fsdp(reading: Reading, fields: dict[str, Any], at: _Sections) -> None:
    word = reading.text(_ACTOR + "strategy", "fsdp") if at is _RL else reading.text("model.strategy", "fsdp2")
    fields["stack"] = "accelerate" if reading.text("engine.strategy", word) == "fsdp2" else "accelerate@0.34"
    cp = reading.count(at.degree, reading.count(at.engine + "ulysses_sequence_parallel_size", 1))
    fields.update({"strategy.tp": 1, "strategy.cp": cp, "strategy.zero": 3, "training.precision": "bf16"})
    if cp > 1:
        fields["strategy.context_method"] = "ulysses"
    group = reading.integer(at.engine + "fsdp_size", -1)
    if group > 0:
        fields["strategy.shard_group"] = group
    if not reading.flag(at.engine + "reshard_after_forward", True):
        fields["strategy.keep_parameters"] = True
    keys = [at.engine + name for name in ("offload_policy", "cpu_offload")]
    if any([reading.flag(key) for key in keys]):  # noqa: C419 (each is read)
        fields.update({f"strategy.offload.{part}": 1.0 for part in ("weights", "gradients", "optimizer")})
    _note_moves(reading, at.engine)
    if reading.text(at.engine + "model_dtype", "fp32") in ("bf16", "bfloat16"):
        recipes.keep_all_in_16_bit(fields)


def _note_moves(reading: Reading, engine: str) -> None:
    keys = [engine + name for name in ("param_offload", "grad_offload", "optimizer_offload", "offload_params")]
    if any([reading.flag(key) for key in keys]):  # noqa: C419 (each is read)
        reading.notes.append("param_offload, optimizer_offload: on the device for the update; the way there takes time")


def _read_megatron(reading: Reading, fields: dict[str, Any], section: str) -> None:
    tp, pp = (reading.count(f"{section}{name}_model_parallel_size", 1) for name in ("tensor", "pipeline"))
    cp, ep = reading.count(section + "context_parallel_size", 1), reading.count(
        section + "expert_model_parallel_size", 1)  # fmt: skip
    fields.update({"stack": "megatron-core", "strategy.tp": tp, "strategy.pp": pp, "strategy.cp": cp, "strategy.ep": ep,
                   "strategy.sequence_parallel": reading.flag(section + "sequence_parallel", True) and tp > 1,
                   "strategy.zero": int(reading.flag(section + "use_distributed_optimizer", True)),
                   "training.precision": "bf16-fp32-grads"})  # fmt: skip
    inner = reading.count(section + "expert_tensor_parallel_size", tp)
    if ep > 1:
        fields["strategy.expert_tp"] = inner
    chunks = reading.count(section + "virtual_pipeline_model_parallel_size", 1)
    if pp > 1:
        fields["strategy.schedule"] = chosen_chunks_schedules()[0] if chunks > 1 else PLAIN
        fields.update({"strategy.interleave": chunks, "strategy.stage_layers": "balanced"})
    own = section + "override_transformer_config."
    word = reading.text(own + "recompute_granularity", None)
    if word is not None:
        fields["strategy.recompute"] = word
        if word == "full":
            layers = reading.count(own + "recompute_num_layers", None)
            if layers is not None and reading.text(own + "recompute_method", "uniform") == "block":
                fields["strategy.recompute_layers"] = layers
    if reading.flag(own + "moe_enable_deepep"):
        fields["strategy.dispatch"] = "deduplicated"
    _note_moves(reading, section)
    cpu = section.removesuffix("megatron.").removesuffix("engine.") + "optim.override_optimizer_config."
    if reading.flag(cpu + "optimizer_cpu_offload"):
        fields["strategy.offload.optimizer"] = float(reading.number(cpu + "optimizer_offload_fraction", 1.0))


# -- the rest ------------------------------------------------------------------------------------------------------


def _read_kernels(reading: Reading, fields: dict[str, Any], at: _Sections, *, compiled: bool) -> None:
    fields["training.attention"] = "flash"
    if reading.flag(at.model + "enable_gradient_checkpointing", True) and not compiled:
        fields["strategy.recompute"] = "full"
    if reading.flag(at.model + "enable_activation_offload"):
        fields["strategy.offload.activations"] = 1.0
    if reading.flag(at.model + "use_liger"):
        fields.update(recipes.LIGER)
    if reading.flag(at.model + "use_fused_kernels"):
        fields.update(recipes.LOSS_IN_PIECES)
    elif at is _RL and not compiled:
        fields["stack.loss"] = "fused"  # flash-attn's cross entropy, in place (utils/torch_functional.py)


def _read_learning(reading: Reading, fields: dict[str, Any], at: _Sections) -> None:
    recipes.read_optimizer(reading, fields, at.optim + "optimizer", "adamw")
    keys = {"learning_rate": at.optim + "lr", "decay": at.optim + "weight_decay", "clip_norm": at.optim + "clip_grad",
            "kind": at.optim + ("lr_scheduler" if at is _OLD_SFT else "lr_scheduler_type")}  # fmt: skip
    recipes.read_learning(reading, fields, keys)
    if at is not _RL:
        recipes.read_steps(reading, fields, "trainer.total_training_steps")
    if fields.get("stack.masters") == "none":
        recipes.keep_all_in_16_bit(fields)


def _read_adapters(reading: Reading, fields: dict[str, Any], at: _Sections) -> None:
    rank = reading.integer(at.model + "lora_rank", reading.integer(at.model + "lora.rank", 0))
    named = reading.value(at.model + "target_modules", reading.value(at.model + "lora.target_modules", "all-linear"))
    alpha = reading.number(at.model + "lora_alpha", reading.number(at.model + "lora.alpha", 16))
    if rank <= 0:
        return
    fields.update({
        "training.adapters.rank": rank, "training.adapters.alpha": float(alpha),
        "training.adapters.targets": recipes.targets_of(reading, at.model + "target_modules", named),
    })  # fmt: skip
    if fields.get("stack.masters") == "none":
        fields["training.optimizer"] = "adamw"
        recipes.read_base(fields, bits=16, double=False)


VERL = recipes.reader(
    "verl", "verl", _interpret, format=replace(recipes.RECIPE, parse=_parse),
    signature=("actor_rollout_ref.model.path", "actor_rollout_ref.actor.ppo_mini_batch_size", "model.partial_pretrain",
               "data.max_token_len_per_gpu"),
    programs=("verl",), stacks=("accelerate", "megatron-core"),
    defaults_in=("ppo_trainer.yaml", "ppo_megatron_trainer.yaml", "sft_trainer.yaml", "sft_trainer_engine.yaml"),
    learning=("actor_rollout_ref.actor.optim.", "optim.", "trainer.total_training_steps", "data.train_batch_size"),
)  # fmt: skip
