"""The seconds of synchronising that the paper's form of a chain is built from: lines in the parameters of a stage."""

import itertools

from funcpipe.core import MB, FunctionSize
from funcpipe.partitioner.cost.loads import Setting
from funcpipe.partitioner.cost.stores import UNPACED, Pace, pace_of
from funcpipe.partitioner.cost.sync_time import sync_time_s


def sync_s(setting: Setting, size: FunctionSize, gradient_mb: float, pace: Pace = UNPACED) -> float:
    """Seconds in which replicas on `size` synchronise `gradient_mb`."""
    exchanged = setting.exchanged_bytes(gradient_mb * MB)
    seconds = sync_time_s(
        setting.way.sync,
        gradient_bytes=setting.sync_wire_ratio * exchanged,
        merged_bytes=setting.merged_wire_ratio * exchanged,
        replicas=setting.replicas,
        upload_bytes_s=size.upload_bytes_s,
        download_bytes_s=size.download_bytes_s,
        latency_s=setting.spec.latency_s,
        poll_s=setting.spec.poll_s,
        rounding=setting.rounding(size.vcpu),
        pace=pace,
    )
    return setting.meeting_share * float(seconds)


def paced_lines(setting: Setting, size: FunctionSize, *, least_mb: float, most_mb: float) -> list[tuple[float, float]]:
    """Seconds of synchronising, fixed and for each MB, of stages with gradients from `least_mb` to `most_mb` whose
    requests wait for the store; none where nothing waits.

    The seconds are the greatest of these lines, and of that of stages whose requests do not wait. They cross where n-1
    requests, one after the other, wait for as long as n-2 of their objects take.
    """
    pace, others = pace_of(setting.sum_store, setting.replicas, setting.replicas), setting.replicas - 1
    if setting.replicas == 1 or sync_s(setting, size, least_mb, pace) <= sync_s(setting, size, least_mb):
        return []
    if least_mb == most_mb:
        return [(sync_s(setting, size, least_mb, pace), 0.0)]
    crossings = {
        setting.replicas * bytes_s * wait_s / max(others - 1, 1) / ratio / setting.exchanged_bytes(MB)
        for bytes_s in (size.upload_bytes_s, size.download_bytes_s)
        for wait_s in (others * pace.put_s - pace.free_put_s, others * pace.get_s - pace.free_get_s)
        for ratio in (setting.sync_wire_ratio, setting.merged_wire_ratio)
    }
    lines = []
    for low, high in itertools.pairwise(sorted({least_mb, most_mb, *(x for x in crossings if least_mb < x < most_mb)})):
        low_s, high_s = (sync_s(setting, size, gradient_mb, pace) for gradient_mb in (low, high))
        slope_s = (high_s - low_s) / (high - low)
        lines.append((low_s - slope_s * low, slope_s))
    return lines
