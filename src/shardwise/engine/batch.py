"""One step's data on a rank: sequences, cut into microbatches and, for context parallelism, along the sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.models.dropout import keys_of_tokens
from shardwise.models.layer import Ahead, ahead_of
from shardwise.models.loss import IGNORED


@dataclass(frozen=True)
class Batch:
    """Sequences of one step; all tensors are [sequences, seq]."""

    tokens: Tensor
    labels: Tensor  # the token after each one; -100 where it does not count
    positions: Tensor
    documents: Tensor | None = None  # numbers of the documents that are packed into each row
    most_documents: int | None = None  # the most documents in any row, where that is known
    ahead: Ahead | None = None  # what prediction modules read and predict (`with_ahead`)
    token_keys: Tensor | None = None  # what the dropout of adapters follows (`with_keys`)

    @classmethod
    def of(
        cls, tokens: Tensor, labels: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Batch:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return cls(tokens, labels, positions, documents)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """``change`` applied to every tensor."""
        documents = None if self.documents is None else change(self.documents)
        changed = change(self.tokens), change(self.labels), change(self.positions)
        ahead = None if self.ahead is None else Ahead(change(self.ahead.tokens), change(self.ahead.labels))
        token_keys = None if self.token_keys is None else change(self.token_keys)
        return Batch(*changed, documents, self.most_documents, ahead, token_keys)

    def with_ahead(self, modules: int) -> Batch:
        """Adds what so many prediction modules read and predict; call on whole sequences, before they are cut."""
        if modules == 0:
            return self
        return replace(self, ahead=ahead_of(self.tokens, self.labels, self.documents, modules))

    def with_keys(self, seed: int, step: Tensor | int, rows: range, of_rows: int) -> Batch:
        """Adds what dropout follows; these are some ``rows`` of a global batch; call on whole sequences."""
        keys = keys_of_tokens(seed, step, rows, of_rows, self.tokens.shape[1], self.tokens.device)
        return replace(self, token_keys=keys)

    def share(self, rank: int, size: int) -> Batch:
        """The sequences of one of ``size`` data-parallel ranks, of a global batch."""
        each = self.tokens.shape[0] // size
        return self.rows(range(rank * each, (rank + 1) * each))

    def rows(self, chosen: range) -> Batch:
        """Some of the sequences."""
        return self.changed(lambda tensor: tensor[chosen.start : chosen.stop])

    def microbatches(self, number: int, replicas: int = 1) -> list[Batch]:
        """Equal parts in order. A batch may hold the sequences of several ``replicas`` of another stage, each of which
        cuts its own: then every part has some of each."""
        each = self.tokens.shape[0] // (number * replicas)

        def part(tensor: Tensor, which: int) -> Tensor:
            starts = [(replica * number + which) * each for replica in range(replicas)]
            pieces = [tensor[start : start + each] for start in starts]
            return pieces[0] if replicas == 1 else torch.cat(pieces)

        return [self.changed(lambda tensor, which=i: part(tensor, which)) for i in range(number)]  # type: ignore[misc]

    @property
    def counted(self) -> Tensor:
        return (self.labels != IGNORED).sum()
