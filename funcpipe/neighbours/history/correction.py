"""Corrections of predictions by earlier observations: regression with forgetting, as STOIC does for its placements.

A prediction is off in proportion where work is similar: what every task costs beside its seconds, such as a call or a
request, is most of a toy's iteration, and nothing of a large model's. So for each platform, place, size and quantity,
from runs of the same model whose prediction is at most LIKE times the one to correct, and at least 1/LIKE of it,

    observed = factor · predicted

is fitted in log space, where a factor of 2 and one of 1/2 are equally far from 1. With yᵢ = ln(observedᵢ / predictedᵢ),
the newest observation of age 0, and weights wᵢ = 2^(−ageᵢ / HALF_LIFE), ages counted in observations, least squares
with a prior observation y = 0 of weight PRIOR gives

    ln factor = Σ wᵢ yᵢ / (PRIOR + Σ wᵢ).

By hand, with HALF_LIFE = 4 and PRIOR = 1/4: three runs that took twice what was predicted have y = ln 2 = 0.693 and
the weights 1, 2^(−1/4) = 0.841 and 2^(−1/2) = 0.707, in all 2.548. So ln factor = 2.548 · 0.693 / 2.798 = 0.631, and
the factor is 1.88. After the first of them it was 2^(1 / 1.25) = 1.74; after many it is 2^(6.285 / 6.535) = 1.95, as
the weights sum to 1 / (1 − 2^(−1/4)) = 6.285.

A start-up is predicted by one number for a size, so a factor and an offset cannot be separated, and the number may be
0. What is fitted for it is an offset in seconds, observed = predicted + offset, with the same weights and prior:

    offset = Σ wᵢ (observedᵢ − predictedᵢ) / (PRIOR + Σ wᵢ).

STOIC: PerCom Workshops 2020, and Software: Practice and Experience 51(9), 1852-1867, 2021. The formulas here are ours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from funcpipe.core import Observation, Quantity

HALF_LIFE = 4.0
"""After so many newer observations one counts half."""

LIKE = 2.0
"""The most that predictions of work of one kind differ by, as a factor."""

PRIOR = 0.25
"""The weight of the prior, that predictions are right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """observed = factor · predicted + offset_s, learned from `runs` runs."""

    factor: float = 1.0
    offset_s: float = 0.0
    runs: int = 0

    def apply(self, predicted_s: float) -> float:
        """The corrected seconds."""
        return max(self.factor * predicted_s + self.offset_s, 0.0)


def fit(observations: Sequence[Observation]) -> Correction:
    """The correction by observations of one quantity, the oldest first; those of 0 seconds teach no factor."""
    runs = len({one.run for one in observations})
    if observations and observations[0].quantity is Quantity.START_UP:
        return Correction(offset_s=_mean([one.observed_s - one.predicted_s for one in observations]), runs=runs)
    usable = [one for one in observations if has_ratio(one)]
    factor = math.exp(_mean([math.log(one.observed_s / one.predicted_s) for one in usable]))
    return Correction(factor=factor, runs=len({one.run for one in usable}))


def is_like(predicted_s: float, other_s: float) -> bool:
    """Return True if two predictions of one model are so near that observations of one apply to the other."""
    return other_s > 0 and 1 / LIKE <= predicted_s / other_s <= LIKE


def has_ratio(observation: Observation) -> bool:
    """Return True if observed and predicted seconds have a ratio."""
    return observation.predicted_s > 0 and observation.observed_s > 0


def _mean(values: Sequence[float]) -> float:
    """The mean with forgetting, and with the prior that it is 0; the newest value is the last."""
    weights = [2 ** (-age / HALF_LIFE) for age in reversed(range(len(values)))]
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / (PRIOR + sum(weights))
