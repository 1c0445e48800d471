"""One pass of a microbatch through a user's own network: what goes in, and the one tensor that comes out.

The network's ``forward`` is replaced by one that gives a loss or hidden states when it is called with a `Pass`, and
does what it did otherwise. Data parallelism thus sees a plain tensor leave the network, whatever its author returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.batch import Batch
from shardwise.engine.mesh import Mesh
from shardwise.engine.own_model.inputs import as_mapping
from shardwise.engine.own_model.stages import PassedBy
from shardwise.engine.patterns import Patterns, matching
from shardwise.engine.tensor.vocabulary import CutHead, cut_loss
from shardwise.models.loss import cross_entropy_sum
from shardwise.spec.errors import SpecError

Loss = Callable[[Any, Any], Tensor]
Summed = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
Forward = Callable[..., Any]
Call = Callable[[Forward, Any], Any]


@dataclass(frozen=True)
class Pass:
    """A microbatch on its way; ``last``: through the last stage, where the loss is."""

    batch: Any
    last: bool = True


def call_stage(module: nn.Module, inputs: Tensor, batch: Batch, last: bool) -> Tensor:
    """How a pipeline calls a stage."""
    output: Tensor = module(Pass(batch, last), inputs)
    return output


def answer_passes(root: nn.Module, run: Callable[[Forward, Pass, Tensor | None], Tensor], whole: bool) -> None:
    """Lets ``root`` answer a `Pass` by ``run``, which is given what ``forward`` was.

    Not ``whole``: cut along its layers or its sequences, it cannot be called in any other way.
    """
    plain = root.forward

    @wraps(plain)
    def forward(*arguments: Any, **named: Any) -> Any:
        if arguments and isinstance(arguments[0], Pass):
            return run(plain, *arguments, *([None] if len(arguments) == 1 else []))
        if not whole:
            problem = "a network split by layers or sequences cannot be called directly"
            raise SpecError("strategy", problem, "use step or evaluate")
        return plain(*arguments, **named)

    root.forward = forward


def any_pass(call: Call, loss: Loss, dtype: torch.dtype) -> Callable[[Forward, Pass, Tensor | None], Tensor]:
    """A pass of a network without a table: the user's call, the user's loss."""

    def run(plain: Forward, one: Pass, inputs: Tensor | None) -> Tensor:
        outputs = call(lambda *arguments, **named: plain(*_cast(arguments, dtype), **_cast(named, dtype)), one.batch)
        return loss(outputs, one.batch)

    return run


class TokenPass:
    """A pass of a network with a table: tokens or hidden states in, hidden states or the summed loss out.

    Without a ``loss`` of the user's it is computed where the head is called, from hidden states: all logits together
    never exist.
    """

    def __init__(self, root: nn.Module, patterns: Patterns, mesh: Mesh, loss: Loss | None) -> None:
        self.patterns, self.loss, self.whole_rows = patterns, loss, mesh.size("cp") == 1
        self.cap: float | None = getattr(root.config, patterns.logit_cap) if patterns.logit_cap else None
        self.labels: Tensor | None = None
        self.total: Tensor | None = None
        heads = [head for _, head in matching(root, patterns.head)]
        self.ends = [one for one in heads if isinstance(one, PassedBy)]
        for head in heads:
            if loss is None and not isinstance(head, PassedBy):
                self._loss_in(head, mesh)

    def _loss_in(self, head: nn.Module, mesh: Mesh) -> None:
        plain = head.forward
        summed: Summed = partial(cross_entropy_sum, softcap=self.cap)
        if isinstance(head, CutHead):
            place = mesh.rank("tp"), mesh.group("tp"), mesh.strategy.sequence_parallel
            summed = cut_loss(head.slice.vocabulary, *place, self.cap)

        def forward(hidden: Tensor) -> Tensor:
            if self.labels is None:
                logits: Tensor = plain(hidden)
                return logits
            self.total = summed(hidden, head.weight, head.bias, self.labels)  # type: ignore[arg-type]
            return self.total

        head.forward = forward

    def __call__(self, plain: Forward, one: Pass, inputs: Tensor | None) -> Tensor:
        batch, at_loss = one.batch, one.last and self.loss is None
        self.labels = batch.labels if at_loss else None
        try:
            outputs = plain(batch.tokens if inputs is None else inputs, **self._named(batch))
            if one.last and self.loss is not None:
                return self.loss(outputs, as_mapping(batch, self.whole_rows))
            expected = self.total if at_loss else self.ends[0].seen
        finally:
            self.labels = self.total = None
            for end in self.ends:
                end.seen = None
        if self.cap is not None and expected is not None:
            return expected  # the network bounds what its head gives, which is in the loss already
        return _unchanged(outputs, expected)

    def _named(self, batch: Batch) -> dict[str, Any]:
        named = dict(self.patterns.constants)
        if self.patterns.positions:
            named[self.patterns.positions] = batch.positions
        if batch.documents is not None:
            if not self.patterns.documents:
                raise SpecError("batch", "has documents, but the table names no argument for them", "give documents=")
            named[self.patterns.documents] = batch.documents
        return named


def _unchanged(outputs: Any, expected: Tensor | None) -> Tensor:
    """What the network returns has to be what its last part gave: else that is not the loss, nor the hidden states."""
    found: Any = outputs
    if isinstance(outputs, Mapping):
        found = outputs["logits"] if "logits" in outputs else next(iter(outputs.values()))
    elif isinstance(outputs, tuple):
        found = outputs[0]
    if expected is None or found is not expected:
        problem = "the network changes what its head gives (or does not call it)"
        raise SpecError("patterns.head", problem, "name the last module that does, or pass loss=")
    return expected


def _cast(arguments: Any, dtype: torch.dtype) -> Any:
    """Inputs in the format that the network computes in."""
    if dtype == torch.float32:
        return arguments
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, arguments
    )
