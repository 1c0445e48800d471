"""Runs collective schedules: what `shardwise.collectives` describes, prices and proves."""

from shardwise.engine.collectives.communicator import Communicator, run_schedule

__all__ = ["Communicator", "run_schedule"]
