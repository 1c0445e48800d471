"""Lab: all-reduce among 4 processes on 2 nodes: ring, tree and hierarchical, over a fast link and over a slow one.

Bytes and messages are counted where they leave a rank. With root the slow link is emulated and times are compared too.
Then a training step is traced twice: gradients that are summed after the backward pass block the step, gradients that
are summed layer by layer hide behind it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.collectives import CollectiveKind, Schedule, Topology, build_schedule, draw_rounds, simulated_seconds
from shardwise.collectives.pricing import volume_of
from shardwise.engine.labels import Called
from shardwise.engine.mesh import process_group
from shardwise.labs.ranks import (
    CountingCommunicator,
    EngineRun,
    Pace,
    TimedRange,
    described,
    lab_job,
    run_engine,
    slow_nodes,
)
from shardwise.labs.registry import LabFinding, LabReport, LabSetup, Relation
from shardwise.launch.pool import Pool, WorkerPlace
from shardwise.layout.groups import node_of
from shardwise.layout.network import network
from shardwise.report.console import table
from shardwise.report.page import Line, Piece
from shardwise.spec.emulation import Emulation
from shardwise.spec.units import readable_bytes, readable_seconds

RANKS, PER_NODE = 4, 2
SIZE = 2 * 2**20  # bytes of the tensor that is summed
SLOW = Emulation(nodes=2, ranks_per_node=PER_NODE, rate=25e6, delay=1e-3)
RATIO_TOLERANCE = 0.35
ALGORITHMS = {"ring": "flat_ring", "tree": "binomial", "hierarchical": "hierarchical"}
LAYERS = 6
MODEL = {"layers": LAYERS, "hidden": 128, "heads": 8, "kv_heads": 4, "ffn": 384, "vocab": 256}
PACE = Pace(layer_forward=0.02, layer_backward=0.04)
TracedStep = tuple[TimedRange, ...]
BLOCKING, OVERLAPPED = "1GB", "100kB"  # buckets: one of all gradients, or about one for each layer


@dataclass(frozen=True)
class RankCount:
    """What a rank sent in an all-reduce, and how long several took."""

    messages: int
    sent_bytes: int
    across_bytes: int
    seconds: tuple[float, ...]
    right: bool


def run(setup: LabSetup) -> LabReport:
    topology = network(described(SLOW))
    schedules = {name: _schedule(name, topology) for name in ALGORITHMS}
    repeats = 5 if setup.short else 15
    setup.on_progress("all-reduce over a fast link")
    fast = {name: _measured(setup.pool, schedule, repeats) for name, schedule in schedules.items()}
    findings = [finding for name, schedule in schedules.items() for finding in _counts(name, schedule, fast[name])]
    pieces: list[Piece] = list(_drawings(schedules))
    with slow_nodes(SLOW) as pool:
        slow: dict[str, list[RankCount]] = {}
        if not isinstance(pool, str):
            setup.on_progress(f"all-reduce over {SLOW}")
            slow = {name: _measured(pool, schedule, repeats) for name, schedule in schedules.items()}
        setup.on_progress("a training step that waits, and one that overlaps")
        there = setup.pool if isinstance(pool, str) else pool
        steps = {bucket: _step(there, bucket, setup.short) for bucket in (BLOCKING, OVERLAPPED)}
        left_out = pool if isinstance(pool, str) else ""
    pieces.append(_table(schedules, topology, fast, slow))
    if left_out:
        pieces.append(
            Line(f"There is no slow link here, so that bytes, messages and order are all there is: {left_out}")
        )
    pieces += _trace_pieces(steps)
    findings += _order(steps)
    findings += [*_times(schedules, topology, slow), *_overlap(steps)] if slow else []
    return LabReport(tuple(pieces), tuple(findings), {"all-reduce-trace.json": _chrome(steps)})


def _schedule(name: str, topology: Topology) -> Schedule:
    """A tree has no levels: it is built as if all ranks were on one switch."""
    if name != "tree":
        return build_schedule(CollectiveKind.ALL_REDUCE, topology, ALGORITHMS[name], SIZE)
    flat = network(described(Emulation(nodes=RANKS, ranks_per_node=1, rate=SLOW.rate, delay=SLOW.delay)))
    return build_schedule(CollectiveKind.ALL_REDUCE, flat, ALGORITHMS[name], SIZE)


def _measured(pool: Pool, schedule: Schedule, repeats: int) -> list[RankCount]:
    counts: list[RankCount] = pool.run(_reduce, RANKS, schedule, repeats)
    return counts


def _reduce(place: WorkerPlace, schedule: Schedule, repeats: int) -> RankCount:
    torch.set_num_threads(1)
    with process_group(place.rank, place.world, place.rendezvous_file):
        counting = CountingCommunicator()
        tensor = torch.full((SIZE // 4,), float(place.rank + 1))
        counting.run(schedule, tensor)
        right = bool((tensor == sum(range(1, place.world + 1))).all())
        messages, sent = counting.messages, counting.sent_bytes
        across, seconds = counting.sent_to_other_nodes(PER_NODE), []
        for _ in range(repeats):
            dist.barrier()
            began = time.monotonic()
            counting.run(schedule, tensor)
            seconds.append(time.monotonic() - began)
    return RankCount(messages, sent, across, tuple(seconds), right)


# -- bytes, messages and times ---------------------------------------------------------------------------


def _counts(name: str, schedule: Schedule, ranks: Sequence[RankCount]) -> Iterator[LabFinding]:
    each = f"{name}: "
    yield LabFinding(
        f"{each}ranks with the right sum", RANKS, sum(rank.right for rank in ranks), 0, "sum: 1 + 2 + 3 + 4 everywhere"
    )
    yield LabFinding(
        f"{each}messages", sum(map(len, schedule.rounds)), sum(rank.messages for rank in ranks), 0,
        "messages: the transfers of the schedule; a ring has 2(n−1)n, a tree 2(n−1)",
    )  # fmt: skip
    yield LabFinding(
        f"{each}bytes of the busiest rank", float(volume_of(schedule, SIZE).sent_bytes),
        max(rank.sent_bytes for rank in ranks), 0,
        "bytes: a ring sends 2(n−1)/n of the tensor from every rank (Patarasuk & Yuan 2009); a tree's inner rank more",
        unit="bytes",
    )  # fmt: skip
    yield LabFinding(
        f"{each}bytes between the nodes", _crossing(schedule), sum(rank.across_bytes for rank in ranks), 0,
        "between nodes: hierarchical sums inside a node first, so that each rank sends its half across once",
        unit="bytes",
    )  # fmt: skip


def _crossing(schedule: Schedule) -> float:
    chunk = SIZE * schedule.chunk_fraction
    return sum(
        len(transfer.chunks) * chunk
        for transfers in schedule.rounds
        for transfer in transfers
        if node_of(transfer.src, PER_NODE) != node_of(transfer.dst, PER_NODE)
    )


def _median(ranks: Sequence[RankCount]) -> float:
    """Median over the repeats of the slowest rank's time."""
    return float(statistics.median(max(each) for each in zip(*(rank.seconds for rank in ranks))))


