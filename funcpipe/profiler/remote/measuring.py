"""Measurements by functions of every size: of their platform, and of the layers of a model on it.

Probes run within the lifetime of functions, and within a budget of dollars.
"""

import hashlib
import secrets
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from funcpipe.comm import codec
from funcpipe.core import FunctionSize, LayerReport, MachineReport, PlatformSpec, ProbeSpec, from_text
from funcpipe.core.texts import usd_text
from funcpipe.errors import DeadlineExceeded, InputError, KeyMissing, ModelError, WorkerFailed
from funcpipe.model.split import StageModule, dump_stage
from funcpipe.platforms.base import Cause, Platform, State, Status, Storage
from funcpipe.platforms.function_group import FunctionGroup
from funcpipe.profiler.measure import Loss, Timing, faster
from funcpipe.profiler.remote.function import ProbeKeys

_LIFETIME_SHARE = 0.8  # of a function's lifetime; the rest is for its start and its last layer


class Budget:
    """The dollars to spend on functions of a platform; None for no limit."""

    def __init__(self, spec: PlatformSpec, max_usd: float | None) -> None:
        self._spec = spec
        self._max_usd = max_usd
        self.spent_usd = 0.0

    def longest_s(self, sizes: Sequence[FunctionSize]) -> float:
        """Return how long functions of these sizes may run after their invocation, within lifetime and budget.

        Raises InputError if that is too short to measure anything.
        """
        lifetime_s = float("inf") if self._spec.lifetime_s is None else self._spec.lifetime_s
        longest_s = lifetime_s + self._spec.cold_start_s
        if self._max_usd is not None:
            left_usd = self._max_usd - self.spent_usd - len(sizes) * self._spec.price_invocation_usd
            longest_s = min(longest_s, left_usd / max(sum(size.price_usd_s for size in sizes), 1e-12))
        if self.working_s(longest_s) < 1:
            raise InputError(
                f"${self._max_usd:g} is too little: ${usd_text(self.spent_usd)} is spent, the rest does not pay for a "
                f"second of {len(sizes)} functions of {self._spec.name}; allow more dollars or fewer sizes"
            )
        return longest_s

    def working_s(self, longest_s: float) -> float:
        """Return the part of that time in which a function may start new measurements."""
        return min((longest_s - self._spec.cold_start_s) * _LIFETIME_SHARE, 1e6)

    def spend(self, size: FunctionSize, seconds: float) -> None:
        """Add the price of a function of this size that ran for `seconds`."""
        self.spent_usd += self._spec.price_invocation_usd + seconds * size.price_usd_s


POLL_S = 0.05
"""Pause between two polls of the functions."""


@dataclass(frozen=True)
class FinishedProbe:
    """A probe that has ended: when it was invoked, its status, and whether it was stopped as too `late`."""

    probe: ProbeSpec
    invoked_at_s: float
    status: Status
    late: bool

    @property
    def out_of_resources(self) -> bool:
        """True if it ran out of memory or time."""
        return self.late or self.status.cause in (Cause.OUT_OF_MEMORY, Cause.TIMED_OUT)


def run_probes(
    platform: Platform, probes: Sequence[ProbeSpec], budget: Budget, *, longest_s: float
) -> tuple[FinishedProbe, ...]:
    """Run the functions, as many at once as the platform allows; each at most `longest_s`.

    Functions that share the processors of one machine run one after the other. All have ended on return.
    """
    spec = platform.spec
    at_once = 1 if spec.shared_cores is not None else spec.max_functions
    waiting, ended = {probe.worker: probe for probe in probes}, list[FinishedProbe]()
    by_worker = dict(waiting)
    with FunctionGroup(platform, clock=time.monotonic) as group:
        while waiting or group.running:
            while waiting and len(group.running) < at_once:
                group.start(waiting.pop(next(iter(waiting))), sleep=time.sleep)
            time.sleep(POLL_S)
            for function in group.running:
                status, seconds = group.poll(function), function.watched_s()
                late = status.state is State.RUNNING and seconds > longest_s
                if late:
                    group.stop([function])
                if not function.runs:
                    probe = by_worker[function.started.worker]
                    budget.spend(spec.size(probe.size), seconds)
                    ended.append(FinishedProbe(probe, function.started.started_at_s, status, late))
    return tuple(ended)


