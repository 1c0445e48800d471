"""What is trained and how: batch, sequence, numeric formats, optimizer."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from shardwise.spec import units
from shardwise.spec.codec import Spec, count, setting
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.fine_tuning import (
    BASE_FORMATS,
    PARTS,
    Adapters,
    BasePrecision,
    Preference,
    TrainedPattern,
    Tuning,
)
from shardwise.spec.layers import LONGEST
from shardwise.spec.lengths import Lengths


@dataclass(frozen=True, kw_only=True)
class LossScaling(Spec):
    """Loss scaling of fp16. A dynamic scale doubles after `window` good steps in a row, and halves after `hysteresis`
    overflows since its last change, as in Megatron-LM and DeepSpeed."""

    initial: float = setting(2.0**16, above=0)
    """First dynamic scale."""
    window: int = count(1000)
    """Good steps in a row that double it."""
    hysteresis: int = count(2)
    """Overflows that halve it."""
    minimum: float = setting(1.0, above=0)
    """It never falls below this."""
    static: float | None = setting(None, above=0)
    """A fixed scale instead."""


@dataclass(frozen=True, kw_only=True)
class Optimization(Spec):
    """Constants of the optimizer, which change no memory and no time. The defaults are those of large open models
    (Llama, OLMo)."""

    learning_rate: float = setting(3e-4, above=0)
    """Peak learning rate."""
    decay: float = setting(0.1, minimum=0)
    """Weight decay, except of norms and biases."""
    beta1: float = setting(0.9, minimum=0, maximum=1)
    """Decay of Adam's first moment."""
    beta2: float = setting(0.95, minimum=0, maximum=1)
    """Decay of Adam's second moment."""
    epsilon: float = setting(1e-8, above=0)
    """Adam's epsilon."""
    momentum: float = setting(0.95, minimum=0, maximum=1)
    """Of SGD and Muon."""
    clip_norm: float | None = setting(1.0, above=0)
    """Limit of the global gradient norm. None: no limit."""
    loss_scaling: LossScaling = LossScaling()
    """Loss scaling of fp16."""
    seed: int = count(0, minimum=0)
    """Seed of the optimizer."""


