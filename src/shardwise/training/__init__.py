"""The training loop around the engine: data, schedules, checkpoints, recovery, metrics."""
