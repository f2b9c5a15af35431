"""Fit the growth of a figure: a straight line or a power."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """value = base + slope * n."""

    base: float
    slope: float
    error: float
    """The largest relative difference of a measured value from the line."""

    def at(self, number: float) -> float:
        """Return the predicted value."""
        return self.base + self.slope * number

    def __str__(self) -> str:
        return f"{self.base:.4g} + {self.slope:.4g} n (within {self.error:.0%})"


def line(numbers: Sequence[float], values: Sequence[float]) -> Line:
    """Return the line with the smallest relative errors, so that small sizes count as much as large ones.

    Raises ValueError for fewer than two different numbers.
    """
    weights = [1.0 / max(1e-12, value) ** 2 for value in values]
    total = sum(weights)
    mean_n = sum(w * n for w, n in zip(weights, numbers, strict=True)) / total
    mean_v = sum(w * v for w, v in zip(weights, values, strict=True)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, n in zip(weights, numbers, strict=True))
    if spread <= 0:
        raise ValueError("a line takes two different numbers")
    together = sum(w * (n - mean_n) * (v - mean_v) for w, n, v in zip(weights, numbers, values, strict=True))
    slope = together / spread
    base = mean_v - slope * mean_n
    errors = [abs(base + slope * n - v) / max(1e-12, v) for n, v in zip(numbers, values, strict=True)]
    return Line(base, slope, max(errors))


def exponent(numbers: Sequence[float], values: Sequence[float]) -> float:
    """Return the power of n by which values grow: 1 is linear, 2 quadratic. Raises ValueError below two numbers."""
    xs, ys = [math.log(number) for number in numbers], [math.log(max(1e-12, value)) for value in values]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread <= 0:
        raise ValueError("an exponent takes two different numbers")
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
