"""An analysis as plain data: the same figures as the text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardwise.cost.analysis import Analysis
from shardwise.cost.compute.flops import CONVENTIONS
from shardwise.cost.step.parts import COMMUNICATION
from shardwise.cost.step.verdict import Change
from shardwise.cost.traffic.traffic import Traffic
from shardwise.planner.advice.assessment import Assessment
from shardwise.planner.describe import change_words
from shardwise.report.campaign import campaign_data
from shardwise.report.memory_timeline import memory_over_time_data
from shardwise.report.verdict import bottleneck_sentence
from shardwise.spec.job import Job

FORMAT = 2


def analysis_data(found: Assessment) -> dict[str, Any]:
    """Everything `analyze` prints, keyed by name; bytes, seconds and FLOPs as numbers."""
    analysis = found.analysis
    data = {
        "format": FORMAT,
        "job": analysis.job.to_dict(),
        "notes": list(analysis.notes),
        "devices": analysis.job.cluster.devices,
        "microbatches": analysis.job.microbatches,
        "sequences": analysis.job.sequences,
        "tokens_per_step": analysis.job.tokens_per_step,
        "parameters": analysis.parameters,
        "trained_parameters": analysis.trained_parameters,
        "active_parameters": analysis.active_parameters,
        "dimensions": {
            name: dimension_data(analysis, name) for name in COMMUNICATION if analysis.dimension_traffics(name)
        },
        "memory": _memory(analysis),
        "flops": _flops(analysis),
        "time": _time(found),
        "storage": {**asdict(found.storage), "levels": [asdict(cost) for cost in found.storage.levels]},
        "bottleneck": bottleneck_sentence(analysis, found.bottleneck),
    }
    if found.gradient_times:
        data["gradient_sums"] = [
            {
                "what": one.payload.words,
                "algorithm": one.choice.algorithm,
                "seconds": one.seconds,
                "backend_seconds": one.backend_seconds,
            }
            for one in found.gradient_times
        ]
    if analysis.fits:
        data["best_change"] = None if found.best_change is None else _change(analysis.job, found.best_change)
    else:
        data["what_would_fit"] = found.what_would_fit
    if found.campaign is not None:
        data["campaign"] = campaign_data(found.campaign)
    if found.scaling is not None:
        data["scaling"] = {kind: [asdict(row) for row in rows] for kind, rows in found.scaling.items()}
    if found.ranks is not None:
        data["ranks"] = [asdict(place) for place in found.ranks]
    if found.memory_over_time is not None:
        data["memory_over_time"] = memory_over_time_data(found.memory_over_time)
    return data


def _change(job: Job, change: Change) -> dict[str, Any]:
    return {
        "what": change_words(job.strategy, change.job.strategy),
        "strategy": change.job.strategy.to_dict(),
        "predicted_seconds": change.predicted_seconds,
        "exposed_share": change.exposed_share,
        "memory_bytes": change.memory.total,
    }


def dimension_data(analysis: Analysis, name: str) -> dict[str, Any]:
    traffics = analysis.dimension_traffics(name)
    return {
        "pipeline_rank": analysis.dimension_rank(name),
        "seconds": sum(traffic.seconds for traffic in traffics),
        "exposed_seconds": analysis.parts[name],
        "bytes_sent": sum(traffic.bytes_sent for traffic in traffics),
        "collectives": [_traffic(traffic) for traffic in traffics],
    }


def _traffic(traffic: Traffic) -> dict[str, Any]:
    cost = traffic.cost
    return {
        "what": traffic.what,
        "kind": traffic.kind.value,
        "algorithm": cost.algorithm,
        "exact": cost.exact,
        "network": traffic.network,
        "size_bytes": traffic.size_bytes,
        "count": traffic.count,
        "steps": cost.steps,
        "latency_seconds": traffic.count * float(cost.latency_seconds),
        "bandwidth_seconds": traffic.count * float(cost.bandwidth_seconds),
        "seconds": traffic.seconds,
        "exposed_seconds": traffic.added_seconds,
        "slowed_seconds": traffic.slowed_seconds,
        "hidden_seconds": traffic.hidden_seconds,
        "bytes_sent": traffic.bytes_sent,
    }


def _memory(analysis: Analysis) -> dict[str, Any]:
    room = analysis.room
    return {
        **analysis.memory.to_dict(),
        "usable_bytes": room.usable_bytes,
        "plannable_bytes": room.planned_bytes,
        "fit": analysis.fit,
        "left_bytes": room.usable_bytes - analysis.memory.total,
        "by_pipeline_rank": [memory.to_dict() for memory in analysis.memories],
    }


def _flops(analysis: Analysis) -> dict[str, Any]:
    return {
        "per_token": {one.name: analysis.flops_per_token(one.name) for one in CONVENTIONS},
        "per_step": analysis.flops_per_step(),
        "cluster_peak_per_second": analysis.peak_flops,
        "mfu": analysis.mfu,
        "mfu_ceiling": analysis.mfu_ceiling,
        "mfu_peak": analysis.job.training.recipe.compute,
    }


def _time(found: Assessment) -> dict[str, Any]:
    analysis = found.analysis
    return {
        "predicted_seconds": analysis.predicted_seconds,
        "predicted_seconds_low": found.predicted_seconds_low,
        "predicted_seconds_high": found.predicted_seconds_high,
        "parts": analysis.parts,
        "exposed_seconds": analysis.exposed_seconds,
        "exposed_share": analysis.exposed_share,
        "tokens_per_second": analysis.tokens_per_second,
        "floor_seconds": analysis.floor_seconds,
    }
