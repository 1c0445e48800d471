"""1-bit Adam as the engine runs it, against the formulas of the paper written down plainly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.test_compressed_training import job
from engine.workers import on_ranks
from shardwise.engine.data.apply import Replicated
from shardwise.engine.engine import Engine
from shardwise.measure.reference import sample_batch
from shardwise.models.loss import IGNORED
from shardwise.spec import Job
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Optimization

STEPS = 6
EPSILON = 1e-3  # above most second moments: the rounding of small ones does not grow


def one_bit_adam(one: Job) -> dict[str, Tensor]:
    """Weights at the end, in the order in which their gradients are summed."""
    engine = Engine(one)
    for step in range(STEPS):
        engine.step(sample_batch(one, step, 0).share(engine.mesh.rank("dp"), 2))
    (part,) = engine.data.parts.values()
    assert isinstance(part, Replicated)
    names = {held.parameter: held.name for held in engine.parameters}
    (bucket,) = part.buckets
    return {names[one]: one.detach().clone() for one in bucket.parameters}


def by_the_paper(one: Job, names: list[str]) -> dict[str, Tensor]:
    """Algorithm 1 of arXiv 2102.02888 for two workers in one process, with AdamW's decay; weights at its end."""
    beta1, beta2, block = 0.9, 0.95, one.strategy.compression.block
    half = replace(one.training, global_batch=4)
    engine = Engine(replace(one, cluster=one.cluster.with_devices(1), strategy=Strategy(), training=half))
    weights = {held.name: held.parameter for held in engine.parameters}
    first = second = error_of_sum = torch.zeros(sum(weights[name].numel() for name in names))
    errors, exact, feeds_back = (
        [first, first],
        one.strategy.compression.exact_steps,
        one.strategy.compression.error_feedback,
    )
    for step in range(STEPS):
        own = worker_gradients(one, engine, step, names)
        if step < exact:
            gradient = own[0] + own[1]
            gradient = gradient * min(1.0, 1.0 / float(gradient.norm()))
            first = beta1 * first + (1 - beta1) * gradient
            second = beta2 * second + (1 - beta2) * gradient**2
        else:
            meant = [beta1 * first / 2 + (1 - beta1) * one + error for one, error in zip(own, errors)]
            codes = [signs(one, block) for one in meant]
            total = codes[0] + codes[1] + error_of_sum
            first = signs(total, block)
            if feeds_back:
                errors, error_of_sum = [one - code for one, code in zip(meant, codes)], total - first
        learnt = 1 - beta2 ** min(step + 1, exact)
        moves = first / (1 - beta1 ** (step + 1)) / ((second / learnt).sqrt() + EPSILON) * (second > 0)
        for name, move in zip(names, torch.split(moves, [weights[name].numel() for name in names])):
            weight, rate = weights[name].data, one.training.optimization.learning_rate
            weight.mul_(1 - rate * (0.1 if weight.dim() > 1 else 0.0)).sub_(rate * move.view_as(weight))
    return {name: weights[name].detach() for name in names}


def worker_gradients(one: Job, engine: Engine, step: int, names: list[str]) -> list[Tensor]:
    """What either worker adds to the gradient of the whole batch."""
    batch, found = sample_batch(one, step, 0), []
    for worker in range(2):
        share = batch.share(worker, 2)
        engine.forward_backward(share)
        weight = float((share.labels != IGNORED).sum() / (batch.labels != IGNORED).sum())
        gradients = {held.name: held.gradient for held in engine.parameters}
        found.append(weight * torch.cat([gradients[name].reshape(-1) for name in names]))
        engine.data.after_step()
    return found


def signs(values: Tensor, block: int) -> Tensor:
    padded = torch.cat([values, values.new_zeros(-len(values) % block)]).view(-1, block)
    return (torch.where(padded >= 0, 1.0, -1.0) * padded.abs().mean(1, keepdim=True)).view(-1)[: len(values)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("error_feedback", [True, False])
def test_it_is_the_algorithm_of_the_paper(error_feedback: bool) -> None:
    compression = {"method": "1bit-adam", "exact_steps": 2, "block": 32, "error_feedback": error_feedback}
    one = job(compression)
    one = replace(one, training=replace(one.training, optimization=Optimization(learning_rate=1e-3, epsilon=EPSILON)))
    found = on_ranks(2, one_bit_adam, one)[0]
    (meant,) = on_ranks(1, by_the_paper, one, list(found))
    for name, weight in found.items():
        # A sum that is zero but for rounding may take either sign: a few elements of thousands.
        off = (weight - meant[name]).abs() > 1e-5
        assert off.float().mean() < 0.002, name
