"""`shardwise list`: the catalogue."""

from __future__ import annotations

from typing import Any

from shardwise.cli.arguments import Parser
from shardwise.cli.output import add_output_arguments, show
from shardwise.report.page import Page
from shardwise.report.tables import Column, FittedTable
from shardwise.spec import presets
from shardwise.spec.errors import SpecError, nearest_name
from shardwise.spec.hardware import Cluster, Device
from shardwise.spec.model import Model
from shardwise.spec.network import Link
from shardwise.spec.parameters import active_parameter_count, parameter_count
from shardwise.spec.stack import Stack
from shardwise.spec.units import readable_bytes, readable_count, readable_rate, readable_seconds

WHAT = ("models", "devices", "links", "clusters", "stacks", "schedules", "collectives")
Rows = list[dict[str, Any]]
_OPTIONAL = ("published", "vocab", "heads", "hidden", "closed form", "schedule")  # what a narrow console leaves out


def run(arguments: list[str]) -> int:
    parser = Parser(
        "list",
        "Shows the catalogue. Any name in it works wherever a file of your own would.",
        "shardwise list clusters",
    )
    parser.add_argument("what", help=", ".join(WHAT))
    add_output_arguments(parser)
    parser.add_argument("--sources", action="store_true", help="where each entry comes from")
    parsed = parser.parse(arguments)
    if parsed.what not in WHAT:
        raise SpecError("", f"unknown list {parsed.what!r}", nearest_name(parsed.what, WHAT))
    rows = {
        "models": _models,
        "devices": _devices,
        "links": _links,
        "clusters": _clusters,
        "stacks": _stacks,
        "schedules": _schedules,
        "collectives": _collectives,
    }[parsed.what]()
    hidden = () if parsed.sources else ("source",)
    show(parsed, lambda: _page(rows, hidden), lambda: rows)
    return 0


def _page(rows: Rows, hidden: tuple[str, ...]) -> Page:
    names = [name for name in rows[0] if name not in hidden]
    columns = tuple(Column(name, numeric=all(isinstance(row[name], int) for row in rows)) for name in names)
    return Page((FittedTable("", columns, tuple(tuple(str(row[name]) for name in names) for row in rows), _OPTIONAL),))


def _models() -> Rows:
    rows = []
    for name in presets.names("model"):
        model = presets.load("model", Model, name)
        total, active = parameter_count(model), active_parameter_count(model)
        published = model.published_parameters
        kind = "MoE" if model.moe else "dense"
        attention = (
            "MLA" if model.mla else "MHA" if model.key_value_heads == model.heads else f"GQA {model.key_value_heads}"
        )
        rows.append(
            {
                "name": name,
                "parameters": f"{total:,}",
                "published": f"{published:,}" if isinstance(published, int) else str(published),
                "active": readable_count(active),
                "kind": kind,
                "layers": model.layers,
                "hidden": model.hidden,
                "heads": model.heads,
                "attention": attention,
                "vocab": model.vocab,
                "source": model.source,
            }
        )
    return rows


def _devices() -> Rows:
    rows = []
    for name in presets.names("device"):
        device = presets.load("device", Device, name)
        peaks = ", ".join(f"{kind} {peak / 1e12:g}" for kind, peak in device.peak.items())
        rows.append(
            {
                "name": name,
                "memory": readable_bytes(device.memory),
                "usable": readable_bytes(device.usable_memory),
                "bandwidth": readable_rate(device.memory_bandwidth),
                "peak TFLOP/s, dense": peaks,
                "source": device.source,
            }
        )
    return rows


def _links() -> Rows:
    rows = []
    for name in presets.names("link"):
        link = presets.load("link", Link, name)
        rows.append(
            {
                "name": name,
                "kind": link.kind,
                "bandwidth, one way": readable_rate(link.bandwidth),
                "latency": readable_seconds(link.latency),
                "efficiency": f"{link.efficiency:g}",
                "source": link.source,
            }
        )
    return rows


def _clusters() -> Rows:
    rows = []
    for name in presets.names("cluster"):
        cluster = presets.load("cluster", Cluster, name)
        levels = " · ".join(
            f"{level.name} {'x'.join(map(str, level.shape)) if level.shape else level.width} "
            f"({level.topology}, {readable_rate(level.bandwidth_per_direction)})"
            for level in cluster.levels
        )
        rows.append(
            {
                "name": name,
                "device": cluster.device.name,
                "devices": cluster.devices,
                "levels, innermost first": levels,
                "source": cluster.source,
            }
        )
    return rows


def _stacks() -> Rows:
    rows = []
    for name in presets.names("stack"):
        stack = presets.load("stack", Stack, name)
        hidden = [dimension for dimension in ("tp", "cp", "ep", "pp", "dp") if getattr(stack.overlap, dimension)]
        fused = [
            flag.removeprefix("fused_") for flag, value in vars(stack).items() if flag.startswith("fused_") and value
        ]
        rows.append(
            {
                "name": name,
                "attention": stack.attention,
                "overlaps": ", ".join(hidden) or "nothing",
                "gradients": stack.gradient_reduce,
                "dispatch": stack.dispatch,
                "kernels": stack.elementwise,
                "fused": ", ".join(fused).replace("_", " "),
                "source": stack.source,
            }
        )
    return rows


def _schedules() -> Rows:
    from shardwise.spec.schedules import schedule_records

    return [
        {
            "name": one.name,
            "stages per rank": "strategy.interleave" if one.chunks is None else str(one.chunks),
            "placement": one.placement,
            "backward": "split" if one.splits_backward else "whole",
            "microbatches": "multiples of pp" if one.in_rounds else "any",
            "engine": "runs" if one.runs else "priced only",
            "bubble": "closed form" if one.closed_forms else "simulated",
            "hides expert exchange": "yes" if one.hides_exchange else "no",
            "source": one.source,
        }
        for one in schedule_records()
        if one.in_jobs
    ]


def _collectives() -> Rows:
    from shardwise.collectives import pairs
    from shardwise.collectives.listing import WHY_NOT

    def row(
        kind: str, topology: str, algorithm: str, form: str, schedule: str, text: str, source: str
    ) -> dict[str, Any]:
        values = (kind, topology, algorithm, form, schedule, text, source)
        return dict(
            zip(("collective", "topology", "algorithm", "closed form", "schedule", "seconds", "source"), values)
        )

    offered = [
        row(pair.kind.value, pair.topology, pair.algorithm, pair.bound, "yes" if pair.has_schedule else "none",
            pair.formula, pair.source)
        for pair in pairs()
    ]  # fmt: skip
    return offered + [
        row(
            "any",
            topology,
            algorithm,
            "none",
            "none",
            f"not offered: {reason}",
            "routes of its schedule over the network",
        )
        for algorithm, topologies, reason in WHY_NOT
        for topology in topologies
    ]
