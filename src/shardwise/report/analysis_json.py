"""An analysis as plain data, for machines; the same figures as the text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardwise.cost.analysis import DIMENSIONS, Analysis
from shardwise.cost.campaign import Campaign
from shardwise.cost.flops import CONVENTIONS, flops_per_token
from shardwise.cost.own_schedules import gradient_times
from shardwise.cost.prediction import predict
from shardwise.cost.ranks import rank_places
from shardwise.cost.scaling import scaling_table
from shardwise.cost.storage import checkpoint_bytes, data_rate, storage_costs
from shardwise.cost.traffic import Traffic
from shardwise.cost.verdict import EXPOSED_LIMIT, best_change, bottleneck
from shardwise.report.campaign import campaign_data

FORMAT = 1


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
        "dimensions": {
            name: _dimension(analysis.dimension_traffics(name))
            for name in DIMENSIONS
            if analysis.dimension_traffics(name)
        },
        "memory": _memory(analysis),
        "flops": _flops(analysis),
        "time": _time(analysis),
        "prediction": _prediction(analysis),
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
    if analysis.exposed_share > EXPOSED_LIMIT:
        change = best_change(analysis)
        data["best_change"] = None if change is None else asdict(change)
    if campaign is not None:
        data["campaign"] = campaign_data(campaign)
    if scaling:
        data["scaling"] = {
            kind: [asdict(row) for row in scaling_table(analysis.job, kind)] for kind in ("strong", "weak")
        }
    if ranks:
        data["ranks"] = [asdict(place) for place in rank_places(analysis.job)]
    return data


def _dimension(traffics: tuple[Traffic, ...]) -> dict[str, Any]:
    return {
        "seconds": sum(traffic.seconds for traffic in traffics),
        "exposed_seconds": sum(traffic.exposed_seconds for traffic in traffics),
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
        "exposed_seconds": traffic.exposed_seconds,
        "hidden_seconds": traffic.hidden_seconds,
        "bytes_sent": traffic.bytes_sent,
    }


def _memory(analysis: Analysis) -> dict[str, Any]:
    return {
        **analysis.memory.to_dict(),
        "capacity_bytes": analysis.capacity_bytes,
        "fits": analysis.fits,
        "margin_bytes": analysis.capacity_bytes - analysis.memory.total,
        "by_pipeline_rank": [memory.to_dict() for memory in analysis.memories],
    }


def _flops(analysis: Analysis) -> dict[str, Any]:
    job = analysis.job
    return {
        "per_token": {c.name: flops_per_token(job.model, job.training.seq, c.name) for c in CONVENTIONS},
        "per_step": analysis.flops_per_step(),
        "cluster_peak_per_second": analysis.peak_flops,
        "mfu_ceiling": analysis.mfu_ceiling,
    }


def _time(analysis: Analysis) -> dict[str, Any]:
    return {
        "ideal_compute_seconds": analysis.compute_seconds,
        "bubble_seconds": analysis.bubble_seconds,
        "exposed_communication_seconds": analysis.exposed_seconds,
        "step_floor_seconds": analysis.step_seconds,
        "exposed_share": analysis.exposed_share,
        "tokens_per_second_ceiling": analysis.tokens_per_second,
        "exposed_by_dimension": analysis.exposed_by_dimension(),
    }


def _prediction(analysis: Analysis) -> dict[str, Any]:
    prediction = predict(analysis.job)
    return {
        "step_seconds": prediction.step_seconds,
        "pipeline_seconds": prediction.pipeline_seconds,
        "bubble_seconds": prediction.bubble_seconds,
        "tail_seconds": prediction.tail_seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
    }


def _storage(analysis: Analysis) -> dict[str, Any]:
    return {
        "checkpoint_bytes": checkpoint_bytes(analysis),
        "data_bytes_per_second": data_rate(analysis),
        "levels": [asdict(cost) for cost in storage_costs(analysis)],
    }
