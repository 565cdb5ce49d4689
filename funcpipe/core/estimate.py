"""The predictions for one iteration of a plan and for a whole job, and how the plan was found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from funcpipe.core import checks
from funcpipe.core.json_form import IF_CHANGED
from funcpipe.core.texts import counted, time_text, usd_text


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of the accelerator of a stage's function by purpose, and all that it has, `has_bytes`."""

    has_bytes: int
    context_bytes: int
    state_bytes: int
    activation_bytes: int
    waste_bytes: int

    @property
    def needs_bytes(self) -> int:
        """The peak."""
        return self.context_bytes + self.state_bytes + self.activation_bytes + self.waste_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """The prediction for one stage: a function's memory by purpose, and each lane's seconds for one micro-batch.

    On a function with an accelerator that is the memory of the host, and `device` that of the accelerator; messages
    are copied between the two on lanes of their own.

    `joint_s` is what the exchange of outputs for a joint loss takes, once an iteration. Where replicas train alone,
    `sync_s` is a step's share of a meeting.
    """

    base_bytes: int
    state_bytes: int
    activation_bytes: int
    waste_bytes: int
    forward_s: float
    forward_upload_s: float
    forward_download_s: float
    backward_s: float
    backward_upload_s: float
    backward_download_s: float
    sync_s: float
    load_s: float = 0.0
    data_bytes: int = 0
    joint_s: float = 0.0
    device: DeviceMemory | None = field(default=None, metadata=IF_CHANGED)
    forward_to_host_s: float = field(default=0.0, metadata=IF_CHANGED)
    forward_to_device_s: float = field(default=0.0, metadata=IF_CHANGED)
    backward_to_host_s: float = field(default=0.0, metadata=IF_CHANGED)
    backward_to_device_s: float = field(default=0.0, metadata=IF_CHANGED)

    @property
    def memory_bytes(self) -> int:
        """The peak memory of one function of the stage."""
        return self.base_bytes + self.state_bytes + self.activation_bytes + self.waste_bytes + self.data_bytes

    def lacks_bytes(self, memory_mb: int) -> int:
        """Return how much too small a function with `memory_mb`, or its accelerator, is for the stage; else 0."""
        device_bytes = 0 if self.device is None else self.device.needs_bytes - self.device.has_bytes
        return max(0, self.memory_bytes - memory_mb * 2**20, device_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEstimate:
    """The use that one kind of object makes of its store in an iteration, all functions together.

    `hours_usd` pays for the iteration's part of an hour of a store that is there for it; the first kind that is in the
    store has it.
    """

    kind: str
    store: str
    puts: int
    gets: int
    sent_bytes: int
    received_bytes: int
    request_usd: float
    transfer_usd: float
    hours_usd: float = 0.0

    @property
    def cost_usd(self) -> float:
        """Dollars for requests, bytes and hours."""
        return self.request_usd + self.transfer_usd + self.hours_usd


BY_RATES = "estimated from operations and bytes, by published rates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The prediction for one iteration: seconds, itemised dollars, bytes, requests, and the bottleneck.

    `compute_usd` pays for the functions' time, `request_usd` for storage requests and bytes, `hours_usd` for the hours
    of stores that cost by the hour. `stores` has the use of each store by kind of object; older estimates lack it.

    `overhead_s` and `overhead_usd` are what an iteration's share of starting functions, and of handing over when their
    lifetime ends, adds; `iteration_s` and `cost_usd` do not include them.

    Where replicas train alone between meetings, an iteration is the mean of all steps; one with a meeting takes
    `meeting_s`. `by_rates` is true where the seconds that accelerators compute follow from their published rates.
    """

    iteration_s: float
    cost_usd: float
    compute_usd: float
    request_usd: float
    peak_memory_bytes: int
    puts: int
    gets: int
    bottleneck: str
    stages: tuple[StageEstimate, ...]
    overhead_s: float = 0.0
    overhead_usd: float = 0.0
    hours_usd: float = 0.0
    stores: tuple[StoreEstimate, ...] = ()
    meeting_s: float | None = field(default=None, metadata=IF_CHANGED)
    by_rates: bool = field(default=False, metadata=IF_CHANGED)

    def usd_in(self, iteration_s: float) -> float:
        """Dollars of an iteration that takes `iteration_s` instead: those of functions and of hours follow the time."""
        longer = iteration_s / self.iteration_s if self.iteration_s else 1.0
        return longer * (self.compute_usd + self.hours_usd) + self.request_usd


class Optimality(Enum):
    """The evidence for a plan: that it is the best there is, or only the best that was found."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """The outcome of a search. No plan has an objective below `bound`; `gap` = (objective − bound) / objective.

    `merged_layers` is how many layers the plan was chosen among, where that is fewer than the profile has; `sync_ways`
    how many ways of synchronising, the same for all stages, where not every stage could have any. No *such* plan is
    below `bound`. A plan that is better in another way has no bound. Where plans were simulated, `simulated_plans` says
    how many, and the other two what this one, the best of them, takes then: seconds and dollars of an iteration.
    """

    name: str
    status: Optimality
    objective: float
    gap: float | None
    solve_s: float
    bound: float | None = None
    merged_layers: int | None = None
    sync_ways: int | None = None
    simulated_plans: int | None = None
    simulated_s: float | None = None
    simulated_usd: float | None = None


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
        checks.all_at_least(self, 0, "count", "seconds", "functions_usd", "requests_usd")

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
    another region's. `start_parts` are seconds of a start, of the function that takes longest, by the names of
    `StartPart`.
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
    start_parts: Mapping[str, float] = field(default_factory=dict, hash=False)

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
