"""A run is a folder: the job as it is run, its prediction, metrics, checkpoints, and logs of every attempt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwise.training.checkpoint.folder import CheckpointFolder


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def job(self) -> Path:
        return self.path / "job.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def prediction(self) -> Path:
        return self.path / "prediction.json"

    @property
    def data(self) -> Path:
        """A fingerprint of the data when the run began."""
        return self.path / "data.json"

    @property
    def peak(self) -> Path:
        """The peak bytes of any rank, after a trial step."""
        return self.path / "peak.json"

    @property
    def profile(self) -> Path:
        """What every rank recorded of the steps that were profiled."""
        return self.path / "profile"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.path / "checkpoints")
