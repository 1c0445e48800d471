"""The order of parts around a ring: what a rank multiplies next is what its neighbour has just had."""

from __future__ import annotations

import pytest

from shardwise.layout.pieces import gathered_parts, scattered_parts, share_beside_products


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_part_comes_from_the_rank_before(ranks: int) -> None:
    for order in (gathered_parts, scattered_parts):
        for rank in range(ranks):
            mine, before = order(rank, ranks), order((rank - 1) % ranks, ranks)
            assert sorted(mine) == list(range(ranks))
            assert mine[1:] == before[:-1]
    assert all(gathered_parts(rank, ranks)[0] == rank == scattered_parts(rank, ranks)[-1] for rank in range(ranks))


def test_each_part_but_one_is_sent_beside_a_product() -> None:
    assert [share_beside_products(ranks) for ranks in (1, 2, 8)] == [0, 1 / 2, 7 / 8]
