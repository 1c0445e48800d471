"""A layout that suits another model or cluster: the nearest to that of the page which can be priced.

The rules of a job name what is wrong and the nearest values that would hold; each is a way out, taken with the least
change of the degrees first.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from shardwise.spec.errors import SpecError, shown
from shardwise.spec.rules import divisors
from shardwise.ui.given import job_of

Keywords = dict[str, Any]

_DEGREES = ("pp", "ep", "cp", "tp")
_MOST_TRIED = 60  # layouts; ten milliseconds each
_SMALL = 0.25  # what another change counts beside one of a degree by a factor of two


def adapted(given: Mapping[str, Any]) -> dict[str, Any]:
    """For the keywords ``job``, which were refused: ``set``, those to change, and ``words``; None if nothing is near.

    The keywords named in ``keep`` stay as they are: what somebody has just asked for.
    """
    job, keep = given.get("job"), given.get("keep", [])
    if not isinstance(job, Mapping):
        raise SpecError("job", f"{shown(job)} is not a job", "send the keywords of the one on the page")
    if not isinstance(keep, list) or not all(isinstance(name, str) for name in keep):
        raise SpecError("keep", f"{shown(keep)} is not a list of keywords", "send those that stay")
    before = dict(job)
    refused = _refusal(before)
    after = None if refused is None else _nearest(before, refused, frozenset(keep))
    if refused is None or after is None:
        return {"set": None, "words": ""}
    changes = {name: after.get(name) for name in {**before, **after} if before.get(name) != after.get(name)}
    return {"set": changes, "words": f"{refused.problem}: {_words(before, changes)}"}


def _nearest(given: Keywords, refused: SpecError, keep: frozenset[str]) -> Keywords | None:
    order = count()
    waiting = [(cost, next(order), other) for cost, other in _ways_out(given, refused, keep)]
    heapq.heapify(waiting)
    seen: set[str] = set()
    while waiting and len(seen) < _MOST_TRIED:
        cost, _, keywords = heapq.heappop(waiting)
        if (key := json.dumps(keywords, sort_keys=True)) in seen:
            continue
        seen.add(key)
        error = _refusal(keywords)
        if error is None:
            return keywords
        for more, other in _ways_out(keywords, error, keep):
            heapq.heappush(waiting, (cost + more, next(order), other))
    return None


def _refusal(keywords: Keywords) -> SpecError | None:
    try:
        job_of(keywords)
    except SpecError as error:
        return error
    return None


def _ways_out(given: Keywords, error: SpecError, keep: frozenset[str]) -> Iterator[tuple[float, Keywords]]:
    """Keywords that may hold where these are refused, with how far away they are."""
    room, _, rest = error.field.partition(".")
    name = re.split(r"[.\[]", rest)[0] if room in ("strategy", "training") else room
    if room not in ("strategy", "training", *_DEGREES):
        return
    for cost, changes in _changes(given, name, error.remedy):
        if keep.isdisjoint(changes):
            yield cost, {key: value for key, value in {**given, **changes}.items() if value is not None}


def _changes(given: Keywords, name: str, remedy: str) -> Iterator[tuple[float, Keywords]]:
    if name == "strategy" or not name:  # the product of the degrees
        yield _SMALL, {"dp": None}
        for degree in _DEGREES:
            if degree != "ep":  # is within the others
                yield from _smaller(given, degree)
        return
    if name in (*_DEGREES, "global_batch", "seq"):
        now = given.get(name, 1)
        for value in map(int, re.findall(r"\b\d+\b", remedy.replace(",", ""))):
            if isinstance(now, int) and now > 0 < value != now:
                yield abs(math.log2(value / now)), {name: value}
    if name == "pp":
        yield _SMALL, {"stage_layers": "balanced"}
        yield _SMALL, {"schedule": None, "interleave": None}
    if name in _DEGREES:
        yield from _smaller(given, name)
    elif name == "global_batch":
        yield _SMALL, {"microbatch": None}
        yield _SMALL, {"schedule": None, "interleave": None}
    elif name in given and name != "seq":
        yield _SMALL, {name: None}


def _smaller(given: Keywords, degree: str) -> Iterator[tuple[float, Keywords]]:
    now = given.get(degree, 1)
    if isinstance(now, int) and now > 1:
        value = divisors(now)[-2]
        yield math.log2(now / value), {degree: value}


def _words(before: Keywords, changes: Keywords) -> str:
    def of(value: Any) -> str:
        return "default" if value is None else value if isinstance(value, str) else json.dumps(value)

    return ", ".join(f"{name.replace('_', ' ')} {of(before.get(name))} → {of(new)}" for name, new in changes.items())
