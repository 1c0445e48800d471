"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290, equation 7; label smoothing as in TRL).

Rows hold documents, of which 2k and 2k + 1 are the chosen and the rejected answer to the same prompt
(`run.data.packing`); labels count in answers alone. The reference is the model without its adapters. It runs first,
over all microbatches of a step; what is kept of it is a number for each document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.engine.autograd import with_gradient
from shardwise.engine.batch import Batch
from shardwise.engine.collectives.reductions import all_reduce_sum
from shardwise.engine.labels import Called
from shardwise.engine.mesh import Mesh
from shardwise.engine.pipeline.runtime import call_decoder
from shardwise.engine.profiler_ranges import sent
from shardwise.engine.tensor.apply import cut_loss
from shardwise.models.adapters import Adapter, ExpertAdapter
from shardwise.models.loss import IGNORED, entropy_, token_entropies
from shardwise.spec.fine_tuning import Preference
from shardwise.spec.model import Model


class PreferenceLoss:
    """Calls a stage on a microbatch, in place of `call_decoder`; the last gives the summed loss of its pairs.

    The decoder's ``loss_function`` has to return the cross-entropy of every token.
    """

    def __init__(self, preference: Preference, mesh: Mesh) -> None:
        self.preference, self.mesh = preference, mesh
        self.in_reference = False
        self.kept: dict[int, Tensor] = {}  # of a microbatch: what the reference makes of its documents

    def __call__(self, module: nn.Module, inputs: Tensor, batch: Batch, last: bool) -> Tensor:
        output = call_decoder(module, inputs, batch, last)
        if not last:
            return output
        entropies = self._of_documents(output.view(batch.labels.shape), batch)
        if self.in_reference:
            self.kept[id(batch)] = entropies
            return output.sum()
        return self._loss(entropies, self.kept[id(batch)], batch)

    @contextmanager
    def reference(self, stages: Iterable[nn.Module]) -> Iterator[None]:
        """Passes inside are those of the frozen model alone, and are kept until the next reference."""
        parts = (part for stage in stages for part in stage.modules() if isinstance(part, Adapter | ExpertAdapter))
        adapters: list[Any] = list(parts)
        self.kept.clear()
        self.in_reference = True
        for adapter in adapters:
            adapter.on = False
        try:
            yield
        finally:
            self.in_reference = False
            for adapter in adapters:
                adapter.on = True

    def _of_documents(self, entropies: Tensor, batch: Batch) -> Tensor:
        """The cross-entropy of each document's answer [rows, documents], over all ranks that share its tokens."""
        documents, most = _documents(batch)
        sums = entropies.new_zeros((len(documents), most)).scatter_add(1, documents, entropies)
        size = self.mesh.size("cp")
        if size == 1:
            return sums
        # Every rank computes the same loss from the sum, and counts it for its share (`_loss`).
        return with_gradient(sums, self._over_context, lambda gradient: gradient * size)

    def _over_context(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        with sent("cp", Called.OVER_THE_BATCH, total):
            all_reduce_sum(total, self.mesh.group("cp"))
        return total

    def _loss(self, entropies: Tensor, reference: Tensor, batch: Batch) -> Tensor:
        present = self._present(batch)
        policy, before = (torch.unflatten(each, 1, (-1, 2)) for each in (entropies, reference))
        margins = self.preference.beta * ((policy[..., 1] - policy[..., 0]) - (before[..., 1] - before[..., 0]))
        smoothing = self.preference.label_smoothing
        losses = -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)
        return (losses * present).sum() / self.mesh.size("cp")

    def _present(self, batch: Batch) -> Tensor:
        """Which pairs have labels in both documents: 1 or 0 [rows, pairs]."""
        documents, most = _documents(batch)
        labels = torch.zeros((len(documents), most), device=documents.device)
        labels.scatter_add_(1, documents, (batch.labels != IGNORED).float())
        if self.mesh.size("cp") > 1:
            labels = self._over_context(labels)
        return (torch.unflatten(labels, 1, (-1, 2)) > 0).all(-1).float()


def _documents(batch: Batch) -> tuple[Tensor, int]:
    assert batch.documents is not None and batch.most_documents is not None
    return batch.documents, batch.most_documents + batch.most_documents % 2


def pairs_of(batch: Batch) -> Tensor:
    """How many pairs of answers whole sequences hold."""
    documents, most = _documents(batch)
    labels = torch.zeros((len(documents), most), device=documents.device)
    labels.scatter_add_(1, documents, (batch.labels != IGNORED).float())
    return (torch.unflatten(labels, 1, (-1, 2)) > 0).all(-1).float().sum()


def in_pairs(batch: Batch) -> Batch:
    """The batch with the number of its documents; without any, each row is a pair, cut in the middle."""
    documents = batch.documents
    if documents is None:
        seq = batch.tokens.shape[1]
        behind = torch.arange(seq, device=batch.tokens.device) >= seq // 2
        documents = behind.long().expand_as(batch.tokens).contiguous()
        return replace(batch, documents=documents, most_documents=2)
    most = batch.most_documents or int(documents.max()) + 1
    return replace(batch, documents=documents, most_documents=most)


def answers_loss(mesh: Mesh, model: Model) -> Callable[..., Tensor]:
    """The cross-entropy of every token, for a head that tensor parallelism may have cut."""
    softcap = model.numerics.logit_softcap
    if mesh.size("tp") == 1:
        return partial(_of_whole_head, softcap)
    cut = mesh.rank("tp"), mesh.group("tp"), mesh.strategy.sequence_parallel
    return cut_loss(model.vocab, *cut, softcap, token_entropies)


def _of_whole_head(
    softcap: float | None, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shares: Tensor | None
) -> Tensor:
    return token_entropies(hidden, weight, bias, labels, shares, softcap, entropy_)
