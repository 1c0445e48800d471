"""The option names of a framework, recorded from one named version of it in ``options/<framework>.txt``.

A file has a line ``# version:`` and a line ``# source:``, then one name per line. ``section.*`` stands for anything
below the section, a name that ends in ``!`` is a switch without a value. ``# ignored:`` lists patterns of settings
that have no effect on cost, which an importer passes over without a word.
"""

from __future__ import annotations

import fnmatch
import functools
from dataclasses import dataclass
from pathlib import Path

from shardwise.spec.errors import SpecError, nearest_name, shown

_FOLDER = Path(__file__).parent / "options"


@dataclass(frozen=True)
class Names:
    """All names that a version of a framework knows."""

    version: str
    source: str
    exact: frozenset[str]
    open_sections: tuple[str, ...]
    switches: frozenset[str]
    without_effect: tuple[str, ...]

    def __contains__(self, name: str) -> bool:
        return name in self.exact or name.startswith(self.open_sections)

    def is_section(self, name: str) -> bool:
        section = name + "."
        return section in self.open_sections or any(known.startswith(section) for known in self.exact)

    def ignores(self, name: str) -> bool:
        """Whether a setting has no effect on cost."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.without_effect)

    def check(self, name: str, value: object) -> None:
        """Raises SpecError for an unknown name, with the nearest known one, or a section that is a plain value."""
        if name in self:
            return
        if self.is_section(name):
            if value not in ({}, None):  # an empty section is valid
                raise SpecError(name, f"{shown(value)} should be a mapping of settings", f"see {self.version}")
        else:
            remedy = nearest_name(name, self.exact) or f"{self.version} does not know it"
            raise SpecError(name, f"is not a setting of {self.version}", remedy)


@functools.cache
def recorded(framework: str) -> Names:
    """The names recorded for a framework."""
    lines = (_FOLDER / f"{framework}.txt").read_text(encoding="utf-8").splitlines()
    comments = [line.partition(":") for line in lines if line.startswith("# ")]
    header = {name: text.strip() for name, _, text in comments}
    given = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return Names(
        version=header["# version"],
        source=header["# source"],
        exact=frozenset(name.rstrip("!") for name in given if not name.endswith(".*")),
        open_sections=tuple(name.removesuffix("*") for name in given if name.endswith(".*")),
        switches=frozenset(name.rstrip("!") for name in given if name.endswith("!")),
        without_effect=tuple(name for line in lines if line.startswith("# ignored:") for name in line.split()[2:]),
    )
