"""What the history knows: an iteration of a plan as it would be observed here, and how far predictions were off."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from funcpipe.core import Observation, Plan, Quantity
from funcpipe.history.correction import Correction, fit, has_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedIteration:
    """What one iteration takes where earlier runs ran, `ran_on`: as modelled, and corrected by what they took.

    `same_sizes` says whether those runs had functions of the plan's sizes; otherwise they stand for all sizes. Dollars
    for functions follow the seconds, those for requests stay.
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
        found.append(
            ObservedIteration(
                platform=plan.platform,
                ran_on=place,
                runs=correction.runs,
                same_sizes=same,
                factor=correction.factor,
                modelled_s=estimate.iteration_s,
                modelled_usd=estimate.cost_usd,
                observed_s=correction.apply(estimate.iteration_s),
                observed_usd=correction.apply(estimate.compute_usd) + estimate.request_usd,
            )
        )
    return tuple(found)


def known(observations: Sequence[Observation]) -> tuple[Known, ...]:
    """All that is known, by platform, place, size and quantity."""
    groups: Mapping[tuple[str, str, str, int], list[Observation]] = defaultdict(list)
    for one in observations:
        groups[one.platform, one.ran_on, one.size, list(Quantity).index(one.quantity)].append(one)
    return tuple(_known(groups[key]) for key in sorted(groups))


def _known(observations: Sequence[Observation]) -> Known:
    first, correction = observations[0], fit(observations)
    later = range(1, len(observations))
    unchanged = Correction()
    return Known(
        platform=first.platform,
        ran_on=first.ran_on,
        size=first.size,
        quantity=first.quantity,
        runs=len({one.run for one in observations}),
        factor=correction.factor,
        offset_s=correction.offset_s,
        error_before=_error([(unchanged, observations[i]) for i in later or (0,)]),
        error_after=_error([(fit(observations[:i]), observations[i]) for i in later]),
    )


def _error(predictions: Sequence[tuple[Correction, Observation]]) -> float | None:
    errors = [
        abs(correction.apply(one.predicted_s) - one.observed_s) / one.observed_s
        for correction, one in predictions
        if one.observed_s > 0
    ]
    return median(errors) if errors else None
