"""The nouns a user writes, their units, checks and presets."""

from shardwise.spec.errors import SpecError
from shardwise.spec.hardware import Cluster, Device
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.network import Link, NetworkLevel
from shardwise.spec.strategy import Strategy
from shardwise.spec.training import Training

__all__ = ["Cluster", "Device", "Job", "Link", "Model", "NetworkLevel", "SpecError", "Strategy", "Training"]
