"""Descriptions of ways to do a job, of what is known of earlier ones, and of training around a parameter server."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from funcpipe.core.loss_model import InverseLoss, LossModel
from funcpipe.core.provision import Provision, ProvisionTable
from funcpipe.core.texts import counted, number_text, time_text, usd_text
from funcpipe.errors import Infeasible
from funcpipe.show.describe import Column, Description, Table, percent

if TYPE_CHECKING:
    from funcpipe.neighbours.history.hindsight import Hindsight
    from funcpipe.neighbours.history.learned import Known, ObservedIteration
    from funcpipe.neighbours.parameter_server.training import ServerResult


def observed_lines(found: "Sequence[ObservedIteration]", prefix: str = "") -> list[str]:
    """An iteration as modelled, and as observed wherever its platform's plans have run; no lines without history."""
    if not found:
        return []
    first = found[0]
    lines = [f"{prefix}as modelled: an iteration takes {_iteration(first.modelled_s, first.modelled_usd)}"]
    lines += [
        f"{prefix}as observed here, on {one.ran_on}: {_iteration(one.observed_s, one.observed_usd)} "
        f"(x {one.factor:.2f}, by {one.runs} {'run' if one.runs == 1 else 'runs'}"
        f"{'' if one.same_sizes else ' with functions of other sizes'})"
        for one in found
    ]
    return lines


def _iteration(seconds: float, usd: float) -> str:
    return f"{number_text(seconds, 3)} s, ${number_text(usd, 6)}"


def observed(found: "Sequence[ObservedIteration]", prefix: str = "") -> Description:
    """Return the lines of `observed_lines` as facts."""
    return Description(title="", facts=tuple(("", line) for line in observed_lines(found, prefix)))


def history(found: "Sequence[Known]", path: Path | None) -> Description | str:
    """Return all that is known, a line for each quantity of a size."""
    if path is None:
        return "the history is turned off: FUNCPIPE_HISTORY is empty"
    if not found:
        return f"nothing is known yet: {path} has no observations; runs of plans with an estimate are filed there"
    columns = (
        *(Column("platform", text=True, drop=1), Column("ran on", text=True), Column("size", text=True)),
        *(Column("model", text=True, drop=3), Column("what", text=True), Column("runs"), Column("factor")),
        *(Column("offset s", drop=2), Column("error before"), Column("error after")),
    )
    rows = tuple(
        (
            *(one.platform, one.ran_on, one.size, one.model or "-", one.quantity.value, str(one.runs)),
            f"{one.factor:.2f}" if not one.offset_s else "-",
            f"{one.offset_s:+.2f}" if one.offset_s else "-",
            *(percent(one.error_before), percent(one.error_after)),
        )
        for one in found
    )
    return Description(
        title="predicted and observed",
        facts=(("", f"errors are medians, of runs after the first; from {path}"),),
        tables=(Table(columns=columns, rows=rows),),
    )


def hindsight(found: "Sequence[Hindsight]") -> Description:
    """Return the chosen ways in hindsight: a line for each job that was done by one of the ways compared for it."""
    if not found:
        return Description(title="")
    known_jobs = [one for one in found if one.counts]
    columns = (
        *(Column("compared", text=True, drop=1), Column("job", text=True), Column("chosen way", text=True)),
        *(Column("predicted"), Column("observed"), Column("best in hindsight", text=True)),
    )
    rows = tuple(
        (
            time.strftime("%Y-%m-%d", time.localtime(one.comparison.at_s)),
            *(f"{one.comparison.model}, {one.comparison.job.goal}", one.chosen.way),
            *(_price(one.chosen.seconds, one.chosen.usd), _price(one.observed.seconds, one.observed.usd)),
            _best(one),
        )
        for one in found
    )
    best = sum(one.is_best for one in known_jobs)
    facts = [("chosen way best in hindsight", f"{best} of {counted(len(known_jobs), 'job')}")]
    others = [known for one in known_jobs for known in one.known if known.way != one.chosen.way]
    modelled = sum(known.basis == "modelled" for known in others)
    if others:
        why = "are as modelled, as no run of them is known here"
        facts.append(("", f"of {len(others)} predictions of other ways, {modelled} {why}"))
    if len(known_jobs) < len(found):
        facts.append(("", "runs that were not where the way was predicted for do not count"))
    return Description(title="", facts=tuple(facts), tables=(Table(columns=columns, rows=rows),))


def _best(one: "Hindsight") -> str:
    if not one.counts:
        return f"not counted: it ran on {one.run.ran_on}"
    if one.is_best:
        return "the chosen one"
    if one.best is None:
        return "none would do the job"
    (known,) = [known for known in one.known if known.way == one.best]
    return f"{known.way}: {_price(known.seconds, known.usd)}, {'as ' if known.basis == 'modelled' else ''}{known.basis}"


def _price(seconds: float, usd: float) -> str:
    return f"{time_text(seconds) if seconds >= 10 else f'{seconds:.2g} s'}, ${usd_text(usd)}"


