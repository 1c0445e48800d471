"""A pipeline schedule of one's own: 1F1B that runs one more forward pass ahead, to bridge slow messages.

`python examples/own_schedule.py` verifies, draws and prices it. docs/schedules.md says how every process of a run
comes to know it.
"""

from __future__ import annotations

from shardwise import Job, analyze
from shardwise.pipeline import build, draw_timeline, equal_stages, simulate, verify
from shardwise.pipeline.builders.flush import one_forward_one_backward
from shardwise.pipeline.schedule import PipelineSchedule, loop_placement, one_copy
from shardwise.spec.schedules import ScheduleRecord, register


def eager(ranks: int, microbatches: int) -> PipelineSchedule:
    """Every rank's actions in order; the last rank has nobody to wait for."""
    ahead = [ranks - rank + (rank < ranks - 1) for rank in range(ranks)]
    actions = [one_forward_one_backward(rank, microbatches, ahead[rank]) for rank in range(ranks)]
    return one_copy("eager", microbatches, loop_placement(ranks), actions)


EAGER = ScheduleRecord(name="eager", builder=eager, source="1F1B and one more: p − rank + 1")


def main() -> None:
    register(EAGER)
    schedule = build("eager", ranks=3, microbatches=6)
    verify(schedule)
    slow_messages = 0.5
    print(draw_timeline(simulate(schedule, equal_stages(3), slow_messages)))
    print(draw_timeline(simulate(build("1f1b", 3, 6), equal_stages(3), slow_messages)))
    for name in ("1f1b", "eager"):
        strategy = {"tp": 8, "pp": 4, "dp": 2, "zero": 1, "schedule": name}
        training = {"global_batch": 128, "seq": 8192}
        job = {"model": "llama3-8b", "cluster": "dgx-h100:8", "strategy": strategy, "training": training}
        held = analyze(Job.from_dict(job)).memory.activations
        print(f"{name}: {held / 2**30:.2f} GiB of activations")


if __name__ == "__main__":
    main()
