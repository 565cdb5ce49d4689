"""The estimate of a whole job: from the plan's estimate of one iteration to seconds and dollars of all of it.

The cost model knows what a step takes, and what its messages cost. Around the steps there is what this module adds: the
functions' starts, hand-overs and checkpoints, by the same rules by which functions decide on them; the requests with
which workers stay alive and find each other; and those of the client. How many requests each makes was counted.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from funcpipe.client.prepare.job_shape import JobShape, learned_bytes, request_counts, watched_bytes
from funcpipe.core import (
    Estimate,
    FaultTolerance,
    FunctionSize,
    JobEstimate,
    JobItem,
    Plan,
    PlatformSpec,
    RunLimits,
    prices_of,
    shift_of,
)
from funcpipe.core.settings import leaves_at_s, overlap_s
from funcpipe.core.start import StartPart
from funcpipe.core.texts import time_text
from funcpipe.errors import PlanError
from funcpipe.partitioner.cost.evaluate import hand_over_time_s, size_of
from funcpipe.partitioner.cost.loads import meeting_share
from funcpipe.partitioner.cost.stores import checkpoint_files, sync_bytes_each, sync_requests
from funcpipe.platforms.catalog import load_spec, planned_spec
from funcpipe.platforms.launch_rate import launched_after_s
from funcpipe.worker.checkpoint_manager import CheckpointInterval

_EMPTY_GETS = 1.5
"""The requests for a message before it is there."""

_LOAD_REQUESTS = 8
"""A function's requests before its first task: lease, orders, code, tensors, checkpoints, payloads."""

_END_REQUESTS = 8
"""A function's requests after its last task: checkpoint, marks, trace, heartbeat, lease, report."""

_LOAD_CPU_S = 0.6
"""Seconds of one processor to load a stage's code, make its optimiser, and warm up in the first step."""

_POLL_S = 0.2
"""Pause between two polls of a successor for its predecessor."""


def within(spec: PlatformSpec, faults: FaultTolerance, *, reading_s: float) -> FaultTolerance:
    """`faults` within the limits of a platform, where functions read for `reading_s` before they can work."""
    lifetime_s = min([s for s in (faults.lifetime_s, spec.lifetime_s) if s is not None], default=None)
    return replace(faults, lifetime_s=lifetime_s, cold_start_s=max(faults.cold_start_s, spec.cold_start_s + reading_s))


def base_s(plan: Plan, prices: PlatformSpec) -> float:
    """Seconds in which the slowest function reads what no checkpoint holds, such as frozen weights; 0 where unknown."""
    if plan.estimate is None:
        return 0.0
    return max((stage.constant_bytes or 0) / size_of(stage.size, prices).download_bytes_s for stage in plan.stages)


def estimate_job(
    plan: Plan,
    shape: JobShape,
    *,
    faults: FaultTolerance,
    prices: PlatformSpec | None = None,
    functions: PlatformSpec | str | None = None,
) -> JobEstimate:
    """The estimate of the job of `shape` by `plan`, in functions that start and end as those of `functions`.

    `prices` are by default those of the plan's platform, and so are functions. Raises PlanError for a plan without an
    estimate.
    """
    if plan.estimate is None or len(plan.estimate.stages) != len(plan.stages):
        raise PlanError(
            "the plan has no estimate of an iteration by its stages; plans that `funcpipe optimize` writes have one"
        )
    billed = prices or planned_spec(plan)
    spec = load_spec(functions) if isinstance(functions, str) else functions or billed
    faults = within(spec, faults, reading_s=base_s(plan, billed))
    return _JobCosts(plan, plan.estimate, shape, billed, faults, spec).estimate()