def check(ended: FinishedProbe, storage: Storage) -> None:
    """Raise WorkerFailed, with the function's traceback, if it failed other than by running out of memory or time."""
    if ended.status.state is State.FAILED and not ended.out_of_resources:
        try:
            failure = storage.get(ProbeKeys(ended.probe.run).failure(ended.probe.number)).decode()
        except KeyMissing:
            failure = "it left no traceback"
        who = f"run {ended.probe.run}: {ended.probe.worker}, a function of {ended.probe.size},"
        raise WorkerFailed(f"{who} {ended.status.reason}: {failure}")


def remove_objects(storage: Storage, run: str) -> None:
    """Delete all objects of a run."""
    storage.delete_many(storage.list(f"{run}/"))


_MEASURED = ("vcpu", "upload_bytes_s", "download_bytes_s", "latency_s", "cold_start_s", "base_memory_bytes")


def measure_platform(
    platform: Platform, storage: Storage, storage_url: str, *, max_usd: float | None = None
) -> PlatformSpec:
    """Return the specification of `platform` with the values that a function of each size measures, as `sources` says.

    Raises WorkerFailed if a function fails, InputError if `max_usd` is too little.
    """
    run = f"measure-{secrets.token_hex(6)}"
    spec = platform.spec
    budget = Budget(spec, max_usd)
    longest_s = budget.longest_s(spec.sizes)
    probes = [
        ProbeSpec(
            run=run,
            number=number,
            size=size.name,
            memory_mb=size.memory_mb,
            storage=storage_url,
            platform=platform.url,
            time_s=budget.working_s(longest_s),
        )
        for number, size in enumerate(spec.sizes)
    ]
    try:
        ended = run_probes(platform, probes, budget, longest_s=longest_s)
        reports = {item.probe.size: _report(item, storage) for item in ended}
    finally:
        remove_objects(storage, run)
    started = {item.probe.size: item.invoked_at_s for item in ended}
    cold_start_s = {size: max(reports[size].started_at_s - started[size], 0.0) for size in reports}
    return measured(spec, reports, cold_start_s=cold_start_s, when=time.strftime("%Y-%m-%d"))


def measured(
    spec: PlatformSpec, reports: Mapping[str, MachineReport], *, cold_start_s: Mapping[str, float], when: str
) -> PlatformSpec:
    """Return `spec` with the values of the reports, one for each size, and each size's cold start."""
    reference_s = _reference_s(spec, reports)
    sizes = tuple(
        replace(_measured_size(size, reports[size.name], reference_s), cold_start_s=cold_start_s[size.name])
        for size in spec.sizes
    )
    return replace(
        spec,
        as_of=when,
        sizes=sizes,
        latency_s=statistics.median(report.latency_s for report in reports.values()),
        cold_start_s=max(cold_start_s.values()),
        base_memory_bytes=max(report.base_memory_bytes for report in reports.values()),
        sources={**spec.sources, **dict.fromkeys(_MEASURED, f"measured by functions of every size, {when}")},
    )


def _measured_size(size: FunctionSize, report: MachineReport, reference_s: float) -> FunctionSize:
    return replace(
        size,
        vcpu=reference_s / report.all_threads_s,
        upload_bytes_s=report.upload_bytes_s,
        download_bytes_s=report.download_bytes_s,
    )


def _reference_s(spec: PlatformSpec, reports: Mapping[str, MachineReport]) -> float:
    """Return seconds of a matrix product on one whole vCPU, from one thread, or from its share of a vCPU."""
    return min(report.one_thread_s * min(1.0, spec.size(name).vcpu) for name, report in reports.items())


def _report(ended: FinishedProbe, storage: Storage) -> MachineReport:
    check(ended, storage)
    key = ProbeKeys(ended.probe.run).machine(ended.probe.number)
    try:
        return from_text(MachineReport, storage.get(key), source=key)
    except KeyMissing:
        reason = "was stopped" if ended.late else ended.status.reason or "left no report"
        raise WorkerFailed(f"run {ended.probe.run}: {ended.probe.worker}, {ended.probe.size}: {reason}") from None


