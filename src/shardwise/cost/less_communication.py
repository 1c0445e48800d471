"""What sending less costs a device: memory for what is kept back, and memory traffic for making it small."""

from __future__ import annotations

from shardwise.spec.strategy import Strategy


def kept_bytes(strategy: Strategy) -> float:
    """Bytes that a device keeps for each of its parameters from one step to the next.

    Error feedback: what a rank's codes left out, and what the codes of the sum did of the piece that it adds up.
    """
    compression, ranks = strategy.compression, strategy.gradient_group
    if not compression.keeps_errors or ranks == 1:
        return 0.0
    return 4.0 if compression.method == "powersgd" else 4 + 4 / ranks


def moved_bytes(strategy: Strategy) -> float:
    """Bytes read and written in a device's memory for each of its parameters in a step, to compress its gradient.

    It is read into fp32, that is read, and the sum is written (16); what was left out is read and written (8); codes
    are written, read to be added, written and read again. The products of powersgd read the matrix twice (8).
    """
    compression = strategy.compression
    if not compression.is_used or strategy.gradient_group == 1:
        return 0.0
    codes = 8.0 if compression.method == "powersgd" else 4 * compression.element_bytes
    return 16 + (8 if compression.error_feedback else 0) + codes
