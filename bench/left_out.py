"""Errors of published runs by constants that were fitted without them: without their model, source or device.

A device's constants are fitted on its rows that are not left out. Where none remain it has what its file in the
catalogue would then have: the constants of the nearest device of its family (`FAMILIES`) that still has rows, else the
generic ones.

Log errors are near linear in the logarithms of the constants, so that their slopes at the shipped constants replace a
fit for everything that is left out (`bench/fit_devices.py --refit` compares).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
    widths_of,
    with_constants,
)
from shardwise.accuracy.runs import PublishedRun
from shardwise.spec.efficiency import Efficiency

What = Literal["model", "source", "device"]
# Generations of a vendor's devices, oldest first, and in each the devices that are alike side by side.
FAMILIES = (
    (
        ("a100-80gb",),
        ("h100-sxm", "h200-sxm", "h100-sxm-96gb-hbm2e", "h100-sxm-64gb"),
        ("b200", "gb200", "gb300", "b300"),
    ),
    (("tpu-v4",), ("tpu-v5e", "tpu-v5p"), ("tpu-v6e",), ("tpu7x",)),
    (("mi300x", "mi325x"), ("mi350x", "mi355x")),
    (("gaudi2",), ("gaudi3",)),
)


# What the file of a device without rows would have, where more is known than its family's constants: those of the H100
# at the share of its clock that 500 of 700 W leave; the best matmul of a search over shapes (stas00/ml-engineering
# 744d01e) times 0.81, the share of its own best that the H100 sustains; what its vector units take for scores.
SLOWER_CLOCKS = {("h100-sxm-96gb-hbm2e", "h100-sxm"): 0.82}
_CLOCKED = ("gemm.16", "gemm.fp8", "attention_forward", "attention_backward")
KNOWN = {
    "gaudi2": {"gemm.16": 0.81 * 0.969, "gemm.fp8": 0.81 * 0.955},
    "ascend-910b": {"exponential_flops": 512.0},
}


@dataclass(frozen=True)
class Linear:
    """Log errors of the rows of one device, by the shipped constants of a device, and their slopes in these."""

    errors: Array
    slopes: Array


class LeftOut:
    """Errors with rows left out of the fits of ``runs``."""

    def __init__(self, runs: Sequence[PublishedRun], fits: Iterable[Fit]) -> None:
        self.runs = tuple(runs)
        self.fits = tuple(fits)
        self.each = cache(self._each)
        self._generic, self._linear, self._change = cache(self._generic_errors), cache(self._around), cache(self._refit)

    def _each(self, what: What) -> dict[str, float]:
        """Log error of every row, all rows of the same model, source or device left out."""
        found: dict[str, float] = {}
        for name in sorted({name_of(run, what) for run in self.runs}):
            found |= self.without(what, frozenset((name,)), of=name)
        return found

    def without(self, what: What, names: frozenset[str], of: str) -> dict[str, float]:
        """Log errors of the rows of ``of``, all rows of ``names`` left out."""
        found: dict[str, float] = {}
        for device, rows in self._rows.items():
            if any(name_of(run, what) == of for run in rows):
                errors = self._errors(device, what, names)
                found |= {run.row_id: float(error) for run, error in zip(rows, errors) if name_of(run, what) == of}
        return found

    @cached_property
    def _rows(self) -> dict[str, list[PublishedRun]]:
        found: dict[str, list[PublishedRun]] = {}
        for run in self.runs:
            found.setdefault(device_of(run), []).append(run)
        return found

    def _fits_of(self, device: str) -> list[Fit]:
        return [fit for fit in self.fits if device in fit.devices]

    def _errors(self, device: str, what: What, names: frozenset[str]) -> Array:
        """By the constants of the nearest device whose dense models are not all left out."""
        for other in self._nearest_first(device):
            fits = self._fits_of(other)
            changes = [self._change(fit, what, names) for fit in fits]
            if changes[0] is None:
                continue
            linear = self._linear(device, other)
            known = [change if change is not None else -_off_prior(fit, other) for fit, change in zip(fits, changes)]
            return linear.errors + linear.slopes @ np.concatenate(known)
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
        return [other for *_, other in sorted(far) if self._fits_of(other)]

    def _generic_errors(self, device: str) -> Array:
        return log_errors(self._rows[device], KNOWN.get(device, {}), Efficiency())

    def _around(self, device: str, constants_of: str) -> Linear:
        rows, base = self._rows[device], efficiency_of(constants_of)
        if (device, constants_of) in SLOWER_CLOCKS:
            share = SLOWER_CLOCKS[device, constants_of]
            base = with_constants(base, {name: share * constant(base, name) for name in _CLOCKED})
        constants = {name: constant(base, name) for fit in self._fits_of(constants_of) for name in fit.priors}
        errors = log_errors(rows, constants, base)
        return Linear(errors, slopes(rows, constants, errors, base))

    def _refit(self, fit: Fit, what: What, names: frozenset[str]) -> Array | None:
        """By how much the logarithms of a fit's constants change; None if no row is left to fit them on."""
        kept = [run for run in self.runs if fit.covers(run) and name_of(run, what) not in names]
        if not kept:
            return None
        rows = [self._row(run, fit) for run in kept]
        errors, slope = np.array([error for error, _ in rows]), np.array([slope for _, slope in rows])
        weights = source_weights(kept)
        off_prior, change = _off_prior(fit, fit.devices[0]), np.zeros(len(fit.priors))
        for _ in range(20):
            now = errors + slope @ change
            change = change + improved(now, slope, off_prior + change, widths_of(fit), weights)
        return change

    def _row(self, run: PublishedRun, fit: Fit) -> tuple[float, Array]:
        """A row's error by the shipped constants, and its slopes in those of a fit."""
        device = device_of(run)
        linear, index = self._linear(device, device), self._rows[device].index(run)
        fits = self._fits_of(device)
        start = sum(len(one.priors) for one in fits[: fits.index(fit)])
        return linear.errors[index], linear.slopes[index, start : start + len(fit.priors)]


def _off_prior(fit: Fit, device: str) -> Array:
    """How far the logarithms of a device's shipped constants are from their priors."""
    efficiency = efficiency_of(device)
    return np.array([math.log(constant(efficiency, name) / prior.value) for name, prior in fit.priors.items()])


def name_of(run: PublishedRun, what: What) -> str:
    return {"model": run.model_name, "source": run.source.name, "device": device_of(run)}[what]
