"""A platform's specification with values measured by functions."""

import secrets
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace

from funcpipe.core import FunctionSize, MachineReport, PlatformSpec, ProbeSpec, from_text
from funcpipe.errors import KeyMissing, WorkerFailed
from funcpipe.platforms.base import Platform, Storage
from funcpipe.profiler.remote import keys
from funcpipe.profiler.remote.budget import Budget
from funcpipe.profiler.remote.client import FinishedProbe, check, remove_objects, run_probes

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
    key = keys.machine(ended.probe.run, ended.probe.number)
    try:
        return from_text(MachineReport, storage.get(key), source=key)
    except KeyMissing:
        reason = "was stopped" if ended.late else ended.status.reason or "left no report"
        raise WorkerFailed(f"run {ended.probe.run}: {ended.probe.worker}, {ended.probe.size}: {reason}") from None
