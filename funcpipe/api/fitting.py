"""The decisions of `fit`: how many samples a step has, how many of them a function takes at once, and by which plan.

Micro-batches of a few samples are measured first, then larger ones as long as their plan is better by the goal and fits
into functions. Where the samples of a batch depend on each other, as under BatchNorm, the largest that fits is taken:
only a whole global batch gives what a script gives.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from funcpipe.api.predicting import Predicting
from funcpipe.client.prepare.arguments import spec_of
from funcpipe.client.prepare.data import open_data, open_with_first
from funcpipe.client.prepare.precheck import record_of, with_last
from funcpipe.client.prepare.rehearsal import rehearse, rehearse_shapes
from funcpipe.client.prepare.session import open_session
from funcpipe.core import (
    Coupled,
    JobEstimate,
    ModelProfile,
    Plan,
    PlatformSpec,
    RunSettings,
    Validation,
    checks,
)
from funcpipe.core.cached import cached_property
from funcpipe.core.texts import counted, number_text, time_text, usd_text
from funcpipe.errors import Infeasible, InvalidValue
from funcpipe.model.tensors import is_weightless
from funcpipe.platforms.catalog import LOCAL, is_ray, offer_at, with_region
from funcpipe.platforms.room import Offer
from funcpipe.training.batches import Batches
from funcpipe.training.data_source import Data, DataSource
from funcpipe.training.optimizers import trainable_shapes
from funcpipe.training.recipe import no_optimizer
from funcpipe.training.recipe_trial import optimizer_kind

DEFAULT_BATCH = 32
"""The samples of a step, if neither the user nor a DataLoader says how many."""

_FEW = 4
"""The samples of the smallest micro-batch that is measured; the next one has as many times more."""

_BETTER = 0.98
"""A larger micro-batch is taken if the goal's value falls at least to this share."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a user says of a plan: where it runs, the samples of a step and of a function, and what an hour is worth."""

    platform: str = LOCAL
    like: str | PlatformSpec | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    time_value: float = 0.0

    def __post_init__(self) -> None:
        checks.all_whole(self, 1, "global_batch", "micro_batch")
        checks.at_least("time_value", self.time_value, 0)

    @cached_property
    def offer(self) -> Offer:
        """What there is to plan with."""
        if self.like is not None:
            return Offer(spec=spec_of(self.like))
        return offer_at(self.platform)

    @property
    def spec(self) -> PlatformSpec:
        """The platform to plan for."""
        return self.offer.spec

    @property
    def functions(self) -> str | PlatformSpec | None:
        """The platform as an estimate takes it: functions start and end as there."""
        return self.like or (None if self.platform == LOCAL or is_ray(self.platform) else with_region(self.platform))


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A plan, in a line each what was chosen, and what the whole run is expected to take."""

    plan: Plan
    lines: tuple[str, ...]
    job: JobEstimate | None = None


def choose(pipe: Predicting, dataset: Data, wanted: Wanted, kept: Plan | None = None) -> Chosen:
    """The plan to train `pipe` by: the one that was `kept`, or that it has, if it is what is wanted, or a new one.

    Profile and plan of `pipe` are then those. Raises DataError, ModelError, InvalidValue or Infeasible.
    """
    _, source = open_data(dataset)
    batch, why = _global_batch(source, wanted)
    if wanted.micro_batch is not None and batch % wanted.micro_batch:
        raise InvalidValue("micro_batch", wanted.micro_batch, f"must divide the global batch of {batch} samples")
    if pipe._recipe.optimizer is no_optimizer:
        no_optimizer([])
    known = kept or pipe._plan
    other = "" if known is None else _mismatch(known, pipe, batch, wanted)
    if known is not None and not other:
        pipe._plan, how = known, "by the plan that was there"
    else:
        how = _tried_text(_search(pipe, dataset, source, batch, wanted)) + (f"; {other}" if other else "")
    assert pipe._plan is not None, "it is known or was found"
    samples = f"{batch} samples a step, {why}; {pipe._plan.micro_batch} at a time, {how}"
    return Chosen(plan=pipe._plan, lines=(samples, plan_text(pipe._plan)))


def choose_for_run(
    pipe: Predicting,
    dataset: Data,
    wanted: Wanted,
    *,
    epochs: int,
    validation: Validation | Data | None,
    max_usd: float | None,
    settings: RunSettings,
    kept: Plan | None = None,
) -> Chosen:
    """The same, with a line of what the whole run is expected to take; a run that is resumed goes on by its own plan.

    Raises RunUnknown for a run that is not there, InvalidValue for a name that is taken.
    """
    checks.whole("epochs", epochs, 1)
    if settings.name is not None or settings.resume is not None:
        with open_session(wanted.platform, wanted.like, settings) as session:
            record = record_of(session.storage, with_last(session.storage, settings))
        kept = kept if record is None else record.plan
    chosen = choose(pipe, dataset, wanted, kept)
    if chosen.plan.estimate is None:
        return replace(chosen, lines=(*chosen.lines, "what it costs is not known: the plan has no estimate"))
    job = pipe.estimate(
        dataset,
        epochs=epochs,
        platform=wanted.functions,
        plan=chosen.plan,
        prices=settings.prices,
        validation=validation,
    )
    return replace(chosen, lines=(*chosen.lines, job.line(max_usd)), job=job)


def micro_batches(batch: int) -> Iterator[int]:
    """Yield the sizes to try, each a divisor of the global `batch`: a few samples, several times as many, …, all."""
    least = min(_FEW, batch)
    for size in range(1, batch + 1):
        if batch % size == 0 and (size >= least or size == batch):
            yield size
            least = size * _FEW
    if least // _FEW != batch:
        yield batch


def couples_samples(model: nn.Module) -> bool:
    """Return True if what a model makes of a sample depends on the others of its batch."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _global_batch(source: DataSource, wanted: Wanted) -> tuple[int, str]:
    """The samples of a step, and why so many."""
    samples = len(source.dataset)
    if wanted.global_batch is not None:
        Batches(samples=samples, global_batch=wanted.global_batch, micro_batch=1, seed=0)  # or it raises DataError
        return wanted.global_batch, "as asked"
    if source.drop_last and source.batch_size is not None:
        Batches(samples=samples, global_batch=source.batch_size, micro_batch=1, seed=0)
    if source.batch_size is not None:
        return min(source.batch_size, samples), "as the DataLoader has it"
    return min(DEFAULT_BATCH, samples), "by default; a DataLoader's batch_size or global_batch says otherwise"


