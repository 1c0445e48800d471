"""Options of a launch target, behind its name: `slurm,time=4:00:00,submit`.

Commas separate them. A comma that belongs to a value is escaped (`comment=a\\, b`) or in quotes (`comment="a, b"`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.spec.errors import SpecError, nearest_name, shown

OptionValues = Mapping[str, tuple[str, ...]]
"""The values of each option that was given; an option without one has an empty text."""


def any_line(text: str) -> bool:
    return text.strip() != "" and "\n" not in text


@dataclass(frozen=True)
class TargetOption:
    what: str
    """Its value, in the words of an error and of `shardwise list targets`."""
    accepts: Callable[[str], object] | None = any_line
    """Whether a text is such a value. None: the job decides, and the option is refused."""
    several: bool = False
    """It may be given several times."""
    alone: bool = False
    """It may be given without a value."""
    names: tuple[str, ...] = ()
    """Names of options that are all like this one; without them its key in the table is its name."""


def words_of(text: str) -> list[str]:
    """The target's name and its options."""
    words = shlex.shlex(text, posix=True)
    words.whitespace, words.whitespace_split, words.commenters = ",", True, ""
    try:
        return [word.strip() for word in words]
    except ValueError as error:  # a quotation or an escape without its end
        raise SpecError("⟨on⟩", f"{shown(text)}: {str(error).lower()}", "write it like slurm,time=4:00:00") from None


def text_of(words: Sequence[str]) -> str:
    """The text that has these words."""
    return ",".join(re.sub(r"([\\,'\"])", r"\\\1", word) for word in words)


def checked_options(
    target: str, words: Sequence[str], table: Mapping[str, TargetOption], others: Callable[[str], str]
) -> OptionValues:
    """Raises SpecError for the first option that is unknown, malformed or given twice.

    Dashes before a name are optional, but let the table's option "--" pass on names that it does not know. ``others``
    says which other target has an option of that name.
    """
    known = {name: option for key, option in table.items() for name in option.names or (key,)}
    values: dict[str, tuple[str, ...]] = {}
    for word in words:
        dashed, equals, value = word.partition("=")
        name = dashed.removeprefix("--")
        option = known.get(name) or (known.get("--") if dashed != name else None)
        if option is None:
            raise SpecError("⟨on⟩", f"{shown(dashed)} is not an option of {target}", _remedy(name, known, others(name)))
        if option.accepts is None:
            raise SpecError("⟨on⟩", f"{name} follows from the job", "leave it out")
        if not (option.accepts(value) if equals else option.alone):
            remedy = f"write it like {name}{'' if option.alone else '=...'}"
            raise SpecError("⟨on⟩", f"{shown(word)}: {name} is {option.what}", remedy)
        if name in values and not option.several:
            raise SpecError("⟨on⟩", f"{name} is given twice", "give it once")
        values[name] = (*values.get(name, ()), value)
    return values


def _remedy(name: str, known: Mapping[str, TargetOption], elsewhere: str) -> str:
    if elsewhere:
        return f"it is for ⟨on={elsewhere}⟩"
    return nearest_name(name, known) or "`shardwise list targets` has them" if known else "leave it out"
