"""The lessons of earlier observations: how far predictions were off, and corrections, as STOIC does for placements.

A correction is a regression with forgetting.

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
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from funcpipe.core import Observation, Plan, Quantity
from funcpipe.core.distribution import needed_from
from funcpipe.errors import InputError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedIteration:
    """One iteration at a place, `ran_on`: as modelled, and corrected by runs of like work there.

    With `same_sizes` those runs had functions of the plan's sizes; otherwise they stand for all sizes. Dollars are
    those of so long an iteration.
    """

    platform: str
    ran_on: str
    runs: int
    same_sizes: bool
    factor: float
    modelled_s: float
    modelled_usd: float
    observed_s: float
    observed_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One quantity of one model on functions of one size: its correction, and how far predictions were off.

    The correction is the one for another run like the newest. A start-up is of no model. Errors, before and after
    correction, are the median of |predicted - observed| / observed. For `error_after` each run but the first is
    predicted with what was known before it; `error_before` is of the same runs without a correction. With one run there
    is nothing that could be compared: `error_after` is None.
    """

    platform: str
    ran_on: str
    size: str
    model: str
    quantity: Quantity
    runs: int
    factor: float
    offset_s: float
    error_before: float | None
    error_after: float | None


def sizes_of(plan: Plan) -> str:
    """The sizes of a plan's functions, as observations of an iteration name them."""
    return "+".join(sorted({stage.size for stage in plan.stages}))


def start_up_of(observations: Sequence[Observation], *, platform: str, size: str) -> Correction | None:
    """The correction of a start-up on `platform` itself by functions of that `size`, or by all; None if none ran."""
    similar = [
        one
        for one in observations
        if (one.platform, one.ran_on, one.quantity) == (platform, platform, Quantity.START_UP)
    ]
    return fit([one for one in similar if one.size == size] or similar) if similar else None


def iteration_of(
    observations: Sequence[Observation], *, platform: str, ran_on: str, size: str, model: str, predicted_s: float
) -> tuple[Correction, bool] | None:
    """The correction of an iteration by runs of like work there, and True if their functions had that `size`."""
    similar = [
        one
        for one in observations
        if (one.platform, one.ran_on, one.quantity, one.model) == (platform, ran_on, Quantity.ITERATION, model)
        and has_ratio(one)
        and is_like(predicted_s, one.predicted_s)
    ]
    same = [one for one in similar if one.size == size]
    return (fit(same or similar), bool(same)) if similar else None


def as_observed(
    plan: Plan, observations: Sequence[Observation], *, ran_on: str | None = None
) -> ObservedIteration | None:
    """One iteration of `plan` at its platform, or where that name says; None where no run of like work was observed."""
    estimate, place = plan.estimate, ran_on or plan.platform
    if estimate is None:
        return None
    learned = iteration_of(
        observations,
        platform=plan.platform,
        ran_on=place,
        size=sizes_of(plan),
        model=plan.model,
        predicted_s=estimate.iteration_s,
    )
    if learned is None:
        return None
    correction, same = learned
    observed_s = correction.apply(estimate.iteration_s)
    return ObservedIteration(
        platform=plan.platform,
        ran_on=place,
        runs=correction.runs,
        same_sizes=same,
        factor=correction.factor,
        modelled_s=estimate.iteration_s,
        modelled_usd=estimate.cost_usd,
        observed_s=observed_s,
        observed_usd=estimate.usd_in(observed_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """The errors of each run's prediction of one quantity, oldest run first: |predicted - observed| / observed.

    For `after` each run is predicted with what was known before it, so the first is as `before`.
    """

    platform: str
    ran_on: str
    size: str
    model: str
    quantity: Quantity
    before: tuple[float, ...]
    after: tuple[float, ...]


def known(observations: Sequence[Observation]) -> tuple[Known, ...]:
    """All that is known, by platform, place, size, quantity and model."""
    return tuple(_known(group) for group in _groups(observations))


def errors(observations: Sequence[Observation]) -> tuple[Errors, ...]:
    """The errors of all predictions, by platform, place, size, quantity and model."""
    return tuple(_errors(group) for group in _groups(observations))


def _groups(observations: Sequence[Observation]) -> list[list[Observation]]:
    groups: dict[tuple[str, str, str, int, str], list[Observation]] = defaultdict(list)
    for one in observations:
        groups[one.platform, one.ran_on, one.size, list(Quantity).index(one.quantity), _model_of(one)].append(one)
    return [groups[key] for key in sorted(groups)]


def _known(observations: Sequence[Observation]) -> Known:
    first, correction, off = observations[0], fit(_like(observations, observations[-1])), _errors(observations)
    later = slice(1 if len(observations) > 1 else 0, None)
    return Known(
        platform=first.platform,
        ran_on=first.ran_on,
        size=first.size,
        model=_model_of(first),
        quantity=first.quantity,
        runs=len({one.run for one in observations}),
        factor=correction.factor,
        offset_s=correction.offset_s,
        error_before=_median(off.before[later]),
        error_after=_median(off.after[1:]),
    )


def _errors(observations: Sequence[Observation]) -> Errors:
    first = observations[0]
    unchanged = Correction()
    counted = [i for i, one in enumerate(observations) if one.observed_s > 0]
    return Errors(
        platform=first.platform,
        ran_on=first.ran_on,
        size=first.size,
        model=_model_of(first),
        quantity=first.quantity,
        before=tuple(_off(unchanged, observations[i]) for i in counted),
        after=tuple(_off(fit(_like(observations[:i], observations[i])), observations[i]) for i in counted),
    )


def _model_of(one: Observation) -> str:
    """The model of an observation; a start-up is of no model."""
    return "" if one.quantity is Quantity.START_UP else one.model


def _like(observations: Sequence[Observation], other: Observation) -> list[Observation]:
    """The observations of one model and quantity that apply to `other`."""
    if other.quantity is Quantity.START_UP:
        return list(observations)
    return [one for one in observations if is_like(other.predicted_s, one.predicted_s)]


def _off(correction: Correction, one: Observation) -> float:
    return abs(correction.apply(one.predicted_s) - one.observed_s) / one.observed_s


def _median(errors: Sequence[float]) -> float | None:
    return median(errors) if errors else None


def plot_errors(found: Sequence[Errors], path: str | Path) -> None:
    """Draw `found` into the file `path`, its kind after the ending: runs across, errors in per cent up.

    Needs matplotlib, which is imported only here. Raises InputError where there is nothing to draw.
    """
    drawn = [one for one in found if len(one.before) > 1]
    if not drawn:
        raise InputError("no prediction has been compared with two runs or more: there are no errors to draw")
    with needed_from("figures"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.2 * len(drawn)), layout="constrained")
    for axes, one in zip(figure.subplots(len(drawn), squeeze=False)[:, 0], drawn, strict=True):
        runs = range(1, len(one.before) + 1)
        axes.plot(runs, [100 * error for error in one.before], marker="o", color="tab:gray", label="as modelled")
        axes.plot(runs, [100 * error for error in one.after], marker="o", color="tab:blue", label="as observed here")
        place = one.platform if one.ran_on == one.platform else f"{one.platform} on {one.ran_on}"
        model = f" of {one.model}" if one.model else ""
        axes.set_title(f"{one.quantity.value}{model}, {place}, {one.size}", fontsize="medium")
        axes.set_xlabel("run")
        axes.set_ylabel("error, %")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
