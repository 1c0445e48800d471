"""One kind of communication in a step: its payload, its collective, how often it runs, its cost and its overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from shardwise.collectives import CollectiveCost, CollectiveKind, Topology, collective_cost
from shardwise.collectives.arrays import is_array, maximum, minimum
from shardwise.cost.compute.operators import gradient_share
from shardwise.layout.network import level_names
from shardwise.layout.payloads import PASSES, Pass, Payload
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

# -- Overlap of communication with computation, for one rank (numbers) and a table of strategies (columns) alike

Window = Literal["none", "forward", "backward", "attention forward", "attention backward"]


@dataclass(frozen=True)
class OverlappedTransfer:
    """All transfers of one kind in a step; every figure may be an array."""

    in_pass: Pass  # the pass that waits for it
    seconds: Any  # duration if nothing is overlapped
    link_seconds: Mapping[str, Any]  # how long it keeps each link busy
    window: Window = "none"  # the computation that it may overlap with
    window_share: Any = 1.0  # the part of that computation which is left once the data is ready
    last_only: bool = False  # it may overlap with the last microbatch only, when gradients are complete
    hideable: Any = 1.0  # the share that may overlap: not the first gather, nor the last bucket
    units_taken: Any = 0.0  # the share of the compute units that it occupies
    repeated: Any = 0.0  # the share of a forward pass's transfers that recompute sends again, in the backward pass
    delay: Any = 0.0  # seconds from the beginning of its window to its own

    def beside(self, link: str) -> Any:
        """Seconds in which it does not use the link, which may be busy for longer than the transfer itself takes."""
        return maximum(0.0, self.seconds - self.link_seconds[link])


@dataclass(frozen=True)
class ComputeWindows:
    """Seconds of computation of one step on the busiest device, at its peak (the floor) or as predicted."""

    forward: Any
    backward: Any
    attention_forward: Any
    attention_backward: Any

    def seconds(self, window: Window) -> Any:
        return {
            "none": 0.0,
            "forward": self.forward,
            "backward": self.backward,
            "attention forward": self.attention_forward,
            "attention backward": self.attention_backward,
        }[window]


def hidden_in_layers(transfers: Sequence[OverlappedTransfer], windows: ComputeWindows) -> list[Any]:
    """Hidden seconds of transfers inside a layer: each takes its part of the pass's computation in turn."""
    used: dict[str, Any] = {}
    hidden: list[Any] = []
    for transfer in transfers:
        if transfer.window == "none":
            hidden.append(0.0)
            continue
        left = windows.seconds(transfer.in_pass) - used.get(transfer.in_pass, 0.0)
        available = minimum(left, windows.seconds(transfer.window))
        under = maximum(0.0, minimum(transfer.seconds * transfer.hideable, available))
        used[transfer.in_pass] = used.get(transfer.in_pass, 0.0) + under
        hidden.append(under)
    return hidden


def layer_windows(
    transfers: Sequence[OverlappedTransfer], hidden: Sequence[Any], windows: ComputeWindows
) -> tuple[dict[Pass, Any], dict[Pass, dict[str, Any]]]:
    """Seconds of each pass including the exposed transfers of its layers, and how long these keep each link busy."""
    lasting: dict[Pass, Any] = {which: windows.seconds(which) for which in PASSES}
    busy: dict[Pass, dict[str, Any]] = {which: {} for which in PASSES}
    for transfer, under in zip(transfers, hidden):
        which = transfer.in_pass
        lasting[which] = lasting[which] + (transfer.seconds - under)
        for name, seconds in transfer.link_seconds.items():
            busy[which][name] = busy[which].get(name, 0.0) + seconds
    return lasting, busy


