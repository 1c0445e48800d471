"""Errors of published runs by constants that were fitted without them: without their model, source or device.

A device's constants are fitted on its rows that are not left out. Where none remain it has what its file in the
catalogue would then have: the constants of the nearest device of its family (`FAMILIES`) that still has rows, else the
generic ones.

Log errors are near linear in the logarithms of the constants, so that their slopes at the shipped constants replace a
fit for everything that is left out (`bench/fit_devices.py --refit` compares).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import numpy as np

from fit_devices import (
    Array,
    Fit,
    constant,
    device_of,
    efficiency_of,
    improved,
    log_errors,
    slopes,
    source_weights,
)
from shardwise.cost.accuracy.runs import PublishedRun
from shardwise.spec.hardware import Efficiency

What = Literal["model", "source", "device"]
# Generations of a vendor's devices, oldest first, and in each the devices that are alike side by side.
FAMILIES = (
    (("a100-80gb",), ("h100-sxm", "h200-sxm", "h100-sxm-96gb-hbm2e"), ("b200", "gb200", "gb300", "b300")),
    (("tpu-v4",), ("tpu-v5e", "tpu-v5p"), ("tpu-v6e",), ("tpu7x",)),
    (("mi300x", "mi325x"), ("mi350x", "mi355x")),
    (("gaudi2",), ("gaudi3",)),
)


@dataclass(frozen=True)
class Linear:
    """Log errors of the rows of one device, by the shipped constants of a device, and their slopes in these."""

    errors: Array
    slopes: Array


class LeftOut:
    """Errors with rows left out of the fits of ``runs``."""

    def __init__(self, runs: Sequence[PublishedRun], fits: Iterable[Fit]) -> None:
        self.runs = tuple(runs)
        self.fits = {fit.device: fit for fit in fits}
        self.each, self._generic = cache(self._each), cache(self._by_generic_constants)
        self._linear, self._change = cache(self._around), cache(self._refitted)

    def _each(self, what: What) -> dict[str, float]:
        """Log error of every row, all rows of the same model, source or device left out."""
        found: dict[str, float] = {}
        for name in sorted({name_of(run, what) for run in self.runs}):
            found |= self.without(what, frozenset((name,)), of=name)
        return found

    def without(self, what: What, names: frozenset[str], of: str) -> dict[str, float]:
        """Log errors of the rows of ``of``, all rows of ``names`` left out."""
        found: dict[str, float] = {}
        for device in self._rows:
            if any(name_of(run, what) == of for run in self._rows[device]):
                errors = self._errors(device, what, names)
                found |= {
                    run.row_id: float(error)
                    for run, error in zip(self._rows[device], errors)
                    if name_of(run, what) == of
                }
        return found

    @cached_property
    def _rows(self) -> dict[str, list[PublishedRun]]:
        found: dict[str, list[PublishedRun]] = {}
        for run in self.runs:
            found.setdefault(device_of(run), []).append(run)
        return found

    def _errors(self, device: str, what: What, names: frozenset[str]) -> Array:
        for other in self._nearest_first(device):
            change = self._change(other, what, names)
            if change is not None:
                linear = self._linear(device, other)
                return linear.errors + linear.slopes @ change
        return self._generic(device)

    def _nearest_first(self, device: str) -> list[str]:
        """Of the device and its family those that are fitted: its own generation first, then newer before older."""
        family = next((own for own in FAMILIES if any(device in generation for generation in own)), ((device,),))
        own = next(number for number, generation in enumerate(family) if device in generation)
        at = family[own].index(device)
        far = [
            (abs(number - own), -number, abs(index - at) if number == own else index, other)
            for number, generation in enumerate(family)
            for index, other in enumerate(generation)
        ]
        return [other for *_, other in sorted(far) if other in self.fits]

    def _by_generic_constants(self, device: str) -> Array:
        return log_errors(self._rows[device], Efficiency())

    def _around(self, device: str, constants_of: str) -> Linear:
        rows, efficiency = self._rows[device], efficiency_of(constants_of)
        errors = log_errors(rows, efficiency)
        return Linear(errors, slopes(rows, efficiency, self._shipped(constants_of), errors))

    def _shipped(self, device: str) -> Mapping[str, float]:
        efficiency = efficiency_of(device)
        return {name: constant(efficiency, name) for name in self.fits[device].priors}

    def _refitted(self, device: str, what: What, names: frozenset[str]) -> Array | None:
        """By how much the logarithms of a device's constants change; None if no row is left to fit them on."""
        rows = self._rows.get(device, [])
        kept = np.array([name_of(run, what) not in names for run in rows], bool)
        if not kept.any():
            return None
        linear, priors = self._linear(device, device), self.fits[device].priors
        weights = source_weights([run for run, keep in zip(rows, kept) if keep])
        off_prior = np.array([math.log(value / priors[name]) for name, value in self._shipped(device).items()])
        change = np.zeros(len(off_prior))
        for _ in range(20):
            now = linear.errors[kept] + linear.slopes[kept] @ change
            change = change + improved(now, linear.slopes[kept], off_prior + change, weights)
        return change


def name_of(run: PublishedRun, what: What) -> str:
    return {"model": run.model_name, "source": run.source.name, "device": device_of(run)}[what]
