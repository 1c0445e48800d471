"""Records with known times: what a step is made of, who waited for whom, and how a pipeline is cut again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.engine import labels
from shardwise.engine.labels import Called, StepPhase
from shardwise.interop.jobs import model_from
from shardwise.layout.groups import stride
from shardwise.measure.compare.comparison import (
    MeasuredLink,
    links_of,
    rank_slowness,
    same_work,
    slow_link,
    straggler,
)
from shardwise.measure.compare.recorded import mismatch, sent_bytes, steps_of
from shardwise.measure.compare.step_parts import Measured, measured
from shardwise.measure.recut import recut
from shardwise.run.records import HOST, STREAMS, Flight, NamedRange, RankRecord, read_records
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

BACKEND = 1
ALONE = ("tp", "cp", "dp", "pp", "shard", "replicate", "ep", "expert_tp")


def job_of(devices: int, layers: int = 4, **strategy: object) -> Job:
    model = replace(model_from("tiny"), layers=layers)
    training = {"global_batch": 8, "seq": 32}
    fields = {"model": model, "cluster": f"laptop:{devices}", "strategy": strategy, "training": training}
    return Job.from_dict(fields)


def record(
    rank: int, *ranges: tuple[str, float, float, int] | tuple[str, float, float], **groups: tuple[int, ...]
) -> RankRecord:
    """One step on a rank; ``groups`` are those in which it is not alone."""
    ordered = sorted((NamedRange(*one) for one in ranges), key=lambda one: (one.start, -one.end))
    known = {**dict.fromkeys(ALONE, (rank,)), **groups}
    return RankRecord(rank, rank // 2, "cpu", 0.0, known, {0: (0, 1, 2, 3)}, {}, tuple(ordered))


def two_ranks(late: float) -> Measured:
    """Rank 1 begins a sum ``late`` seconds after rank 0; it takes 1 second once both are there."""
    both = (0, 1)
    records = [
        record(
            rank,
            ("step 7", 0.0, 10.0 + late),
            ("data", 0.0, 1.0),
            ("forward 0", 1.0, 3.0 + start),
            ("layer 0", 1.0, 2.0 + start),
            ("dp: all-reduce of gradients 4000 B", 3.0 + start, 5.0 + late - 1.0),
            ("gloo:all_reduce", 3.0 + start, 5.0 + late - 1.0, BACKEND),
            ("backward 0", 5.0 + late - 1.0, 7.0 + late),
            ("optimizer", 7.0 + late, 9.0 + late),
            dp=both,
            replicate=both,
        )
        for rank, start in ((0, 0.0), (1, late))
    ]
    return measured(records, pipelined=False)


def test_waiting_for_a_late_rank_is_not_the_networks_doing() -> None:
    found = two_ranks(late=2.0)
    first, second = found.ranks
    assert first.parts["late ranks"] == pytest.approx(2.0)
    assert "late ranks" not in second.parts
    assert first.parts["dp"] == pytest.approx(1.0) == second.parts["dp"]
    for rank in found.ranks:
        assert sum(rank.parts.values()) == pytest.approx(12.0) == rank.step_seconds
        assert rank.parts["data"] == pytest.approx(1.0)
        assert rank.parts["optimizer"] == pytest.approx(2.0)
        assert rank.parts["host"] == pytest.approx(1.0)
    assert found.busiest.rank == 1  # who waits least
    (sum_of_gradients,) = found.exchanges
    assert (sum_of_gradients.seconds, sum_of_gradients.complete) == (pytest.approx(1.0), pytest.approx(5.0))


def test_the_rank_whose_layers_take_longer_is_the_straggler() -> None:
    job, found = job_of(2, dp=2), two_ranks(late=2.0)
    slowness = rank_slowness(job.model, found)
    assert slowness == pytest.approx((1.0, 3.0))
    assert straggler(slowness) == 1
    assert straggler(rank_slowness(job.model, two_ranks(late=0.1))) is None


def test_ranks_of_unlike_stages_are_not_compared_with_each_other() -> None:
    """A rank that has its layers alone takes longer for them than two that share theirs."""
    found = two_ranks(late=2.0)
    assert rank_slowness(job_of(2, dp=2).model, found, alike=("two", "alone")) == (1.0, 1.0)
    strategy = {"pp": 2, "stage_tp": (2, 1), "stage_dp": (1, 2)}
    assert same_work(job_of(4, **strategy)) == ((2, 2, 0), (2, 2, 0), (1, 1, 0), (1, 1, 0))


def test_what_the_backend_does_beside_the_computation_is_hidden() -> None:
    both = (0, 1)
    ranges = (
        ("step 1", 0.0, 10.0),
        ("backward 0", 0.0, 8.0),
        ("dp: reduce-scatter of gradients 64 B", 1.0, 1.0 + 1e-3),
        ("gloo:all_to_all", 1.0, 6.0, BACKEND),
        ("dp: wait for reduce-scatter of gradients", 4.0, 6.0),
    )
    found = measured([record(rank, *ranges, dp=both, shard=both) for rank in both], pipelined=False)
    for rank in found.ranks:
        assert rank.hidden["dp"] == pytest.approx(3.0, abs=2e-3)
        assert rank.parts["dp"] == pytest.approx(2.0, abs=2e-3)
        assert rank.parts["compute"] == pytest.approx(6.0, abs=2e-3)
    assert found.exchanges[0].seconds == pytest.approx(5.0, abs=2e-3)


def test_evaluation_is_no_part_of_a_step_and_a_checkpoint_is_one_part() -> None:
    ranges = (
        ("step 1", 0.0, 10.0),
        ("evaluation", 1.0, 4.0),
        ("forward 0", 2.0, 3.0),
        ("checkpoint", 5.0, 7.0),
        ("data", 5.5, 6.0),
    )
    (rank,) = measured([record(0, *ranges)], pipelined=False).ranks
    assert rank.step_seconds == pytest.approx(7.0)
    assert rank.parts == pytest.approx({"host": 5.0, "checkpoint": 2.0})


@pytest.mark.parametrize("evaluates", [False, True])
def test_on_a_gpu_kernels_say_where_the_time_went(evaluates: bool) -> None:
    """The host is done in a millisecond; an all-reduce runs beside a backward pass, and a bit longer. An evaluation
    inside the last step changes nothing."""
    compute, network = STREAMS + 7, STREAMS + 20
    evaluation = (
        ("evaluation", 12.0, 14.0, compute),
        ("layer 0", 12.0, 14.0, compute),
        ("gemm", 12.0, 14.0, compute),
        ("evaluation", 13.0, 16.0, network),
        ("dp: sum over the batch 4 B", 13.0, 16.0, network),
        ("ncclDevKernel_AllReduce", 13.0, 16.0, network),
    )
    ranges = (
        ("step 1", 0.0, 0.001),
        ("data", 9.0, 9.5),
        ("step 1", 0.0, 9.0, compute),
        ("forward 0", 0.0, 2.0, compute),
        ("layer 0", 0.5, 2.0, compute),
        ("gemm", 0.0, 1.0, compute),
        ("gemm", 1.0, 2.0, compute),
        ("backward 0", 2.0, 5.0, compute),
        ("gemm", 2.0, 5.0, compute),
        ("dp: all-reduce of gradients 64 B", 3.0, 7.0, network),
        ("ncclDevKernel_AllReduce", 3.0, 7.0, network),
        ("optimizer", 7.0, 8.0, compute),
        ("adam", 7.0, 8.0, compute),
        ("step 2", 10.0, 16.0 if evaluates else 12.0, compute),
        ("gemm", 10.0, 12.0, compute),
        *(evaluation if evaluates else ()),
    )
    both = (0, 1)
    records = [replace(record(rank, *ranges, dp=both, replicate=both), device="cuda") for rank in both]
    found = measured(records, pipelined=False)
    assert [one.seconds for one in found.steps[0]] == pytest.approx([10.0, 2.0])
    (rank, _) = found.ranks
    expected = {"compute": 7.0, "dp": 2.0, "optimizer": 1.0, "data": 2.0}
    assert {name: 2 * seconds for name, seconds in rank.parts.items()} == pytest.approx(expected)
    assert 2 * rank.hidden["dp"] == pytest.approx(2.0)
    assert rank.layers == pytest.approx({0: 1.0})
    assert [one.seconds for one in found.exchanges] == pytest.approx([4.0])


def pipeline(slow: dict[int, float], late_message: float = 0.0) -> tuple[Job, Measured]:
    """Two stages of two ranks each (0 and 1, 2 and 3), eight layers; a layer takes 1 second, on slow ranks more."""
    job = job_of(4, 8, dp=2, pp=2)
    records = []
    for rank in range(4):
        each, stage = slow.get(rank, 1.0), rank // 2
        start = 4.0 * stage
        other = rank + 2 if stage == 0 else rank - 2
        arrival = 4.5 + (late_message if rank == 2 else 0.0)
        sent = [("pp: send stage 0's output 100 B", 4.0, 4.1)] if stage == 0 else []
        came = [("pp: wait for stage 0's output", 1.0, arrival)] if stage else []
        begin = start if stage == 0 else arrival
        layers = [(f"layer {4 * stage + i}", begin + i * each, begin + (i + 1) * each) for i in range(4)]
        passes = [
            (f"forward 0 of stage {stage}", begin, begin + 4 * each),
            (f"backward 0 of stage {stage}", 50.0, 50.0 + 8 * each),
        ]
        group = tuple(sorted((rank, other)))
        one = record(rank, ("step 1", 0.0, 100.0), *passes, *layers, *sent, *came, pp=group)
        records.append(replace(one, stages={stage: tuple(range(4 * stage, 4 * stage + 4))}))
    return job, measured(records, pipelined=True)


def test_waiting_for_a_message_that_was_not_sent_is_bubble() -> None:
    _, found = pipeline({})
    receiver = found.ranks[2]
    assert receiver.parts["bubble"] == pytest.approx(3.0)  # from 1 to 4
    assert receiver.parts["pp"] == pytest.approx(0.5)


def test_of_two_pairs_the_slow_one_is_named() -> None:
    job, found = pipeline({}, late_message=3.0)
    slow = slow_link(links_of(job, found), found.step_seconds, compute_ratio=1.0)
    assert slow is not None
    assert (slow.link.members, slow.link.nodes, slow.than) == ((0, 2), (0, 1), "between other ranks")
    assert slow.times == pytest.approx(3.5 / 0.5)
    assert slow.link.between == "ranks 0 and 2 (nodes 0 and 1)"


def test_equal_ranks_are_not_cut_again() -> None:
    job, found = pipeline({})
    again = recut(job, found)
    assert again.job == job
    assert again.gain == 1


def test_a_slow_stage_gets_fewer_layers() -> None:
    job, found = pipeline({0: 2.0, 1: 2.0})
    again = recut(job, found)
    assert again.layers == ((4, 4), (3, 5))
    assert again.gain > 1.02  # of a step that is mostly not the pipeline
    assert again.slowness == pytest.approx((2.0, 2.0, 1.0, 1.0), rel=0.05)


def test_slow_ranks_of_different_stages_are_brought_together() -> None:
    """Ranks 0 and 2 would slow both stages; with pp inside dp they are the first stage."""
    job, found = pipeline({0: 3.0, 2: 3.0})
    again = recut(job, found)
    assert stride(again.job.strategy, "pp") == 1
    first, second = again.layers[1]
    assert first < second
    assert again.gain > 1.2


def test_records_that_cannot_be_used(tmp_path: Path) -> None:
    record(0, ("step 1", 0.0, 1.0)).write(tmp_path)
    with pytest.raises(SpecError, match=r"rank-1.json is missing"):
        read_records(tmp_path, 2)
    (tmp_path / "rank-1.json").write_text("{}")
    with pytest.raises(SpecError, match="is not a record of a rank"):
        read_records(tmp_path, 2)
    (again,) = read_records(tmp_path, 1)
    assert again == record(0, ("step 1", 0.0, 1.0))
    assert again.ranges[0].lane == HOST
    with pytest.raises(SpecError, match="did not record the same steps"):
        measured([again, record(1, ("step 2", 0.0, 1.0))], pipelined=False)


def test_a_rank_that_does_something_else_is_named() -> None:
    def recorded(rank: int, *flights: tuple[str, int]) -> RankRecord:
        own = tuple(Flight(name, (0, 1), size, 0.1 * number) for number, (name, size) in enumerate(flights))
        return replace(record(rank), flights=own)

    same = [("all_reduce", 64), ("all_gather", 32)]
    assert mismatch([recorded(0, *same), recorded(1, ("all_reduce", 64), ("all_gather", 16))]) is None
    for other, said in ((("all_reduce", 60), "60 B"), (("all_to_all", 64), "all_to_all")):
        found = mismatch([recorded(0, *same), recorded(1, other, same[1])])
        assert found is not None and found.startswith("Rank 1's collective 1 with 0, 1") and said in found


def test_sums_that_went_as_messages_are_not_compared_with_the_record() -> None:
    """Of a step with two sums, by the backend or by a schedule of ours, whose messages gloo does not record."""
    job, both = job_of(2, dp=2), (0, 1)
    loss, gradients = "dp: sum over the batch 4 B", "dp: all-reduce of gradients 4000 B"
    ranges = (("step 7", 0.0, 9.0), (loss, 1.0, 2.0), (gradients, 3.0, 4.0))
    recorded = record(0, *ranges, dp=both, replicate=both)
    for starts, unrecorded in (((1.5, 3.5), ()), ((1.5,), ("all-reduce of gradients",))):
        flights = tuple(Flight("all_reduce", both, 4, start) for start in starts)
        whole = replace(recorded, flights=flights)
        (found,) = sent_bytes(job, whole, steps_of(whole))
        assert (found.dimensions, found.unrecorded) == (("dp",), unrecorded)


# -- names -------------------------------------------------------------------------------------------


def reword(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other names for every collective and phase of the engine."""
    for namespace, tables in ((Called, ["_PRICED_AS"]), (StepPhase, ["_PARTS", "_PURPOSES"])):
        new: dict[str, str] = {}
        known = [(name, old) for name, old in vars(namespace).items() if name.isupper()]
        for number, (name, old) in enumerate(known):
            new[old] = f"thing {namespace.__name__} {number}"
            monkeypatch.setattr(namespace, name, new[old])
        for table in tables:
            entries: dict[str, Any] = getattr(labels, table)
            monkeypatch.setattr(labels, table, {new[old]: value for old, value in entries.items()})
    labels.label_of.cache_clear()


