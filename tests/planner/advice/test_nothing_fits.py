"""Nothing fits: what is named instead fits."""

from __future__ import annotations

import pytest

from shardwise.api import plan
from shardwise.spec.errors import SpecError


@pytest.mark.slow
def test_as_many_devices_as_it_says_hold_it() -> None:
    """Offloaded states that the host has no memory for; narrowed to one family of layouts, which is quick."""
    narrow = {"model": "llama3-405b", "global_batch": 64, "seq": 8192, "tp": 8, "microbatch": 1, "schedule": "1f1b",
              "recompute": "full", "cp": 1}  # fmt: skip
    with pytest.raises(SpecError, match="of host memory per node") as refused:
        plan(cluster="dgx-h100:1", **narrow)  # type: ignore[arg-type]
    assert refused.value.remedy == "use 32 devices, or hosts with more memory"
    assert plan(cluster="dgx-h100:4", **narrow).job.cluster.devices == 32  # type: ignore[arg-type]
