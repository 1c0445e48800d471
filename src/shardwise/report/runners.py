"""Who can run a plan: what each framework lacks, and the price of the plan as each of them runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.planner.advice.frameworks import FrameworkVerdict
from shardwise.planner.advice.why_not import difference_words
from shardwise.planner.candidate import Candidate
from shardwise.planner.describe import strategy_words
from shardwise.spec.support import verdict
from shardwise.spec.units import readable_bytes, readable_seconds


def runner_lines(best: Candidate, verdicts: Sequence[FrameworkVerdict]) -> Iterator[str]:
    """One line for all that run the plan, then one for each framework, priced as that runs it."""
    here = ["shardwise"] if verdict(best.job).status == "runs" else []
    able = [*here, *(one.name for one in verdicts if one.runs)]
    yield f"\nWho can run 1: {', '.join(able) or 'no framework known here'}."
    yield "Each framework with its own kernels and precision, compared with 1 as priced above:"
    for one in verdicts:
        lacks = ", ".join(lost.short_field for lost in one.lacks)
        lead = f"lacks {lacks}" if lacks else ""
        searched = one.own or one.needed_bytes or (one.searched and all(lost.within("strategy") for lost in one.lacks))
        yield (
            f"  {one.name}: " + "; ".join(part for part in (lead, searched and _what_it_runs(best, one)) if part) + "."
        )


def _what_it_runs(best: Candidate, one: FrameworkVerdict) -> str:
    parts = [] if one.needed_bytes is None else [f"1 needs {readable_bytes(one.needed_bytes)} there"]
    if one.own is not None:
        what = "runs it" if one.runs else f"its best near 1 is {strategy_words(one.own.job.strategy)}"
        way = f", with {' and '.join(one.differs)}" if one.differs else ""
        parts.append(f"{what}{way}: {_against(best, one.own)}")
    elif one.searched:
        parts.append(f"nothing near 1 fits (`plan --for {one.name}` searches everything it can express)")
    return "; ".join(parts)


def _against(best: Candidate, own: Candidate) -> str:
    slower = own.loss_to(best)
    more = own.memory.total - best.memory.total
    memory = f"{'+' if more >= 0 else '-'}{readable_bytes(abs(more))}"
    step, held = readable_seconds(own.step_seconds), readable_bytes(own.memory.total)
    return f"{step} ({difference_words(slower)}), {held} ({memory})"


def runner_data(one: FrameworkVerdict, best: Candidate) -> dict[str, Any]:
    """A verdict as plain data; ``loss`` is of time, as a share."""
    own = one.own
    return {
        "name": one.name,
        "runs": one.runs,
        "lacks": [lost.field for lost in one.lacks],
        "differs": list(one.differs),
        "stack": None if own is None else own.job.stack.name,
        "best": None if own is None else strategy_words(own.job.strategy),
        "loss": None if own is None else own.loss_to(best),
        "memory_bytes": None if own is None else own.memory.total,
        "needed_bytes": one.needed_bytes,
    }
