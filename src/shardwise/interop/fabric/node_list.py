"""Node lists and task counts as Slurm writes them: `n[01-03,7],gpu-a` and `2(x3),1`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, product

from shardwise.spec.errors import SpecError, shown

MOST_NODES = 100_000
_PART = re.compile(r"[^\[\],\s]+|\[[^\[\]]*\]")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")


def nodes_of(text: str, field: str = "node list") -> list[str]:
    """The names in their order: ``n[01-03,7],gpu-a`` is n01, n02, n03, n7 and gpu-a."""
    names = (name for item in _split(text, field) for name in _expanded(item, text, field))
    nodes = list(islice(names, MOST_NODES + 1))
    if not nodes:
        raise _wrong(text, field)
    if len(nodes) > MOST_NODES:
        raise _too_many(field)
    return nodes


def tasks_of_nodes(text: str, field: str = "tasks per node") -> list[int]:
    """The count of each node: ``2(x3),1`` is 2, 2, 2 and 1."""
    counts: list[int] = []
    for item in text.split(","):
        match = _TASKS.fullmatch(item.strip())
        if match is None or int(match[2] or 1) > MOST_NODES:
            raise SpecError(field, f"{shown(text)} does not count tasks", "written like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
        if len(counts) > MOST_NODES:
            raise _too_many(field)
    return counts


def _split(text: str, field: str) -> Iterator[str]:
    """At commas outside of brackets."""
    depth, begin = 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _wrong(text, field)
        if letter == "," and depth == 0:
            yield text[begin:at]
            begin = at + 1
    if depth:
        raise _wrong(text, field)
    yield text[begin:]


def _expanded(item: str, text: str, field: str) -> Iterator[str]:
    """All names of one item, which may have several brackets: ``r[1-2]n[1-2]``; the last one turns fastest."""
    parts = _PART.findall(item.strip())
    if not parts or "".join(parts) != item.strip():
        raise _wrong(text, field)
    choices, size = [], 1
    for part in parts:
        numbers = _numbers(part[1:-1], text, field) if part.startswith("[") else iter((part,))
        choices.append(list(islice(numbers, MOST_NODES + 1)))
        size *= len(choices[-1])
        if size > MOST_NODES:
            raise _too_many(field)
    yield from map("".join, product(*choices))


def _numbers(inside: str, text: str, field: str) -> Iterator[str]:
    """``01-03,7`` as 01, 02, 03 and 7: a number keeps the zeros of the range's first."""
    for item in inside.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise _wrong(text, field)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MOST_NODES:
            raise _wrong(text, field)
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _too_many(field: str) -> SpecError:
    return SpecError(field, f"names more than {MOST_NODES:,} nodes", "give fewer")


def _wrong(text: str, field: str) -> SpecError:
    return SpecError(field, f"{shown(text)} is not a list of nodes", "written like n[01-03,7],gpu-a")
