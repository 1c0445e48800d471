"""Bubbles by formula: what a step costs beyond the work of one rank, without building a schedule.

Times are those of one stage (one chunk). "Exact" means equal to the simulator for equal stages and overlapped
messages; ``bubble_is_exact`` says where. Elsewhere the longer of two estimates counts: passes set the pace, or
messages do (`message_pace`). All arguments may be numpy arrays. The bubble is that of the longest rank
(``Timeline.bubble_seconds``).
"""

from __future__ import annotations

from typing import Any

from shardwise.collectives.arrays import maximum, minimum
from shardwise.pipeline.build import chunks_per_rank
from shardwise.pipeline.message_pace import one_f_one_b_wait, paced_by_messages
from shardwise.spec.errors import SpecError

_ANY_MESSAGES = frozenset(("sequential", "gpipe", "1f1b"))  # exact for short and for long ones


def bubble_seconds(
    name: str,
    ranks: Any,
    microbatches: Any,
    chunks: Any = None,
    forward: Any = 1.0,
    input_grad: Any = 1.0,
    weight_grad: Any = 1.0,
    comm_seconds: Any = 0.0,
    released_by_input_grad: float = 0.0,
) -> Any:
    """Seconds that the longest rank spends beyond its own work, for equal stages."""
    v = chunks_per_rank(name) if chunks is None else chunks
    seconds = (forward, input_grad, weight_grad, comm_seconds)
    bubble = _paced_by_passes(name, ranks, microbatches, v, seconds, released_by_input_grad)
    if name in _ANY_MESSAGES:
        return bubble
    work = microbatches * v * (forward + input_grad + weight_grad)
    return maximum(bubble, (ranks > 1) * (paced_by_messages(name, ranks, microbatches, v, *seconds) - work))


def _paced_by_passes(
    name: str, p: Any, m: Any, v: Any, seconds: tuple[Any, Any, Any, Any], released_by_input_grad: float
) -> Any:
    """The bubble where messages delay what waits for them and no link is short of time."""
    F, I, W, c = seconds  # noqa: E741
    hops = p - 1
    round_trip = hops * (F + I)
    match name:
        case "sequential":
            # Every other rank's work of every microbatch is waited for.
            return m * hops * (F + I + W + 2 * c)
        case "gpipe":
            # (p-1)(F+B): Narayanan et al. 2021, section 2.2.1; a message per hop, there and back. Each way, all follow
            # each other at the pace of the pass or of the message, whichever is slower.
            queue = maximum(0.0, c - F) + maximum(0.0, c - (I + W))
            return hops * (F + I + W + 2 * c) + (m - 1) * queue * (p > 1)
        case "1f1b":
            # The same; besides, p in flight make every later microbatch pay (p-1)/p of a round trip of messages.
            return hops * (F + I + W) + one_f_one_b_wait(p, m, F + I + W, c)
        case "interleaved":
            # (p-1)(F+B)/v of a whole rank: Narayanan et al. 2021, section 2.2.2; every boundary once each way.
            return hops * (F + I + W) + 2 * (p * v - 1) * (p > 1) * c
        case "zb-h1" | "zb-1p":
            # (p-1)(F+I-W): Qi et al. 2023, section 2.2; needs m >= p and W <= F, else as here.
            waits = minimum(one_f_one_b_wait(p, m, F + I, c), 4 * hops * c)
            return round_trip - minimum(m - 1, hops) * minimum(W, F) + waits
        case "zb-h2":
            # (p-1)(F+I-2W): Qi et al. 2023, section 2.2; fewer microbatches fill less.
            return maximum(0.0, round_trip - minimum(m - 1, 2 * hops) * W) + 2 * hops * c
        case "zb-2p":
            # As zb-h2, with room for as many waiting weight gradients as 2p activations give.
            waiting = (2 * p - 1) / max(1 - released_by_input_grad, 1e-9)
            return maximum(0.0, round_trip - minimum(m - 1, waiting) * W) + 2 * hops * c
    return _folded_bubble(name, p, m, F, I, W, c)


def _folded_bubble(name: str, p: Any, m: Any, F: Any, I: Any, W: Any, c: Any) -> Any:  # noqa: E741
    """Schedules that turn round in the middle: exact for F = I = W and c = 0, else read off the simulator.

    There W <= F and W <= I and short messages are taken for granted.
    """
    slow = maximum(F, I)
    match name:
        case "zbv":
            # 0 for F = I = W (Qi et al. 2023); with fewer microbatches than 2p-1 the pipeline never fills.
            unfilled = maximum(0, maximum(2 * p - 1 - m, 4 * (p - m) - 1)) * (p > 1)
            uneven = maximum(slow, W) - minimum(minimum(F, I), W)
            return unfilled * (F + I + W) / 3 + (p - 1) * (2 * uneven + 6 * c)
        case "v-half":
            # Half of 1F1B's 6(p-1) units (Qi et al. 2024), one unit less for odd p.
            filling = (3 * (p - 1) - p % 2) * slow + (p + 1) * (minimum(F, I) - W)
            return (p > 1) * (filling + (2 * m + 5 * p - 8) * c)
        case "v-min":
            # Two thirds of 1F1B's (Qi et al. 2024): 4(p-1) units, one less, or one more where 3 divides p.
            # Its steady state is six times the longest pass.
            longest = maximum(slow, W)
            filling = (4 * (p - 1) + 2 * (p % 3 == 0) - 1) * longest
            steady = m * (6 * longest - 2 * (F + I + W))
            return (p > 1) * (filling + steady + (6 * (p - 1) / p * m + 3 * (p - 2)) * c)
        case "dualpipe":
            # The README's (p/2-1)(F&B + B - 3W) has F&B as one block; apart, the next rank need not wait for both.
            return (p > 1) * ((p / 2 - 1) * (F + I - W) + (5 * p / 2 - 3) * c)
        case "dualpipev":
            return (p - 1) * (F + I - W + 4 * c)
    raise SpecError("schedule", f"{name} has no closed form", "build it and simulate")


def bubble_is_exact(
    name: str,
    ranks: int,
    microbatches: int,
    forward: float = 1.0,
    input_grad: float = 1.0,
    weight_grad: float = 1.0,
    comm_seconds: float = 0.0,
) -> bool:
    """Whether ``bubble_seconds`` equals the simulator (equal stages, B = I + W, overlapped messages)."""
    p, m, c = ranks, microbatches, comm_seconds
    F, I, W = forward, input_grad, weight_grad  # noqa: E741
    few_messages = c == 0 or 2 * p * c <= W
    even = F == I == W and c == 0
    if p == 1:
        return True
    return {
        "sequential": True,
        "gpipe": True,
        "1f1b": True,
        "interleaved": c <= min(F, I, W),
        "zb-h1": few_messages and (W <= F or (m >= p and c == 0)),
        "zb-h2": few_messages and W <= F and (2 * W <= F + I or (m >= 2 * p - 1 and c == 0)),
        "zbv": even,
        "v-half": even and m > p // 2,
        "v-min": even and m > 1,
        "dualpipe": even and m >= 2 * p and m % 2 == 0,
        "dualpipev": even and m >= 2 * p,
    }.get(name, False)
