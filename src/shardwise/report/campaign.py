"""A whole run as a table and as plain data: days, device hours, money, interruptions, checkpoints, goodput."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from shardwise.cost.campaign import Campaign
from shardwise.report.console import bar, picked, table
from shardwise.report.tables import Cell, FittedTable
from shardwise.spec.units import counted, readable_count, readable_duration, readable_money, readable_share

SHARES = {
    "training": "training",
    "checkpoints": "writing checkpoints",
    "restarts": "restarts",
    "lost": "work lost to interruptions",
}


def campaign_pieces(run: Campaign) -> Iterator[FittedTable | str]:
    """The table of a whole run, and a note if no interruptions are counted."""
    tokens, rate = readable_count(run.tokens), f"{run.tokens_per_second:,.0f} tokens/s"
    title = f"The whole run: {tokens} tokens at {rate} on {counted(run.devices, 'device')}"
    yield table(title, ("part", "share of the run", "value", "share"), _rows(run), numbers_from=2)
    if math.isinf(run.between_interruptions):
        yield "No interruptions are counted: give --mtbf (50700h is what Llama 3 saw on 16,384 GPUs).\n"


def _rows(run: Campaign) -> Iterator[tuple[Cell, ...]]:
    shares = {name: share for name, share in run.shares.items() if share > 0}
    if len(shares) > 1:
        for name, share in shares.items():
            yield SHARES[name], bar(share), readable_duration(share * run.seconds), readable_share(share)
    yield "whole run, wall time", bar(1), readable_duration(run.seconds), "100.0%"
    yield "device-hours", "", readable_count(run.device_hours), ""
    if run.cost is not None:
        price = readable_money(run.price_per_device_hour or 0.0, run.currency)
        yield f"cost at {price} per device-hour", "", readable_money(run.cost, run.currency), ""
    if math.isfinite(run.between_interruptions):
        every = f"interruptions, one every {readable_duration(run.between_interruptions)}"
        yield every, "", f"{run.interruptions:,.{0 if run.interruptions >= 10 else 2}f}", ""
        yield "one restart", "", readable_duration(run.restart_seconds), ""
    if math.isfinite(run.interval):
        where = f" ({run.storage})" if run.storage else ""
        yield f"one checkpoint{where}", "", readable_duration(run.checkpoint_seconds), ""
        if run.interval != run.best_interval:
            yield "time between checkpoints", "", readable_duration(run.interval), ""
        if math.isfinite(run.best_interval):
            yield "best time between checkpoints", "", readable_duration(run.best_interval), ""
    yield "goodput", "", readable_share(run.goodput), ""


def campaign_data(run: Campaign) -> dict[str, Any]:
    """A whole run as plain data; infinite times (no interruptions, no checkpoints) are None."""
    return {
        **picked(run, "tokens", "tokens_per_second", "devices", "seconds", "days", "device_hours"),
        **picked(run, "price_per_device_hour", "cost"),
        "currency": None if run.cost is None else run.currency,
        **picked(run, "device_hours_per_interruption", seconds_between_interruptions="between_interruptions"),
        **picked(run, "interruptions", "checkpoint_seconds", checkpoint_storage="storage"),
        **picked(run, "restart_seconds", checkpoint_interval_seconds="interval", best_interval_seconds="best_interval"),
        **picked(run, "goodput", "shares"),
    }