def _times(
    schedules: Mapping[str, Schedule], topology: Topology, slow: Mapping[str, Sequence[RankCount]]
) -> Iterator[LabFinding]:
    """Compares ratios, not seconds, since the machine adds its own time to all."""
    reference = "hierarchical"
    for name in schedules:
        if name == reference:
            continue
        priced = [simulated_seconds(schedules[algorithm], topology, SIZE) for algorithm in (name, reference)]
        yield LabFinding(
            f"slow link: {name} over {reference}", priced[0] / priced[1],
            _median(slow[name]) / _median(slow[reference]), RATIO_TOLERANCE,
            "ratio: the rounds of both schedules, simulated message by message on the emulated link", timed=True,
        )  # fmt: skip


def _drawings(schedules: Mapping[str, Schedule]) -> Iterator[Piece]:
    yield Line(f"Ranks 0 and 1 are on one node, 2 and 3 on another; every rank holds {readable_bytes(SIZE)}.\n")
    for name, schedule in schedules.items():
        yield Line(f"{name}\n{draw_rounds(schedule)}\n", fixed=True)


def _table(
    schedules: Mapping[str, Schedule], topology: Topology, fast: Mapping[str, Sequence[RankCount]],
    slow: Mapping[str, Sequence[RankCount]],
) -> Piece:  # fmt: skip
    rows = [
        (
            name,
            readable_bytes(sum(rank.across_bytes for rank in fast[name])),
            readable_seconds(_median(fast[name])),
            readable_seconds(simulated_seconds(schedule, topology, SIZE)),
            readable_seconds(_median(slow[name])) if slow else "not run",
        )
        for name, schedule in schedules.items()
    ]
    names = ("", "between nodes", "fast link measured", "slow link simulated", "slow link measured")
    return table(f"All-reduce of {readable_bytes(SIZE)}; slow: {SLOW}", names, rows)


