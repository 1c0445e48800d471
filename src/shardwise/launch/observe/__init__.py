"""A run as others see it while it goes on: read from what it records, and from nothing else."""
