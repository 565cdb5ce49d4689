"""A check of a job's way in hindsight: was it the best of those compared, by what is known now?

A comparison predicted seconds and dollars of each way, and one of them was run. Now that way has what the run took.
Each other way has its prediction, corrected by what later runs have taught: of a plan, the seconds of its iterations
and of its start, as predictions of new plans are; of a way on machines, what runs by the same way have taken beside
their predictions. Most ways were never run, and have nothing but the model: `Hindsight.modelled` names them. Then the
same rule recommends again. Only the configurations that were compared count: a way that had known better might
have rented something else.

By hand: funcpipe was recommended with 100 s and $1.00, one-machine had 150 s and $1.20, and there is no deadline. The
run took 130 s and $1.30. One-machine, of which no run is known, would have been cheaper, if its model is right.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from funcpipe.core import Observation, Plan, Quantity, to_text
from funcpipe.core.history import ComparedWay, Comparison, WayRun
from funcpipe.core.json_form import to_plain
from funcpipe.core.provision import CostItem, Provision, ProvisionTable
from funcpipe.errors import Infeasible
from funcpipe.neighbours.history.journal import History
from funcpipe.neighbours.history.learned import fit, is_like, iteration_of, sizes_of, start_up_of
from funcpipe.neighbours.provisioning.compare import recommend, within_budget
from funcpipe.neighbours.provisioning.goal import miss_chance

_ONCE = ("requests", "traffic")
"""Items of a bill that do not grow with the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownWay:
    """A way as it is known now: seconds and dollars of the whole job, `basis` says from what."""

    way: str
    seconds: float
    usd: float
    basis: str


