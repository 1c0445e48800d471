"""Random valid jobs for property tests: models of equal and of unlike layers on switches, several levels and tori."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st

from cost.builders import GPT, LLAMA, MIXED, MLA_MOE, MOE, WINDOWS, switched
from shardwise.cost.analysis import analyze
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.less_communication import Compression, Synchronise
from shardwise.spec.schedules import job_schedules
from shardwise.spec.strategy import DIMENSIONS, Offload, Overlap, Strategy
from shardwise.spec.training import Training

SCHEDULES = job_schedules()

MODELS = (GPT, LLAMA, MOE, MLA_MOE, WINDOWS, MIXED)
OFFLOADS = (Offload(), Offload(), Offload(optimizer=1), Offload(activations=0.5), Offload(weights=1, gradients=1))
COMPRESSIONS = (Compression(), Compression(), *(Compression(method=one) for one in ("int8", "1bit", "powersgd")))
MEETINGS = (Synchronise(), Synchronise(), *(Synchronise(method=one) for one in ("local-sgd", "diloco", "async")))
HOST = {"host_link": {"bandwidth": 1e9, "latency": 1e-6}}


def clusters() -> list[Cluster]:
    return [
        switched(16, **HOST),
        switched(4, 4, **HOST),
        switched(2, 4, 2, **HOST),
        cluster_from("dgx-h100:2"),
        cluster_from("h100-pcie-server:2"),
        cluster_from("tpu-v5p:4x2x2"),
    ]


CLUSTERS = clusters()
_DEGREES = [(t, c, d, p) for t in (1, 2, 4) for c in (1, 2) for p in (1, 2, 4) for d in (1, 2, 4, 8, 16)
            if t * c * d * p == 16]  # fmt: skip


@st.composite
def valid_jobs(draw: st.DrawFn) -> Job:
    """A job of 16 devices that can be priced."""
    tp, cp, dp, pp = draw(st.sampled_from(_DEGREES))
    model = draw(st.sampled_from(MODELS))
    schedule = draw(st.sampled_from(SCHEDULES)) if pp > 1 else "1f1b"
    zero = draw(st.sampled_from((0, 1, 2, 3)))
    switches = {name: draw(st.booleans()) for name in ("dp", "tp", "pp", "cp", "ep", "offload")}
    try:
        case = Job(
            model=model,
            cluster=draw(st.sampled_from(CLUSTERS)),
            strategy=Strategy(
                tp=tp,
                cp=cp,
                dp=dp,
                pp=pp,
                ep=draw(st.sampled_from((1, 2, 4, 8))) if model.moe else 1,
                expert_tp=draw(st.sampled_from((None, 1))) if model.moe else None,
                sequence_parallel=draw(st.booleans()),
                zero=zero,
                shard_group=draw(st.sampled_from((None, None, 2))) if zero else None,
                keep_parameters=draw(st.booleans()),
                accumulate=draw(st.sampled_from(("sharded", "local"))),
                order=tuple(draw(st.permutations(DIMENSIONS))),
                schedule=schedule,
                interleave=2 if schedule == "interleaved" else 1,
                recompute=draw(st.sampled_from(("none", "selective", "full"))),
                recompute_layers=draw(st.sampled_from((None, 1))),
                context_method=draw(st.sampled_from(("ring", "all-gather", "ulysses"))),
                dispatch=draw(st.sampled_from(("all-to-all", "deduplicated"))),
                overlap=Overlap(**switches),
                offload=draw(st.sampled_from(OFFLOADS)),
                compression=Compression() if zero else draw(st.sampled_from(COMPRESSIONS)),
                synchronise=Synchronise() if zero else draw(st.sampled_from(MEETINGS)),
                bucket=None if zero else draw(st.sampled_from((None, None, 1e6))),
            ),
            training=Training(seq=128, global_batch=dp * draw(st.sampled_from((1, 4, 8)))),
        )
        analyze(case)
    except SpecError:
        assume(False)
    return case


def with_faster_level(case: Job, index: int) -> Job:
    levels = list(case.cluster.levels)
    levels[index] = replace(levels[index], bandwidth=2 * levels[index].bandwidth_per_direction,
                            latency=levels[index].latency_per_step, efficiency=levels[index].reached_share)  # fmt: skip
    return replace(case, cluster=replace(case.cluster, levels=tuple(levels)))
