"""What the history knows: an iteration of a plan as it would be observed here, and how far predictions were off."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from funcpipe.core import Observation, Plan, Quantity
from funcpipe.history.correction import Correction, fit, has_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedIteration:
    """What one iteration takes where earlier runs ran, `ran_on`: as modelled, and corrected by what they took.

    `same_sizes` says whether those runs had functions of the plan's sizes; otherwise they stand for all sizes. Dollars
    are those of so long an iteration.
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
    """One quantity on functions of one size: its correction, and how far predictions were off before and after it.

    Errors are the median of |predicted - observed| / observed. For `error_after` each run but the first is predicted
    with what was known before it; `error_before` is of the same runs without a correction. With one run there is
    nothing that could be compared: `error_after` is None.
    """

    platform: str
    ran_on: str
    size: str
    quantity: Quantity
    runs: int
    factor: float
    offset_s: float
    error_before: float | None
    error_after: float | None


def sizes_of(plan: Plan) -> str:
    """The sizes of a plan's functions, as observations of an iteration name them."""
    return "+".join(sorted({stage.size for stage in plan.stages}))


def correction_of(
    observations: Sequence[Observation], *, platform: str, ran_on: str, size: str, quantity: Quantity
) -> tuple[Correction, bool] | None:
    """The correction by runs with that `size`, or else by all of the platform; and whether it was the former."""
    alike = [
        one
        for one in observations
        if (one.platform, one.ran_on, one.quantity) == (platform, ran_on, quantity)
        and (quantity is Quantity.START_UP or has_ratio(one))
    ]
    same = [one for one in alike if one.size == size]
    return (fit(same or alike), bool(same)) if alike else None


def as_observed(plan: Plan, observations: Sequence[Observation]) -> tuple[ObservedIteration, ...]:
    """One iteration of `plan`, wherever plans for its platform have run; nothing for a plan without an estimate."""
    estimate, size = plan.estimate, sizes_of(plan)
    if estimate is None:
        return ()
    found = []
    for place in dict.fromkeys(one.ran_on for one in observations if one.platform == plan.platform):
        learned = correction_of(
            observations, platform=plan.platform, ran_on=place, size=size, quantity=Quantity.ITERATION
        )
        if learned is None:
            continue
        correction, same = learned
        observed_s = correction.apply(estimate.iteration_s)
        found.append(
            ObservedIteration(
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
        )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far off each run's prediction of one quantity was, oldest run first: |predicted - observed| / observed.

    For `after` each run is predicted with what was known before it, so the first is as `before`.
    """

    platform: str
    ran_on: str
    size: str
    quantity: Quantity
    before: tuple[float, ...]
    after: tuple[float, ...]


def known(observations: Sequence[Observation]) -> tuple[Known, ...]:
    """All that is known, by platform, place, size and quantity."""
    return tuple(_known(group) for group in _groups(observations))


def errors(observations: Sequence[Observation]) -> tuple[Errors, ...]:
    """The errors of all predictions, by platform, place, size and quantity."""
    return tuple(_errors(group) for group in _groups(observations))


def _groups(observations: Sequence[Observation]) -> list[list[Observation]]:
    groups: dict[tuple[str, str, str, int], list[Observation]] = defaultdict(list)
    for one in observations:
        groups[one.platform, one.ran_on, one.size, list(Quantity).index(one.quantity)].append(one)
    return [groups[key] for key in sorted(groups)]


def _known(observations: Sequence[Observation]) -> Known:
    first, correction, off = observations[0], fit(observations), _errors(observations)
    later = slice(1 if len(observations) > 1 else 0, None)
    return Known(
        platform=first.platform,
        ran_on=first.ran_on,
        size=first.size,
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
        quantity=first.quantity,
        before=tuple(_off(unchanged, observations[i]) for i in counted),
        after=tuple(_off(fit(observations[:i]) if i else unchanged, observations[i]) for i in counted),
    )


def _off(correction: Correction, one: Observation) -> float:
    return abs(correction.apply(one.predicted_s) - one.observed_s) / one.observed_s


def _median(errors: Sequence[float]) -> float | None:
    return median(errors) if errors else None
