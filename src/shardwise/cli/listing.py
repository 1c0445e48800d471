"""`shardwise list`: the catalogue, and the schema of a job file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shardwise.cli.output import add_output_arguments, show
from shardwise.cli.parser import Parser
from shardwise.report.page import Page
from shardwise.report.tables import Column, FittedTable
from shardwise.spec import presets
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.hardware import Cluster, Device
from shardwise.spec.model import Model
from shardwise.spec.network import Link
from shardwise.spec.parameters import active_parameter_count, parameter_count
from shardwise.spec.stack import ForMixtures, Stack
from shardwise.spec.units import readable_bytes, readable_count, readable_rate, readable_seconds

Row = dict[str, Any]
_NAMING = ("name", "device", "collective", "topology", "algorithm", "target")  # columns that words are looked for in
_OPTIONAL = ("published", "vocab", "heads", "hidden", "closed form", "schedule")  # what a narrow console leaves out


def run(arguments: list[str]) -> int:
    parser = Parser(
        "list",
        "Shows the catalogue. Any name in it works wherever a file of your own would.",
        "shardwise list models qwen",
    )
    parser.add_argument("what", help=", ".join(WHAT))
    parser.add_argument("words", nargs="*", metavar="WORD", help="show only entries that have every word in their name")
    add_output_arguments(parser)
    parser.add_argument("--sources", action="store_true", help="show where each entry comes from")
    parsed = parser.parse(arguments)
    if parsed.what not in WHAT:
        raise SpecError("", f"unknown list {parsed.what!r}", nearest_name(parsed.what, WHAT))
    if parsed.what == "schema":
        if parsed.words:
            raise SpecError("", f"schema is one document, without {shown(' '.join(parsed.words))}", "leave it out")
        from shardwise.spec.schema import job_schema

        print(json.dumps(job_schema(), indent=2, ensure_ascii=False))
        return 0
    rows = _TABLES[parsed.what]() if parsed.what in _TABLES else _presets(*_PRESETS[parsed.what])
    rows = _named(rows, parsed.words, parsed.what)
    hidden = () if parsed.sources else ("source",)
    show(parsed, lambda: _page(rows, hidden), lambda: rows)
    return 0


def _named(rows: list[Row], words: list[str], what: str) -> list[Row]:
    """The rows with every word in their names, as people type these: "llama-3" is in "llama3-8b"."""
    named = [("".join(_letters(str(row[column])) for column in _NAMING if column in row), row) for row in rows]
    found = [row for name, row in named if all(_letters(word) in name for word in words)]
    if not found:
        every = sorted({str(row[next(iter(row))]) for row in rows})
        remedy = nearest_name(words[0], every) or f"`shardwise list {what}` shows all"
        raise SpecError("", f"no {what} are named {shown(' '.join(words))}", remedy)
    return found


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter not in "-_ ")


def _page(rows: list[Row], hidden: tuple[str, ...]) -> Page:
    names = [name for name in rows[0] if name not in hidden]
    columns = tuple(Column(name, numeric=all(isinstance(row[name], int) for row in rows)) for name in names)
    return Page((FittedTable("", columns, tuple(tuple(str(row[name]) for name in names) for row in rows), _OPTIONAL),))


def _presets(kind: str, noun: type[Any], figures: Callable[[Any], Row]) -> list[Row]:
    loaded = ((name, presets.load(kind, noun, name)) for name in presets.names(kind))
    return [{"name": name, **figures(preset), "source": preset.source} for name, preset in loaded]


def _stacks() -> list[Row]:
    """A row for every version, newest first; for a stack without versions one."""
    return [row for name in presets.names("stack") for row in _versions(name)]


def _versions(name: str) -> list[Row]:
    stacks = [presets.load("stack", Stack, each) for each in presets.versioned("stack", name) or [name]]
    older = [*stacks[1:], None]
    return [
        {"name": stack.name, "changed": _changed(before, stack), **_stack(stack), "source": stack.source}
        for stack, before in zip(stacks, older)
    ]


def _changed(before: Stack | None, stack: Stack) -> str:
    """What is otherwise than in the next older version."""
    if before is None:
        return ""
    names = (name for name, value in vars(stack).items() if value != getattr(before, name))
    told = [_told(name, getattr(stack, name)) for name in names if name not in ("name", "source")]
    return "; ".join(told) or "nothing"


def _told(name: str, value: Any) -> str:
    if name == "mixtures":
        return "; ".join(["mixtures" + _rule(rule) for rule in value] or ["mixtures as other models"])
    if name == "overlap":
        return f"overlaps {', '.join(part for part, is_hidden in vars(value).items() if is_hidden) or 'nothing'}"
    words = {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value
    return f"{name.replace('_', ' ')} {words}"


def _rule(rule: ForMixtures) -> str:
    """How mixtures are run, and where."""
    data = rule.to_dict()
    where = [
        f" {word} {', '.join(data.pop(key))}" for key, word in (("precision", "in"), ("devices", "on")) if key in data
    ]
    return "".join(where) + ": " + ", ".join(_told(name, value) for name, value in data.items())


def _model(model: Model) -> Row:
    published, heads = model.published_parameters, model.key_value_heads
    return {
        "parameters": f"{parameter_count(model):,}",
        "published": f"{published:,}" if isinstance(published, int) else str(published),
        "active": readable_count(active_parameter_count(model)),
        "kind": "MoE" if model.moe else "dense",
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "attention": "MLA" if model.mla else "MHA" if heads == model.heads else f"GQA {heads}",
        "vocab": model.vocab,
    }


def _device(device: Device) -> Row:
    return {
        "memory": readable_bytes(device.memory),
        "usable": readable_bytes(device.usable_memory),
        "bandwidth": readable_rate(device.memory_bandwidth),
        "peak TFLOP/s, dense": ", ".join(f"{kind} {peak / 1e12:g}" for kind, peak in device.peak.items()),
    }


def _link(link: Link) -> Row:
    return {
        "kind": link.kind,
        "bandwidth, one way": readable_rate(link.bandwidth),
        "latency": readable_seconds(link.latency),
        "efficiency": f"{link.efficiency:g}",
        "assumed": ", ".join(link.assumed),
    }


def _cluster(cluster: Cluster) -> Row:
    levels = (
        f"{level.name} {'x'.join(map(str, level.shape)) if level.shape else level.width} "
        f"({level.topology}, {readable_rate(level.bandwidth_per_direction)})"
        for level in cluster.levels
    )
    return {
        "device": cluster.device.name,
        "devices": cluster.devices,
        "levels, innermost first": " · ".join(levels),
    }


def _stack(stack: Stack) -> Row:
    overlapped = [dimension for dimension in ("tp", "cp", "ep", "pp", "dp") if getattr(stack.overlap, dimension)]
    fused = [name.removeprefix("fused_") for name, value in vars(stack).items() if name.startswith("fused_") and value]
    return {
        "attention": stack.attention,
        "overlaps": ", ".join(overlapped) or "nothing",
        "gradients": stack.gradient_reduce,
        "dispatch": stack.dispatch,
        "kernels": stack.elementwise,
        "fused": ", ".join(fused).replace("_", " "),
    }


def _schedules() -> list[Row]:
    from shardwise.spec.schedules import schedule_records

    return [
        {
            "name": record.name,
            "stages per rank": "strategy.interleave" if record.chunks is None else str(record.chunks),
            "placement": record.placement,
            "backward": "split" if record.splits_backward else "whole",
            "microbatches": "multiples of pp" if record.in_rounds else "any",
            "engine": "runs" if record.runs else "priced only",
            "bubble": "closed form" if record.closed_forms else "simulated",
            "hides expert exchange": "yes" if record.hides_exchange else "no",
            "source": record.source,
        }
        for record in schedule_records()
        if record.in_jobs
    ]


def _targets() -> list[Row]:
    from shardwise.launch.targets.registry import HOSTS, TARGETS

    rows = []
    for target in (HOSTS, *TARGETS.values()):
        rows.append({"target": target.name, "option": "", "what": target.what})
        for name, option in target.options.items():
            if option.accepts is not None:
                shown = name if option.alone else f"{name}=..."
                rows.append({"target": target.name, "option": shown, "what": option.what})
    return rows


def _collectives() -> list[Row]:
    from shardwise.collectives import pairs
    from shardwise.collectives.closed_form import WHY_NOT

    columns = ("collective", "topology", "algorithm", "closed form", "schedule", "seconds", "source")
    offered = [
        (
            *(pair.kind.value, pair.topology, pair.algorithm, pair.bound),
            *("yes" if pair.has_schedule else "none", pair.formula, pair.source),
        )
        for pair in pairs()
    ]
    others = [
        ("any", topology, algorithm, "none", "none", f"not offered: {reason}",
         "routes of its schedule over the network")
        for algorithm, topologies, reason in WHY_NOT
        for topology in topologies
    ]  # fmt: skip
    return [dict(zip(columns, row)) for row in offered + others]


_PRESETS: dict[str, tuple[str, type[Any], Callable[[Any], Row]]] = {
    "models": ("model", Model, _model),
    "devices": ("device", Device, _device),
    "links": ("link", Link, _link),
    "clusters": ("cluster", Cluster, _cluster),
}
_TABLES: dict[str, Callable[[], list[Row]]] = {
    "stacks": _stacks,
    "schedules": _schedules,
    "collectives": _collectives,
    "targets": _targets,
}
WHAT = (*_PRESETS, *_TABLES, "schema")
