"""Small models, clusters and requests for the planner's tests, and strategies enumerated without the planner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from cost.builders import GPT, LLAMA, MLA_MOE, MOE
from cost.jobs import CLUSTERS
from shardwise.cost.memory.device import device_memories, peak_memory
from shardwise.planner.advice.explanation import WhyNot, judged, wish
from shardwise.planner.constraints import Allowed, Constraints, allowed
from shardwise.planner.plan import Plan
from shardwise.planner.request import Request
from shardwise.planner.search.supported import findings_of
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

MODELS: dict[str, Model] = {
    name: replace(model, max_seq=8192)
    for name, model in {
        "dense": LLAMA,
        "tied": GPT,
        "window": replace(LLAMA, sliding_window=64),
        "experts": MOE,
        "latent": MLA_MOE,
    }.items()
}
# Sixteen devices each: one switch, two levels, three levels, real nodes, a torus.
NETWORKS: dict[str, Cluster] = dict(zip(("flat", "two", "three", "h100", "pcie", "torus"), CLUSTERS))


def job_of(model: Model | str, cluster: Cluster | str, batch: int | str | None, **training: Any) -> Job:
    """A job whose batch need not divide over the strategy that it has: the planner looks for another."""
    job = Job(model=model, cluster=cluster, training=Training(**training))  # type: ignore[arg-type]
    return job.unchecked(training=Training(global_batch=batch, **training))


def within(**texts: str) -> Constraints:
    """Constraints as the command line writes them: tp="2,4", microbatch="1"."""
    return Constraints({name: allowed(name, text) for name, text in texts.items()})


def why_not(found: Plan, wanted: Mapping[str, Allowed]) -> WhyNot:
    """What keeps strategies with the ``wanted`` values from being the plan."""
    asked = wish(found, wanted)
    return judged(found.with_candidates(asked.candidates), asked)


def host_room(cluster: Cluster) -> float:
    """Bytes of the host for one device."""
    return float("inf") if cluster.host_memory is None else cluster.host_memory / cluster.node_devices


def fits(request: Request, job: Job) -> bool:
    host = max(memory.host for memory in device_memories(job))
    return peak_memory(job).total <= request.capacity_bytes and host <= host_room(job.cluster)


def runs(request: Request, job: Job) -> bool:
    return not findings_of(job, any_priced=request.any_priced)


# -- every strategy, by trying -----------------------------------------------------------------------

# ZeRO stage, parameters kept, gradients accumulated: what a search tries unless it is told otherwise.
SHARDINGS = ((0, False, "sharded"), (1, False, "sharded"), (2, False, "sharded"), (3, False, "sharded"),
             (3, True, "sharded"), (3, True, "local"))  # fmt: skip


def every_job(request: Request, values: Mapping[str, tuple[Any, ...]]) -> Iterator[Job]:
    """Every job with one of the ``values`` in each field: all combinations are tried, and `Job` refuses the wrong ones.

    Fields that make no difference keep their plain value. ``sharding`` stands for three fields.
    """
    devices, model = request.job.cluster.devices, request.job.model
    for choice in product(*values.values()):
        fields = dict(zip(values, choice))
        sharding = fields.pop("sharding")
        if devices % prod(fields[name] for name in ("tp", "cp", "pp")) or not _sensible(fields):
            continue
        if devices == fields["tp"] * fields["pp"] and sharding != values["sharding"][0]:
            continue  # over one rank all are the same
        fields["zero"], fields["keep_parameters"], fields["accumulate"] = sharding
        try:
            strategy = Strategy(**fields, overlap=replace(request.job.stack.overlap, ep=_hides(fields)))
            even = model.layers % strategy.stages == 0
            yield replace(request.job, strategy=replace(strategy, stage_layers="even" if even else "balanced"))
        except SpecError:
            continue


def _sensible(fields: Mapping[str, Any]) -> bool:
    """Whether fields that make no difference are plain, and experts are cut like the rest or not at all."""
    return (
        (fields["tp"] > 1 or fields["sequence_parallel"])
        and (fields["cp"] > 1 or fields["context_method"] == "ring")
        and (fields["pp"] > 1 or fields["schedule"] == "1f1b")
        and (fields["interleave"] > 1) == (fields["schedule"] == "interleaved")
        and (fields["recompute"] == "full" or fields["recompute_layers"] is None)
        and fields["expert_tp"] in (None, 1, fields["tp"])
    )


def _hides(fields: Mapping[str, Any]) -> bool:
    """DualPipe hides the exchange of expert tokens under another microbatch."""
    return bool(fields["ep"] > 1 and fields["pp"] > 1 and fields["schedule"].startswith("dualpipe"))


def narrow_request(model: Model | str, cluster: Cluster | str, batch: int, seq: int, **options: Any) -> Request:
    """A request whose space is small enough to try everything: see ``narrow_values``."""
    constraints = within(
        microbatch="1,2",
        order="tp-cp-dp-pp",
        schedule="1f1b,interleaved,zbv",
        interleave="1,2",
        stage_layers="even,balanced",
        recompute="none,full",
        context_method="ring,all-gather",
        offload="none",
    )
    constraints = constraints.with_allowed({"recompute_layers": Allowed((None,)), "shard_group": Allowed((None,))})
    return Request(job_of(model, cluster_from(cluster), batch, seq=seq), constraints, **options)


def narrow_values(request: Request) -> dict[str, tuple[Any, ...]]:
    """The values of every field in the space of a narrow request."""
    job = request.job
    degrees = tuple(degree for degree in (1, 2, 4, 8, 16) if degree <= job.cluster.devices)
    return {
        "tp": degrees,
        "cp": tuple(degree for degree in degrees if degree <= max(1, job.training.seq // 1024)),
        "pp": degrees,
        "ep": degrees if job.model.moe else (1,),
        "expert_tp": degrees if job.model.moe else (None,),
        "sequence_parallel": (True, False),
        "sharding": SHARDINGS,
        "microbatch": (1, 2),
        "schedule": ("1f1b", "interleaved", "zbv"),
        "interleave": (1, 2),
        "recompute": ("none", "full"),
        "recompute_layers": (None,),
        "context_method": ("ring", "all-gather"),
    }
