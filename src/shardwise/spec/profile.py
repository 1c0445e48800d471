"""Which steps of a run are looked at closely."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.spec.codec import Spec, count
from shardwise.spec.errors import SpecError, shown

MOST_STEPS = 100  # what is recorded of a step is kept in memory until the last of them


@dataclass(frozen=True, kw_only=True)
class Profile(Spec):
    """Steps ``first`` to ``last`` of a run, counted from 1, both included."""

    first: int = count()
    last: int = count()

    def check(self) -> None:
        if not self.first <= self.last < self.first + MOST_STEPS:
            problem = f"from step {self.first} to {self.last} are not 1 to {MOST_STEPS} steps"
            raise SpecError("last", problem, "name a few steps in the middle of the run, such as 10 to 12")

    @classmethod
    def parse(cls, text: str, field: str) -> Profile:
        """From ``steps=10:12``, or ``steps=10``."""
        found = re.fullmatch(r"steps=(\d{1,9})(?::(\d{1,9}))?", text.strip())
        if found is None:
            raise SpecError(field, f"{shown(text)} names no steps", "write it like steps=10:12")
        try:
            return cls(first=int(found[1]), last=int(found[2] or found[1]))
        except SpecError as error:
            raise SpecError(field, error.problem, error.remedy) from None
