"""Temporarily replaces functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Owner (a module, a class, an object), name and what stands under the name until the end."""
    originals = [vars(owner).get(name, _MISSING) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), original in zip(replacements, originals):
            if original is _MISSING:  # it was its class's
                delattr(owner, name)
            else:
                setattr(owner, name, original)
