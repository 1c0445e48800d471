"""The loss on held-out data: the same batches each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardwise.engine.batch import Batch
from shardwise.engine.trainer import Trainer
from shardwise.training.data.loader import Loader, Rows


def batch_of(rows: Rows, device: torch.device) -> Batch:
    """A rank's rows on its device. Rows of one document each need no mask, which makes attention quicker."""
    packed, documents_of_row = bool(rows.documents.any()), 1 + np.count_nonzero(np.diff(rows.documents), axis=1)
    tensors = [torch.from_numpy(one) for one in (rows.tokens, rows.labels, rows.positions, rows.documents)]
    if device.type == "cuda":
        tensors = [one.pin_memory().to(device, non_blocking=True) for one in tensors]
    tokens, labels, positions, documents = tensors
    # A power of two, so that few sizes occur.
    most = 1 << int(documents_of_row.max() - 1).bit_length()
    return Batch(tokens, labels, positions, documents, most) if packed else Batch(tokens, labels, positions)


def evaluate(trainer: Trainer[Any], loader: Loader, batches: int) -> float:
    """The mean over the first ``batches`` of the loader, equal on all ranks."""
    losses = [trainer.evaluate(batch_of(loader.take(number), trainer.device)) for number in range(batches)]
    return float(torch.stack(losses).mean())
