"""Robust non-negative least squares on a few unknowns."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

_PRIOR_WEIGHT = 1e-4  # against data rows of weight 1: decides only what the data leave open
_HUBER = 1.5  # residuals beyond so many typical ones count less


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one thing: their median and their spread (half the width of the middle half)."""

    median: float
    spread: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Samples":
        ordered = sorted(values)
        quarter = len(ordered) // 4
        return cls(median(ordered), (ordered[-1 - quarter] - ordered[quarter]) / 2, len(ordered))


def nonnegative_fit(
    rows: Sequence[Sequence[float]], values: Sequence[float], priors: Sequence[Sequence[float]] = ()
) -> NDArray[np.float64]:
    """Unknowns >= 0 that explain ``values`` as ``rows @ unknowns`` with small relative errors; outliers count less.

    Args:
        rows: one per value, a coefficient per unknown.
        values: measured, positive.
        priors: rows that should give about 0; they decide only what the values leave open.
    """
    matrix, target = np.array(rows, dtype=float), np.array(values, dtype=float)
    scale = float(np.median(target))
    weights = np.ones(len(target))
    solution = np.zeros(matrix.shape[1])
    for _ in range(20):
        factors = weights / target
        blocks = [matrix * factors[:, None]]
        if priors:
            blocks.append(np.array(priors, dtype=float) * (_PRIOR_WEIGHT / scale))
        right = np.concatenate([target * factors, np.zeros(len(priors))])
        solution = _nonnegative(np.concatenate(blocks), right)
        errors = np.abs(matrix @ solution / target - 1)
        typical = max(float(np.median(errors)), 1e-9)
        new = np.sqrt(np.minimum(1.0, _HUBER * typical / np.maximum(errors, 1e-300)))
        if np.allclose(new, weights, rtol=1e-6):
            break
        weights = new
    return solution


def _nonnegative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares in which unknowns that would be negative are 0."""
    free = list(range(matrix.shape[1]))
    solution = np.zeros(matrix.shape[1])
    while free:
        part = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        if part.min() >= 0:
            solution[free] = part
            break
        del free[int(part.argmin())]
    return solution
