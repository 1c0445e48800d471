"""Coefficients of zero or more that explain measured seconds, every measurement weighing the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
NEGLIGIBLE = 1e-9


@dataclass(frozen=True)
class Fit:
    """``values`` of the coefficients, and what is left: shares of each measurement (model / measured - 1)."""

    values: tuple[float, ...]
    residuals: tuple[float, ...]

    @property
    def median_error(self) -> float:
        return float(np.median(np.abs(self.residuals))) if self.residuals else 0.0

    @property
    def worst_error(self) -> float:
        return float(np.max(np.abs(self.residuals))) if self.residuals else 0.0


def fit(features: Sequence[Sequence[float]], seconds: Sequence[float], known: Sequence[float] | None = None) -> Fit:
    """Minimises the relative errors of ``known + features · values``; every value is zero or more.

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23).
    """
    measured = np.asarray(seconds, dtype=float)
    base = np.zeros_like(measured) if known is None else np.asarray(known, dtype=float)
    rows = np.asarray(features, dtype=float) / measured[:, None]
    scales = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    parts = _nonnegative(rows / scales, (measured - base) / measured)  # of the measurement that it explains most of
    values = np.where(parts < NEGLIGIBLE, 0.0, parts) / scales
    model = base + np.asarray(features, dtype=float) @ values
    return Fit(tuple(values.tolist()), tuple((model / measured - 1).tolist()))


def _nonnegative(matrix: Numbers, target: Numbers) -> Numbers:
    count = matrix.shape[1]
    values, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        gain = matrix.T @ (target - matrix @ values)
        gain[free] = -np.inf
        if free.all() or gain.max() <= 1e-12:
            break
        free[int(gain.argmax())] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            if not free.any() or trial[free].min() > 0:
                break
            shrinking = free & (trial <= 0)
            step = (values[shrinking] / np.maximum(values[shrinking] - trial[shrinking], 1e-300)).min()
            values = values + step * (trial - values)
            free &= values > 1e-15
        values = trial
    return values
