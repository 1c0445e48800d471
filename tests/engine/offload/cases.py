"""What tests of offload share: the states of a rank, and what the price says that moves."""

from __future__ import annotations

from collections import Counter

import torch

from shardwise.cost.traffic.offload import offload_traffic
from shardwise.engine.engine import Engine
from shardwise.layout.payloads import Payload
from shardwise.layout.stages import rank_contents
from shardwise.spec import Job


def states_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Masters and moments of this rank, wherever they are."""
    optimizer = engine.optimizer
    return {
        f"{held.name} {name}": optimizer.read(held.parameter, name).clone()
        for held in engine.parameters
        for name in ("master", *optimizer.state[held.parameter])
    }


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], relative: float) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=relative, atol=relative / 10, msg=name)


def priced_bytes(one: Job, steps: int) -> Counter[Payload]:
    """Bytes of all ranks and of ``steps`` steps, by what the price says moves."""
    strategy = one.strategy
    found: Counter[Payload] = Counter()
    for stage in range(strategy.pp):
        for line in offload_traffic(one, rank_contents(one, stage)):
            found[line.payload] += steps * line.count * line.size_bytes * strategy.world / strategy.pp
    return found