def provision(found: Provision) -> Description:
    """Return the resources of one provision, and the prediction for them."""
    chance = percent(found.miss_chance, 1)
    missed = "" if found.miss_chance is None else f", missed with a chance of {chance}"
    return Description(
        title=f"Provision by {found.way}: {found.text}",
        facts=(
            ("takes", f"{time_text(found.seconds)} for {found.iterations:.0f} iterations{missed}"),
            ("costs", f"${usd_text(found.usd)}"),
            ("binds", found.binds),
            ("why", found.why),
        ),
        tables=(
            Table(
                columns=(Column("item", text=True), Column("$")),
                rows=tuple((item.name, usd_text(item.usd)) for item in found.cost),
            ),
        ),
    )


def provisions(found: ProvisionTable) -> Description:
    """Return all ways, the cheapest first, why some cannot, and the one to take."""
    job = found.job
    limits = [] if job.deadline_s is None else [f"within {time_text(job.deadline_s)}"]
    limits += [] if job.budget_usd is None else [f"for at most ${job.budget_usd:g}"]
    columns = (
        *(Column("way", text=True), Column("rents", text=True), Column("time"), Column("$")),
        *(Column("chance to miss"), Column("binds", text=True, drop=1)),
    )
    rows = tuple(
        (
            ("* " if one.way == found.recommended else "  ") + one.way,
            *(one.text, time_text(one.seconds), usd_text(one.usd), percent(one.miss_chance, 1), one.binds),
        )
        for one in found.provisions
    )
    facts = [("cannot", refusal.reason) for refusal in found.refusals]
    facts.append(("recommended", f"{found.recommended or 'none'}: {found.why}"))
    facts += [("assumed", text) for text in found.assumptions]
    if found.market_assumptions:
        names = ", ".join(text.partition(":")[0] for text in found.market_assumptions)
        facts.append((f"assumed in the market {found.market} (--json says how)", names))
    goal = " ".join([f"{found.model} to {job.goal} of {job.samples} samples", *limits])
    return Description(
        title=f"Provisions for {goal}: {counted(len(rows), 'way')} on {found.platform} and machines of {found.market}",
        facts=tuple(facts),
        tables=(Table(columns=columns, rows=rows),),
    )


def loss_model(found: LossModel, path: str, target: float | None, batch: float) -> Description:
    """Return the coefficients with their standard deviations, and how long a loss takes."""
    if isinstance(found, InverseLoss):
        names = {"scale": found.scale, "floor": found.floor}
        form = "loss = scale / steps + floor"
    else:
        names = {"γ1": found.gamma1, "γ2": found.gamma2, "γ3": found.gamma3, "γ5": found.gamma5}
        if len(found.covariance) == 5:
            names["γ4"] = found.gamma4
        form = "equation (3) of spotDNN"
    spread = [math.sqrt(max(row[i], 0.0)) for i, row in enumerate(found.covariance)]
    values = ", ".join(f"{name} {value:.5g} ± {s:.2g}" for (name, value), s in zip(names.items(), spread, strict=True))
    facts = [(form, f"{values}; losses lie {found.residual:.2g} around it")]
    facts += [] if target is None else [("", _duration(found, target, batch))]
    return Description(title="", facts=(*facts, ("", f"written to {path}")))


def _duration(found: LossModel, target: float, batch: float) -> str:
    try:
        if isinstance(found, InverseLoss):
            steps, spread = found.steps(target), found.spread(target)
        else:
            steps = found.steps(target, batch=batch, workers=1, convergence=0.0)
            spread = found.spread(target, batch=batch, workers=1, convergence=0.0)
    except Infeasible as error:
        return str(error)
    return f"a loss of {target:g} takes {steps:.0f} steps ± {steps * spread:.0f} of {batch:.0f} samples on one worker"


def server_result(result: "ServerResult", way: Provision, output: str) -> Description:
    """Return the work of each worker, the losses, the cost beside the predicted one, and the model's file."""
    samples: dict[str, int] = {}
    staleness: dict[str, list[int]] = {}
    for step in result.computed_by:
        for worker, count in step.items():
            samples[worker] = samples.get(worker, 0) + count
    for push in result.pushes:
        samples[push.worker] = samples.get(push.worker, 0) + push.samples
        staleness.setdefault(push.worker, []).append(push.staleness)
    billed = {item.name: item.usd for item in result.bill}
    columns = (Column("worker", text=True), Column("samples"), Column("mean staleness"), Column("$"))
    rows = tuple(
        (
            *(name, str(count), f"{fmean(staleness[name]):.2f}" if name in staleness else "-"),
            usd_text(billed[name]) if name in billed else "-",
        )
        for name, count in sorted(samples.items())
    )
    facts = []
    losses = result.losses or tuple(push.loss for push in result.pushes)
    if losses:
        facts.append(("", f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} updates"))
    facts += [("lost", line) for line in result.lost]
    if result.step_s:
        predicted_s = (way.seconds - way.start_s) / way.iterations
        facts.append(("", f"a step took {fmean(result.step_s):.3g} s, {predicted_s:.3g} s predicted"))
    took = f"took {time_text(result.seconds)} and ${usd_text(result.usd)} here"
    predicted = f"{time_text(way.seconds)} and ${usd_text(way.usd)} predicted for what {way.way} rents"
    return Description(
        title=f"run {result.run}: {way.text}, {result.updates.value}",
        facts=(*facts, ("", f"{took}; {predicted}"), ("", f"the model is in {output}")),
        tables=(Table(columns=columns, rows=rows),),
    )
