"""Random weights and data that any process can make for itself: the same whole model and batch for every layout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from shardwise.engine.batch import Batch
from shardwise.models.initialise import DEVIATION, initial_value, is_bias, is_norm
from shardwise.models.loss import IGNORED
from shardwise.spec.job import Job
from shardwise.spec.model import Model


def sample_batch(job: Job, step: int, seed: int, device: str = "cpu") -> Batch:
    """The global batch of a step. Labels are missing unevenly, so that means over parts are not means over all."""
    random = torch.Generator().manual_seed(1_000_003 * seed + step)
    size = (job.sequences, job.training.seq)
    text = torch.randint(job.model.vocab, (size[0], size[1] + 1), generator=random)
    labels = text[:, 1:].clone()
    missing = torch.rand(size, generator=random) < 0.4 * torch.rand((size[0], 1), generator=random)
    labels[missing] = IGNORED
    labels[0, : size[1] // 2] = IGNORED
    return Batch.of(text[:, :-1].contiguous(), labels).changed(lambda tensor: tensor.to(device))


def sample_weight(name: str, shape: Iterable[int], seed: int, model: Model) -> Tensor:
    """A parameter of the whole model: its first value, but no bias is zero and no norm one.

    A bias of zero would hide that it is added twice; and AdamW's rounding is large beside weights that start at zero.
    """
    value = initial_value(name, shape, seed, model)
    if not (is_bias(name) or is_norm(name)):
        return value
    digest = hashlib.sha256(f"sample {seed} {name}".encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return value + DEVIATION * torch.randn(value.shape, generator=random)
