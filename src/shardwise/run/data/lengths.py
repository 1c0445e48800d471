"""How long the documents of a pair are: measured when it is built, kept beside it, read by who prices a run on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.run.storage.place import Place, place_of
from shardwise.spec.errors import SpecError
from shardwise.spec.files import IN_BULK, parse_json

if TYPE_CHECKING:
    import numpy as np

ABOUT = ".sums.json"  # the file beside a pair that holds them, and the checksums of the pair
LENGTHS = "lengths"
_EXACT = 256  # different lengths, beyond which near ones are taken together
_PER_DOUBLING = 8  # groups of them: at most 9% apart


def summary(lengths: np.ndarray[Any, np.dtype[Any]], counted: int) -> dict[str, Any]:
    """Pairs of a length and how many documents have it, the longest, and the share of tokens that the loss counts."""
    import numpy as np  # who only reads them needs none

    filled = lengths[lengths > 0]
    values, numbers = np.unique(filled, return_counts=True)
    tokens = int(filled.sum())
    longest = int(values[-1]) if len(values) else 0
    if len(values) > _EXACT:
        groups = np.floor(np.log2(values) * _PER_DOUBLING).astype(np.int64)
        _, begins = np.unique(groups, return_index=True)
        of_group = np.add.reduceat(numbers, begins)
        values, numbers = np.rint(np.add.reduceat(values * numbers, begins) / of_group).astype(np.int64), of_group
    histogram = [[int(value), int(number)] for value, number in zip(values, numbers)]
    return {"histogram": histogram, "longest": longest, "labels": counted / tokens if tokens else 1.0}


def about(prefix: Place | str) -> dict[str, Any]:
    """What is kept beside a pair; empty if nothing is."""
    place = place_of(prefix) if isinstance(prefix, str) else prefix
    path = place.with_name(place.name + ABOUT)
    if not path.is_file():
        return {}
    document = parse_json(path.read_bytes(), str(path), most_values=IN_BULK)
    return document if isinstance(document, dict) else {}


def measured_lengths(prefix: Place | str) -> dict[str, Any]:
    """What `summary` found of a pair; imports no numpy. Raises SpecError if the pair was built without it."""
    try:
        held = about(prefix)[LENGTHS]
        histogram = [[int(length), int(number)] for length, number in held["histogram"]]
        return {"histogram": histogram, "longest": int(held["longest"]), "labels": float(held["labels"])}
    except (OSError, KeyError, ValueError, TypeError):
        problem = "there are no lengths of documents beside it"
        raise SpecError(str(prefix), problem, "build it again: data build") from None