OBSERVED, CORRECTED, MODELLED = "observed", "corrected", "modelled"
"""The values of `KnownWay.basis`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindsight:
    """A comparison that a run has followed.

    `chosen` is the way that was run, as it was predicted, and `run` what that took; `observed` is that for the whole
    job. `known` are all ways as they are known now, and `best` is the way that would be recommended, None if none would
    do the job. Only a run at the place that was predicted for `counts`.
    """

    comparison: Comparison
    chosen: ComparedWay
    run: WayRun
    observed: KnownWay
    known: tuple[KnownWay, ...]
    best: str | None
    counts: bool

    @property
    def is_best(self) -> bool:
        """True if the chosen way would be recommended again."""
        return self.best == self.chosen.way

    @property
    def modelled(self) -> tuple[str, ...]:
        """The ways that are known only by the model."""
        return tuple(one.way for one in self.known if one.basis == MODELLED)


def comparison_of(table: ProvisionTable, *, at_s: float) -> Comparison:
    """The record of a comparison made `at_s` seconds after 1970."""
    ways = tuple(_compared(one, table) for one in table.provisions)
    found = Comparison(
        key="",
        job=table.job,
        model=table.model,
        platform=table.platform,
        market=table.market,
        ways=ways,
        recommended=table.recommended,
        at_s=at_s,
    )
    return with_key(found)


def with_key(one: Comparison) -> Comparison:
    """A comparison with its key, which it gets again if it is made again."""
    fields = [to_plain(one.job), one.model, one.platform, one.market, to_plain(one.ways), one.recommended]
    return replace(one, key=_digest(json.dumps(fields)))


def _compared(one: Provision, table: ProvisionTable) -> ComparedWay:
    return ComparedWay(
        way=one.way,
        key=way_key(one),
        rented=one.text,
        place=table.market if one.plan is None else one.plan.platform or table.platform,
        seconds=one.seconds,
        usd=one.usd,
        iterations=one.iterations,
        start_s=min(one.start_s, one.seconds),
        requests_usd=sum(item.usd for item in one.cost if item.name in _ONCE),
        sizes="" if one.plan is None else sizes_of(one.plan),
        spread=one.spread,
        losses_s=one.losses_s,
        delay_s=one.delay_s,
    )


def plan_key(plan: Plan) -> str:
    """The key of a plan, whatever was predicted of it, whichever search found it, in whatever order it is written."""
    text = to_text(replace(plan, estimate=None, solver=None, request=None))
    return _digest(json.dumps(json.loads(text), sort_keys=True))


def way_key(one: Provision) -> str:
    """The key of a way: of its plan, or else of what is rented and predicted."""
    if one.plan is not None:
        return plan_key(one.plan)
    return _digest(json.dumps([one.way, to_plain(one.rented), one.seconds, one.iterations, to_plain(one.cost)]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hindsights(history: History) -> tuple[Hindsight, ...]:
    """The hindsight of each comparison that a run has followed, the oldest first.

    Of several runs the newest of the recommended way counts, or else the newest of all; of a way, runs at the place
    that was predicted for go before others.
    """
    found = []
    for comparison in history.comparisons:
        ways = {one.way: one for one in comparison.ways}
        runs = [run for run in history.way_runs if run.comparison == comparison.key and run.way in ways]
        if runs:
            order = sorted(runs, key=lambda run: (run.ran_on == ways[run.way].place, run.at_s))
            newest = {run.way: run for run in order}
            chosen = newest.get(comparison.recommended or "") or order[-1]
            found.append(_hindsight(comparison, chosen, newest, history))
    return tuple(found)


def _hindsight(comparison: Comparison, chosen: WayRun, runs: dict[str, WayRun], history: History) -> Hindsight:
    """Assess a comparison; `runs` are the newest of each way, and those elsewhere count only for the `chosen` way."""
    known = []
    for one in comparison.ways:
        run = runs.get(one.way)
        if run is not None and (run.ran_on == one.place or run is chosen):
            known.append(observed_way(one, run))
        else:
            known.append(corrected_way(one, history, comparison.model))
    (way,) = [one for one in comparison.ways if one.way == chosen.way]
    return Hindsight(
        comparison=comparison,
        chosen=way,
        run=chosen,
        observed=observed_way(way, chosen),
        known=tuple(known),
        best=recommended(comparison, known)[0],
        counts=chosen.ran_on == way.place,
    )


def observed_way(one: ComparedWay, run: WayRun) -> KnownWay:
    """The whole job as `run` took it.

    A run that did a part of the work is taken to go on as fast; a start that was not observed is as predicted, and
    costs as much a second as the rest.
    """
    start_s = min(one.start_s, run.seconds) if run.with_start else 0.0
    seconds = start_s + (run.seconds - start_s) / run.share + (0.0 if run.with_start else one.start_s)
    return KnownWay(way=one.way, seconds=seconds, usd=run.usd * seconds / run.seconds, basis=OBSERVED)


def corrected_way(one: ComparedWay, history: History, model: str) -> KnownWay:
    """The whole job as it is predicted now: corrected by runs of like work of the `model` at the way's place.

    It is as modelled without any.
    """
    offset_s, work = 0.0, None
    if one.sizes:
        learned = iteration_of(
            history.observations,
            platform=one.place,
            ran_on=one.place,
            size=one.sizes,
            model=model,
            predicted_s=_iteration_s(one),
        )
        work = None if learned is None else learned[0].apply(one.seconds - one.start_s)
        starts = [start_up_of(history.observations, platform=one.place, size=size) for size in one.sizes.split("+")]
        offset_s = max((start.offset_s for start in starts if start is not None), default=0.0)
    elif taught := _runs_of_the_way(one, history, model):
        work = fit(taught).apply(one.seconds - one.start_s)
    if work is None:
        return KnownWay(way=one.way, seconds=one.seconds, usd=one.usd, basis=MODELLED)
    seconds = max(one.start_s + offset_s, 0.0) + work
    longer = seconds / one.seconds if one.seconds else 1.0
    usd = one.requests_usd + longer * (one.usd - one.requests_usd)
    return KnownWay(way=one.way, seconds=seconds, usd=usd, basis=CORRECTED)


def _iteration_s(one: ComparedWay) -> float:
    return (one.seconds - one.start_s) / one.iterations if one.iterations else 0.0


def _runs_of_the_way(one: ComparedWay, history: History, model: str) -> list[Observation]:
    """The times after the start, beside predictions, of runs of like work by the way of that name at its place."""
    ways = {(c.key, way.way): way for c in history.comparisons if c.model == model for way in c.ways}
    taught = []
    for run in sorted(history.way_runs, key=lambda run: run.at_s):
        way = ways.get((run.comparison, run.way))
        if way is None or (way.way, way.place, run.ran_on) != (one.way, one.place, one.place):
            continue
        if not is_like(_iteration_s(one), _iteration_s(way)):
            continue
        work = Observation(
            run=run.run,
            platform=one.place,
            ran_on=one.place,
            size=one.way,
            model="",
            quantity=Quantity.ITERATION,
            predicted_s=way.seconds - way.start_s,
            observed_s=max(observed_way(way, run).seconds - way.start_s, 0.0),
            at_s=run.at_s,
        )
        taught.append(work)
    return taught


def recommended(comparison: Comparison, known: Sequence[KnownWay]) -> tuple[str | None, str]:
    """The way that the rule of comparisons recommends, and why; those beyond the budget are out."""
    job, provisions = comparison.job, []
    for way, now in zip(comparison.ways, known, strict=True):
        chance = miss_chance(now.seconds, job.deadline_s, spread=way.spread, losses_s=way.losses_s, delay_s=way.delay_s)
        if now.basis == OBSERVED and job.deadline_s is not None:
            chance = float(now.seconds > job.deadline_s)
        one = Provision(
            way=way.way,
            rented=(),
            seconds=now.seconds,
            iterations=way.iterations,
            cost=(CostItem(name="all", usd=now.usd),),
            binds="",
            why="",
            miss_chance=chance,
        )
        try:
            provisions.append(within_budget(one, job))
        except Infeasible:
            continue
    best, why = recommend(provisions, job)
    return None if best is None else best.way, why
