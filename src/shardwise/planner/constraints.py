"""What the user fixes, bounds or excludes: the values that each field of a strategy may take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.schedules import job_schedules
from shardwise.spec.strategy import DIMENSIONS, Offload, Strategy

INTEGERS = ("tp", "cp", "dp", "pp", "ep", "expert_tp", "zero", "shard_group", "microbatch", "interleave",
            "recompute_layers")  # fmt: skip
OFFLOADS: dict[str, Offload] = {
    "none": Offload(),
    "optimizer": Offload(optimizer=1.0),
    "gradients": Offload(optimizer=1.0, gradients=1.0),
    "states": Offload(optimizer=1.0, gradients=1.0, weights=1.0),
    "activations": Offload(activations=1.0),
    "optimizer+activations": Offload(optimizer=1.0, activations=1.0),
    "gradients+activations": Offload(optimizer=1.0, gradients=1.0, activations=1.0),
    "states+activations": Offload(optimizer=1.0, gradients=1.0, weights=1.0, activations=1.0),
}
WORDS: dict[str, Callable[[], tuple[str, ...]] | tuple[str, ...]] = {
    "schedule": job_schedules,
    "recompute": ("none", "selective", "full"),
    "context_method": ("ring", "all-gather", "ulysses"),
    "offload": tuple(OFFLOADS),
    "sequence_parallel": ("true", "false"),
    "keep_parameters": ("true", "false"),
    "accumulate": ("sharded", "local"),
    "stage_layers": ("even", "balanced"),
}
FIELDS = (*INTEGERS, *WORDS, "order")
_SHORT = {"sp": "sequence_parallel", "mbs": "microbatch", "v": "interleave", "group": "shard_group"}
_RANGE = re.compile(r"(\d{0,18})\.\.(\d{0,18})")
_WHOLE = re.compile(r"[+-]?\d{1,18}")


@dataclass(frozen=True)
class Allowed:
    """The values a field may take: those listed, or else whole numbers between two bounds."""

    values: tuple[Any, ...] | None = None
    low: int | None = None
    high: int | None = None

    def __contains__(self, value: Any) -> bool:
        if self.values is not None:
            return value in self.values
        if value is None:  # "all ranks" and "all layers" are not numbers
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def candidates(self, usual: Iterable[Any]) -> tuple[Any, ...]:
        """The values to try: those listed, or the usual ones within the bounds."""
        return self.values if self.values is not None else tuple(value for value in usual if value in self)

    def __str__(self) -> str:
        if self.values is not None:
            return " or ".join(shown_value(value) for value in self.values)
        return f"{self.low or 1}..{'' if self.high is None else self.high}"


@dataclass(frozen=True)
class Constraints:
    """Which strategies a search may offer."""

    allowed: Mapping[str, Allowed] = field(default_factory=dict)  # the values of each field
    excluded: tuple[Mapping[str, Allowed], ...] = ()  # a strategy is excluded if it matches every field of some entry

    def candidates(self, name: str, usual: Iterable[Any]) -> tuple[Any, ...]:
        """The values of a field to try: those allowed, or the ``usual`` ones, less those excluded by themselves."""
        values = self.allowed[name].candidates(usual) if name in self.allowed else tuple(usual)
        alone = [entry[name] for entry in self.excluded if set(entry) == {name}]
        return tuple(value for value in values if not any(value in excluded for excluded in alone))

    def names(self, name: str) -> bool:
        """Whether the user restricts a field."""
        return name in self.allowed

    def with_allowed(self, more: Mapping[str, Allowed]) -> Constraints:
        """These and ``more`` combined; raises SpecError if they contradict."""
        merged = dict(self.allowed)
        for name, values in more.items():
            other = merged.get(name)
            merged[name] = values if other is None else _both(name, other, values)
        return Constraints(merged, self.excluded)


def _both(name: str, first: Allowed, second: Allowed) -> Allowed:
    """The values that both allow."""
    for listed, other in ((first, second), (second, first)):
        if listed.values is not None:
            values = tuple(value for value in listed.values if value in other)
            if values:
                return Allowed(values)
            break
    else:
        low = max((bounds.low for bounds in (first, second) if bounds.low is not None), default=None)
        high = min((bounds.high for bounds in (first, second) if bounds.high is not None), default=None)
        if low is None or high is None or low <= high:
            return Allowed(None, low, high)
    raise SpecError(name, f"cannot be both {first} and {second}", "drop one of the two")


def field_name(text: str) -> str:
    """The field of the strategy that a name on the command line means."""
    name = text.strip().lstrip("-").replace("-", "_")
    name = _SHORT.get(name, name)
    if name not in FIELDS:
        raise SpecError("", f"{shown(text)} is not a field of a strategy", nearest_name(name, FIELDS))
    return name


def allowed(name: str, text: str) -> Allowed:
    """The values that ``text`` allows: "8", "2,4,8", "2..8", "..8", "none,selective"."""
    text = text.strip()
    match = _RANGE.fullmatch(text)
    if match and name in INTEGERS:
        low, high = (int(part) if part else None for part in match.groups())
        if low is not None and high is not None and low > high:
            raise SpecError(name, f"{shown(text)} is an empty range", f"write {high}..{low}")
        return Allowed(None, low, high)
    if name == "order":
        return Allowed((_order(text),))
    return Allowed(tuple(dict.fromkeys(_value(name, part.strip()) for part in text.split(","))))


def parse_constraints(text: str) -> dict[str, Allowed]:
    """The fields of "tp=8,pp=1" or "zero=1,schedule=1f1b"; a value may be a range like 2..8."""
    result: dict[str, Allowed] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or not value.strip():
            raise SpecError("", f"{shown(part)} is not FIELD=VALUE", "write it like tp=8,pp=1")
        name = field_name(name)
        if name in result:
            raise SpecError(name, "is given twice", "give each field once")
        result[name] = allowed(name, value)
    return result


def _order(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in re.split(r"[,\s-]+", text) if part.strip())
    if sorted(parts) != sorted(DIMENSIONS):
        raise SpecError("order", f"{shown(text)} does not name tp, cp, dp and pp once each", "write tp-cp-dp-pp")
    return parts


def _value(name: str, text: str) -> Any:
    if name in INTEGERS:
        if name == "shard_group" and text == "all":
            return None
        lowest = 0 if name in ("zero", "recompute_layers") else 1
        if not _WHOLE.fullmatch(text):
            raise SpecError(name, f"{shown(text)} is not a whole number", "write 8, 2,4,8 or 2..8")
        number = int(text)
        if number < lowest or (name == "zero" and number > 3):
            raise SpecError(name, f"{number} is out of range", "0 to 3" if name == "zero" else f"{lowest} or more")
        return number
    words = WORDS[name]
    known = words() if callable(words) else words
    if text not in known:
        raise SpecError(name, f"{shown(text)} is not known", nearest_name(text, known))
    if name in ("sequence_parallel", "keep_parameters"):
        return text == "true"
    return OFFLOADS[text] if name == "offload" else text


def shown_value(value: Any) -> str:
    """A value as the command line writes it."""
    if isinstance(value, Offload):
        return offload_name(value)
    if isinstance(value, tuple):
        return "-".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def offload_name(offload: Offload) -> str:
    shares = (offload.optimizer, offload.gradients, offload.weights, offload.activations)
    for name, known in OFFLOADS.items():
        if shares == (known.optimizer, known.gradients, known.weights, known.activations):
            return name
    return "own"


def field_value(strategy: Strategy, name: str) -> Any:
    """The value of a field as constraints see it."""
    if name == "dp":
        return strategy.data_parallel
    if name == "expert_tp":
        return strategy.expert_tensor_parallel
    return getattr(strategy, name)


# Fields that have an effect only in some strategies, and a test for these strategies.
ACTS: dict[str, Callable[[Strategy], bool]] = {
    "sequence_parallel": lambda strategy: strategy.tp > 1,
    "context_method": lambda strategy: strategy.cp > 1,
    "expert_tp": lambda strategy: strategy.expert_tp is not None,
    "schedule": lambda strategy: strategy.pp > 1,
    "interleave": lambda strategy: strategy.pp > 1,
    "stage_layers": lambda strategy: strategy.pp > 1,
    "recompute_layers": lambda strategy: strategy.recompute == "full",
    "shard_group": lambda strategy: strategy.zero > 0,
    "keep_parameters": lambda strategy: strategy.zero == 3,
    "accumulate": lambda strategy: strategy.zero >= 2,
}


def has(strategy: Strategy, name: str, values: Allowed, *, idle: bool) -> bool:
    """Whether a field has one of the values; ``idle`` is the answer for a field without effect."""
    if name in ACTS and not ACTS[name](strategy):
        return idle
    if name == "shard_group" and strategy.sharding_group in values:
        return True  # the group of all ranks has that size
    if name == "order" and values.values is not None:
        return _used_order(strategy, strategy.order) in [_used_order(strategy, order) for order in values.values]
    return field_value(strategy, name) in values


def _used_order(strategy: Strategy, order: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in order if strategy.degree(name) > 1)
