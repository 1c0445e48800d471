"""An analysis as plain data, for machines; the same figures as the text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardwise.cost.analysis import Analysis
from shardwise.cost.campaign import Campaign
from shardwise.cost.flops import CONVENTIONS, flops_per_token
from shardwise.cost.own_schedules import gradient_times
from shardwise.cost.scaling import scaling_table
from shardwise.cost.step_parts import COMMUNICATION
from shardwise.cost.storage import checkpoint_bytes, data_rate, storage_costs
from shardwise.cost.traffic import Traffic
from shardwise.cost.validation.residuals import error_bar
from shardwise.cost.verdict import Change, best_change, bottleneck
from shardwise.layout.mesh import rank_places
from shardwise.planner.remedy import what_would_fit
from shardwise.report.campaign import campaign_data

FORMAT = 2


def analysis_data(
    analysis: Analysis, *, scaling: bool = False, ranks: bool = False, campaign: Campaign | None = None
) -> dict[str, Any]:
    """Everything `analyze` says, keyed by name; bytes, seconds and FLOPs as numbers."""
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
        "dimensions": {name: _dimension(analysis, name) for name in COMMUNICATION if analysis.dimension_traffics(name)},
        "memory": _memory(analysis),
        "flops": _flops(analysis),
        "time": _time(analysis),
        "storage": _storage(analysis),
        "bottleneck": bottleneck(analysis),
    }
    if sums := gradient_times(analysis):
        data["gradient_sums"] = [
            {
                "what": one.what,
                "algorithm": one.choice.algorithm,
                "seconds": one.seconds,
                "backend_seconds": one.backend_seconds,
            }
            for one in sums
        ]
    if analysis.fits:
        change = best_change(analysis)
        data["best_change"] = None if change is None else _change(change)
    else:
        data["what_would_fit"] = what_would_fit(analysis.job)
    if campaign is not None:
        data["campaign"] = campaign_data(campaign)
    if scaling:
        data["scaling"] = {
            kind: [asdict(row) for row in scaling_table(analysis.job, kind)] for kind in ("strong", "weak")
        }
    if ranks:
        data["ranks"] = [asdict(place) for place in rank_places(analysis.job)]
    return data


def _change(change: Change) -> dict[str, Any]:
    return {
        "what": change.what,
        "strategy": change.job.strategy.to_dict(),
        "predicted_seconds": change.predicted_seconds,
        "exposed_share": change.exposed_share,
        "memory_bytes": change.memory.total,
    }


def _dimension(analysis: Analysis, name: str) -> dict[str, Any]:
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
    job = analysis.job
    return {
        "per_token": {c.name: flops_per_token(job.model, job.training.seq, c.name) for c in CONVENTIONS},
        "per_step": analysis.flops_per_step(),
        "cluster_peak_per_second": analysis.peak_flops,
        "mfu": analysis.mfu,
        "mfu_ceiling": analysis.mfu_ceiling,
        "mfu_peak": job.training.recipe.compute,
    }


def _time(analysis: Analysis) -> dict[str, Any]:
    seconds, bar = analysis.predicted_seconds, error_bar(analysis.job)
    return {
        "predicted_seconds": seconds,
        "predicted_seconds_low": seconds * (1 + bar.time_low),
        "predicted_seconds_high": seconds * (1 + bar.time_high),
        "parts": analysis.parts,
        "exposed_seconds": analysis.exposed_seconds,
        "exposed_share": analysis.exposed_share,
        "tokens_per_second": analysis.tokens_per_second,
        "floor_seconds": analysis.floor_seconds,
    }


def _storage(analysis: Analysis) -> dict[str, Any]:
    return {
        "checkpoint_bytes": checkpoint_bytes(analysis),
        "data_bytes_per_second": data_rate(analysis),
        "levels": [asdict(cost) for cost in storage_costs(analysis)],
    }
