"""Robust non-negative least squares on a few unknowns."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

_LEAST_NOISE = 1e-5  # of values without any: lets priors decide what the values leave open
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


@dataclass(frozen=True)
class Prior:
    """What is known beforehand: ``row @ unknowns`` is about ``value``, give or take ``sigma``."""

    row: Sequence[float]
    value: float
    sigma: float


def nonnegative_fit(
    rows: Sequence[Sequence[float]], values: Sequence[float], priors: Sequence[Prior] = (), noise: float = 0.0
) -> NDArray[np.float64]:
    """Unknowns >= 0 that explain ``values`` as ``rows @ unknowns`` with small relative errors; outliers count less.

    Args:
        rows: one per value, a coefficient per unknown.
        values: measured, positive.
        priors: weigh as much as the noise allows; with exact values they decide only what those leave open.
        noise: relative spread of the values.
    """
    matrix, target = np.array(rows, dtype=float), np.array(values, dtype=float)
    prior_weight = max(noise, _LEAST_NOISE)
    known = np.array([prior.row for prior in priors], dtype=float).reshape(len(priors), matrix.shape[1])
    factor = np.array([prior_weight / prior.sigma for prior in priors])
    known, expected = known * factor[:, None], np.array([prior.value for prior in priors]) * factor
    weights = np.ones(len(target))
    solution = np.zeros(matrix.shape[1])
    for _ in range(20):
        scaled = weights / target
        solution = _nonnegative(
            np.concatenate([matrix * scaled[:, None], known]), np.concatenate([target * scaled, expected])
        )
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