def hidden_across_layers(
    transfers: Sequence[OverlappedTransfer], lasting: Mapping[Pass, Any], busy: Mapping[Pass, Mapping[str, Any]]
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Hidden seconds of transfers that span layers (gradients, gathered parameters, offload), in all and on each link
    that several of them share.

    They overlap with the whole pass (``lasting``, including exposed transfers of the layers), except while the layers
    keep the same link ``busy``. Transfers of every microbatch claim their time before those of the last microbatch.
    """
    hidden: list[Any] = [0.0 for _ in transfers]
    on_links: list[dict[str, Any]] = [{} for _ in transfers]
    taken: _Taken = {}
    claims = [index for index, transfer in enumerate(transfers) if transfer.window != "none"]
    claims.sort(key=lambda index: transfers[index].last_only)
    users = Counter((transfers[index].in_pass, name) for index in claims for name in transfers[index].link_seconds)
    for index in claims:
        transfer, which = transfers[index], transfers[index].in_pass
        hidden[index], free = _hidden_across(transfer, lasting[which], busy[which], taken)
        for name in transfer.link_seconds:
            if users[which, name] > 1:
                most = maximum(0.0, transfer.seconds * transfer.hideable - transfer.beside(name))
                used = minimum(minimum(hidden[index], free[name]), most)
                _take(taken, (which, name), used, last_only=transfer.last_only)
                on_links[index][name] = used
    return hidden, on_links


@dataclass(frozen=True)
class Waiting:
    """The exposed parts of the transfers of one pass, which run, and are waited for, at the same time."""

    left: tuple[Any, ...]  # exposed seconds of each transfer
    longest: Any  # how long the step waits: for the longest of them, or for the busiest link

    @property
    def alone(self) -> Any:
        """How long they would take one after the other."""
        return sum(self.left, 0.0)

    def beside(self, other: Waiting) -> Waiting:
        """Both together, if they share no link."""
        return Waiting((*self.left, *other.left), maximum(self.longest, other.longest))


def waiting(
    transfers: Sequence[OverlappedTransfer], hidden: Sequence[Any], on_links: Sequence[Mapping[str, Any]], which: Pass
) -> Waiting:
    """What overlap leaves exposed of the transfers of a pass.

    While one transfer waits for its latencies another may use the link, so what counts is how long the link is busy
    with bytes that are not hidden. (The sum of the exposed seconds would fall faster than the window grows.)
    """
    together = [
        (transfer, transfer.seconds - under, used)
        for transfer, under, used in zip(transfers, hidden, on_links)
        if transfer.in_pass == which and transfer.window != "none"
    ]
    left = tuple(exposed for _, exposed, _ in together)
    longest: Any = left[0] if left else 0.0
    for exposed in left[1:]:
        longest = maximum(longest, exposed)
    for name in dict.fromkeys(name for _, _, used in together for name in used):
        first, *others = (
            minimum(transfer.seconds, transfer.link_seconds[name]) - used[name]
            for transfer, _, used in together
            if name in used
        )
        longest = maximum(longest, sum(others, first))
    return Waiting(left, longest)


def added_seconds(transfers: Sequence[OverlappedTransfer], hidden: Sequence[Any], to: Any) -> Any:
    """``to``, plus what lengthens a step besides waiting: transfers without overlap, and slowed computation."""
    for transfer, under in zip(transfers, hidden):
        if transfer.window == "none":
            to = to + transfer.seconds
        elif is_array(transfer.units_taken) or transfer.units_taken:
            to = to + transfer.units_taken * under
    return to


# Seconds of each link in each pass that are already claimed: in all microbatches, and in the last one. None instead of
# 0 spares an array operation.
_Taken = dict[tuple[Pass, str], tuple[Any, Any]]


def _hidden_across(
    transfer: OverlappedTransfer, lasting: Any, busy: Mapping[str, Any], taken: _Taken
) -> tuple[Any, dict[str, Any]]:
    """Hidden seconds of a transfer, and the seconds in which each of its links is free for it."""
    share, late = transfer.window_share, is_array(transfer.delay) or transfer.delay > 0
    window = maximum(0.0, share * lasting - transfer.delay) if late else share * lasting
    hidden, free = minimum(transfer.seconds * transfer.hideable, window), dict.fromkeys(transfer.link_seconds, window)
    for name in transfer.link_seconds:
        spread, last = taken.get((transfer.in_pass, name), (None, None))
        if spread is None and last is None and name not in busy:
            continue  # free all the time: the window itself is the limit
        unused = lasting - busy.get(name, 0.0)
        left = share * maximum(0.0, unused if spread is None else unused - spread)
        if late:
            left = maximum(0.0, left - transfer.delay)
        free[name] = left if last is None else maximum(0.0, left - last)
        # A busy link holds up only what goes over it; the rest of the transfer can still hide.
        hidden = minimum(hidden, free[name] + transfer.beside(name))
    return hidden, free


def _take(taken: _Taken, link: tuple[Pass, str], used: Any, *, last_only: bool) -> None:
    spread, last = taken.get(link, (None, None))
    if last_only:
        last = used if last is None else last + used
    else:
        spread = used if spread is None else spread + used
    taken[link] = (spread, last)


# -- traffic --------------------------------------------------------------------------------------

IN_LAYER = ("tp", "cp", "ep")


@dataclass(frozen=True)
class Traffic:
    """Equal collectives of one step on the busiest device. Fields without a line are those of `OverlappedTransfer`."""

    dimension: str
    payload: Payload
    kind: CollectiveKind
    size_bytes: float  # of one collective
    count: float  # collectives in a step
    cost: CollectiveCost  # of one collective
    network: str  # the network levels that its group spans, in words
    window: Window = "none"
    window_share: float = 1.0
    last_only: bool = False
    delay_seconds: float = 0.0
    unhideable: float = 0.0  # the share that cannot be overlapped
    units_taken: float = 0.0
    repeated: float = 0.0
    once: bool = False  # it is sent after the last microbatch, and not overlapped
    communicator: str = ""  # what runs it, where others of the same pass take turns with it there
    fixed_exposed_seconds: float | None = None
    """Exposed seconds where the pipeline's schedule determines them, as of messages between stages."""
    exposed_seconds: float = 0.0  # what the step waits for
    under_compute_seconds: float = 0.0
    """Hidden by computation; the rest of what is not exposed overlaps with other transfers."""

    def but(self, **changes: Any) -> Traffic:
        """A copy with some fields changed, ten times as fast as `dataclasses.replace`: a price makes hundreds."""
        copy = object.__new__(Traffic)
        copy.__dict__.update(self.__dict__, **changes)
        return copy

    @property
    def seconds(self) -> float:
        return self.count * float(self.cost.seconds)

    @property
    def hidden_seconds(self) -> float:
        return max(0.0, self.seconds - self.exposed_seconds)

    @property
    def slowed_seconds(self) -> float:
        """How much it slows the computation it overlaps with, by the compute units that it occupies."""
        return self.units_taken * self.under_compute_seconds

    @property
    def added_seconds(self) -> float:
        """How much it lengthens the step: what is exposed, and how much computation slows down."""
        return self.exposed_seconds + self.slowed_seconds

    @property
    def what(self) -> str:
        """In words; decisions depend on the payload."""
        return self.payload.words

    @property
    def in_pass(self) -> Pass:
        return self.payload.in_pass

    @property
    def level_seconds(self) -> dict[str, float]:
        """Seconds in the step that it keeps each network level's links busy."""
        seconds: dict[str, float] = {}
        for level in self.cost.levels:
            seconds[level.level_name] = seconds.get(level.level_name, 0.0) + self.count * float(level.busy_seconds)
        return seconds

    @property
    def in_layer(self) -> bool:
        """Whether it belongs to a layer of a microbatch."""
        return self.dimension in IN_LAYER and not self.once

    @property
    def transfer(self) -> OverlappedTransfer:
        """The same as an input of `overlap`."""
        links = self.level_seconds
        if self.communicator:
            links[self.communicator] = self.seconds
        return OverlappedTransfer(
            self.in_pass,
            self.seconds,
            links,
            self.window,
            self.window_share,
            self.last_only,
            1 - self.unhideable,
            self.units_taken,
            self.repeated,
            self.delay_seconds,
        )

    @property
    def bytes_sent(self) -> float:
        """Bytes the busiest device sends in the whole step."""
        return self.count * float(self.cost.sent_bytes)


def in_passes(job: Job, traffics: list[Traffic]) -> list[Traffic]:
    """Traffic inside layers, as often as its passes run: backward only where a gradient flows; forward once more for
    the reference of a preference."""
    flows = gradient_share(job.model, job.training.tuning)
    times = {"backward": flows, "forward": job.training.forward_passes}
    if set(times.values()) == {1}:
        return traffics
    return [
        replace(traffic, count=traffic.count * times[traffic.in_pass]) if traffic.in_layer else traffic
        for traffic in traffics
    ]


def priced(
    dimension: str,
    payload: Payload,
    kind: CollectiveKind,
    size_bytes: float,
    count: float,
    topology: Topology,
    algorithm: str,
    again: float = 0,
    **overlap: object,
) -> Traffic:
    """A traffic with its collective priced on the network that its group spans.

    Recompute repeats the share ``again`` of the ``count`` collectives.
    """
    cost, repeated = collective_price(kind, size_bytes, topology, algorithm), again / (1 + again)
    count, network = count * (1 + again), level_names(topology)
    return Traffic(dimension, payload, kind, size_bytes, count, cost, network, repeated=repeated, **overlap)  # type: ignore[arg-type]


def collective_price(kind: CollectiveKind, size_bytes: Any, topology: Topology, algorithm: str) -> CollectiveCost:
    """By the given algorithm; if there is none by that name for this collective or network, by the cheapest."""
    price = _price_of_one if isinstance(size_bytes, float) else _price  # many layouts need the price of one size
    return price(kind, size_bytes, topology, algorithm)


def _price(kind: CollectiveKind, size_bytes: Any, topology: Topology, algorithm: str) -> CollectiveCost:
    if algorithm not in ("auto", "textbook"):
        try:
            return collective_cost(kind, size_bytes, topology, algorithm)
        except SpecError:
            algorithm = "auto"
    return collective_cost(kind, size_bytes, topology, algorithm)


_price_of_one = lru_cache(maxsize=4096)(_price)


def with_exposed_seconds(traffics: list[Traffic], windows: ComputeWindows) -> list[Traffic]:
    """The same traffics with their exposed seconds."""
    result = list(traffics)
    inside = [index for index, traffic in enumerate(traffics) if traffic.in_layer]
    layers = [traffics[index].transfer for index in inside]
    hidden = hidden_in_layers(layers, windows)
    for index, transfer, under in zip(inside, layers, hidden):
        left_over = transfer.seconds - under
        result[index] = traffics[index].but(exposed_seconds=left_over, under_compute_seconds=under)
    lasting, busy = layer_windows(layers, hidden, windows)
    across = [i for i, t in enumerate(traffics) if not t.in_layer and t.fixed_exposed_seconds is None and t.seconds]
    transfers = [traffics[index].transfer for index in across]
    hidden, on_links = hidden_across_layers(transfers, lasting, busy)
    left = {which: waiting(transfers, hidden, on_links, which) for which in PASSES}
    for index, transfer, under in zip(across, transfers, hidden):
        together = left[transfer.in_pass]
        # Transfers that are waited for at the same time share that time in proportion.
        share = together.longest / together.alone if transfer.window != "none" and together.alone else 1.0
        exposed = (transfer.seconds - under) * share
        result[index] = traffics[index].but(exposed_seconds=exposed, under_compute_seconds=under)
    scheduled = ((traffic, traffic.fixed_exposed_seconds) for traffic in result)
    return [traffic if fixed is None else traffic.but(exposed_seconds=fixed) for traffic, fixed in scheduled]
