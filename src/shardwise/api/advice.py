"""What to change in a file: its own settings, in the order of what they gain, and its text with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from shardwise.api.given import JobArguments
from shardwise.api.inputs import decided_job, source_of
from shardwise.cost.step.verdict import neighbours
from shardwise.planner.advice.file_changes import FileAdvice, file_changes
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job


def file_advice(arguments: JobArguments, job: Job) -> FileAdvice:
    """Advice for the configuration that ``job`` was read from; raises SpecError where it was not read from one."""
    source = source_of(arguments)
    if isinstance(source, Mapping):
        problem = "is for a file of another framework, in whose settings it is given"
        raise SpecError("⟨advise⟩", problem, "leave it out: `shardwise plan` searches for a job of our own")

    def edited(changes: Iterable[Mapping[str, Any]]) -> Any:
        return reduce(lambda configuration, settings: configuration.edited(settings), changes, source)

    def changed(changes: list[Mapping[str, Any]]) -> Job | None:
        try:
            return decided_job(replace(arguments, file=None, source=edited(changes)))[0]
        except SpecError:
            return None

    found = file_changes(job, lambda current: source.edits(current, neighbours(current)), changed)
    text = edited(change.settings for change in found).text
    return FileAdvice(Path(source.file).name, tuple(found), text)
