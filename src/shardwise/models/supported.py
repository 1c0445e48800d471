"""What the decoder cannot compute: one line that says so, before anything is built."""

from __future__ import annotations

from shardwise.spec.errors import SpecError
from shardwise.spec.model import Model
from shardwise.spec.support import not_built


def require_supported(model: Model) -> None:
    """Raises SpecError for the first thing in ``model`` that the decoder would silently get wrong."""
    for one in not_built(model):
        raise SpecError(one.field, f"{one.reason} ({model.name})", one.remedy)
