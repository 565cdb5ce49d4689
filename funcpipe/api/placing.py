"""The place for a job: of several platforms the best by what is predicted for each, as runs there have corrected it.

STOIC (PerCom Workshops 2020; Software: Practice and Experience 51(9), 2021) dispatches training so between edge and
cloud. What was compared is in the history, so that `funcpipe history` says whether a choice was the best in hindsight.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from funcpipe.api.fitting import Chosen, Wanted, choose_for_run, plan_text
from funcpipe.api.predicting import Predicting
from funcpipe.client.prepare.data import open_data
from funcpipe.client.prepare.session import one_cluster
from funcpipe.core import ModelProfile, Plan, PlatformSpec, RunLimits, RunSettings, Validation
from funcpipe.core.history import ComparedWay, Comparison
from funcpipe.core.provision import JobSpec
from funcpipe.core.texts import time_text, usd_text
from funcpipe.errors import Infeasible, InvalidValue
from funcpipe.platforms.catalog import places_of
from funcpipe.training.data_source import Data


@contextmanager
def clusters(platform: str) -> Iterator[None]:
    """Start Ray once, or connect to it once, for all that is done within this context, if a place is Ray."""
    with ExitStack() as stack:
        for place in places_of(platform):
            stack.enter_context(one_cluster(place))
        yield


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A platform with what was chosen there, and the profile, specification and plan that the module has then."""

    platform: str
    chosen: Chosen
    way: ComparedWay
    state: tuple[ModelProfile | None, PlatformSpec | None, Plan | None]


def choose_among_places(
    pipe: Predicting,
    dataset: Data,
    wanted: Wanted,
    *,
    epochs: int,
    validation: Validation | Data | None,
    limits: RunLimits,
    settings: RunSettings,
    kept: Plan | None = None,
) -> tuple[str, Chosen]:
    """The platform to train on, one or the best of several in `wanted`, and what was chosen there.

    Best is the cheapest that keeps `limits`, where an hour is worth `time_value`. Profile and plan of `pipe` are those
    of the best. Raises Infeasible if no place will do, and what `choose_for_run` raises.
    """
    places = places_of(wanted.platform)
    terms: dict[str, Any] = {"epochs": epochs, "validation": validation, "settings": settings, "kept": kept}
    terms["max_usd"] = limits.max_usd
    if len(places) < 2:
        return wanted.platform, choose_for_run(pipe, dataset, wanted, **terms)
    if wanted.like is not None or settings.resume is not None:
        field, value = ("like", wanted.like) if wanted.like is not None else ("resume", settings.resume)
        raise InvalidValue(field, value, f"goes with one platform, not with all of {wanted.platform}")
    before, found, reasons = (pipe._profile, pipe._spec, pipe._plan), list[_Place](), dict[str, str]()
    for place in places:
        pipe._profile, pipe._spec, pipe._plan = before
        try:
            chosen = choose_for_run(pipe, dataset, replace(wanted, platform=place), **terms)
        except Infeasible as error:
            reasons[place] = str(error)
            continue
        state = pipe._profile, pipe._spec, pipe._plan
        found.append(_Place(platform=place, chosen=chosen, way=_way(place, chosen), state=state))
    samples = len(open_data(dataset)[1].dataset)
    best, lines = _best(found, reasons, samples, epochs, wanted, limits)
    pipe._profile, pipe._spec, pipe._plan = best.state
    return best.platform, replace(best.chosen, lines=(*lines, *best.chosen.lines))


def _way(place: str, chosen: Chosen) -> ComparedWay:
    """What is predicted for a place, as comparisons in the history have it."""
    from funcpipe.neighbours.history.hindsight import plan_key
    from funcpipe.neighbours.history.learned import sizes_of

    plan, job = chosen.plan, chosen.job
    if job is None:
        raise Infeasible(f"{place}: the plan that was there has no estimate; leave it out, so that one is made")
    return ComparedWay(
        way=place,
        key=plan_key(plan),
        rented=plan_text(plan),
        place=plan.platform,
        seconds=job.seconds,
        usd=job.cost_usd,
        iterations=job.steps,
        start_s=min(job.start.seconds, job.seconds),
        requests_usd=job.requests_usd + job.traffic_usd,
        sizes=sizes_of(plan),
    )


def _best(
    places: Sequence[_Place], reasons: dict[str, str], samples: int, epochs: int, wanted: Wanted, limits: RunLimits
) -> tuple[_Place, list[str]]:
    """The best of the places, and a line for each of all."""
    from funcpipe.neighbours.history.filing import file_comparison
    from funcpipe.neighbours.history.hindsight import corrected_way, recommended, with_key
    from funcpipe.neighbours.history.journal import read_all

    history, lines = read_all(), list[str]()
    known = {one.platform: corrected_way(one.way, history, one.chosen.plan.model) for one in places}
    for one in places:
        now = known[one.platform]
        lines.append(f"{one.platform}: {time_text(now.seconds)}, ${usd_text(now.usd)}, {now.basis}")
    within = [one for one in places if limits.max_usd is None or known[one.platform].usd <= limits.max_usd]
    within = within or [one for one in places if limits.allow_partial]
    lines += [f"{place}: {reason}" for place, reason in reasons.items()]
    if not within:
        why = "no place does the job" if limits.max_usd is None else f"no place does the job for ${limits.max_usd:g}"
        raise Infeasible("\n".join([f"{why}:", *lines]))
    job = JobSpec(
        samples=samples,
        global_batch=within[0].chosen.plan.global_batch,
        epochs=epochs,
        deadline_s=limits.deadline_s,
        time_value=wanted.time_value,
    )
    comparison = Comparison(
        key="",
        job=job,
        model=within[0].chosen.plan.model,
        platform=wanted.platform,
        market="",
        ways=tuple(one.way for one in within),
        recommended=None,
        at_s=time.time(),
    )
    name, why = recommended(comparison, [known[one.platform] for one in within])
    file_comparison(with_key(replace(comparison, recommended=name)))
    (best,) = [one for one in within if one.platform == name]
    return best, [*lines, f"takes {name}: {why}"]
