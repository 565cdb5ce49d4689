"""Results of the history: an iteration of a plan as it would be observed here, and how far predictions were off."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from funcpipe.core import Observation, Plan, Quantity
from funcpipe.neighbours.history.correction import Correction, fit, has_ratio, is_like


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
