"""What communication hides under what: one rule for a single rank (numbers) and for a table of strategies (columns)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.collectives.arrays import maximum, minimum

Pass = Literal["forward", "backward"]
Window = Literal["none", "forward", "backward", "attention forward", "attention backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward")
NOTHING = 0.0


@dataclass(frozen=True)
class Transfer:
    """One kind of communication of a step, as overlap sees it; every figure may be an array.

    ``link_seconds`` is how long it keeps each link busy. ``window`` is the computation it may run under,
    ``window_share`` the part of that computation that is there when the data is: with ``last_only`` that of the last
    microbatch, when gradients are complete. ``unhideable`` is the share of the communication that nothing can hide (the
    first gather, the last bucket), ``units_taken`` the share of the compute units that it runs on.
    """

    in_pass: Pass
    seconds: Any
    link_seconds: Mapping[str, Any]
    window: Window = "none"
    window_share: Any = 1.0
    last_only: bool = False
    unhideable: Any = 0.0
    units_taken: Any = 0.0


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


def hidden_in_layers(transfers: Sequence[Transfer], windows: ComputeWindows) -> list[Any]:
    """Seconds of each that hide under its pass's computation, one after the other: what belongs to a layer."""
    used: dict[str, Any] = {}
    hidden: list[Any] = []
    for transfer in transfers:
        if transfer.window == "none":
            hidden.append(0.0)
            continue
        left = windows.seconds(transfer.in_pass) - used.get(transfer.in_pass, 0.0)
        available = minimum(left, windows.seconds(transfer.window))
        under = maximum(0.0, minimum(transfer.seconds * (1 - transfer.unhideable), available))
        used[transfer.in_pass] = used.get(transfer.in_pass, 0.0) + under
        hidden.append(under)
    return hidden


def hidden_across_layers(
    transfers: Sequence[Transfer], lasting: Mapping[Pass, Any], busy: Mapping[Pass, Mapping[str, Any]]
) -> list[Any]:
    """Seconds of each that hide under computation: gradients, gathered parameters and offload, which span layers.

    They hide under the whole pass (``lasting``, exposed transfers of the layers included), except while the layers
    keep the same link ``busy``. Those of all microbatches claim their time before those of the last one.
    """
    hidden: list[Any] = [0.0 for _ in transfers]
    taken: dict[tuple[str, str], tuple[Any, Any]] = {}
    claims = [index for index, transfer in enumerate(transfers) if transfer.window != "none"]
    claims.sort(key=lambda index: transfers[index].last_only)
    for place, index in enumerate(claims):
        transfer = transfers[index]
        hidden[index] = _hidden_across(transfer, lasting[transfer.in_pass], busy[transfer.in_pass], taken)
        later = {
            name
            for other in claims[place + 1 :]
            if transfers[other].in_pass == transfer.in_pass
            for name in transfers[other].link_seconds
        }
        _take(transfer, hidden[index], later, taken)
    return hidden


@dataclass(frozen=True)
class Waiting:
    """What is left of the transfers of one pass and waited for together, each on its links at the same time.

    ``alone`` is how long they would take one after the other, ``longest`` how long the longest takes, or the busiest
    link; which is how long the step waits.
    """

    alone: Any = 0.0
    longest: Any = 0.0

    def beside(self, other: Waiting) -> Waiting:
        """Both together, where no link is in both."""
        return Waiting(self.alone + other.alone, maximum(self.longest, other.longest))


def waiting(transfers: Sequence[Transfer], hidden: Sequence[Any], which: Pass) -> Waiting:
    """What the pass's transfers that may be overlapped leave."""
    links: dict[str, Any] = {}
    alone: Any = 0.0
    longest: Any = 0.0
    left = [(one, one.seconds - under) for one, under in zip(transfers, hidden) if one.in_pass == which]
    left = [(one, exposed) for one, exposed in left if one.window != "none"]
    if len(left) == 1:
        return Waiting(left[0][1], left[0][1])
    for one, exposed in left:
        alone, longest = alone + exposed, maximum(longest, exposed)
        for name, seconds in one.link_seconds.items():
            links[name] = links.get(name, 0.0) + minimum(exposed, seconds)
    for seconds in links.values():
        longest = maximum(longest, seconds)
    return Waiting(alone, longest)


def _hidden_across(
    transfer: Transfer, lasting: Any, busy: Mapping[str, Any], taken: dict[tuple[str, str], tuple[Any, Any]]
) -> Any:
    """``taken`` is what others used of each link: of all microbatches, and of the last."""
    share = transfer.window_share
    hidden = minimum(transfer.seconds * (1 - transfer.unhideable), share * lasting)
    for name, needed in transfer.link_seconds.items():
        # Where nothing was taken, arrays need not be touched.
        spread, last = taken.get((transfer.in_pass, name), (NOTHING, NOTHING))
        free = share * maximum(0.0, lasting - busy.get(name, 0.0) - spread)
        if last is not NOTHING:
            free = maximum(0.0, free - last)
        # A busy link holds up only what goes over it; the rest of the transfer can still hide.
        hidden = minimum(hidden, free + (transfer.seconds - needed))
    return hidden


def _take(transfer: Transfer, hidden: Any, later: set[str], taken: dict[tuple[str, str], tuple[Any, Any]]) -> None:
    """Notes what a hidden transfer uses of the links that ``later`` ones want too."""
    for name in later & transfer.link_seconds.keys():
        spread, last = taken.get((transfer.in_pass, name), (NOTHING, NOTHING))
        used = maximum(0.0, hidden - (transfer.seconds - transfer.link_seconds[name]))
        taken[transfer.in_pass, name] = (spread, last + used) if transfer.last_only else (spread + used, last)
