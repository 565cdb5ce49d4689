"""The estimate of a whole job, before it is started: seconds and dollars, item by item."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from funcpipe.core import checks
from funcpipe.core.bill import Bill


@dataclass(frozen=True, slots=True, kw_only=True)
class JobItem:
    """One item of an estimate: what happens `count` times, and lasts `seconds` in all.

    `functions_usd` pays for the functions' time, `requests_usd` for requests and invocations.
    """

    count: int = 0
    seconds: float = 0.0
    functions_usd: float = 0.0
    requests_usd: float = 0.0

    def __post_init__(self) -> None:
        for name in ("count", "seconds", "functions_usd", "requests_usd"):
            checks.at_least(name, getattr(self, name), 0)

    @property
    def cost_usd(self) -> float:
        """Dollars of the item."""
        return self.functions_usd + self.requests_usd


NOTHING = JobItem()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEstimate:
    """The prediction for the remaining `steps` steps at the prices of `platform`.

    `start` counts functions: their cold starts, and loading code and tensors. `training` counts steps, with the
    messages of activations, gradients and sums; `validation` forward-only steps. `hand_overs` counts functions that
    take the place of others, `checkpoints` those of all stages. `watching` counts seconds: heartbeats, leases and empty
    requests of functions, besides their work. `client` counts the client's own requests. The earlier cost of the run is
    `earlier_usd`, `hours_usd` pays for stores that cost by the hour, while the run lasts, and `traffic_usd` for what
    the client downloads. Logs and the watchdog of a deployment are not in it. `prices_note` says which prices are
    another region's.
    """

    FORMAT: ClassVar[str] = "funcpipe.job-estimate/1"

    platform: str
    epochs: int
    steps: int
    start: JobItem
    training: JobItem
    validation: JobItem = field(default=NOTHING)
    hand_overs: JobItem = field(default=NOTHING)
    checkpoints: JobItem = field(default=NOTHING)
    watching: JobItem = field(default=NOTHING)
    client: JobItem = field(default=NOTHING)
    earlier_usd: float = 0.0
    hours_usd: float = 0.0
    traffic_usd: float = 0.0
    prices_note: str = ""

    @staticmethod
    def upgrade(fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of what a command has printed with `--json`, which says beside them what was observed here."""
        return {name: value for name, value in fields.items() if name != "observed_here"}

    @property
    def items(self) -> dict[str, JobItem]:
        """All items by name."""
        names = ("start", "training", "validation", "hand_overs", "checkpoints", "watching", "client")
        return {name: getattr(self, name) for name in names}

    @property
    def seconds(self) -> float:
        """From the first function's start to the last one's end."""
        return sum(item.seconds for item in self.items.values())

    @property
    def functions_usd(self) -> float:
        """Dollars for the time of functions."""
        return sum(item.functions_usd for item in self.items.values())

    @property
    def requests_usd(self) -> float:
        """Dollars for requests and invocations."""
        return sum(item.requests_usd for item in self.items.values())

    @property
    def cost_usd(self) -> float:
        """Dollars for all that is left, and all that the run has cost before."""
        return self.functions_usd + self.requests_usd + self.hours_usd + self.traffic_usd + self.earlier_usd

    def line(self, max_usd: float | None = None) -> str:
        """Return the estimate in one line, with the limit `max_usd` if there is one."""
        parts = [counted(self.epochs, "epoch"), counted(self.steps, "step"), f"about {time_text(self.seconds)}"]
        if self.cost_usd:
            items = [f"functions {usd_text(self.functions_usd)}", f"requests {usd_text(self.requests_usd)}"]
            items += [f"stores {usd_text(self.hours_usd)}"] if self.hours_usd else []
            items += [f"traffic {usd_text(self.traffic_usd)}"] if self.traffic_usd else []
            items += [f"so far {usd_text(self.earlier_usd)}"] if self.earlier_usd else []
            parts.append(f"${usd_text(self.cost_usd)} on {self.platform} ({', '.join(items)})")
        else:
            parts.append(f"no cost on {self.platform}")
        if max_usd is not None:
            parts.append(f"cap ${max_usd:g}")
        return ", ".join(parts) + (f"; {self.prices_note}" if self.prices_note else "")


def earlier_text(bill: Bill) -> str:
    """Return the part of a bill that is from before its run was resumed, in words."""
    return f", ${usd_text(bill.earlier_usd)} of it before it was resumed" if bill.earlier_usd else ""


def counted(number: int, what: str) -> str:
    """Return a number of things as text: '1 step', '2 steps'."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def time_text(seconds: float) -> str:
    """Return a time in words, to two digits or so."""
    if seconds < 90:
        return f"{number_text(seconds, 0) if seconds < 0.95 else f'{seconds:.0f}'} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def usd_text(usd: float) -> str:
    """Return dollars to cents, or to two digits below ten cents."""
    return f"{usd:.2f}" if usd >= 0.1 or not usd else f"{usd:.2g}" if usd >= 1e-4 else number_text(usd, 6)


def number_text(value: float, decimals: int) -> str:
    """Return a number with so many decimals, or as many more as it takes to show two digits that count; zero is "0"."""
    if not value or not math.isfinite(value):
        return f"{value:.0f}"
    if abs(value) < 1e-9:
        return f"{value:.1e}"
    return f"{value:.{max(decimals, 1 - math.floor(math.log10(abs(value))))}f}"
