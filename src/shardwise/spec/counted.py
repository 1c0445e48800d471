"""What a model's code has beside what its description says."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.codec import Spec, count, setting


@dataclass(frozen=True, kw_only=True)
class CodeCounts(Spec):
    """Counted of a model's code, beside what its other fields say; such a model is priced, and not run."""

    code: str
    """Whose code was counted."""
    assumed: tuple[str, ...] = ()
    """What its price takes as given."""
    layer_parameters: int = count(0, minimum=0)
    """Parameters of all layers together."""
    end_parameters: int = setting(0)
    """Parameters before and behind the layers; below 0 where the embedding is narrower than the layers."""
    layer_flops: float = setting(0.0, minimum=0)
    """FLOPs of matmuls in the forward pass of one token through one layer, on average."""

    @property
    def notes(self) -> list[str]:
        """That the price is less certain, and why, in one line."""
        return ["; ".join((f"priced from its code ({self.code}), not from a description", *self.assumed))]
