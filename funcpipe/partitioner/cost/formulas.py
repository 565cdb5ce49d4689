"""The performance model, element by element: every function takes arrays with one element for each stage.

After FuncPipe (Liu et al., Proc. ACM Meas. Anal. Comput. Syst. 6(3), 2022), section 3, whose chain of layers is widened
here to any graph, with recomputation, wire formats, request prices and shared links added; docs/planning.md derives it.
Plans, the exact search, the solvers' coefficients and the other policies are all priced by this folder alone:

- `loads`: what the formulas are given;
- `formulas`: seconds of each lane of each stage, and all `stage_costs` together;
- `pipeline`: from stages to the seconds and dollars of an iteration;
- `sync_time`, `sync_ways`, `sync_choice`: how long the ways of synchronising take, for all stages, and which is best
  for one gradient;
- `requests`, `memory`, `ties`: storage requests, peak bytes, parameters that several layers share;
- `evaluate`: all of it for one plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from funcpipe.core import ScheduleKind, SyncWay
from funcpipe.partitioner.cost.arrays import Array
from funcpipe.partitioner.cost.loads import Loads, Setting
from funcpipe.partitioner.cost.pipeline import StageCosts
from funcpipe.partitioner.cost.requests import request_usd, requests
from funcpipe.partitioner.cost.sync_time import sync_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Seconds that one micro-batch takes on each lane of each stage."""

    forward_s: Array
    forward_upload_s: Array
    forward_download_s: Array
    backward_s: Array
    backward_upload_s: Array
    backward_download_s: Array

    @property
    def forward_sum_s(self) -> Array:
        """Of the forward pass, all lanes one after the other."""
        return self.forward_s + self.forward_upload_s + self.forward_download_s

    @property
    def backward_sum_s(self) -> Array:
        """Of the backward pass, all lanes one after the other."""
        return self.backward_s + self.backward_upload_s + self.backward_download_s

    @property
    def round_s(self) -> Array:
        """From the start of a forward to the end of its backward, without what happens at later stages."""
        return self.forward_s + self.forward_upload_s + self.backward_download_s + self.backward_s

    def slowest(self, schedule: ScheduleKind) -> tuple[Array, Array]:
        """The slowest lane of the forward and of the backward pass.

        Where a stage runs forwards and backwards in turn, it is the slowest lane of both together and counts forward.
        """
        upload_s, download_s = self.forward_upload_s, self.forward_download_s
        if schedule is ScheduleKind.GPIPE:
            backward_lanes = np.maximum(self.backward_upload_s, self.backward_download_s)
            forward_lane_s = np.maximum(np.maximum(self.forward_s, upload_s), download_s)
            return forward_lane_s, np.maximum(self.backward_s, backward_lanes)
        compute_s = self.forward_s + self.backward_s
        links_s = np.maximum(upload_s + self.backward_upload_s, download_s + self.backward_download_s)
        return np.maximum(compute_s, links_s), np.zeros_like(compute_s)


def shared_link(loads: Loads, setting: Setting, workers: int) -> tuple[Array, Array]:
    """Bytes per second up and down that each of `workers` functions gets, all of them transferring at once.

    The platform's cap, where it has one, holds for each direction and is shared evenly.
    """
    cap = setting.spec.shared_bytes_s
    share = np.inf if cap is None else cap / workers
    return np.minimum(loads.upload_bytes_s, share), np.minimum(loads.download_bytes_s, share)


def lane_times(loads: Loads, setting: Setting, *, workers: int) -> Lanes:
    """Seconds of one micro-batch on each lane; `workers` functions share the platform's links."""
    up, down = shared_link(loads, setting, workers)
    ratio, latency_s, traffic = setting.wire_ratio, setting.spec.latency_s, loads.traffic
    ratio_back = ratio if setting.gradient_wire_ratio is None else setting.gradient_wire_ratio
    forward_s = setting.spec.contention * loads.forward_s
    backward_s = setting.spec.contention * loads.backward_s
    return Lanes(
        forward_s=forward_s,
        forward_upload_s=ratio * traffic.forward_out_bytes / up + latency_s * traffic.forward_out_objects,
        forward_download_s=ratio * traffic.forward_in_bytes / down + latency_s * traffic.forward_in_objects,
        backward_s=backward_s + np.where(loads.recompute, forward_s, 0.0),
        backward_upload_s=ratio_back * traffic.backward_out_bytes / up + latency_s * traffic.backward_out_objects,
        backward_download_s=ratio_back * traffic.backward_in_bytes / down + latency_s * traffic.backward_in_objects,
    )


def tied_times(loads: Loads, setting: Setting, up: Array, down: Array) -> tuple[Array, Array]:
    """Seconds in which each stage writes and reads the gradients of tied parameters, and those of the backward during
    which other gradients may travel: none where stages share parameters, as nothing travels before it has ended.
    """
    ties = loads.ties
    tied_s = ties.upload_bytes / up + ties.download_bytes / down
    tied_s = tied_s + setting.spec.latency_s * (ties.upload_objects + ties.download_objects)
    backward_s = np.where(ties.download_objects > 0, 0.0, setting.spec.contention * loads.backward_s)
    return tied_s, backward_s


def sync_times(loads: Loads, setting: Setting, *, workers: int, way: SyncWay | None = None) -> Array:
    """Seconds in which each stage's replicas sum their gradients, from its last backward on, in `way`.

    They include those in which it writes and reads the gradients of tied parameters, one after the other. `workers`
    functions share the platform's links. None stands for the way of the setting.
    """
    up, down = shared_link(loads, setting, workers)
    tied_s, backward_s = tied_times(loads, setting, up, down)
    way = setting.way if way is None else way
    return tied_s + sync_time_s(
        way.sync,
        gradient_bytes=setting.sync_wire_ratio * loads.summed_bytes,
        merged_bytes=setting.merged_wire_ratio * loads.summed_bytes,
        replicas=setting.replicas,
        upload_bytes_s=up,
        download_bytes_s=down,
        latency_s=setting.spec.latency_s,
        streams=way.streams,
        backward_s=backward_s,
    )


def compute_work_s(lanes: Lanes, setting: Setting) -> Array:
    """Seconds of one processor that each stage computes in one iteration, all replicas together."""
    return setting.micro_batches * (lanes.forward_s + lanes.backward_s)


def stage_costs(
    loads: Loads, lanes: Lanes, sync_s: Array, setting: Setting, ways: Sequence[SyncWay] | None = None
) -> StageCosts:
    """What the stages cost, by their lanes and their synchronisation; `share` is left at 0 for the caller to set.

    `ways` are those of the stages, as in `requests`.
    """
    forward_lane_s, backward_lane_s = lanes.slowest(setting.schedule)
    return StageCosts(
        forward_sum_s=lanes.forward_sum_s,
        forward_lane_s=forward_lane_s,
        backward_sum_s=lanes.backward_sum_s,
        backward_lane_s=backward_lane_s,
        round_s=lanes.round_s,
        sync_s=sync_s,
        price_usd_s=setting.replicas * loads.price_usd_s,
        request_usd=request_usd(*requests(loads, setting, ways), setting.spec),
        work_s=compute_work_s(lanes, setting),
        share=np.zeros(1),
    )
