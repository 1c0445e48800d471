"""The table of pipeline schedules: what a record says is what its schedule does, and nobody asks for names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.pipeline import ActionKind, bubble_is_exact, bubble_seconds, build, peak_chunks_in_flight
from shardwise.pipeline.builders.flush import one_f_one_b
from shardwise.spec import schedules
from shardwise.spec.errors import SpecError
from shardwise.spec.schedules import ScheduleRecord, job_schedules, register, schedule_record, schedule_records
from shardwise.spec.strategy import Strategy

BUILT = [one.name for one in schedule_records() if one.name != "zb-auto"]
CASES = [(2, 4), (4, 4), (4, 12), (6, 18)]


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "_RECORDS", dict(schedules._RECORDS))


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize(("ranks", "microbatches"), CASES)
def test_a_record_says_what_its_schedule_does(name: str, ranks: int, microbatches: int) -> None:
    record, schedule = schedule_record(name), build(name, ranks, microbatches)
    chunks = record.chunks_per_rank(ranks, 2)
    assert (schedule.name, schedule.stages) == (name, ranks * chunks)
    copies = [record.stages_of(rank, ranks, chunks) for rank in range(ranks)]
    for stage, rank in enumerate(schedule.placement):
        assert stage in copies[rank]
    assert len(schedule.placements) == (2 if record.two_copies else 1)
    assert (schedule.placement[0] == schedule.placement[-1]) == record.ends_meet
    kinds = {action.kind for actions in schedule.actions for action in actions}
    assert (ActionKind.W in kinds) == record.splits_backward


def test_all_losses_come_first_where_a_record_says_so() -> None:
    for name in BUILT:
        own = [action.kind for action in build(name, 4, 12).actions[-1]]
        first = next(place for place, kind in enumerate(own) if kind in (ActionKind.B, ActionKind.I))
        assert (ActionKind.F not in own[first:]) == schedule_record(name).forwards_first, name


@pytest.mark.parametrize("name", BUILT)
def test_without_closed_forms_the_schedule_is_built_and_simulated(name: str) -> None:
    """The same schedule under another name: as many chunks in flight, and the bubble where the form is exact."""
    other = f"twin-of-{name}"
    register(replace(schedule_record(name), name=other, closed_forms=None))
    for ranks, microbatches in CASES:
        own, twin = (
            [peak_chunks_in_flight(one, ranks, microbatches, None, rank) for rank in range(ranks)]
            for one in (name, other)
        )
        assert own == twin
        if bubble_is_exact(name, ranks, microbatches):
            expected = bubble_seconds(name, ranks, microbatches)
            assert bubble_seconds(other, ranks, microbatches) == pytest.approx(expected, abs=1e-9)


def test_arrays_are_simulated_one_by_one() -> None:
    import numpy as np

    register(replace(schedule_record("zbv"), name="twin", closed_forms=None))
    forwards = np.array([[1.0, 2.0], [3.0, 4.0]])
    found = bubble_seconds("twin", 4, 8, 2, forwards, 1.0, 1.0)
    assert found.tolist() == [[bubble_seconds("twin", 4, 8, 2, one, 1.0, 1.0) for one in row] for row in forwards]


def test_registering() -> None:
    own = ScheduleRecord(name="own", builder=one_f_one_b, source="a test")
    assert register(own) is own and register(own) is own
    assert "own" in job_schedules() and Strategy(pp=2, schedule="own").chunks_per_rank == 1
    with pytest.raises(SpecError, match="'own' is registered already"):
        register(replace(own, splits_backward=True))
    with pytest.raises(SpecError, match="even number of chunks"):
        register(replace(own, name="bent", placement="folded", chunks=3))
    with pytest.raises(SpecError, match="two copies"):
        register(replace(own, name="double", placement="both ends"))


def test_what_a_job_may_name() -> None:
    with pytest.raises(SpecError, match="schedule: sequential is for comparison, not for jobs; choose one of gpipe"):
        Strategy(pp=2, schedule="sequential")
    with pytest.raises(SpecError, match="schedule: 'zb-h3' is not a pipeline schedule; did you mean"):
        Strategy(pp=2, schedule="zb-h3")
