"""The single process that every layout must match: the plain model in a plain loop, without the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.engine.batch import Batch
from shardwise.models.decoder import Decoder
from shardwise.models.initialise import DEVIATION, initial_value, is_bias, is_norm
from shardwise.models.loss import IGNORED
from shardwise.models.moe import MoELayer
from shardwise.spec.job import Job
from shardwise.spec.model import Model

# -- random weights and data, the same in every process and for every layout -------------------------


def sample_batch(job: Job, step: int, seed: int, device: str = "cpu") -> Batch:
    """The global batch of a step. Labels are missing unevenly, so that the mean of partial means is not the mean."""
    random = torch.Generator().manual_seed(1_000_003 * seed + step)
    size = (job.sequences, job.training.seq)
    text = torch.randint(job.model.vocab, (size[0], size[1] + 1), generator=random)
    labels = text[:, 1:].clone()
    missing = torch.rand(size, generator=random) < 0.4 * torch.rand((size[0], 1), generator=random)
    labels[missing] = IGNORED
    labels[0, : size[1] // 2] = IGNORED
    return Batch.of(text[:, :-1].contiguous(), labels).changed(lambda tensor: tensor.to(device))


def sample_weight(name: str, shape: Iterable[int], seed: int, model: Model) -> Tensor:
    """A parameter of the unsharded model: its initial value, but no bias is zero and no norm one.

    A bias of zero would hide that it is added twice; and rounding in AdamW is large relative to weights near zero.
    """
    value = initial_value(name, shape, seed, model)
    if not (is_bias(name) or is_norm(name)):
        return value
    digest = hashlib.sha256(f"sample {seed} {name}".encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return value + DEVIATION * torch.randn(value.shape, generator=random)


# -- the single process ------------------------------------------------------------------------------

MOST_TOKENS = 1024  # of one pass, in full sequences: logits of a large vocabulary are large


@dataclass
class Reference:
    """Losses and gradients of each step, and the weights at the end; tensors by the unsharded model's names."""

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def reference_key(job: Job, steps: int, seed: int) -> str:
    """Equal for jobs that a single process runs alike, whatever their layouts."""
    fields = (job.model, job.sequences, job.training.seq, job.training.optimization, steps, seed)
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:24]


def run_reference(job: Job, steps: int, seed: int, after_step: Callable[[], None] = lambda: None) -> Reference:
    """``steps`` AdamW steps of the unsharded model on `sample_batch`, in fp32."""
    model = Decoder(job.model)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(sample_weight(name, parameter.shape, seed, job.model))
    found, settings = Reference(), job.training.optimization
    # Biases of stacked experts have two dimensions.
    decayed = {name: one.dim() > 1 and not is_bias(name) for name, one in model.named_parameters()}
    matrices = [one for name, one in model.named_parameters() if decayed[name]]
    others = [one for name, one in model.named_parameters() if not decayed[name]]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )
    for step in range(steps):
        found.losses.append(_gradients(model, job, step, seed))
        found.gradients.append(
            {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        )
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm or float("inf"))
        found.gradient_norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        for mixture in _mixtures(model):
            mixture.update_bias(mixture.load, job.model.numerics.bias_rate)
        after_step()
    found.weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    return found


def _gradients(model: Decoder, job: Job, step: int, seed: int) -> float:
    """Forward and backward of one global batch, some sequences at a time; the mean loss over its labels."""
    batch = sample_batch(job, step, seed)
    counted = batch.counted
    for mixture in _mixtures(model):
        mixture.balance_scale = job.model.numerics.balance_loss / job.sequences
    total = 0.0
    each = max(1, MOST_TOKENS // job.training.seq)
    for start in range(0, job.sequences, each):
        one = batch.changed(lambda tensor, start=start: tensor[start : start + each])  # type: ignore[misc]
        loss = model(one.tokens, one.labels, positions=one.positions, documents=one.documents) / counted
        loss.backward()
        total += loss.item()
    return total


def _mixtures(model: Decoder) -> list[MoELayer]:
    return [one for one in model.modules() if isinstance(one, MoELayer)]
