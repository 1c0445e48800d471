"""A run is a folder: the job as it is run, its prediction, metrics, checkpoints, and logs of every attempt."""

from __future__ import annotations

from pathlib import Path

from shardwise.training.checkpoint.folder import CheckpointFolder


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.job = path / "job.yaml"
        self.metrics = path / "metrics.jsonl"
        self.data = path / "data.json"  # a fingerprint of the data when the run began
        self.peak = path / "peak.json"  # the peak bytes of any rank, after a trial step
        self.profile = path / "profile"  # of every rank, the steps that were profiled
        self.attempts = path / "attempts"
        self.checkpoints = CheckpointFolder(path / "checkpoints")