def _mismatch(plan: Plan, pipe: Predicting, batch: int, wanted: Wanted) -> str:
    """Why `plan` is not what is wanted; empty if it is."""
    recipe = pipe._recipe
    kind = optimizer_kind(recipe.optimizer, trainable_shapes(pipe.model, recipe.loss))
    keeps_more = kind.values_per_parameter > plan.optimizer.values_per_parameter
    held = [stage.parameter_bytes or 0 for stage in plan.stages]
    for what, before, now in (
        ("model", plan.model, type(pipe.model).__name__),
        ("bytes of parameters", sum(held) or _trained_bytes(pipe.model), _trained_bytes(pipe.model)),
        ("platform", plan.platform, wanted.spec.name),
        ("region", plan.region, wanted.spec.region),
        ("global batch", plan.global_batch, batch),
        ("micro-batch", plan.micro_batch, wanted.micro_batch or plan.micro_batch),
        ("precision", plan.precision.value, recipe.precision.value),
        ("optimiser", plan.optimizer.value, kind.value if keeps_more else plan.optimizer.value),
        ("average", plan.averaged, recipe.average is not None),
        ("loss of a whole batch", plan.joint_loss, recipe.coupled is Coupled.CACHE),
    ):
        if before not in ("", now):  # plans by hand may lack what they are for
            return f"the plan that was there has the {what} {before}, not {now}"
    if not wanted.offer.has_room(plan):
        return "the plan that was there needs more than the machines at hand have"
    asked = plan.made_for
    if asked is not None and wanted.time_value and asked.time_value != wanted.time_value:
        return f"the plan that was there is for an hour worth ${asked.time_value:g}"
    return ""


