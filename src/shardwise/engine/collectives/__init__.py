"""Runs collective schedules: what `shardwise.collectives` describes, prices and proves."""

from shardwise.engine.collectives.communicator import Communicator as Communicator
