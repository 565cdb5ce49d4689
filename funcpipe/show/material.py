"""The material of a page: whichever of plan, profile, platform, traces and results there are."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from funcpipe.analysis.predict import predict
from funcpipe.core import (
    Estimate,
    FinishedRun,
    ModelProfile,
    Plan,
    PlatformSpec,
    RunRecord,
    Source,
    Trace,
    read,
    read_trace,
)
from funcpipe.core.trace import TRACE_FORMAT
from funcpipe.errors import FormatError, InputError
from funcpipe.partitioner.cost.evaluate import evaluate
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import planned_spec

_DOCUMENTS: dict[str, tuple[str, Any]] = {
    Plan.FORMAT: ("plan", Plan),
    ModelProfile.FORMAT: ("profile", ModelProfile),
    PlatformSpec.FORMAT: ("spec", PlatformSpec),
    FinishedRun.FORMAT: ("finished", FinishedRun),
    RunRecord.FORMAT: ("record", RunRecord),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """The known parts of a run or a plan, or None. `finished` is the outcome of a run, `record` describes it."""

    plan: Plan | None = None
    profile: ModelProfile | None = None
    spec: PlatformSpec | None = None
    predicted: Trace | None = None
    observed: Trace | None = None
    finished: FinishedRun | None = None
    record: RunRecord | None = None

    @property
    def title(self) -> str:
        """The run's name, or the model's."""
        if self.observed is not None:
            return self.observed.run
        if self.record is not None:
            return self.record.run
        return (self.plan.model if self.plan is not None else "") or "plan"

    @property
    def estimate(self) -> Estimate | None:
        """The predicted cost of an iteration: the plan's, or by its profile and platform."""
        if self.plan is None or self.plan.estimate is not None:
            return None if self.plan is None else self.plan.estimate
        if self.profile is None or self.spec is None:
            return None
        return evaluate(self.plan, self.profile, self.spec)

    def completed(self) -> "Material":
        """Add the run's plan, and a prediction where plan, profile and platform allow one; raises PlanError."""
        plan = self.plan or (None if self.record is None else self.record.plan)
        predicted = self.predicted
        if predicted is None and plan is not None and self.profile is not None and self.spec is not None:
            predicted = predict(plan, self.profile, self.spec)
        return replace(self, plan=plan, predicted=predicted)


def read_material(paths: Sequence[str]) -> Material:
    """Sort files by what they are. Raises FormatError for other files, InputError for two of one kind."""
    found: dict[str, Any] = {}
    for path in paths:
        name, value = _read_one(path)
        if name in found:
            raise InputError(f"{path} is a second {name}: a report is of one; name one of them")
        found[name] = value
    return Material(**found)


def merged(first: Material, second: Material) -> Material:
    """Merge two materials; raises InputError for what both have."""
    both = [f.name for f in fields(Material) if getattr(first, f.name) and getattr(second, f.name)]
    if both:
        raise InputError(f"there are two of: {', '.join(both)}; name each once")
    return Material(**{f.name: getattr(first, f.name) or getattr(second, f.name) for f in fields(Material)})


def _read_one(path: str) -> tuple[str, Any]:
    form = document_format(path)
    if form == TRACE_FORMAT:
        trace = read_trace(path)
        return ("predicted" if trace.source is Source.SIMULATED else "observed"), trace
    if form not in _DOCUMENTS:
        known = ", ".join(["a trace", "a plan", "a profile", "a platform", "what a run left"])
        raise FormatError(f"{path}: a report cannot use {form or 'a file without a format'}; it can use {known}")
    name, kind = _DOCUMENTS[form]
    return name, read(kind, path)


def document_format(path: str) -> str | None:
    """The format that a JSON file names; None if it names none. Raises FormatError if it cannot be read."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    form = data.get("format") if isinstance(data, dict) else None
    return form if isinstance(form, str) else None


def load_kept(storage: Storage, run: str, spec: PlatformSpec | None = None) -> Material:
    """The plan, trace, losses and bill of the run; of one that still trains, what it has written so far.

    Prices are those of `spec`, or else of the platform that the plan was made for. Raises RunUnknown, and InvalidValue
    where that platform is none of the catalogue.
    """
    from funcpipe.client.follow.results import load_trace
    from funcpipe.client.prepare.session import prices_at
    from funcpipe.runstate.reader import RunReader
    from funcpipe.runstate.signing import signed

    reader = RunReader.newest(signed(storage), run)
    record = reader.record
    prices = spec or prices_at(record.platform, planned_spec(record.plan), given=False)
    trace = load_trace(reader, prices)
    return Material(plan=record.plan, record=record, finished=reader.finished, observed=trace if trace.events else None)
