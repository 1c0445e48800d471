"""What a test needs of its machine: without it the test is skipped, or fails where the machine is known to have it.

SHARDWISE_REQUIRE names what is known to be there, as in "emulate,cuda"; `.ci/run` sets it.
"""

from __future__ import annotations

import os

import pytest


def require(name: str, missing: str | None) -> None:
    """Ends the test where something is ``missing``, which says what."""
    if missing is None:
        return
    if name in os.environ.get("SHARDWISE_REQUIRE", "").split(","):
        pytest.fail(f"SHARDWISE_REQUIRE names {name}, but: {missing}")
    pytest.skip(missing)
