"""What an error of the rules advises is followed, and must be accepted: the same field is not refused again."""

from __future__ import annotations

import random
import re
from typing import Any

from shardwise.spec import Job
from shardwise.spec.errors import SpecError

CASES = 800
VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "strategy": {
        "tp": (1, 2, 3, 4, 6, 8),
        "pp": (1, 2, 3, 5, 8),
        "cp": (1, 2, 3),
        "ep": (1, 2, 3, 8),
        "microbatch": (1, 2, 3),
        "interleave": (1, 2, 3),
        "schedule": ("1f1b", "interleaved", "zbv", "dualpipe"),
        "zero": (0, 1, 3),
        "shard_group": (None, None, 3, 4),
    },
    "training": {"global_batch": (7, 12, 64, 100), "seq": (100, 128, 1000, 2048)},
}


def drawn(draw: random.Random) -> dict[str, Any]:
    model = draw.choice(("llama3-8b", "gpt2", "mixtral-8x7b", "deepseek-v2-lite", "tiny"))
    parts = {part: {name: draw.choice(values) for name, values in own.items()} for part, own in VALUES.items()}
    return {"model": model, "cluster": draw.choice(("dgx-h100:2", "dgx-h100:4", "laptop:6")), **parts}


def refused(fields: dict[str, Any]) -> SpecError | None:
    try:
        Job.from_dict(fields)
    except SpecError as error:
        return error
    return None


def test_a_number_that_is_advised_is_accepted() -> None:
    draw, followed = random.Random(0), 0
    for _ in range(CASES):
        fields = drawn(draw)
        error = refused(fields)
        advised = re.match(r"use (\d+)(?: or (\d+))?$", error.remedy) if error else None
        part, _, name = error.field.partition(".") if error else ("", "", "")
        if advised is None or error is None or not name:
            continue
        for number in filter(None, advised.groups()):
            again = refused({**fields, part: {**fields[part], name: int(number)}})
            assert again is None or again.field != error.field, f"{error}: then {again}"
            followed += 1
    assert followed > CASES / 4
