"""Cuts a run's pipeline anew while it trains: a rank that `compare` would call slow gets fewer layers."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.measure.compare.comparison import profiled_run
from shardwise.measure.compare.stragglers import straggler_of_steps
from shardwise.measure.recut import recut
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.profile import path_of
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.run import RecutPolicy


@dataclass
class RunRecuts:
    """Finds better cuts of a run; looks at each of its profiles once."""

    folder: RunFolder
    policy: RecutPolicy
    _seen_ns: int = 0

    def better_cut(self, since_ns: int) -> tuple[Job, str] | None:
        """A better cut, from a profile newer than ``since_ns``, and why; it is also written to `recut.yaml`."""
        written_ns = self._recorded_ns()
        if written_ns <= max(since_ns, self._seen_ns):
            return None
        try:
            run = profiled_run(str(self.folder.path))
            if len(run.measured.numbers) < self.policy.steps:
                return None
            self._seen_ns = written_ns
            slow = straggler_of_steps(run.job.model, run.measured)
            better = None if slow is None else recut(run.job, run.measured)
        except SpecError:  # ranks are writing the next record, or the layout has just changed
            return None
        if better is None or better.job == run.job or better.gain < 1 + self.policy.gain:
            return None
        self.folder.recut.write_text(better.job.to_yaml(), encoding="utf-8")
        before, after = (", ".join(map(str, counts)) for counts in better.layers)
        times = better.slowness[slow or 0]
        why = f"rank {slow} took {times:.2f} times as long for a layer in {len(run.measured.numbers)} steps"
        return better.job, f"{why}; stages of {before} layers become {after}, expected {better.gain:.2f} times as fast"

    def _recorded_ns(self) -> int:
        """When rank 0 wrote its newest profile; 0 if there is none."""
        try:
            return path_of(self.folder.profile, 0).stat().st_mtime_ns
        except OSError:
            return 0
