"""What invocations need, where some were halted before they had it.

A halted invocation needed more than it had, nobody knows how much: its need is censored. Leaving
those out would take a cap that is too low for enough; the estimator of Kaplan and Meier
("Nonparametric Estimation from Incomplete Observations", 1958) counts them as far as they came.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

Z: Final = 1.959963984540054
"""Standard deviations of a normal distribution within which 95 % of it are."""
ROUNDING: Final = 1e-9
"""What shares are compared to: in binary 1 - 0.99 is a little more than 0.01."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A percentile of a need, with its 95 % interval; `None` is more than anybody was seen with."""

    value: int | None
    low: int | None
    high: int | None


@dataclass(frozen=True, slots=True)
class Step:
    """The share of invocations that need more than a value."""

    value: int
    beyond: float
    size: float
    """As many invocations without a halt would tell as much."""


def percentile(met: Sequence[int], censored: Iterable[int], share: float) -> Estimate:
    """Estimate what is enough for `share` of the invocations.

    Args:
        met: What those needed that came to their end.
        censored: What the halted ones had.
        share: The part of all, above 0 and up to 1.
    """
    steps = list(curve(met, censored))
    left = 1 - share + ROUNDING

    def first(enough: Iterable[bool]) -> int | None:
        return next((step.value for step, yes in zip(steps, enough, strict=True) if yes), None)

    # The same rule for the bounds of each step: the interval is where they cross the line.
    bounds = [interval(step.beyond, step.size) for step in steps]
    return Estimate(
        value=first(step.beyond <= left for step in steps),
        low=first(low <= left for low, _ in bounds),
        high=first(high <= left for _, high in bounds),
    )


def curve(met: Sequence[int], censored: Iterable[int]) -> Iterator[Step]:
    """Estimate the share that needs more than each value that was enough for somebody."""
    ends, halts = Counter(met), Counter(censored)
    at_risk = size = float(sum(ends.values()) + sum(halts.values()))
    beyond, greenwood = 1.0, 0.0
    # In order, as each step depends on how many were still under way before it.
    for value in sorted({*ends, *halts}):
        if ended := ends[value]:
            beyond *= 1 - ended / at_risk
            # At the last step nobody is left, and the variance would divide by nothing.
            if ended < at_risk:
                greenwood += ended / (at_risk * (at_risk - ended))
                # Rothman ("Estimation of confidence limits for the cumulative probability of
                # survival in life table analysis", 1978): by the variance of Greenwood.
                size = (1 - beyond) / (beyond * greenwood)
            yield Step(value, beyond if ended < at_risk else 0.0, size)
        # Whoever was halted at a value needed more than it.
        at_risk -= ended + halts[value]


def interval(share: float, size: float) -> tuple[float, float]:
    """The 95 % interval of a share seen in so many (Wilson, 1927); it never leaves 0 to 1."""
    # Nothing was seen, so that every share is possible.
    if not size:
        return 0.0, 1.0
    middle = share + Z * Z / (2 * size)
    half = Z * math.sqrt(share * (1 - share) / size + (Z / (2 * size)) ** 2)
    whole = 1 + Z * Z / size
    return max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole)
