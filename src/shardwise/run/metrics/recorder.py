"""What rank 0 records: a line per step, with the prediction, to every sink that the run asks for."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.cost.compute.flops import flops_per_token
from shardwise.run.metrics.lines import NAME, MetricLines, missing_steps, open_lines, read_lines, spelled_ranges
from shardwise.run.metrics.tensorboard import EventFile, make_folder
from shardwise.spec.errors import SpecError
from shardwise.spec.files import read_json
from shardwise.spec.job import Job

PREDICTION = "prediction.json"
TENSORBOARD = "tensorboard"


def write_prediction(folder: Path, step_seconds: float, memory_bytes: float) -> None:
    content = {"predicted_seconds": step_seconds, "predicted_memory_bytes": memory_bytes}
    (folder / PREDICTION).write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_prediction(folder: Path) -> dict[str, float]:
    """Empty if the job was not priced, or the file is damaged."""
    try:
        prediction = read_json(folder / PREDICTION, "prediction")
        return {name: float(prediction[name]) for name in ("predicted_seconds", "predicted_memory_bytes")}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


class Recorder:
    """``step`` is the one that the run resumes from."""

    def __init__(self, job: Job, folder: Path, step: int) -> None:
        self.job = job
        self.lines = MetricLines(folder, step)
        self.sinks: list[EventFile | _WeightsAndBiases] = []
        if job.run.logging.tensorboard:
            self.sinks.append(EventFile(folder / TENSORBOARD))
            if step:
                self.sinks[-1].forget_after(step)
        if job.run.logging.wandb is not None:
            self.sinks.append(_WeightsAndBiases(job, job.run.logging.wandb, folder))
        self.predicted = read_prediction(folder)
        peak = job.peak_flops
        self._least_seconds = flops_per_token(job.model, job.training.seq) * job.tokens_per_step / peak
        missing = spelled_ranges(missing_steps(read_lines(self.lines.path), step))
        if missing and not any(record.get("steps_missing") == missing for record in read_lines(self.lines.path)):
            self.write({"step": step, "steps_missing": missing})

    def step(self, step: int, seconds: float, figures: Mapping[str, Any]) -> None:
        """The step number ``step``, counted from 1, and what it took."""
        speed = {
            "seconds": seconds,
            "tokens_per_second": self.job.tokens_per_step / seconds,
            "mfu": self._least_seconds / seconds,
        }
        interval = self.job.run.logging.interval
        every = {"interval": interval} if interval > 1 else {}
        self.write({"step": step, **figures, **every, **speed, **self.predicted})

    def write(self, record: Mapping[str, Any]) -> None:
        self.lines.write(record)
        scalars = {
            name: float(value)
            for name, value in record.items()
            if name != "step" and isinstance(value, (int, float)) and math.isfinite(value)
        }
        for sink in self.sinks:
            sink.scalars(record["step"], scalars)

    def rolled_back(self, step: int) -> None:
        """Drops records of later steps after a roll-back."""
        self.lines.cut_after(step)
        for sink in self.sinks:
            sink.forget_after(step)

    def close(self) -> None:
        self.lines.close()
        for sink in self.sinks:
            sink.close()


def require_writable(job: Job, folder: Path) -> None:
    """Before a process starts: raises SpecError if rank 0 could not record."""
    open_lines(folder / NAME).close()
    if job.run.logging.tensorboard:
        make_folder(folder / TENSORBOARD)


class _WeightsAndBiases:
    def __init__(self, job: Job, project: str, folder: Path) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise SpecError("run.logging.wandb", "the package is not installed", "pip install wandb") from None
        # The same identity after every restart, so that curves continue.
        identity = folder.resolve().as_posix().strip("/").replace("/", "-")[-64:]
        self._run: Any = wandb.init(project=project, id=identity, resume="allow", dir=str(folder), config=job.to_dict())

    def forget_after(self, step: int) -> None:
        """Weights & Biases accepts every step once: the first record stays."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
