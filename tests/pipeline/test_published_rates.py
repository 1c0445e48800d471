"""Bubble rates of the zero-bubble paper, from its own profile (validation/pipeline_bubble.csv).

Run this file for the whole table.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from shardwise.pipeline import build, equal_stages, simulate

TABLE = Path(__file__).parents[2] / "validation" / "pipeline_bubble.csv"
# Qi et al. 2023, Table 3: one layer less on the first and last stage, so 24 and 32 layer slots over 8 stages; the
# interleaved runs have one layer per chunk. Table 1: of 34 + 5as/h bytes per token and hidden unit, the weight
# gradient needs 32.
CHUNKS = {"1.5B": 24 // 8, "6.2B": 32 // 8}
RELEASED = {"1.5B": 1 - 32 / (34 + 5 * 24 * 1024 / 2304), "6.2B": 1 - 32 / (34 + 5 * 32 * 1024 / 4096)}
NAMES = {
    "1F1B": "1f1b",
    "1F1B-I": "interleaved",
    "ZB-H1": "zb-h1",
    "ZB-H2": "zb-h2",
    "ZB-1p": "zb-1p",
    "ZB-2p": "zb-2p",
}


def rows():
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def rate(row) -> float:
    name, model = NAMES[row["schedule"]], row["model"]
    v = CHUNKS[model] if name == "interleaved" else 1
    profile = (row["t_forward_ms"], row["t_input_grad_ms"], row["t_weight_grad_ms"])
    ranks, comm = int(row["stages"]), float(row["t_comm_ms"])
    times = equal_stages(ranks * v, *(float(t) / v for t in profile))
    schedule = build(
        name,
        ranks,
        int(row["microbatches"]),
        chunks=v,
        times=times,
        comm_seconds=comm,
        released_by_input_grad=RELEASED[model],
    )
    return simulate(schedule, times, comm).bubble_rate


def test_the_table_is_whole():
    assert len(rows()) == 36


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row['model']}-{row['microbatches']}-{row['schedule']}")
def test_published_rates(row):
    assert rate(row) == pytest.approx(float(row["bubble_rate"]), abs=0.006)


if __name__ == "__main__":
    for row in rows():
        ours, published = rate(row), float(row["bubble_rate"])
        what = f"{row['model']} m={row['microbatches']} {row['schedule']:7}"
        print(f"{what} {published:.4f} {ours:.4f} {ours - published:+.4f}")
