"""The prediction for one iteration of a plan, and how the plan was found."""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """The prediction for one stage: a function's memory by purpose, and each lane's seconds for one micro-batch.

    `joint_s` is what the exchange of outputs for a joint loss takes, once an iteration.
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

    @property
    def memory_bytes(self) -> int:
        """The peak memory of one function of the stage."""
        return self.base_bytes + self.state_bytes + self.activation_bytes + self.waste_bytes + self.data_bytes


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The prediction for one iteration: seconds, itemised dollars, bytes, requests, and the bottleneck.

    `compute_usd` pays for the functions' time, `request_usd` for storage requests and bytes, `hours_usd` for the hours
    of stores that cost by the hour. `stores` has the use of each store by kind of object; older estimates lack it.

    `overhead_s` and `overhead_usd` are what an iteration's share of starting functions, and of handing over when their
    lifetime ends, adds; `iteration_s` and `cost_usd` do not include them.
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
