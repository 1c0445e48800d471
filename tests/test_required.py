"""What is known to be there must not be skipped."""

from __future__ import annotations

import pytest

from required import require


def test_what_is_missing_skips_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_REQUIRE", "cuda,emulate")
    require("emulate", None)
    with pytest.raises(pytest.fail.Exception, match="emulate, but: no root"):
        require("emulate", "no root")
    with pytest.raises(pytest.skip.Exception, match="no slurm"):
        require("slurm", "no slurm")
