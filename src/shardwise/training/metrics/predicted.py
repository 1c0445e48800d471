"""The price of a job, handed to its run as a file: what is measured stands beside it from the first step on."""

from __future__ import annotations

import json
from pathlib import Path

NAME = "prediction.json"


def write_prediction(folder: Path, step_seconds: float, memory_bytes: float) -> None:
    content = {"predicted_seconds": step_seconds, "predicted_memory_bytes": memory_bytes}
    (folder / NAME).write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_prediction(folder: Path) -> dict[str, float]:
    """Nothing where nobody has priced the job, or the file is not what was written."""
    try:
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
        return {name: float(found[name]) for name in ("predicted_seconds", "predicted_memory_bytes")}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
