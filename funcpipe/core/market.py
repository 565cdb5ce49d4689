"""Machines that can be rented in one region: sizes, prices and limits, as dated data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

from funcpipe.core import checks
from funcpipe.core.accelerator import Accelerator
from funcpipe.errors import InvalidValue

HOUR_S = 3600.0
MONTH_S = 30 * 24 * HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One type of machine: virtual processors, memory, network, GPUs, and dollars for an hour.

    `spot_usd_h` is None where no spot price was found. `interruption` is the chance that a spot machine is taken back
    within a month, the upper end of the band that the provider publishes. `quota` is how many can be rented at once.
    """

    name: str
    vcpu: int
    memory_mb: int
    network_mb_s: float
    on_demand_usd_h: float
    spot_usd_h: float | None = None
    interruption: float | None = None
    gpu: str | None = None
    gpus: int = 0
    pcie_mb_s: float = 10_000.0
    quota: int = 8

    def __post_init__(self) -> None:
        checks.all_whole(self, 1, "vcpu", "memory_mb")
        checks.all_whole(self, 0, "gpus", "quota")
        checks.all_positive(self, "network_mb_s", "on_demand_usd_h", "pcie_mb_s", "spot_usd_h")
        checks.all_at_least(self, 0, "interruption")
        if (self.gpu is None) != (self.gpus == 0):
            raise InvalidValue("gpus", self.gpus, "must be above 0 if, and only if, gpu names their model")

    def usd_h(self, *, spot: bool) -> float | None:
        """Return dollars for an hour; None where it cannot be rented that way."""
        return self.spot_usd_h if spot else self.on_demand_usd_h


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """The machines of one provider in one region, and what holds for all of them.

    `server` names the machine on which a parameter server runs. A machine works `start_s` after it was ordered. A spot
    machine is replaced `replace_s` after it was lost. `sources` maps a field of this class, of a machine or of a GPU to
    where and when its values were published, or says that they are an assumption.
    """

    FORMAT: ClassVar[str] = "funcpipe.market/1"

    name: str
    region: str
    as_of: str
    source: str
    machines: tuple[Machine, ...]
    server: str
    gpus: tuple[Accelerator, ...] = ()
    start_s: float = 0.0
    replace_s: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        checks.filled("machines", self.machines)
        checks.distinct("machines", [machine.name for machine in self.machines])
        checks.distinct("gpus", [gpu.name for gpu in self.gpus])
        checks.all_at_least(self, 0, "start_s", "replace_s")
        known = [gpu.name for gpu in self.gpus]
        for i, machine in enumerate(self.machines):
            if machine.gpu is not None and machine.gpu not in known:
                raise InvalidValue(f"machines[{i}].gpu", machine.gpu, f"must be one of {', '.join(known)}")
        self.machine(self.server)
        documented = {item.name for kind in (Market, Machine, Accelerator) for item in fields(kind)}
        for name in self.sources:
            if name not in documented:
                raise InvalidValue("sources", name, "must name fields of a market, a machine or a GPU")

    def machine(self, name: str) -> Machine:
        """Return the machine called `name`; raises InvalidValue with the names of all."""
        for machine in self.machines:
            if machine.name == name:
                return machine
        raise InvalidValue("machine", name, f"must be one of {', '.join(machine.name for machine in self.machines)}")

    def compute_vcpu(self, machine: Machine) -> float:
        """Return the number of virtual processors that compute as fast as `machine`: its GPUs where it has some."""
        if machine.gpu is None:
            return float(machine.vcpu)
        return machine.gpus * self._gpu(machine.gpu).vcpu_equivalents

    def model_memory_mb(self, machine: Machine) -> int:
        """Return the memory in which the model must fit: that of one GPU where there are some."""
        return machine.memory_mb if machine.gpu is None else self._gpu(machine.gpu).memory_mb

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The values of the market that are assumed, not published."""
        return tuple(f"{name}: {text}" for name, text in self.sources.items() if "assum" in text)

    def _gpu(self, name: str) -> Accelerator:
        return next(gpu for gpu in self.gpus if gpu.name == name)