def by_every_name() -> tuple[Measured, tuple[MeasuredLink, ...]]:
    """One step on two ranks with every collective that the engine has a name for, and every phase."""
    both, phases = (0, 1), [value for name, value in vars(StepPhase).items() if name.isupper()]
    records = []
    for rank in both:
        called = [value for name, value in vars(Called).items() if name.isupper()]
        begun = [
            (labels.begin_name("dp" if number % 2 else "tp", what, 100 * number + 1), number + 0.1 * rank, number + 0.5)
            for number, what in enumerate(called, 1)
        ]
        waited = [(labels.wait_name("dp", what), n + 0.6, n + 0.9) for n, what in enumerate(called, 1) if n % 2]
        later = [(name, 60.0 + 2 * number, 61.0 + 2 * number) for number, name in enumerate(phases)]
        step = (labels.step_name(1), 0.0, 90.0)
        forward = (labels.pass_name("forward", 0), 0.0, 50.0)
        records.append(record(rank, step, forward, *begun, *waited, *later, tp=both, dp=both, replicate=both))
    found = measured(records, pipelined=False)
    return found, links_of(job_of(2, dp=2), found)


def test_what_collectives_are_called_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def figures() -> list[Any]:
        found, links = by_every_name()
        times = [(one.parts, one.hidden, one.layers, one.step_seconds) for one in found.ranks]
        exchanged = [(one.dimension, one.members, one.bytes, one.seconds) for one in found.exchanges]
        return [times, exchanged, [(one.carries[::2], one.seconds, one.price_seconds) for one in links]]

    before = figures()
    assert any(price is not None for _, _, price in before[2]) and any(price is None for _, _, price in before[2])
    reword(monkeypatch)
    try:
        assert figures() == before
    finally:
        labels.label_of.cache_clear()
