"""The loop around the engine: data, schedule, checkpoints, recovery, metrics."""
