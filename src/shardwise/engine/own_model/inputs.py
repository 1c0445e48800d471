"""A user's batch: token batches in Hugging Face's words for networks with a table, any tensors for others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.engine.batch import Batch
from shardwise.models.loss import IGNORED
from shardwise.spec.errors import SpecError, nearest_name

KEYS = ("input_ids", "labels", "shift_labels", "position_ids", "documents", "attention_mask")
LABELS = ("shift_labels", "labels")  # what a batch of any network calls the answers


def token_batch(batch: Batch | Mapping[str, Any], device: torch.device) -> Batch:
    """This rank's sequences, on its device.

    ``labels`` are Hugging Face's: the label of a place is its own token, and the place before predicts it;
    ``shift_labels`` stand already where they are predicted. An ``attention_mask`` keeps padding and text apart as two
    documents, and nothing that padding would predict counts. ``position_ids`` that do not go up by one start a new
    document, as in `transformers`.
    """
    if not isinstance(batch, Batch):
        batch = _from_mapping(batch)
    return batch.changed(lambda tensor: tensor.to(device, non_blocking=True))


def _from_mapping(batch: Mapping[str, Any]) -> Batch:
    for name in batch:
        if name not in KEYS:
            raise SpecError(f"batch.{name}", "is not known for a network with a table", nearest_name(name, KEYS))
    if "input_ids" not in batch or not any(name in batch for name in LABELS):
        raise SpecError("batch", "has no input_ids, or no labels", "give both, [sequences, tokens] each")
    labels = batch["shift_labels"] if "shift_labels" in batch else shifted(batch["labels"])
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    documents = batch.get("documents")
    if mask is not None:
        labels = labels.masked_fill(mask == 0, IGNORED)  # padding predicts nothing
    if documents is None and mask is not None:
        documents = mask.long()
    elif documents is None and positions is not None:
        starts = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
        documents = starts.cumsum(-1)
    elif documents is not None and mask is not None:
        documents = 2 * documents + mask.long()
    return Batch.of(batch["input_ids"], labels, positions, documents)


def shifted(labels: Tensor) -> Tensor:
    """Labels moved to the places that predict them; nothing is predicted behind the last."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)


def as_mapping(batch: Batch, whole_rows: bool = True) -> dict[str, Tensor]:
    """What a user's loss sees of a token batch: this rank's tokens, labels where they are predicted.

    Of ``whole_rows`` also ``labels`` where the tokens themselves stand; the first, which nothing predicts, is -100.
    """
    named = {"input_ids": batch.tokens, "shift_labels": batch.labels, "position_ids": batch.positions}
    if whole_rows:
        none = torch.full_like(batch.labels[:, :1], IGNORED)
        named["labels"] = torch.cat([none, batch.labels[:, :-1]], 1)
    return named if batch.documents is None else {**named, "documents": batch.documents}


# -- batches of any network ------------------------------------------------------------------------------------------


def on_device(batch: Any, device: torch.device) -> Any:
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    return tree_map_only(Tensor, lambda one: one.to(device, non_blocking=True), batch)


def rows_of(batch: Any) -> int:
    sizes = {one.shape[0] for one in tree_leaves(batch) if isinstance(one, Tensor) and one.dim()}
    if len(sizes) != 1:
        found = ", ".join(str(size) for size in sorted(sizes)) or "none"
        raise SpecError("batch", f"its tensors have different numbers of rows ({found})", "give one row per sample")
    return int(sizes.pop())


def in_microbatches(batch: Any, rows: int) -> list[Any]:
    """Consecutive samples, ``rows`` at a time."""
    return [
        tree_map_only(Tensor, lambda one, at=start: one[at : at + rows] if one.dim() else one, batch)  # type: ignore[misc]
        for start in range(0, rows_of(batch), rows)
    ]


def usual_count(batch: Any) -> Tensor:
    """Labels that are not -100, where they are whole numbers; else samples."""
    labels: Any = None
    if isinstance(batch, Mapping):
        labels = next((batch[name] for name in LABELS if name in batch), None)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        labels = batch[1]
    if isinstance(labels, Tensor) and not labels.is_floating_point():
        return (labels != IGNORED).sum()
    first = next(one for one in tree_leaves(batch) if isinstance(one, Tensor))
    return torch.tensor(rows_of(batch), device=first.device)


def usual_call(module: nn.Module) -> Callable[[Callable[..., Any], Any], Any]:
    """Of a mapping what the network's forward takes by name, without labels; of a tuple its first element."""
    parameters = inspect.signature(module.forward).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())

    def call(forward: Callable[..., Any], batch: Any) -> Any:
        if isinstance(batch, Mapping):
            names = [name for name in batch if name not in LABELS and (takes_all or name in parameters)]
            return forward(**{name: batch[name] for name in names})
        return forward(batch[0] if isinstance(batch, (tuple, list)) else batch)

    return call
