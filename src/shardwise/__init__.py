"""shardwise plans, runs and measures distributed training of large language models.

The public names below are imported when first used, so that `import shardwise` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_VERBS = (
    "analyze", "calibrate", "compare", "finetune", "generate", "plan", "plan_mixed", "predict", "status", "train",
    "validate", "verify", "write_report",
)  # fmt: skip
_PUBLIC = {
    "Cluster": "shardwise.spec.hardware",
    "Device": "shardwise.spec.hardware",
    "Link": "shardwise.spec.hardware",
    "Job": "shardwise.spec.job",
    "Optimization": "shardwise.spec.training",
    "Model": "shardwise.spec.model",
    "Strategy": "shardwise.spec.strategy",
    "Training": "shardwise.spec.training",
    "SpecError": "shardwise.spec.errors",
    "read_job": "shardwise.interop.jobs",
    "CollectiveKind": "shardwise.collectives",
    "Topology": "shardwise.collectives",
    "collective_latency_and_volume": "shardwise.collectives",
    "p2p_latency": "shardwise.collectives",
    **dict.fromkeys(_VERBS, "shardwise.api"),
    "per_gpu_memory_bytes": "shardwise.cost.memory.device",
    "Patterns": "shardwise.engine.patterns",
    "gather_state_dict": "shardwise.engine.parallelize",
    "parallelize": "shardwise.engine.parallelize",
}

__all__ = [
    "Cluster",
    "CollectiveKind",
    "Device",
    "Job",
    "Link",
    "Model",
    "Optimization",
    "Patterns",
    "SpecError",
    "Strategy",
    "Topology",
    "Training",
    "__version__",
    "analyze",
    "calibrate",
    "collective_latency_and_volume",
    "compare",
    "finetune",
    "gather_state_dict",
    "generate",
    "p2p_latency",
    "parallelize",
    "per_gpu_memory_bytes",
    "plan",
    "plan_mixed",
    "predict",
    "read_job",
    "status",
    "train",
    "validate",
    "verify",
    "write_report",
]

if TYPE_CHECKING:
    from shardwise.api.analysis import analyze, predict
    from shardwise.api.calibration import calibrate
    from shardwise.api.execution import train
    from shardwise.api.fine_tuning import finetune
    from shardwise.api.generation import generate
    from shardwise.api.observation import compare, status
    from shardwise.api.planning import plan, plan_mixed
    from shardwise.api.reporting import write_report
    from shardwise.api.validation import validate
    from shardwise.api.verification import verify
    from shardwise.collectives import CollectiveKind, Topology, collective_latency_and_volume, p2p_latency
    from shardwise.cost.memory.device import per_gpu_memory_bytes
    from shardwise.engine.parallelize import gather_state_dict, parallelize
    from shardwise.engine.patterns import Patterns
    from shardwise.interop.jobs import read_job
    from shardwise.spec.errors import SpecError
    from shardwise.spec.hardware import Cluster, Device
    from shardwise.spec.job import Job
    from shardwise.spec.model import Model
    from shardwise.spec.network import Link
    from shardwise.spec.strategy import Strategy
    from shardwise.spec.training import Optimization, Training


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
