"""What a text book would choose: fill the node with TP, then PP or ZeRO-3 across nodes until it fits, then DP.

For mixtures of experts EP takes the place of TP (Narayanan et al. 2021, arXiv 2104.04473, section 3: "takeaways" 1
and 2; the rules of thumb of Megatron-LM's and TorchTitan's guides).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.cost.memory.device import peak_memory
from shardwise.planner.candidate import Candidate, candidate
from shardwise.planner.request import Request
from shardwise.planner.space import plain_strategy
from shardwise.planner.supported import findings_of
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.rules import divisors
from shardwise.spec.strategy import Strategy

_RECOMPUTES = ("none", "selective", "full")


def textbook(request: Request) -> Candidate | None:
    """The better of the pipeline and the ZeRO-3 variant; None if neither fits."""
    inner = _inside_the_node(request.job)
    ways = (_by_pipeline(request, inner), _by_zero3(request, inner))
    found = [_first_that_fits(request, options) for options in ways]
    priced = [candidate(job) for job in found if job is not None]
    return min(priced, key=lambda one: one.seconds_per_token, default=None)


def _inside_the_node(job: Job) -> Strategy:
    """As much of TP, or of EP for experts, as one node has room for."""
    width = min(job.cluster.levels[0].width, job.cluster.devices)
    model = job.model
    plain = plain_strategy(job)
    if model.moe:
        ep = max(degree for degree in divisors(model.moe.experts) if degree <= width and width % degree == 0)
        return replace(plain, ep=ep, expert_tp=1)
    for tp in sorted(divisors(width), reverse=True):
        try:
            replace(job, strategy=replace(plain, tp=tp), training=replace(job.training, global_batch=None))
            return replace(plain, tp=tp)
        except SpecError:
            continue
    return plain


def _by_pipeline(request: Request, inner: Strategy) -> Iterator[Strategy]:
    """Ever longer pipelines with ZeRO-1, each without, with selective and with full recompute."""
    layers, devices = request.job.model.layers, request.job.cluster.devices // inner.tp
    for pp in (degree for degree in divisors(devices) if degree <= layers):
        split = "even" if layers % pp == 0 else "balanced"
        for recompute in _RECOMPUTES:
            zero = int(devices > pp)  # one rank has nothing to divide
            yield replace(inner, pp=pp, zero=zero, recompute=recompute, stage_layers=split)  # type: ignore[arg-type]


def _by_zero3(request: Request, inner: Strategy) -> Iterator[Strategy]:
    if request.job.cluster.devices == inner.tp:
        return
    for recompute in _RECOMPUTES:
        yield replace(inner, zero=3, recompute=recompute, stage_layers="even")  # type: ignore[arg-type]


def _first_that_fits(request: Request, strategies: Iterator[Strategy]) -> Job | None:
    for strategy in strategies:
        job = _job(request, strategy)
        if job is None or findings_of(job, any_priced=request.any_priced):
            continue
        if peak_memory(job).total <= request.capacity_bytes:
            return job
    return None


def _job(request: Request, strategy: Strategy) -> Job | None:
    job, minimum = request.job, request.minimum_batch
    try:
        whole = job.unchecked(strategy=strategy, training=replace(job.training, global_batch=None))
        completed = replace(whole, strategy=strategy)
        multiple = completed.strategy.batch_multiple
        batch = -(-minimum // multiple) * multiple if minimum is not None else job.training.global_batch
        return replace(completed, training=replace(job.training, global_batch=batch))
    except SpecError:
        return None
