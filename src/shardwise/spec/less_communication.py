"""Ways to communicate less between data-parallel ranks: compression, larger buckets, fewer synchronisations.

Unlike other choices of a strategy, some of these change what is computed, so no search chooses them by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from shardwise.spec.codec import Spec, count, reference, setting
from shardwise.spec.errors import SpecError

CompressionMethod = Literal["none", "bf16", "fp16", "int8", "fp8", "powersgd", "1bit", "1bit-adam"]
COMPRESSIONS: tuple[str, ...] = get_args(CompressionMethod)
SCALE_BYTES = 4  # of a block of int8, fp8 or 1-bit codes
_CODE_BYTES = {"bf16": 2.0, "fp16": 2.0, "int8": 1.0, "fp8": 1.0, "1bit": 1 / 8, "1bit-adam": 1 / 8}


@dataclass(frozen=True, kw_only=True)
class Compression(Spec):
    """How gradients travel between ranks that hold the same parameters."""

    method: CompressionMethod = "none"
    """`bf16` and `fp16` round; `int8`, `fp8` and `1bit` send codes and a scale per block; `powersgd` sends two factors
    of every matrix; `1bit-adam` sends AdamW's momentum as `1bit` does gradients, and keeps the second moments of the
    exact steps, so that compression errors never enter them (Tang et al. 2021, arXiv 2102.02888)."""
    rank: int = count(4)
    """Columns of each factor of `powersgd`."""
    block: int = count(256, minimum=8, maximum=65536)
    """Elements that share an fp32 scale."""
    error_feedback: bool = True
    """What a rank could not send is added to its next gradient."""
    exact_steps: int = count(0, minimum=0)
    """First steps, which compress nothing."""

    def check(self) -> None:
        if self.compresses_momentum and not self.exact_steps:
            problem = "1bit-adam keeps the second moments of the exact steps, and there are none"
            raise SpecError("exact_steps", problem, "use a fifth to a quarter of the run's steps")
        if self.block % 8:
            nearest = 8 * max(1, round(self.block / 8))
            raise SpecError("block", f"{self.block} is not a multiple of 8, the codes of a byte", f"use {nearest}")

    @property
    def is_used(self) -> bool:
        return self.method != "none"

    @property
    def compresses_momentum(self) -> bool:
        """Whether the optimizer's momentum is sent instead of gradients."""
        return self.method == "1bit-adam"

    @property
    def keeps_errors(self) -> bool:
        return self.is_used and self.error_feedback

    @property
    def element_bytes(self) -> float:
        """Bytes of an element on the wire, its part of the scale included; of all methods but powersgd."""
        scale = 0.0 if self.method in ("bf16", "fp16") else SCALE_BYTES / self.block
        return _CODE_BYTES[self.method] + scale

    def in_blocks(self, elements: float, ranks: int) -> float:
        """``elements`` padded so that every rank reduces the same number of whole blocks."""
        piece = ranks * (1 if self.method in ("bf16", "fp16") else self.block)
        return math.ceil(elements / piece) * piece


def low_rank(rank: int, rows: float, columns: float) -> float:
    """Rank of the two factors that stand for a matrix under powersgd; 0 if they would not be smaller."""
    fits = min(rank, rows, columns)
    return fits if fits * (rows + columns) < rows * columns else 0


SynchroniseMethod = Literal["every-step", "local-sgd", "diloco", "async"]


@dataclass(frozen=True, kw_only=True)
class Synchronise(Spec):
    """When data-parallel workers synchronise."""

    method: SynchroniseMethod = "every-step"
    """`every-step` sums gradients. `local-sgd`: workers train apart, then take the mean of their weights. `diloco`: the
    mean change of their weights is the gradient of an outer step, SGD with Nesterov momentum (Douillard et al. 2023).
    `async`: a step's gradients are summed while later steps run, and applied then."""
    inner_steps: int = count(32)
    """Steps that workers train apart."""
    outer_learning_rate: float = setting(0.7, above=0)
    """Learning rate of the outer step."""
    outer_momentum: float = setting(0.9, minimum=0, maximum=0.999)
    """Momentum of the outer step."""
    staleness: int = count(1, maximum=64)
    """Steps after which the gradients of `async` are applied."""

    @classmethod
    def from_dict(cls, data: object, path: str = "") -> Self:
        """Raises SpecError for a parameter server, with the reason: people know the word, and none trains here."""
        if isinstance(data, Mapping) and data.get("method") == "parameter-server":
            problem = "parameter-server is a comparison here, no way to train: the link of a server carries the "
            problem += "gradients and weights of all workers, an all-reduce spreads them"
            remedy = "every-step, or async; `shardwise bench parameter-server` shows the difference"
            raise SpecError(f"{path}.method" if path else "method", problem, remedy)
        return super().from_dict(data, path)

    @property
    def every_step(self) -> bool:
        return self.method == "every-step"

    @property
    def is_local(self) -> bool:
        """Whether workers have different weights between two synchronisations."""
        return self.method in ("local-sgd", "diloco")

    @property
    def is_async(self) -> bool:
        return self.method == "async"


def method_field(cls: type[Spec]) -> Any:
    """A field that takes the fields of ``cls``, or its ``method`` alone."""

    def short(value: Any) -> Any:
        fields = value.to_dict()
        return value.method if set(fields) <= {"method"} else fields

    return reference(
        lambda value: cls.from_dict({"method": value} if isinstance(value, str) else value), short, default=cls()
    )
