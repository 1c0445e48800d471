"""Arithmetic on a single size or a numpy array of sizes; numpy is imported only for arrays."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

from shardwise.spec.errors import SpecError, shown
from shardwise.spec.units import parse

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Size: TypeAlias = float | NDArray[Any]

MAX_CHUNKS = 4096  # a pipeline is never cut finer than this


def is_array(value: object) -> bool:
    return hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0


def checked_size(size_bytes: Any) -> Size:
    """``size_bytes`` as a float (or float array), or a SpecError if it is not a size."""
    if type(size_bytes) is float and 0 <= size_bytes < math.inf:
        return size_bytes
    if isinstance(size_bytes, (list, tuple)) or is_array(size_bytes):
        import numpy as np

        array = np.asarray(size_bytes, dtype=float)
        if not bool(np.all(np.isfinite(array) & (array >= 0))):
            raise SpecError("size_bytes", "some sizes are negative or not finite", "give sizes of 0 or more")
        return array
    if hasattr(size_bytes, "item"):
        size_bytes = size_bytes.item()
    number = float(parse(size_bytes, "bytes", "size_bytes"))
    if number < 0:
        raise SpecError("size_bytes", f"{shown(size_bytes)} is negative", "give a size of 0 or more")
    return number


def maximum(left: Size, right: Size) -> Size:
    if is_array(left) or is_array(right):
        import numpy as np

        return np.maximum(left, right)
    return left if left >= right else right


def minimum(left: Size, right: Size) -> Size:
    if is_array(left) or is_array(right):
        import numpy as np

        return np.minimum(left, right)
    return left if left <= right else right


def select(condition: Any, chosen: Any, other: Any) -> Any:
    """``chosen`` where the condition holds, else ``other``; element by element for arrays."""
    if is_array(condition):
        import numpy as np

        return np.where(condition, chosen, other)
    return chosen if condition else other


def some(value: Any) -> bool:
    """Whether it is anything but 0; of an array, whether any element is."""
    return bool(value.any()) if is_array(value) else bool(value)


def square_root(value: Size) -> Size:
    if is_array(value):
        import numpy as np

        result: Size = np.sqrt(value)
        return result
    return math.sqrt(float(value))


def best_chunks(extra_stages: int, latency_seconds: float, transfer_seconds: Size) -> Size:
    """The whole number k in 1..MAX_CHUNKS that minimizes (extra_stages + k)(latency + transfer/k).

    The real minimum is sqrt(extra_stages * transfer / latency) (Thakur et al. 2005; Chan et al. 2007).
    """

    def seconds(k: Size) -> Any:
        return (extra_stages + k) * (latency_seconds + transfer_seconds / k)

    if extra_stages <= 0:
        return 1
    work, bound = extra_stages * transfer_seconds, MAX_CHUNKS**2 * latency_seconds
    ideal = square_root(minimum(work, bound) / (latency_seconds or 1.0))
    low = select(work > bound, MAX_CHUNKS, maximum(1, ideal // 1))
    high = minimum(MAX_CHUNKS, low + 1)
    best: Size = select(seconds(high) < seconds(low), high, low)
    return best if is_array(best) else int(best)
