"""Experts spread over ranks: tokens travel to them and back, each rank holding whole experts or slices of them."""

from __future__ import annotations

from shardwise.engine.experts.apply import apply_experts, assume_load, exchange_of
from shardwise.engine.experts.loads import Assumed, LayerLoad, expert_load, update_balance

__all__ = ["Assumed", "LayerLoad", "apply_experts", "assume_load", "exchange_of", "expert_load", "update_balance"]
