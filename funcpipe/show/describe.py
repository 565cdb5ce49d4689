"""Descriptions of values: each value is described once, for terminals, notebooks and pages, which draw descriptions.

`describe(plan)` gives a title, facts by name, tables and a figure; `terminal`, `notebook` and `page` draw them. The
functions that describe are in `plans`, `runs`, `jobs` and `sweeps`; besides the value, some take more that is to be
said of it, such as the file that it was written to.
"""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from funcpipe.core import Trace


@dataclass(frozen=True, slots=True)
class Column:
    """A column, of numbers unless it is `text`.

    Where a terminal is too narrow, columns with the lowest `drop` are left out first, those with 0 never.
    """

    name: str
    text: bool = False
    drop: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows with a cell for each column."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    @classmethod
    def of(cls, title: str, names: Iterable[str], rows: Iterable[Sequence[str]], *, text: bool = False) -> "Table":
        """Return a table of numbers, or of `text`, whose first column names the row."""
        columns = tuple(Column(name, text=text or not place) for place, name in enumerate(names))
        return cls(columns=columns, rows=tuple(map(tuple, rows)), title=title)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """The description of a value.

    A fact without a name is a sentence. The `figure` is a trace, drawn lane by lane, or values, drawn as a curve;
    `commands` are those that may come next, which are printed such that they can be copied.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[Table, ...] = ()
    figure: "Trace | Sequence[float] | None" = None
    commands: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """The facts, one in a line."""
        return tuple(f"{name}: {fact}" if name else fact for name, fact in self.facts)


_DESCRIBED_BY = {
    "ModelProfile": "plans.profile",
    "Plan": "plans.plan",
    "Trace": "plans.trace",
    "PlatformSpec": "plans.platform",
    "StorageReport": "plans.storage_report",
    "RunResult": "runs.training_result",
    "Bill": "runs.bill",
    "Estimate": "runs.estimate",
    "JobEstimate": "runs.job_estimate",
    "RunStatus": "runs.run_status",
    "Report": "runs.comparison",
    "Verification": "runs.verification",
    "EvaluationResult": "runs.evaluation",
    "SweepResult": "sweeps.sweep",
    "SweepStatus": "sweeps.sweep_status",
    "Provision": "jobs.provision",
    "ProvisionTable": "jobs.provisions",
}


def describe(value: Any) -> Description:
    """Return the description of a plan, a profile, a trace, a result, a bill … Raises TypeError for other values."""
    if isinstance(value, Description):
        return value
    if type(value).__name__ not in _DESCRIBED_BY:
        raise TypeError(f"nothing describes a {type(value).__name__}, but: {', '.join(_DESCRIBED_BY)}")
    module, name = _DESCRIBED_BY[type(value).__name__].split(".")
    found: Description = getattr(importlib.import_module(f"funcpipe.show.{module}"), name)(value)
    return found


def usd(value: float) -> str:
    """Return dollars with three digits that count."""
    return f"${value:,.2f}" if value >= 100 else f"${value:.3g}" if value >= 1e-4 or value == 0 else f"${value:.2e}"


def seconds(value: float) -> str:
    """Return seconds with three digits that count; short times in milliseconds."""
    return f"{value * 1e3:.3g} ms" if 0 < abs(value) < 0.1 else f"{value:,.4g} s"


def megabytes(value: float) -> str:
    """Return bytes in MB of 2^20 bytes."""
    return f"{value / 2**20:,.0f} MB" if value >= 10 * 2**20 else f"{value / 2**20:.3g} MB"


def percent(share: float | None, decimals: int = 0) -> str:
    """Return a share in per cent; "-" for None."""
    return "-" if share is None else f"{share:.{decimals}%}"