MOST_SEQUENCES, MOST_TOKENS = 10**9, 10**15  # of a step
_TOKENS = re.compile(r"\s*(.+?)[\s-]*tokens?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Recipe:
    """Bytes per parameter and per activation element of a precision recipe."""

    name: str
    compute: str  # data type of the matmuls
    weight: float  # the weights the model computes with or casts from
    copies: float  # extra low-precision copies of the weights that stay in memory
    gradient: float
    master: float  # fp32 master weights kept by the optimizer
    activation: float  # element of a saved activation
    linear_input: float  # element of a saved input of a linear layer
    communication: float  # element of an activation on the wire
    source: str
    scaling: Literal["", "tensor", "row", "block"] = ""  # what has a scale of its own in FP8, where this engine runs it
    delayed: bool = False  # by the scales of earlier steps
    wide_experts: bool = False  # the stack does not quantise routed experts
    fp32_shards: bool = False  # ZeRO divides fp32 weights and gradients, and whole weights are gathered from them

    whole_gradient: float = 0.0  # of a gradient that ZeRO keeps whole over microbatches, where that is wider
    base: float | None = None  # of a weight in a frozen linear layer; None: as a trained one without a master
    frozen_plain: float = 2  # of other frozen weights beside such a base, at most
    trained_copies: bool = False  # what else is trained beside such a base is a 16-bit copy, without a master
    frozen_gradients: bool = False  # frozen layers have gradients too, where ZeRO-3 divides them

    @property
    def plain_weight(self) -> float:
        """Bytes of a weight that every recipe keeps in at least 16 bits: embeddings, head, norms."""
        return max(self.weight, 2)

    @property
    def gathered(self) -> float:
        """Bytes of a parameter gathered by sharded data parallelism, in the compute format."""
        return self.weight if self.compute == "fp32" else min(self.weight, 2)

    @property
    def gathered_for_every_use(self) -> float:
        """The same of a weight that is multiplied in FP8 and gathered for each pass, by this project's engine.

        With a scale for each row the passes multiply different numbers, and bf16 ones are gathered.
        """
        return 1.0 if self.fp32_shards and self.scaling in ("tensor", "block") else self.gathered

    @property
    def frozen_gathered(self) -> float:
        """Bytes of a weight of a frozen linear layer that is gathered: quantised ones as codes and scales."""
        return self.gathered if self.base is None else min(self.base, self.gathered)

    @property
    def of_experts(self) -> Recipe:
        """The recipe of routed experts."""
        return _of_experts(self) if self.wide_experts else self

    @property
    def wide(self) -> str:
        """The format of what a low-precision recipe does not quantise: attention, head, router."""
        return self.compute if self.compute in ("fp32", "fp16", "bf16") else "bf16"


@lru_cache
def _of_experts(recipe: Recipe) -> Recipe:
    return replace(recipe, compute=recipe.wide, copies=0.0, linear_input=recipe.activation, scaling="")


FP8_BLOCK = 128  # elements that share a scale in block scaling
_MIXED = "Micikevicius et al. 2018 (arXiv 1710.03740); ZeRO (arXiv 1910.02054) section 3.1"
_TE = "NVIDIA Transformer Engine: FP8 weight and its transpose cached beside the BF16 weight"
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32", "fp32", 4, 0, 4, 0, 4, 4, 4, "one format for all"),
        Recipe("fp16", "fp16", 2, 0, 2, 4, 2, 2, 2, _MIXED),
        Recipe("bf16", "bf16", 2, 0, 2, 4, 2, 2, 2, _MIXED),
        Recipe("bf16-fp32-grads", "bf16", 2, 0, 4, 4, 2, 2, 2, "Megatron-LM accumulates gradients in fp32: 18 B"),
        Recipe("fp8", "fp8", 2, 2, 4, 4, 2, 1, 2, _TE, "tensor"),
        Recipe("fp8-delayed", "fp8", 2, 2, 4, 4, 2, 1, 2,
               "Transformer Engine's DelayedScaling: scales by the largest elements of earlier steps", "tensor", True),
        Recipe("fp8-rowwise", "fp8", 2, 2, 4, 4, 2, 1, 2, "torchao float8, recipe rowwise: a scale per row", "row"),
        Recipe("fp8-blockwise", "fp8", 2, 2 * (1 + 4 / FP8_BLOCK**2), 4, 4, 2, 1 + 4 / FP8_BLOCK, 2,
               "DeepSeek-V3 (arXiv 2412.19437, section 3.3): an fp32 scale per 1x128, of weights per 128x128", "block"),
        Recipe("mxfp8", "fp8", 2, 2 * (1 + 1 / 32), 4, 4, 2, 1 + 1 / 32, 2,
               "OCP Microscaling Formats v1.0: one 8-bit scale per 32 elements"),
        Recipe("nvfp4", "fp4", 2, 2 * (1 / 2 + 1 / 16), 4, 4, 2, 1 / 2 + 1 / 16, 2,
               "NVFP4: one 8-bit scale per 16 four-bit elements"),
        Recipe("int8", "int8", 2, 0, 2, 4, 2, 2, 2,
               "google/aqt as MaxText trains with it: operands cast to 8 bit for every matmul, none kept"),
    )
}  # fmt: skip
PrecisionName = Literal[
    "fp32",
    "fp16",
    "bf16",
    "bf16-fp32-grads",
    "fp8",
    "fp8-delayed",
    "fp8-rowwise",
    "fp8-blockwise",
    "mxfp8",
    "nvfp4",
    "int8",
]


