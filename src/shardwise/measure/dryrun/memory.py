"""What the tensors of a rank are for, and how many bytes of each kind there are at every place of a step.

What a tensor is for is known only when it is freed: one that a forward pass makes and a backward pass frees is an
activation. So every change is recorded with its place, and added up after the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwise.engine.torch_private import current_autograd_node, tree_iter
from shardwise.measure.dryrun.result import PARTS, Bytes, Holder
from shardwise.models.decoder import Decoder
from shardwise.models.layer import Layer
from shardwise.spec.layers import LayerRecord
from shardwise.training.memory import TensorBytes

# -- where in a step a rank is: which pass, which stage, which layer ---------------------------------
# Tracked by hooks on the modules for the forward pass and on the tensors between them for the backward pass.


class LayerKind(NamedTuple):
    """What distinguishes layers: all of one kind run the same operators."""

    layer: LayerRecord = LayerRecord()
    recomputed: bool = False
    predicts: bool = False
    tuned: tuple[bool, ...] = ()
    """`Tuning.kind_of`: first whether a gradient flows through it."""

    @property
    def words(self) -> str:
        words = ("experts" if self.layer.feed_forward == "mixture" else "dense",
                 self.layer.mixer != "full" and self.layer.mixer, not self.layer.rotary and "not rotated",
                 self.recomputed and "recomputed", self.predicts and "prediction",
                 self.tuned and not self.tuned[0] and "without gradients")  # fmt: skip
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class StepPlace:
    phase: str  # build, forward, backward, recompute, update or between
    stage: int = 0
    part: str = ""  # of the stage: embedding, layer or head
    kind: LayerKind | None = None  # of a layer
    number: int = 0  # of a layer, among those of its kind in the stage, from the front
    of: int = 0  # how many of its kind there are
    visit: int = 0  # how many passes of the stage in this direction came before: the microbatch

    @property
    def words(self) -> str:
        kind = "" if self.kind is None else f" {self.kind.words}"
        number = f" {self.number}" if self.number >= 0 else f" {-self.number} from the end"
        return f"{self.phase}{kind} {self.part}{number if self.part == 'layer' else ''}".strip()


class Places:
    """Follows a step: ``now`` is the current place, ``passes`` counts the passes so far."""

    def __init__(self) -> None:
        self.now = StepPlace("build")
        self.passes = 0
        self._visits: dict[tuple[int, bool], int] = {}  # by stage, and whether forward

    def start_step(self) -> None:
        self.now = StepPlace("between")
        self._visits.clear()

    def follow(self, stages: Mapping[int, nn.Module], kind_of_layer: Mapping[int, LayerKind]) -> None:
        """Hooks into the decoders of a rank's stages, after all techniques have been applied to them."""
        for stage, module in stages.items():
            decoder = next(inner for inner in module.modules() if isinstance(inner, Decoder))
            self._watch_decoder(decoder, stage)
            kinds = {name: kind_of_layer[int(name)] for name in decoder.layers}
            for name, layer in decoder.layers.items():
                alike = [other for other in kinds if kinds[other] == kinds[name]]
                place = StepPlace("forward", stage, "layer", kinds[name], alike.index(name), len(alike))
                inner = next(part for part in layer.modules() if isinstance(part, Layer))
                self._watch_layer(inner, place, StepPlace("forward", stage, "head"))

    def _watch_decoder(self, decoder: nn.Module, stage: int) -> None:
        def enter(*_: Any) -> None:
            self._begin_pass(stage, forward=True)
            self._enter(StepPlace("forward", stage, "embedding"))

        def leave(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.now = StepPlace("between")
            self._on_gradient(output, StepPlace("backward", stage, "head"))

        decoder.register_forward_pre_hook(enter, prepend=True)
        decoder.register_forward_hook(leave)

    def _watch_layer(self, layer: nn.Module, place: StepPlace, after: StepPlace) -> None:
        def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if _in_backward():
                self._enter(replace(place, phase="recompute"))
                return
            self._enter(place)
            if place.number == 0:
                self._on_gradient(inputs[0], StepPlace("backward", place.stage, "embedding"))

        def leave(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if _in_backward():
                self._enter(replace(place, phase="backward"))
                return
            self._enter(after)
            self._on_gradient(output, replace(place, phase="backward"))

        layer.register_forward_pre_hook(enter, prepend=True)
        layer.register_forward_hook(leave)

    def _on_gradient(self, tensor: Tensor, place: StepPlace) -> None:
        """Enters ``place`` when the gradient of ``tensor`` is computed."""

        def arrived(_: Tensor) -> None:
            if place.part == "head":
                self._begin_pass(place.stage, forward=False)
            self._enter(place)

        if tensor.requires_grad:
            tensor.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _begin_pass(self, stage: int, *, forward: bool) -> None:
        self.passes += 1
        self._visits[stage, forward] = self._visits.get((stage, forward), -1) + 1

    def _enter(self, place: StepPlace) -> None:
        self.now = replace(place, visit=self._visits.get((place.stage, place.phase == "forward"), 0))


def _in_backward() -> bool:
    return current_autograd_node() is not None


# -- bytes at every place ----------------------------------------------------------------------------


@dataclass
class Block:
    """The memory of a tensor and its views, and where it was allocated and freed."""

    born: StepPlace
    born_pass: int
    operator: str
    bytes: int = 0
    died: StepPlace | None = None
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
    """Records every change of memory; ``claim`` says what tensors are for if no rule can tell."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places
        self.blocks: dict[int, Block] = {}  # the live ones, by the key of their storage
        self.changes: list[tuple[Block, int, StepPlace]] = []
        self.observers.append(self._touched)

    def claim(self, part: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            block = self.blocks.get(self.see(tensor))
            if block is not None:
                block.claimed = part

    def forget(self) -> None:
        """Starts the log anew, with the blocks that are alive."""
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
        """Observes operators: marks what collectives read and write."""
        if operator.namespace in ("c10d", "_c10d_functional"):
            for touched in tree_iter((args, result)):
                block = self.blocks.get(self.see(touched)) if isinstance(touched, Tensor) else None
                if block is not None:
                    block.sent = True

    def holders(self) -> list[Holder]:
        """The tensors alive at the peak since `forget`, grouped by origin and size."""
        totals = list(accumulate(difference for _, difference, _ in self.changes))
        last = max(range(len(totals)), key=totals.__getitem__, default=-1)
        live: dict[int, tuple[Block, int]] = {}
        for block, difference, _ in self.changes[: last + 1]:
            live[id(block)] = (block, live.get(id(block), (block, 0))[1] + difference)
        alike: Counter[tuple[str, str, str, int]] = Counter()
        for block, size in live.values():
            where = f"{block.born.phase} {block.born.part}".strip()
            alike[block.part, block.operator, where, size] += size > 0
        holders = [Holder(*key, number) for key, number in alike.items() if number]
        return sorted(holders, key=lambda holder: -holder.bytes * holder.number)

    def moments(self) -> dict[StepPlace, list[Bytes]]:
        """Memory by part after every change since `forget`, grouped by the place of the change."""
        live: Bytes = dict.fromkeys(PARTS, 0.0)
        moments: dict[StepPlace, list[Bytes]] = {}
        for block, difference, place in self.changes:
            live[block.part] += difference
            moments.setdefault(place, []).append(dict(live))
        return moments
