"""What the tensors of a rank are for, and how many bytes of each there are at every place of a step.

A tensor's part is known for certain only when it is gone: what a forward pass makes and a backward pass frees was kept
for it. So every change is noted with its place, and added up when the step is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter

from shardwise.measure.dryrun.places import Place, Places
from shardwise.measure.dryrun.result import PARTS, Bytes, Holder
from shardwise.training.metrics.memory import TensorBytes


@dataclass
class Block:
    """The memory of one tensor and its views, from the first to the last place."""

    born: Place
    born_pass: int
    operator: str
    bytes: int = 0
    died: Place | None = None
    died_pass: int | None = None
    claimed: str = ""
    resized: bool = False
    sent: bool = False

    @property
    def part(self) -> str:
        if self.claimed:
            return self.claimed
        if self.resized:
            return "gathered"
        if self.born.phase == "forward" and (self.died is None or self.died.phase in ("backward", "recompute")):
            return "activations"
        if self.sent:
            return "communication"
        if self.born.phase == "backward" and self.died_pass != self.born_pass:
            return "gradients"
        return "recomputed" if self.born.phase == "recompute" else "temporary"


class MemoryLog(TensorBytes):  # type: ignore[no-untyped-call]
    """Notes every change; ``claim`` says what tensors are for that no rule can know."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places
        self.blocks: dict[int, Block] = {}  # those that live, by the key of their storage
        self.changes: list[tuple[Block, int, Place]] = []
        self.witnesses.append(self._touched)

    def claim(self, part: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            block = self.blocks.get(self.see(tensor))
            if block is not None:
                block.claimed = part

    def forget(self) -> None:
        """Starts a new log with what lives."""
        self.changes = [(block, block.bytes, self.places.now) for block in self.blocks.values()]
        self.reset_peak()

    def changed(self, key: int, difference: int, operator: str) -> None:
        super().changed(key, difference, operator)
        block = self.blocks.get(key)
        if block is None:
            block = self.blocks[key] = Block(self.places.now, self.places.passes, operator)
        block.bytes += difference
        block.resized |= operator == "resize"
        self.changes.append((block, difference, self.places.now))

    def gone(self, key: int) -> None:
        block = self.blocks.pop(key, None)
        if block is not None:
            block.died, block.died_pass = self.places.now, self.places.passes

    def _touched(self, operator: Any, args: Any, named: Any, result: Any) -> None:
        """A witness: what collectives read and write."""
        if operator.namespace in ("c10d", "_c10d_functional"):
            for one in tree_iter((args, result)):
                block = self.blocks.get(self.see(one)) if isinstance(one, Tensor) else None
                if block is not None:
                    block.sent = True

    def holders(self) -> list[Holder]:
        """What was there when there was most, since `forget`; tensors of equal origin and size together."""
        total = most = 0
        last = 0
        for number, (_, difference, _) in enumerate(self.changes):
            total += difference
            if total > most:
                most, last = total, number
        live: dict[int, tuple[Block, int]] = {}
        for block, difference, _ in self.changes[: last + 1]:
            live[id(block)] = (block, live.get(id(block), (block, 0))[1] + difference)
        alike: dict[tuple[str, str, str, int], int] = {}
        for block, size in live.values():
            where = f"{block.born.phase} {block.born.part}".strip()
            key = (block.part, block.operator, where, size)
            alike[key] = alike.get(key, 0) + (size > 0)
        found = [Holder(*key, number) for key, number in alike.items() if number]
        return sorted(found, key=lambda one: -one.bytes * one.number)

    def moments(self) -> dict[Place, list[Bytes]]:
        """What there was, by part, after every change since `forget`, by the place where it happened."""
        live: Bytes = dict.fromkeys(PARTS, 0.0)
        found: dict[Place, list[Bytes]] = {}
        for block, difference, place in self.changes:
            live[block.part] += difference
            found.setdefault(place, []).append(dict(live))
        return found
