"""The small jobs of the labs: a Llama or a mixture that a laptop trains in no time, split as the lab asks."""

from __future__ import annotations

from typing import Any

from shardwise.spec.job import Job

DENSE: dict[str, Any] = {
    "name": "lab", "layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 192, "vocab": 256, "max_seq": 8192,
    "activation": "swiglu", "norm": "rmsnorm",
}  # fmt: skip


def lab_job(strategy: dict[str, Any], *, batch: int, seq: int, cluster: Any = None, **model: Any) -> Job:
    """A job in fp32 on this machine's processes, or on ``cluster``; ``model`` changes the small Llama."""
    world = 1
    for name in ("tp", "cp", "dp", "pp"):
        world *= strategy.get(name, 1)
    return Job.from_dict(
        {
            "model": {**DENSE, **model},
            "cluster": f"laptop:{world}" if cluster is None else cluster,
            "strategy": strategy,
            "training": {"global_batch": batch, "seq": seq, "precision": "fp32"},
        }
    )
