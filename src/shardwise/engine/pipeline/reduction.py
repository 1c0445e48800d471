"""What a pipeline tells data parallelism, which decides when gradients are reduced and parameters freed.

PyTorch's runtime reduces a stage's gradients after its last microbatch, in a pass of their own, and knows no other
way; and FSDP's hooks would not wait for weight gradients that are computed apart (pytorch#144530).
"""

from __future__ import annotations

from typing import Protocol

from torch import nn


class Reduction(Protocol):
    """Data parallelism around the passes of a stage; ``last``: no other gradients of this step follow."""

    def before_backward(self, module: nn.Module, last: bool) -> None:
        """A whole backward pass follows."""

    def before_input_gradients(self, module: nn.Module) -> None:
        """A backward pass without weight gradients follows."""

    def after_weight_gradients(self, module: nn.Module, last: bool) -> None:
        """The weight gradients of a microbatch are in ``.grad``, added outside of a backward pass."""


class NoReduction:
    """One rank holds the stage alone."""

    def before_backward(self, module: nn.Module, last: bool) -> None: ...

    def before_input_gradients(self, module: nn.Module) -> None: ...

    def after_weight_gradients(self, module: nn.Module, last: bool) -> None: ...
