"""Several linear maps of the same hidden states, as one replaceable call.

Who knows more than a single device does (that the inputs can be fetched again, that one large product beats three
small ones) puts another function of this signature in its place.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

Project = Callable[..., tuple[Tensor, ...]]
EveryHead = Callable[..., tuple[Tensor, ...]]


def project_each(hidden: Tensor, *maps: nn.Linear) -> tuple[Tensor, ...]:
    """Each map's outputs, in turn."""
    return tuple(one(hidden) for one in maps)


def as_they_are(*narrow: Tensor) -> tuple[Tensor, ...]:
    """Vectors that the maps of all heads read: one device has them and the heads."""
    return narrow
