"""Overlap of communication with computation, for a single rank (numbers) and a table of strategies (columns) alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.collectives.arrays import is_array, maximum, minimum
from shardwise.layout.payloads import PASSES, Pass

Window = Literal["none", "forward", "backward", "attention forward", "attention backward"]


@dataclass(frozen=True)
class OverlappedTransfer:
    """One kind of communication of a step; every figure may be an array.

    ``link_seconds`` is how long it keeps each link busy. ``window`` is the computation it may overlap with, and
    ``window_share`` the part of it that is left once the data is ready: with ``last_only`` that of the last microbatch,
    when gradients are complete. ``hideable`` is the share of the communication that may overlap (not the first gather,
    nor the last bucket), ``units_taken`` the share of the compute units that it occupies. ``repeated`` is the share of
    a forward pass's communication that recompute sends, in the backward pass. It begins ``delay`` seconds after its
    window does.
    """

    in_pass: Pass
    seconds: Any
    link_seconds: Mapping[str, Any]
    window: Window = "none"
    window_share: Any = 1.0
    last_only: bool = False
    hideable: Any = 1.0
    units_taken: Any = 0.0
    repeated: Any = 0.0
    delay: Any = 0.0

    def beside(self, link: str) -> Any:
        """Seconds in which it does not use the link."""
        return self.seconds - self.link_seconds[link]


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
    """Hidden seconds of transfers inside a layer, which overlap with their pass's computation one after the other."""
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
    """Hidden seconds of transfers that span layers: gradients, gathered parameters and offload.

    They overlap with the whole pass (``lasting``, including exposed transfers of the layers), except while the layers
    keep the same link ``busy``. Those of all microbatches claim their time before those of the last one. Besides, how
    much of its time on every link that it shares with others each of them hides.
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
    """What is left of the transfers of one pass, which run and are waited for at the same time.

    ``left`` are the seconds of each; ``longest`` is the longest of them, or the busiest link, and so the step's wait.
    """

    left: tuple[Any, ...]
    longest: Any

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
    """What remains of the pass's transfers that may be overlapped.

    While one of them waits for its latencies another may use the link, so a link is waited for as long as its own
    seconds that are not hidden: the sum of what is left of the transfers would fall faster than their window grows.
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
        first, *others = (transfer.link_seconds[name] - used[name] for transfer, _, used in together if name in used)
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


# Time of a link in a pass that is taken: in all microbatches, and in the last; None spares an array operation.
_Taken = dict[tuple[Pass, str], tuple[Any, Any]]


def _hidden_across(
    transfer: OverlappedTransfer, lasting: Any, busy: Mapping[str, Any], taken: _Taken
) -> tuple[Any, dict[str, Any]]:
    """Its hidden seconds, and those in which each of its links is free for it."""
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