# -- a step that waits, and one that overlaps ------------------------------------------------------------


def _step(pool: Pool, bucket: str, short: bool) -> TracedStep:
    """The shortest data-parallel step of rank 0 over the slow link: other load on the machine only adds time."""
    strategy = {"dp": RANKS, "microbatch": 1, "bucket": bucket, "collective": "hierarchical"}
    job = lab_job(strategy, batch=RANKS, seq=16, cluster=described(SLOW), **MODEL)
    rank = run_engine(pool, EngineRun(job, steps=3 if short else 6, counts=False, pace=PACE))[0]
    return min(rank.ranges[1:], key=_span)


def _begun_beside(step: TracedStep) -> int:
    """How many sums begin while the backward pass of a lower layer is still to come."""
    begun = [span.start for span in step if span.label.kind == "begin" and span.label.what == Called.GRADIENTS]
    return sum(start < max(begun) - PACE.layer_backward / 2 for start in begun)


def _order(steps: Mapping[str, TracedStep]) -> Iterator[LabFinding]:
    why = "order: a bucket is summed as soon as its layer's backward pass is done, one of all gradients at the end"
    beside = [_begun_beside(steps[bucket]) for bucket in (BLOCKING, OVERLAPPED)]
    yield LabFinding("one bucket: sums that begin before the last layer is done", 0, beside[0], 0, why)
    name = "layer by layer: sums that begin before the last layer is done"
    yield LabFinding(name, LAYERS - 1, beside[1], 0, why, Relation.AT_LEAST)


def _overlap(steps: Mapping[str, TracedStep]) -> Iterator[LabFinding]:
    spans = [_span(steps[bucket]) for bucket in (OVERLAPPED, BLOCKING)]
    yield LabFinding(
        "a step layer by layer over one with one bucket", 1.0, spans[0] / spans[1], 0.1,
        "hidden: what runs beside the backward pass does not make the step longer", Relation.AT_MOST, timed=True,
    )  # fmt: skip


def _trace_pieces(steps: Mapping[str, TracedStep]) -> Iterator[Piece]:
    yield Line("\nOne training step of rank 0; f and b compute, s starts a sum, w waits:\n", "bold")
    longest = max(_span(step) for step in steps.values())
    for bucket, title in ((BLOCKING, "one bucket: waits"), (OVERLAPPED, "layer by layer: hidden")):
        yield Line(_lane(title, steps[bucket], longest), fixed=True)
    yield Line("")


def _span(step: TracedStep) -> float:
    return max(span.end for span in step) - min(span.start for span in step)


def _lane(title: str, step: TracedStep, longest: float, width: int = 64) -> str:
    begun = min(span.start for span in step)
    row = ["."] * width

    def paint(start: float, end: float, letter: str) -> None:
        left = min(width - 1, int((start - begun) / longest * width))
        right = max(left + 1, int((end - begun) / longest * width))
        row[left:right] = letter * (min(right, width) - left)

    for kind, letter in (("pass", ""), ("begin", "s"), ("wait", "w")):
        for span in step:
            if span.label.kind == kind and (kind == "pass" or span.label.what == Called.GRADIENTS):
                paint(span.start, span.end, letter or (span.label.pass_kind or "?")[0])
    return f"  {title:<24}{''.join(row)} {readable_seconds(_span(step))}"


def _chrome(steps: Mapping[str, TracedStep]) -> str:
    events = []
    for number, (bucket, step) in enumerate(steps.items()):
        begun = min(span.start for span in step)
        title = {"name": f"buckets of {bucket}"}
        events.append({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": title})
        for span in step:
            events.append(
                {
                    "ph": "X", "pid": number, "tid": 0 if span.label.kind == "pass" else 1,
                    "name": span.label.pass_kind or span.label.title or span.label.kind,
                    "ts": (span.start - begun) * 1e6, "dur": (span.end - span.start) * 1e6,
                }
            )  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
