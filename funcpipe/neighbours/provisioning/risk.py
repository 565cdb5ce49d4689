"""The chance to miss a deadline: the spread of the predicted time, and machines that are taken back."""

import math
from statistics import NormalDist

from funcpipe.core.market import MONTH_S, Machine

_MOST_LOSSES = 40
"""The largest number of lost machines that is considered; more count as a miss."""


def loss_rate_s(machine: Machine) -> float:
    """The rate of losing one spot machine of this type, per second: a Poisson process by its monthly chance."""
    monthly = min(machine.interruption or 0.0, 0.999)
    return -math.log1p(-monthly) / MONTH_S


def miss_chance(
    seconds: float, deadline_s: float | None, *, spread: float, losses_s: float = 0.0, delay_s: float = 0.0
) -> float | None:
    """The chance that a job of `seconds` takes longer than `deadline_s`; None without one.

    The time without losses is normal with a standard deviation of `spread` times itself. `losses_s` machines a second
    are lost, each of which adds `delay_s`.
    """
    if deadline_s is None or math.isinf(deadline_s):
        return None
    expected, chance, probability = losses_s * seconds, 0.0, math.exp(-losses_s * seconds)
    for number in range(_MOST_LOSSES):
        chance += probability * _late(seconds, deadline_s - number * delay_s, spread)
        probability *= expected / (number + 1)
        if probability < 1e-12:
            break
    return min(chance, 1.0)


def aimed_deadline_s(deadline_s: float | None, allowed: float, spread: float) -> float:
    """The time to plan for, so that `deadline_s` is missed with the chance `allowed`; infinity without a deadline."""
    if deadline_s is None:
        return math.inf
    if allowed <= 0 or spread <= 0:
        return deadline_s
    return deadline_s / (1 + max(NormalDist().inv_cdf(1 - allowed), 0.0) * spread)


def _late(seconds: float, deadline_s: float, spread: float) -> float:
    if spread <= 0 or seconds <= 0:
        return float(seconds > deadline_s)
    return 1 - NormalDist(seconds, spread * seconds).cdf(deadline_s)