@contextmanager
def platform_timer(
    platform: Platform, storage: Storage, storage_url: str, *, max_usd: float | None = None
) -> "Iterator[PlatformTimer]":
    """A Measure that runs in functions of `platform`; its objects in the storage are removed at the end."""
    measure = PlatformTimer(platform, storage, storage_url, Budget(platform.spec, max_usd))
    try:
        yield measure
    finally:
        remove_objects(storage, measure.run)


class PlatformTimer:
    """Collects layers, and times all of them in functions of every size when the first result is needed."""

    def __init__(self, platform: Platform, storage: Storage, storage_url: str, budget: Budget) -> None:
        self.run = f"profile-{secrets.token_hex(6)}"
        self._keys = ProbeKeys(self.run)
        self.budget = budget
        self._platform = platform
        self._storage = storage
        self._url = storage_url
        self._spec = platform.spec
        self._repeats = 1
        self._code: dict[str, str] = {}
        self._found: dict[tuple[str, int], LayerReport] = {}

    def __call__(self, stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None, repeats: int) -> Timing:
        """Put a layer and its inputs into the storage."""
        number = len(self._code)
        given = {name: values[name] for name in (*stage.inputs, *stage.receives)}
        bundle, tensors = dump_stage(stage, (given, loss if stage.is_last else None))
        self._storage.put(self._keys.bundle(number), bundle)
        self._storage.put(self._keys.tensors(number), codec.encode(tensors))
        self._code[str(number)] = hashlib.sha256(bundle).hexdigest()
        self._repeats = repeats
        return lambda: self._times(number)

    def _times(self, layer: int) -> Sequence[LayerReport]:
        if not self._found:
            self._measure()
        return times_of_sizes(self._spec, {size: t for (size, number), t in self._found.items() if number == layer})

    def _measure(self) -> None:
        """Run functions until every layer has been timed in every size with enough memory for it."""
        missing = {size.name: tuple(range(len(self._code))) for size in self._spec.sizes}
        round_of_functions = 0
        while missing:
            sizes = [self._spec.size(name) for name in missing]
            longest_s = self.budget.longest_s(sizes)
            probes = [
                ProbeSpec(
                    run=self.run,
                    number=round_of_functions * len(self._spec.sizes) + i,
                    size=size.name,
                    memory_mb=size.memory_mb,
                    storage=self._url,
                    platform=self._platform.url,
                    time_s=self.budget.working_s(longest_s),
                    repeats=self._repeats,
                    layers=missing[size.name],
                    code={str(number): self._code[str(number)] for number in missing[size.name]},
                )
                for i, size in enumerate(sizes)
            ]
            ended = run_probes(self._platform, probes, self.budget, longest_s=longest_s)
            missing = {item.probe.size: left for item in ended if (left := self._left(item))}
            round_of_functions += 1

    def _left(self, ended: FinishedProbe) -> tuple[int, ...]:
        """Read a function's reports; return the layers that another function of its size has to measure."""
        check(ended, self._storage)
        size = ended.probe.size
        for number in ended.probe.layers:
            found = self._report(size, number)
            if found is not None:
                self._found[size, number] = found
        left = tuple(number for number in ended.probe.layers if (size, number) not in self._found)
        if ended.status.cause is Cause.OUT_OF_MEMORY:
            return left[1:]
        if len(left) == len(ended.probe.layers):
            raise DeadlineExceeded(
                f"a function of {size} could not time one layer in {ended.probe.time_s:.1f} s; allow more money, "
                "larger sizes or a smaller micro-batch"
            )
        return left

    def _report(self, size: str, number: int) -> LayerReport | None:
        key = self._keys.layer(size, number)
        try:
            return from_text(LayerReport, self._storage.get(key), source=key)
        except KeyMissing:
            return None


def times_of_sizes(spec: PlatformSpec, found: Mapping[str, LayerReport]) -> Sequence[LayerReport]:
    """What was measured in each size; where a layer did not fit, those of the next larger size, scaled by vCPUs."""
    times: list[LayerReport] = []
    known: tuple[float, LayerReport] | None = None
    for size in reversed(spec.sizes):
        if size.name in found:
            known = (size.vcpu, found[size.name])
        if known is None:
            raise ModelError(
                f"a layer of the model does not fit a function of {size.name}, the largest of {spec.name}; "
                "choose a smaller micro-batch"
            )
        times.append(faster(known[1], size.vcpu / known[0]))
    return times[::-1]