def _trained_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def _search(pipe: Predicting, dataset: Data, source: DataSource, batch: int, wanted: Wanted) -> list[int]:
    """Find profile and plan for `pipe`; returns the sizes of micro-batches that were measured."""
    sizes = [wanted.micro_batch] if wanted.micro_batch else list(micro_batches(batch))
    smaller = [] if wanted.micro_batch else [size for size in range(sizes[0] - 1, 0, -1) if batch % size == 0]
    _, _, first = open_with_first(dataset, pipe.model, micro_batch=sizes[0])
    rehearsed = rehearse_shapes if is_weightless(pipe.model) else rehearse
    rehearsed(pipe.model, pipe._recipe, first.batch, seed=0)  # mistakes are found here, before anything is measured
    takes_largest, best, tried = couples_samples(pipe.model), None, list[int]()
    while sizes:
        size = sizes.pop(0)
        try:
            found = _planned(pipe, dataset, source, size, batch, wanted)
        except Infeasible:
            if best is not None:
                break
            if not smaller:
                raise
            sizes = [smaller.pop(0)]
            continue
        tried.append(size)
        if best is not None and not takes_largest and _value(found[0]) > _BETTER * _value(best[0]):
            break
        best = found
    assert best is not None, "or else Infeasible was raised"
    pipe._plan, pipe._profile = best
    return tried


def _planned(
    pipe: Predicting, dataset: Data, source: DataSource, size: int, batch: int, wanted: Wanted
) -> tuple[Plan, ModelProfile]:
    """Profile micro-batches of `size` samples, unless `pipe` has such a profile already, and plan."""
    known, spec = pipe._profile, wanted.spec
    if known is not None and (known.micro_batch, known.precision, pipe._spec) == (size, pipe._recipe.precision, spec):
        return _best_with_room(pipe, batch, wanted), known
    loader: DataLoader[Any] = DataLoader(
        source.dataset,  # type: ignore[arg-type]  # any map-style dataset
        batch_size=size,
        collate_fn=source.options.collate,
    )
    profile = pipe.profile(loader, platform=spec, micro_batch=size, dataset=dataset)
    return _best_with_room(pipe, batch, wanted), profile


def _best_with_room(pipe: Predicting, batch: int, wanted: Wanted) -> Plan:
    """The best plan whose functions the machines at hand have room for at once. Raises Infeasible."""
    find = partial(pipe.optimize, global_batch=batch, time_value=wanted.time_value)
    best = find()
    if wanted.offer.has_room(best):
        return best
    found, reasons = list[Plan](), list[Infeasible]()
    for part in wanted.offer.where_all_have_room():
        try:
            found.append(find(spec=part))
        except Infeasible as error:
            reasons.append(error)
    if not found:
        raise reasons[0] if reasons else Infeasible(f"{wanted.platform} has no room for a function of any size")
    return min(found, key=_value)


def _value(plan: Plan) -> float:
    """The goal's value of a plan that was searched for."""
    assert plan.solver is not None, "it was searched for"
    return plan.solver.objective


def _tried_text(tried: list[int]) -> str:
    if len(tried) == 1:
        return "measured here"
    return f"the best of {', '.join(map(str, tried))}, measured here"


def plan_text(plan: Plan) -> str:
    """The functions of a plan in words, and what a step takes."""
    sizes = " and ".join(dict.fromkeys(stage.size for stage in plan.stages))
    each = ""
    if plan.estimate is not None:
        seconds = plan.estimate.iteration_s
        took = time_text(seconds) if seconds >= 1 else f"{number_text(seconds, 3)} s"
        each = f": a step takes about {took} and ${usd_text(plan.estimate.cost_usd)}"
    stages, replicas = counted(len(plan.stages), "stage"), counted(plan.replicas, "replica")
    return f"{counted(plan.workers, 'function')} of {sizes} on {plan.platform}, {stages} x {replicas}{each}"
