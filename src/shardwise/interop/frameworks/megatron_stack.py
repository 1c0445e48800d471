"""What Megatron-LM's arguments change of its software stack: formats of gradients, masters and gathers, loss, graphs.

An option is read only where it has an effect; elsewhere it is among the settings that are not used, which are named.
"""

from __future__ import annotations

from typing import Any

from shardwise.interop.frameworks.documents import Settings
from shardwise.interop.frameworks.target import Reading
from shardwise.spec.job import Job
from shardwise.spec.stack import Stack
from shardwise.spec.training import RECIPES

# Our value -> its options; the first that is written (megatron/core/model_parallel_config.py, transformer_config.py).
_LOSSES = {"native": "steps", "te": "fused"}
_GRAPHS = {"none": "none", "local": "partial", "transformer_engine": "partial", "full_iteration": "full"}
_OLD_GRAPHS = ("--enable-cuda-graph", "--external-cuda-graph")
AWARE = "--use-precision-aware-optimizer"


def reads_bf16_gradients(reading: Reading) -> bool:
    """Whether gradients are kept and reduced in bf16 (``arguments.py``: only where the weights are)."""
    if not reading.settings.get("--bf16"):
        return False
    narrow = reading.flag("--grad-reduce-in-bf16")
    if reading.settings.get(AWARE):
        narrow = narrow or reading.choice("--main-grads-dtype", ("fp32", "bf16"), "fp32") == "bf16"
    return narrow


def interpret(reading: Reading, fields: dict[str, Any]) -> None:
    """Adds what of the stack is not as its preset has it, as ``stack.*``."""
    changes: dict[str, Any] = {}
    recipe = RECIPES[fields["training.precision"]]
    if recipe.compute in ("fp8", "fp4") and reads_bf16_gradients(reading):
        changes["gradient_reduce"] = "bf16"
    if recipe.compute == "fp8" and reading.flag("--fp8-param-gather"):
        changes["parameter_gather"] = "fp8"
    if reading.flag("--cross-entropy-loss-fusion"):
        changes["loss"] = reading.choice("--cross-entropy-fusion-impl", _LOSSES, "steps")
    if reading.flag("--no-gradient-accumulation-fusion"):
        changes["dummy_gradients"] = False
    if reading.flag("--deterministic-mode"):
        changes["deterministic"] = True
    if fields.get("model.moe.experts") and not reading.flag("--moe-grouped-gemm"):
        changes["experts"] = "in turn"
    if fields["strategy.pp"] > 1 and reading.flag("--defer-embedding-wgrad-compute"):
        if (limit := reading.integer("--wgrad-deferral-limit", 0)) > 0:
            changes["deferred_head_gradients"] = limit
        else:
            reading.notes.append("gradients of the head wait for the end of all microbatches: not priced")
    changes |= _masters(reading, fields) | _layers(reading, fields) | _graphs(reading)
    fields.update({f"stack.{name}": value for name, value in changes.items()})


def _masters(reading: Reading, fields: dict[str, Any]) -> dict[str, Any]:
    """A precision-aware optimizer keeps the lower halves of fp32 masters, or masters in fp16: 2 bytes either way.

    Not beside FP8 weights, which are no upper halves, nor on the host (megatron/core/optimizer/optimizer_config.py).
    """
    adam, offloaded = fields["training.optimizer"].startswith("adam"), fields.get("strategy.offload.optimizer")
    if not (adam and reading.settings.get(AWARE) and reading.settings.get("--bf16")) or offloaded:
        return {}
    half = reading.choice("--main-params-dtype", ("fp32", "fp16"), "fp32") == "fp16"
    if reading.settings.get("--fp8-param-gather") and not half:
        return {}
    reading.flag(AWARE)
    return {"masters": "rest"}


def _layers(reading: Reading, fields: dict[str, Any]) -> dict[str, Any]:
    """Megatron's own layers have no fused attention, and no empty gradients of Transformer Engine's."""
    changes: dict[str, Any] = {}
    if reading.choice("--transformer-impl", ("local", "transformer_engine", "inference_optimized")) == "local":
        fields["training.attention"] = "unfused"
        changes = {"layers": "megatron", "dummy_gradients": False}
    return {**changes, "attention": "unfused"} if fields.get("training.attention") == "unfused" else changes


def _graphs(reading: Reading) -> dict[str, Any]:
    old = True in list(map(reading.flag, _OLD_GRAPHS))
    graphs = reading.choice("--cuda-graph-impl", _GRAPHS, "partial" if old else "none")
    if graphs == "none":
        return {}
    scopes = [reading.value(option, []) for option in ("--cuda-graph-scope", "--cuda-graph-modules")]
    whole = any("full_iteration" in scope for scope in scopes)
    return {"cuda_graphs": "full" if whole else graphs}


def compose(job: Job) -> Settings:
    """The options of what differs from its defaults in a stack of Megatron-LM's."""
    stack, compute = job.stack, job.training.recipe.compute
    settings: Settings = {
        "--cuda-graph-impl": {"partial": "local", "full": "full_iteration"}.get(stack.cuda_graphs),
        "--no-gradient-accumulation-fusion": not stack.dummy_gradients or None,
        "--deterministic-mode": stack.deterministic or None,
        "--transformer-impl": "local" if stack.layers == "megatron" else None,
        **_loss(stack),
    }
    if compute in ("fp8", "fp4"):
        settings["--grad-reduce-in-bf16"] = stack.gradient_reduce == "bf16" or None
    if compute == "fp8" and stack.parameter_gather == "fp8" and job.strategy.zero:  # which the option needs
        settings["--fp8-param-gather"] = True
    if stack.deferred_head_gradients and job.strategy.pp > 1:
        settings["--defer-embedding-wgrad-compute"] = True
        settings["--wgrad-deferral-limit"] = stack.deferred_head_gradients
    return settings


def _loss(stack: Stack) -> Settings:
    word = {meaning: word for word, meaning in _LOSSES.items()}.get(stack.loss)
    return {"--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": word} if word else {}
