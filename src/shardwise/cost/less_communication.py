"""What sending less costs a device: memory for what is kept back, and memory traffic for making it small."""

from __future__ import annotations

from shardwise.spec.strategy import Strategy


def kept_bytes(strategy: Strategy) -> float:
    """Bytes that a device keeps for each of its parameters from one step to the next.

    Error feedback: what a rank's codes left out, and what the codes of the sum did of the piece that it adds up.
    DiLoCo: the weights of the last synchronisation and the outer momentum. Asynchronous: fp32 sums in flight.
    """
    compression, ranks, meeting = strategy.compression, strategy.gradient_group, strategy.synchronise
    if not meeting.every_step and ranks > 1:
        return {"diloco": 8.0, "async": 4.0 * meeting.staleness}.get(meeting.method, 0.0)
    if not compression.keeps_errors or ranks == 1:
        return 0.0
    return 4.0 if compression.method == "powersgd" else 4 + 4 / ranks


def moved_bytes(strategy: Strategy) -> float:
    """Bytes read and written in a device's memory for each of its parameters in a step, to compress its gradient.

    It is read into fp32, that is read, and the sum is written (16); what was left out is read and written (8); codes
    are written, read to be added, written and read again. The products of powersgd read the matrix twice (8); 1-bit
    Adam makes its momentum from the gradient, and a gradient from the sum (24). When workers meet, what they send is
    made from their weights and put back (16), by an outer step that reads and writes two states (16); late sums are
    copied once.
    """
    compression, meeting = strategy.compression, strategy.synchronise
    if not meeting.every_step and strategy.gradient_group > 1:
        return 8.0 if meeting.is_async else (32 if meeting.method == "diloco" else 16) / meeting.inner_steps
    if not compression.is_used or strategy.gradient_group == 1:
        return 0.0
    codes = 8.0 if compression.method == "powersgd" else 4 * compression.element_bytes
    momentum = 24 if compression.of_momentum else 0
    return 16 + (8 if compression.error_feedback else 0) + momentum + codes