class _JobCosts:
    """The items of one estimate, and what they have in common."""

    def __init__(
        self,
        plan: Plan,
        iteration: Estimate,
        shape: JobShape,
        prices: PlatformSpec,
        faults: FaultTolerance,
        functions: PlatformSpec,
    ) -> None:
        self._plan, self._iteration, self._shape, self._faults = plan, iteration, shape, faults
        self._prices, self._functions = prices, functions
        self._sizes = [size_of(stage.size, prices) for stage in plan.stages]
        self._usd_s = sum(prices_of(plan, prices).function_usd_s) * plan.replicas
        self._launch_s = launched_after_s(plan.workers, prices)
        first_values, self._other_values = replace(plan, averaged=shape.averaged).saved_values
        self._parameter_bytes = list(self._parameters())
        constants = [stage.constant_bytes or 0 for stage in plan.stages]  # which no checkpoint holds
        self._read_bytes = [own + other for own, other in zip(self._parameter_bytes, constants, strict=True)]
        self._saved_bytes = [held_bytes * first_values for held_bytes in self._parameter_bytes]
        self._save_s = self._slowest_s(self._saved_bytes, up=True) + 2 * prices.store(plan.stores.checkpoints).latency_s
        pause_s = self._slowest_s(self._saved_bytes, up=True) + self._slowest_s(self._saved_bytes, up=False)
        self._pause_s = hand_over_time_s(pause_s, prices.latency_s)
        self._step_s = iteration.iteration_s
        self._checkpoint_steps = self._interval()

    def estimate(self) -> JobEstimate:
        """All items; the time that everything takes decides how often functions beat and the client polls."""
        plan, shape = self._plan, self._shape
        start, training, validation = self._start(), self._training(), self._validation()
        checkpoints = self._checkpoints()
        worked_s = training.seconds + validation.seconds + checkpoints.seconds
        hand_overs = self._hand_overs(start.seconds, worked_s)
        total_s = start.seconds + worked_s + hand_overs.seconds
        return JobEstimate(
            platform=self._prices.name,
            epochs=shape.epochs,
            steps=shape.steps,
            start=start,
            training=training,
            validation=validation,
            hand_overs=hand_overs,
            checkpoints=checkpoints,
            watching=JobItem(
                count=round(plan.workers * total_s / self._faults.heartbeat_s),
                requests_usd=plan.workers * self._watching_usd(total_s),
            ),
            client=JobItem(count=shape.steps, requests_usd=self._client_usd(total_s)),
            earlier_usd=shape.earlier_usd,
            hours_usd=self._prices.stores_usd_h(plan.stores) * total_s / 3600,
            traffic_usd=self._traffic_usd(total_s),
            prices_note=self._prices.prices_note(plan.stores),
            start_parts=self._start_parts(),
        )

    def _start_parts(self) -> dict[str, float]:
        """Seconds of each part of a start, of the function that starts and loads most slowly."""
        known_s = {size.name: size.cold_start_s for size in self._functions.sizes if size.cold_start_s is not None}
        slowest_s = self._functions.cold_start_s
        own_s = [min(known_s.get(size.name, slowest_s), slowest_s) for size in self._sizes]
        starts = [
            {
                StartPart.LAUNCH.value: self._launch_s[0],
                StartPart.ENVIRONMENT.value: cold_s,
                StartPart.CODE.value: _LOAD_CPU_S / min(size.vcpu, 1.0),
                StartPart.TENSORS.value: size_bytes / size.download_bytes_s,
                StartPart.SETUP.value: _LOAD_REQUESTS * self._prices.latency_s,
            }
            for cold_s, (size, size_bytes) in zip(own_s, self._by_size(self._read_bytes), strict=True)
        ]
        return max(starts, key=lambda parts: sum(parts.values()))

    def _start(self) -> JobItem:
        """All functions wait for the one that starts last and loads most slowly; and each ends with a report."""
        seconds = sum(self._start_parts().values()) + _END_REQUESTS * self._prices.latency_s
        _, mean_s = self._launch_s  # functions are billed from their own start on
        return JobItem(
            count=self._plan.workers,
            seconds=seconds,
            functions_usd=(seconds - mean_s) * self._usd_s,
            requests_usd=self._plan.workers * self._one_start_usd(),
        )

    def _one_start_usd(self) -> float:
        """Dollars of one function's beginning and end: leases, code, tensors, lists, the last marks, trace, report."""
        spec = self._prices
        return spec.price_invocation_usd + spec.request_usd(puts=6 + 3, gets=2 + 16, empty_gets=8)

    def _training(self) -> JobItem:
        steps, iteration, spec, more = self._shape.steps, self._iteration, self._prices, 1 + _EMPTY_GETS
        each_usd = self._plan.replicas * spec.price_put_usd  # the reports
        if not iteration.stores:
            each_usd += spec.request_usd(iteration.puts, more * iteration.gets, _EMPTY_GETS * iteration.gets)
        for item in iteration.stores:
            requests = item.puts, more * item.gets, _EMPTY_GETS * item.gets
            each_usd += spec.store(item.store).request_usd(*requests) + item.transfer_usd
        more_s, more_usd = self._more_meetings()
        seconds, usd = steps * self._step_s + more_s, steps * each_usd + more_usd
        return JobItem(count=steps, seconds=seconds, functions_usd=seconds * self._usd_s, requests_usd=usd)

    def _more_meetings(self) -> tuple[float, float]:
        """Seconds of meetings of replicas that train alone, and dollars of their requests, beyond those that are in the
        mean of the steps: the last round of a run may be a short one.
        """
        plan, steps, met_s = self._plan, self._shape.steps, self._iteration.meeting_s
        if met_s is None:
            return 0.0, 0.0
        every, fragments = plan.sync_every, plan.sync_fragments
        share = meeting_share(every, plan.replicas, fragments)
        if share == 1:
            return 0.0, 0.0
        meetings = min(fragments, steps)  # with the last step
        if not isinstance(every, str):
            shifts = [shift_of(fragment, sync_every=every, fragments=fragments) for fragment in range(fragments)]
            meetings += sum(len(range(shift or every, steps, every)) for shift in shifts)
        more = meetings - share * steps
        return more * (met_s - self._step_s) / (1 - share), more * self._meeting_usd()

    def _meeting_usd(self) -> float:
        """Dollars of the requests and bytes in which the replicas of all stages meet once, tied parameters aside."""
        plan, usd = self._plan, 0.0
        store = self._prices.store(plan.stores.sums)
        for way, held_bytes in zip(plan.ways, self._parameter_bytes, strict=True):
            met_bytes = held_bytes / plan.sync_fragments
            puts, gets = sync_requests(way, plan.replicas)
            size, sums = plan.wire_sync.ratio * met_bytes, plan.merged_wire.ratio * met_bytes
            sent, received = sync_bytes_each(way.sync, plan.replicas, size, sums)
            usd += store.request_usd(puts, (1 + _EMPTY_GETS) * gets, _EMPTY_GETS * gets)
            usd += plan.replicas * store.transfer_usd(sent, received)
        return usd

    def _validation(self) -> JobItem:
        """Steps that only run forwards: half of the messages, and no sums of gradients."""
        steps, step_s, iteration = self._shape.forward_steps, self._shape.forward_step_s, self._iteration
        if step_s is None:
            stages = iteration.stages
            both_s = max(sum(stage.forward_s + stage.backward_s for stage in stages), 1e-12)
            step_s = self._step_s * sum(stage.forward_s for stage in stages) / both_s
        seconds, links = steps * step_s, self._plan.micro_batches * (len(self._plan.stages) - 1)
        gets = (1 + _EMPTY_GETS) * links
        usd = steps * self._prices.request_usd(links + self._plan.replicas, gets, _EMPTY_GETS * links)
        return JobItem(count=steps, seconds=seconds, functions_usd=seconds * self._usd_s, requests_usd=usd)

    def _parameters(self) -> Iterator[float]:
        """The bytes of each stage's parameters; those of a plan that does not say so are a part of its state."""
        copies = 2 + self._plan.values_per_parameter
        for planned, stage in zip(self._plan.stages, self._iteration.stages, strict=True):
            yield stage.state_bytes / copies if planned.parameter_bytes is None else planned.parameter_bytes

    def _interval(self) -> int:
        """Steps between two checkpoints, by the rule that functions follow."""
        interval = CheckpointInterval(self._faults, replicas=self._plan.replicas)
        workers, micro_batches = self._plan.workers, self._plan.micro_batches
        received_bytes = max(
            (stage.forward_download_s + stage.backward_download_s) * size.download_bytes_s
            for stage, size in zip(self._iteration.stages, self._sizes, strict=True)
        )
        each_bytes = received_bytes * micro_batches / self._plan.replicas
        interval.record_step(self._step_s, round(each_bytes), math.ceil(self._iteration.puts / workers))
        interval.checkpoint_s = self._save_s
        for _ in range(2):
            interval.begin_checkpoint()
            interval.record_cost(self._save_s)
        return interval.steps()

    def _checkpoints(self) -> JobItem:
        """The checkpoints that are due, and the last one of all stages: the first replica of each saves the model, the
        others what they alone have.
        """
        plan, spec = self._plan, self._prices
        count = (self._shape.steps - 1) // self._checkpoint_steps + 1 if self._shape.steps else 0
        store, others = spec.store(plan.stores.checkpoints), plan.replicas - 1 if self._other_values else 0
        parts = [held_bytes * self._other_values for held_bytes in self._parameter_bytes]
        savers = len(plan.stages) * (1 + others)
        files = self._files() + others * sum(map(checkpoint_files, parts))
        saved_usd = store.transfer_usd(sum(self._saved_bytes) + others * sum(parts), 0.0)
        saved_usd += store.request_usd(puts=files + savers, gets=2 * files + savers, empty_gets=0)
        marked_usd = plan.workers * spec.request_usd(puts=1 + 2.5, gets=3, empty_gets=1)  # a list costs what a put does
        seconds, usd = count * self._save_s, count * (saved_usd + marked_usd)
        return JobItem(count=count, seconds=seconds, functions_usd=seconds * self._usd_s, requests_usd=usd)

    def _hand_overs(self, start_s: float, worked_s: float) -> JobItem:
        """Functions with a lifetime of `lifetime_s` start successors, which run beside them until they are ready."""
        lifetime_s, steps = self._faults.lifetime_s, self._shape.steps + self._shape.forward_steps
        if lifetime_s is None or not steps:
            return JobItem()
        beside_s = overlap_s(self._faults.cold_start_s, self._step_s)
        leaves_s = leaves_at_s(lifetime_s, self._step_s, self._save_s)
        cold_s = self._faults.cold_start_s  # which is over when a lifetime begins
        left_s = worked_s - max(leaves_s - start_s + cold_s, self._step_s)
        hand_overs = max(0, math.ceil(left_s / max(leaves_s - beside_s + cold_s - self._pause_s, self._step_s)))
        hand_overs = min(hand_overs, steps - 1)
        workers, spec = self._plan.workers, self._prices
        polls = max(beside_s / _POLL_S, 0)
        one_usd = self._one_start_usd() + spec.request_usd(puts=8, gets=8 + polls, empty_gets=4 + polls)
        return JobItem(
            count=hand_overs * workers,
            seconds=hand_overs * self._pause_s,
            functions_usd=hand_overs * (self._pause_s + beside_s) * self._usd_s,
            requests_usd=hand_overs * workers * one_usd,
        )

    def _files(self) -> int:
        """The files of one checkpoint of all stages, each by its first replica."""
        return sum(map(checkpoint_files, self._saved_bytes))

    def _watching_usd(self, total_s: float) -> float:
        """Dollars of one worker's heartbeats, its polls for orders, and its checks of its lease before writes."""
        beats, checks = total_s / self._faults.heartbeat_s, total_s / self._faults.lease_s
        found, empty = beats + checks, 2 * beats + checks
        return self._prices.request_usd(puts=beats, gets=found + empty, empty_gets=empty)

    def _client_usd(self, total_s: float) -> float:
        """Dollars of the requests of a client that starts the run, watches it, and collects its result."""
        steps, files = self._shape.steps, self._files()
        counts = request_counts(
            self._plan, self._faults, steps=steps, step_s=self._step_s, total_s=total_s, files=files
        )
        return self._prices.request_usd(*counts)

    def _traffic_usd(self, total_s: float) -> float:
        shape, collected = self._shape, self._shape.collected_bytes
        if collected is None:
            held = sum(self._parameter_bytes)
            collected = learned_bytes(self._plan, held, held, averaged=shape.averaged)
        watched = watched_bytes(self._plan, self._faults, steps=shape.steps, total_s=total_s)
        return self._prices.traffic_usd(collected + watched)

    def _by_size(self, stage_bytes: list[float]) -> list[tuple[FunctionSize, float]]:
        return list(zip(self._sizes, stage_bytes, strict=True))

    def _slowest_s(self, stage_bytes: list[float], *, up: bool) -> float:
        sizes = self._by_size(stage_bytes)
        return max(moved / (size.upload_bytes_s if up else size.download_bytes_s) for size, moved in sizes)


def check_limits(estimate: JobEstimate, limits: RunLimits, *, elapsed_s: float = 0.0) -> None:
    """Raise PlanError if the run, which has taken `elapsed_s` before, is expected to reach a limit before its end."""
    check_expected(usd=estimate.cost_usd, seconds=elapsed_s + estimate.seconds, line=estimate.line(), limits=limits)


def check_expected(*, usd: float, seconds: float, line: str, limits: RunLimits) -> None:
    """The same for a run that is expected to cost `usd` dollars and to take `seconds` in all, as `line` says."""
    if limits.allow_partial:
        return
    way_out = (
        "raise the limit, train for fewer epochs, or train as far as the limit allows, to be resumed later: --yes "
        "(in Python: RunLimits(allow_partial=True))"
    )
    if limits.max_usd is not None and usd > limits.max_usd:
        raise PlanError(f"the job is expected to cost more than the limit of ${limits.max_usd:g}: {line}; {way_out}")
    if limits.deadline_s is not None and seconds > limits.deadline_s:
        raise PlanError(
            f"the job is expected to take {time_text(seconds)}, longer than the limit of "
            f"{time_text(limits.deadline_s)}: {line}; {way_out}"
        )
