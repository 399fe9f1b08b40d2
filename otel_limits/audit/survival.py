"""Percentiles of what invocations need, if some were halted before they had it.

A halted invocation needed more than it used, by an unknown amount: its need is censored. Leaving it
out would underestimate the need; the estimator of Kaplan and Meier ("Nonparametric Estimation from
Incomplete Observations", 1958) counts it as far as it got.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

Z: Final = 1.959963984540054
"""Number of standard deviations that contain 95% of a normal distribution."""
ROUNDING: Final = 1e-9
"""Tolerance of comparisons: in binary 1 - 0.99 is slightly more than 0.01."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A percentile estimate with a 95% interval. `None` if above every observation."""

    value: int | None
    low: int | None
    high: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """The share of invocations that need more than a value."""

    value: int
    beyond: float
    size: float
    """The number of invocations without halts that would be as informative."""


def percentile(met: Sequence[int], censored: Iterable[int], share: float) -> Estimate:
    """Estimate what covers `share` of the invocations.

    Args:
        met: Usage of finished invocations.
        censored: Usage of halted ones.
        share: The share to cover, above 0 and up to 1.
    """
    steps = list(curve(met, censored))
    left = 1 - share + ROUNDING

    def first(covers: Iterable[bool]) -> int | None:
        return next((step.value for step, yes in zip(steps, covers, strict=True) if yes), None)

    # The same rule for the bounds of each step: the interval is where they cross the line.
    bounds = [interval(step.beyond, step.size) for step in steps]
    return Estimate(
        value=first(step.beyond <= left for step in steps),
        low=first(low <= left for low, _ in bounds),
        high=first(high <= left for _, high in bounds),
    )


def curve(met: Sequence[int], censored: Iterable[int]) -> Iterator[Step]:
    """Estimate the share that needs more than each observed value."""
    ends, halts = Counter(met), Counter(censored)
    at_risk = size = float(sum(ends.values()) + sum(halts.values()))
    beyond, greenwood = 1.0, 0.0
    # In order, as each step depends on how many remain.
    for value in sorted({*ends, *halts}):
        if ended := ends[value]:
            beyond *= 1 - ended / at_risk
            # At the last step none remain, and the variance would divide by zero.
            if ended < at_risk:
                greenwood += ended / (at_risk * (at_risk - ended))
                # Rothman ("Estimation of confidence limits for the cumulative probability of
                # survival in life table analysis", 1978): by the variance of Greenwood.
                size = (1 - beyond) / (beyond * greenwood)
            yield Step(value, beyond if ended < at_risk else 0.0, size)
        # An invocation halted at a value needed more.
        at_risk -= ended + halts[value]


def interval(share: float, size: float) -> tuple[float, float]:
    """Return the 95% interval of a share in a sample of `size` (Wilson, 1927), within 0 to 1."""
    # Without a sample every share is possible.
    if not size:
        return 0.0, 1.0
    middle = share + Z * Z / (2 * size)
    half = Z * math.sqrt(share * (1 - share) / size + (Z / (2 * size)) ** 2)
    whole = 1 + Z * Z / size
    # Of none or all, an end is exact, which floating point would miss by a trillionth or less.
    low = (middle - half) / whole if share > 0 else 0.0
    high = (middle + half) / whole if share < 1 else 1.0
    return max(0.0, low), min(1.0, high)
