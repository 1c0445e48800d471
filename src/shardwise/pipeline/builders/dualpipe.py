"""DualPipe and DualPipeV: microbatches enter at both ends, and a forward overlaps a backward.

DeepSeek-AI 2024, arXiv 2412.19437 section 3.2.1, and github.com/deepseek-ai/DualPipe. DualPipeV is the same cut in
half: one V per rank instead of two pipelines. A forward and a backward that may overlap are neighbours in the order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from shardwise.pipeline.forms import ClosedForms, EqualStages
from shardwise.pipeline.schedule import (
    Action,
    ActionKind,
    PipelineSchedule,
    keep_microbatches,
    loop_placement,
    one_copy,
    v_placement,
)
from shardwise.spec.errors import SpecError

_Phase = tuple[int, int]  # the stage that this rank holds of it, and its first microbatch


def dualpipe(ranks: int, microbatches: int) -> PipelineSchedule:
    """Two copies of the parameters: rank r holds stage r of the first and stage p-1-r of the second."""
    if ranks == 1:
        alone = [Action(kind, 0, j) for j in range(microbatches) for kind in (ActionKind.F, ActionKind.B)]
        return one_copy("dualpipe", microbatches, (0,), [alone])
    if ranks % 2:
        problem = f"dualpipe pairs its ranks, and {ranks} is odd"
        raise SpecError("ranks", problem, f"use {ranks - 1} or {ranks + 1} ranks, or dualpipev")
    full = max(microbatches + microbatches % 2, 2 * ranks) // 2  # per direction
    actions = []
    for rank in range(ranks):
        mirrored = ranks - 1 - rank
        own, other = (rank, 0), (mirrored, full)
        first, second = (own, other) if rank < mirrored else (other, own)
        actions.append(tuple(_Rank(min(rank, mirrored), ranks // 2, full, first, second).actions()))
    placements = (loop_placement(ranks), tuple(reversed(range(ranks))))
    whole = PipelineSchedule("dualpipe", ranks, 2 * full, placements, tuple(actions))
    down, up = (microbatches + 1) // 2, microbatches // 2
    kept = keep_microbatches(whole, [*range(down), *range(full, full + up)])
    return replace(kept, placements=placements[:1]) if microbatches == 1 else kept


def dualpipev(ranks: int, microbatches: int) -> PipelineSchedule:
    full = max(microbatches, 2 * ranks)
    actions = [_Rank(r, ranks, full, (r, 0), (2 * ranks - 1 - r, 0)).actions() for r in range(ranks)]
    whole = one_copy("dualpipev", full, v_placement(ranks), actions)
    return keep_microbatches(whole, range(microbatches))


class _Rank:
    """The actions of a rank, numbered from its end of the pipeline, where phase 0 enters and phase 1 leaves."""

    def __init__(self, rank: int, half: int, microbatches: int, *phases: _Phase) -> None:
        self.rank, self.half, self.microbatches, self.phases = rank, half, microbatches, phases
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.pending: deque[Action] = deque()
        self.made: list[Action] = []

    def actions(self) -> list[Action]:
        outward, inward = self.half - self.rank - 1, self.rank + 1
        for _ in range(2 * outward):
            self._forward(0)
        for _ in range(inward):
            self._forward(0)
            self._forward(1)
        for _ in range(outward):
            self._input_grad(1)
            self._weight_grad()
            self._forward(1)
        for _ in range(self.microbatches - 2 * self.half + inward):
            self._forward(0)
            self._backward(1)
            self._forward(1)
            self._backward(0)
        for _ in range(outward):
            self._backward(1)
            self._forward(1)
            self._backward(0)
        self._drain(outward, inward)
        return self.made

    def _drain(self, outward: int, inward: int) -> None:
        """Backwards of both phases alternate, later ones split; their weight gradients fill the end."""
        for index in range(2 * inward):
            backward = self._backward if index <= self.rank else self._input_grad
            backward(1 - index % 2)
        for _ in range(outward):
            self._weight_grad()
            self._input_grad(0)
        while self.pending:
            self._weight_grad()

    def _forward(self, phase: int) -> None:
        self._add(ActionKind.F, phase, self.forwards)

    def _backward(self, phase: int) -> None:
        self._add(ActionKind.B, phase, self.backwards)

    def _input_grad(self, phase: int) -> None:
        self._add(ActionKind.I, phase, self.backwards)
        self.pending.append(self.made[-1]._replace(kind=ActionKind.W))

    def _weight_grad(self) -> None:
        self.made.append(self.pending.popleft())

    def _add(self, kind: ActionKind, phase: int, counts: list[int]) -> None:
        stage, start = self.phases[phase]
        self.made.append(Action(kind, stage, start + counts[phase]))
        counts[phase] += 1


def _bubble(case: EqualStages) -> Any:
    """The README's (p/2-1)(F&B + B - 3W) counts an overlapped pair F&B as one block; here the next rank need not wait
    for both."""
    p = case.p
    return (p > 1) * ((p / 2 - 1) * (case.F + case.I - case.W) + (5 * p / 2 - 3) * case.c)


def _in_flight(p: int, m: int, v: int, r: int) -> int:
    if p == 1:
        return 1
    # Microbatches that enter at this rank's end, and its distance from that end.
    entering = (m + 1) // 2 if r < p // 2 else m // 2
    return min(m, entering + min(r, p - 1 - r) + 1, p + 1)


def _v_is_exact(case: EqualStages) -> bool:
    return case.is_even and bool(case.m >= 2 * case.p)


# Exact for F = I = W and c = 0, otherwise fitted to the simulator, as those of `zbv` are.
FORMS = ClosedForms(
    bubble=_bubble,
    in_flight=_in_flight,
    is_exact=lambda case: _v_is_exact(case) and bool(case.m % 2 == 0),
    text="max(0, p/2−1, 2·p+1−3·m)/(3·m)",
)
# DualPipe on 2p ranks, folded: 2p + 1.
V_FORMS = ClosedForms(
    bubble=lambda case: (case.p - 1) * (case.F + case.I - case.W + 4 * case.c),
    in_flight=lambda p, m, v, r: min(2 * m, m + r + 1, 2 * p + 1),
    is_exact=_v_is_exact,
    text="max(p−1, 4·p+1−6·m)/(6·m)",
)
