"""A matmul cut into one part per rank, which overlaps the ring that brings its input or takes its result.

Wang et al. 2023 (ASPLOS, doi 10.1145/3567955.3567959): while a part is multiplied, the next one is on its way. The
price and the engine use the same order.
"""

from __future__ import annotations


def gathered_parts(rank: int, ranks: int) -> tuple[int, ...]:
    """The parts of an all-gather in the order in which they reach a rank: its own first, then those of ranks before."""
    return tuple((rank - step) % ranks for step in range(ranks))


def scattered_parts(rank: int, ranks: int) -> tuple[int, ...]:
    """The parts of a reduce-scatter in the order in which a rank adds to them: its own last, which is then complete."""
    return tuple((rank - 1 - step) % ranks for step in range(ranks))


def share_beside_products(ranks: int) -> float:
    """The share of the parts that are sent while another is multiplied: all but one."""
    return 1 - 1 / ranks