@dataclass(frozen=True)
class OptimizerStates:
    """Bytes of optimizer state per parameter, besides the master weights of the recipe."""

    matrices: float  # weight matrices inside the layers
    others: float  # embeddings, head, norms, biases
    source: str
    root: float = 0.0  # the square root of a second moment, where torch's AdamW updates with it


OPTIMIZERS: dict[str, OptimizerStates] = {
    "sgd": OptimizerStates(0, 0, "no state"),
    "sgd-momentum": OptimizerStates(4, 4, "one fp32 momentum"),
    "adamw": OptimizerStates(8, 8, "two fp32 moments (arXiv 1711.05101)", 4),
    "adamw-bf16-moments": OptimizerStates(4, 4, "two bf16 moments (DeepSeek-V3, arXiv 2412.19437, section 3.3.3)", 2),
    "adam8bit": OptimizerStates(2 + 8 / 256, 2 + 8 / 256,
                                "two 8-bit moments, an fp32 scale per 256 (arXiv 2110.02861; bitsandbytes 0.43+)"),
    "muon": OptimizerStates(4, 8, "one fp32 momentum for matrices, AdamW for the rest (Jordan et al. 2024)"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Training(Spec):
    """What is trained and how: batch, sequence, numeric formats, optimizer."""

    global_batch: int | str | None = setting(None, flag="--global-batch")
    """Sequences per step, or tokens: 16M-tokens. Tokens are rounded to what this layout and others divide, with a note.
    By default one microbatch for every data-parallel rank."""
    seq: int = count(2048, maximum=LONGEST, flag="--seq")
    """Tokens per sequence."""
    precision: PrecisionName = setting("bf16", flag="--precision")
    """Numeric recipe. `mxfp8`, `nvfp4` and `int8` are priced, not run."""
    optimizer: Literal["sgd", "sgd-momentum", "adamw", "adamw-bf16-moments", "adam8bit", "muon"] = setting(
        "adamw", flag="--optimizer"
    )
    """Optimizer, and the format of its states."""
    attention: Literal["flash", "unfused"] = setting("flash", flag="--attention")
    """Fused attention, or one that stores its scores."""
    dropout: bool = setting(False, flag="--dropout")
    """Dropout, whose masks are kept for the backward pass. Priced, not run."""
    compile: bool = False
    """Compile layers with `torch.compile`. Prices only our own engine."""
    graphs: Literal["auto", True, False] = "auto"
    """Launch a step as one CUDA graph; `auto`: where that is possible. Prices only our own engine."""
    optimization: Optimization = Optimization()
    """Constants of the optimizer."""
    task: Literal["pretrain", "sft", "dpo"] = setting("pretrain", flag="--task")
    """What is learned: the next token (`pretrain`), answers in conversations (`sft`), or preferences (`dpo`)."""
    adapters: Adapters | None = None
    """Train narrow matrices beside frozen linear layers (LoRA, DoRA)."""
    trained: tuple[str, ...] = setting((), words=PARTS)
    """Parts that are trained while all others are frozen: `head`, `norms`, `layers.28-31`, `layers.0-3.attention`. By
    default everything, or with adapters nothing else."""
    base_precision: BasePrecision = setting("computed", flag="--base-precision")
    """How frozen linear layers are kept; `computed`: like trained weights."""
    preference: Preference | None = None
    """Settings of `dpo`."""
    lengths: Lengths | None = None
    """Lengths of the documents in a sequence; by default each fills one."""
    tokens: int | None = count(None, maximum=10**18)
    """Tokens of the whole training."""
    checkpoint_interval: float | None = setting(None, dimension="seconds", above=0)
    """Seconds between two checkpoints."""

    def check(self) -> None:
        self.batch_request()
        if self.tuning.everything and self.base_precision != "computed":
            problem = f"{self.base_precision} keeps frozen weights, and every weight is trained"
            raise SpecError("base_precision", problem, "add adapters, or leave it out")
        if self.preference is not None and self.task != "dpo":
            raise SpecError("preference", f"belongs to dpo, and the task is {self.task}", "use task: dpo")
        only_adapters = self.adapters is not None and not self.trained
        if self.preference is not None and self.preference.reference == "adapters-off" and not only_adapters:
            problem = "adapters-off is the reference only where nothing but adapters is trained"
            raise SpecError("preference.reference", problem, "use copy")

    @cached_property
    def tuning(self) -> Tuning:
        """What of the model is trained."""
        patterns = (TrainedPattern.of(text, f"trained[{index}]") for index, text in enumerate(self.trained))
        return Tuning(self.adapters, tuple(patterns), BASE_FORMATS[self.base_precision])

    @property
    def freezes(self) -> bool:
        """Whether some weights are not trained."""
        return not self.tuning.everything

    @property
    def forward_passes(self) -> int:
        """Forward passes of a microbatch: two where a frozen reference judges the answers too."""
        return 2 if self.task == "dpo" else 1

    @property
    def reference_copy(self) -> bool:
        """Whether `dpo` keeps its reference as a second copy of the model."""
        if self.task != "dpo":
            return False
        where = (self.preference or Preference()).reference
        return where == "copy" or (where == "auto" and (self.adapters is None or bool(self.trained)))

    @cached_property
    def recipe(self) -> Recipe:
        recipe, base = RECIPES[self.precision], BASE_FORMATS[self.base_precision].bytes
        return recipe if base is None else replace(recipe, base=base)

    def batch_request(self) -> tuple[int, bool] | None:
        """The batch as asked for, and whether it counts tokens; None if it was left out."""
        value = self.global_batch
        if value is None:
            return None
        match = _TOKENS.fullmatch(value) if isinstance(value, str) else None
        in_tokens = match is not None
        text = match.group(1) if match else value
        number: float = units.parse(text, "count", "global_batch") if isinstance(text, str) else text
        most = MOST_TOKENS if in_tokens else MOST_SEQUENCES
        if number > most:
            raise SpecError("global_batch", f"{shown(value)} is above {most}", f"use {most} or less")
        if number != int(number) or number < 1:
            remedy = "write sequences like 1024, or tokens like 16M-tokens"
            raise SpecError("global_batch", f"{shown(value)} is not a positive whole number", remedy)
        return int(number), in_tokens

    def sequences(self, multiple: int) -> int:
        """The global batch in sequences; one given in tokens is rounded to what this layout and others divide."""
        request = self.batch_request()
        if request is None:
            return multiple
        requested, in_tokens = request
        if not in_tokens:
            return requested
        whole = self._divisible(multiple)
        return max(1, round(requested / self.seq / whole)) * whole

    def _divisible(self, multiple: int) -> int:
        """What a batch in tokens is a multiple of: as many powers of two as move it by 5% at most; none if it fits."""
        requested, _ = self.batch_request() or (0, True)
        if requested % (self.seq * multiple) == 0:
            return multiple
        least_parts = 10  # rounding a number of so many parts to whole ones moves it by 5%
        evens = (math.lcm(multiple, 2**power) for power in range(requested.bit_length(), 0, -1))
        return next((whole for whole in evens if whole * least_parts * self.seq <= requested), multiple)

    def batch_note(self, multiple: int) -> str:
        """What was assumed or rounded to get the batch in sequences; empty when nothing was."""
        sequences = self.sequences(multiple)
        request = self.batch_request()
        if request is None:
            return f"no global batch given: {sequences:,} sequences, one microbatch per data-parallel rank"
        requested, in_tokens = request
        tokens = sequences * self.seq
        if not in_tokens or tokens == requested:
            return ""
        return (
            f"global batch {requested:,} tokens rounded to {sequences:,} sequences of {self.seq:,} "
            f"({tokens:,} tokens, {tokens / requested - 1:+.2%}), a multiple of {self._divisible(multiple)}"
        )
