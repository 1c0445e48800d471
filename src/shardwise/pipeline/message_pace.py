"""Steps whose pace messages set, not passes: by formula, for equal stages.

A link leads from one rank to another and carries one message after the other. Once the first microbatch has made its
round trip, every other one adds at least what the busiest link takes for it; or, where only so many may be in flight,
its share of a round trip. All arguments but names may be numpy arrays.
"""

from __future__ import annotations

from typing import Any

from shardwise.collectives.arrays import maximum
from shardwise.pipeline.build import TWO_CHUNKS

_AS_1F1B = frozenset(("zb-h1", "zb-1p"))


def messages_per_link(name: str, ranks: Any, chunks: Any) -> Any:
    """Messages of one microbatch over the busiest link, in one direction.

    Of two ranks that interleave, each sends the other activations and gradients, as neighbours in a V do.
    """
    if name == "interleaved":
        return chunks + (chunks - 1) * (ranks == 2)
    return 2 if name in TWO_CHUNKS else 1


def paced_by_messages(
    name: str,
    ranks: Any,
    microbatches: Any,
    chunks: Any,
    forward: Any,
    input_grad: Any,
    weight_grad: Any,
    comm_seconds: Any,
) -> Any:
    """Seconds of the longest rank where messages are so long that every wait for passes is over before theirs."""
    p, m, v, c = ranks, microbatches, chunks, comm_seconds
    F, I, W = forward, input_grad, weight_grad  # noqa: E741
    if name in _AS_1F1B:  # and the weight gradients, but for the last, in the waits
        return (m + p - 1) * (F + I) + W + one_f_one_b_wait(p, m, F + I, c)
    crossings = (p - 1) * v
    if name == "interleaved":  # whole backwards; the last rank sends to the first between two chunks
        I, W, crossings = I + W, 0.0, p * v - 1  # noqa: E741
    first_round_trip = p * v * (F + I) + W + 2 * crossings * c
    by_links = _messages_that_follow(name, p, m, v) * c
    return first_round_trip + maximum(by_links, _by_round_trips(name, p, m, v, F + I, c))


def _messages_that_follow(name: str, p: Any, m: Any, v: Any) -> Any:
    """Messages over the busiest link beside those of the first round trip."""
    if name == "interleaved":  # p microbatches make each round trip together, one message apart
        return (m - p) * messages_per_link(name, p, v) + p - 1
    entering = 2 if name == "dualpipe" else 1  # at its two ends, one each
    return maximum(0, m - entering) * messages_per_link(name, p, v)


def one_f_one_b_wait(p: Any, m: Any, there_and_back: Any, c: Any) -> Any:
    """Seconds that 1F1B waits for messages: the first round trip, then (p-1)/p of one for every further microbatch.

    Exact for any m (the form 2(p-1)m/p + 2(p-2) is so only when p divides m). Of the microbatches that enter together
    the second is the first to meet a message on its link, if a stage does not take longer ``there_and_back``.
    """
    messages = 2 * (p - 1) + 2 * ((m - 1) * (p - 1) // p)
    return messages * c + ((m - 1) % p == 1) * maximum(0.0, c - there_and_back)


def _by_round_trips(name: str, p: Any, m: Any, v: Any, there_and_back: Any, c: Any) -> Any:
    """What those microbatches add that enter only when another is back.

    Those in flight share the time that a rank holds the chunks of one microbatch. No other schedule is held up by that
    more than by its links, or by its passes.
    """
    if name == "interleaved":
        in_flight = (v + 1) * p - 1
        held = v * (v + 1) * p / 2 * there_and_back + (v * (v + 1) * p - 2 * v) * c
    elif name == "v-half":
        in_flight = p  # of the p + 2 that it holds: read off the simulator
        held = 2 * p * there_and_back + 4 * (p - 1) * c
    else:
        return 0.0
    return maximum(0.0, m - in_flight / v) * held / in_flight
