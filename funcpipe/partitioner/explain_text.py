"""An explanation as text."""

from collections.abc import Iterator, Mapping, Sequence

from funcpipe.core import MB, Wire
from funcpipe.core.estimate import BY_RATES
from funcpipe.partitioner.explain import Alternative, Explanation, StageExplanation
from funcpipe.partitioner.local_steps import RoundChoice
from funcpipe.partitioner.problem.goal import reason_for


def render(explanation: Explanation) -> str:
    """The explanation in lines of at most some hundred characters."""
    return "\n".join(_lines(explanation)) + "\n"


def _lines(explanation: Explanation) -> Iterator[str]:
    plan, estimate = explanation.plan, explanation.plan.estimate
    assert estimate is not None
    yield (
        f"{plan.model or 'model'} on {plan.platform or 'platform'}: {_count(len(plan.stages), 'stage')} × "
        f"{_count(plan.replicas, 'replica')}, {plan.schedule.value}, synchronisation {plan.synchronisation}, "
        f"{plan.wire.value} on the wire"
        + (f", sums in {plan.wire_sync.value}" if plan.replicas > 1 and plan.wire_sync is not Wire.FP32 else "")
        + (", optimiser divided over the replicas" if plan.divides_optimizer else "")
        + (f", {plan.meetings}" if plan.trains_locally else "")
        + (f", the loss computed for {plan.loss_of}" if plan.joint_loss else "")
    )
    if reason := reason_for(plan):
        yield f"number formats: {reason}"
    hours = f", hours of stores {estimate.hours_usd:.4g} $" if estimate.hours_usd else ""
    yield (
        f"an iteration of {plan.global_batch} samples: {estimate.iteration_s:.4g} s, {estimate.cost_usd:.4g} $ "
        f"(functions {estimate.compute_usd:.4g} $, {estimate.puts} puts and {estimate.gets} gets "
        f"{estimate.request_usd:.4g} ${hours})"
    )
    if estimate.meeting_s is not None:
        yield f"that is the mean of a round; a step that ends with a meeting takes {estimate.meeting_s:.4g} s"
    if plan.prices_note:
        yield plan.prices_note
    if estimate.by_rates:
        yield f"seconds on GPUs: {BY_RATES}"
    yield from _store_lines(explanation)
    if estimate.overhead_s or estimate.overhead_usd:
        yield (
            f"starting and handing over adds {estimate.overhead_s:.3g} s and {estimate.overhead_usd:.3g} $ "
            "to each, over a function's life"
        )
    yield f"busiest: {explanation.bottleneck}"
    for number, stage in enumerate(explanation.stages):
        yield ""
        yield from _stage_lines(number, stage, explanation.unit)
    yield ""
    yield "limits that bind: " + ("; ".join(explanation.binding) or "none")
    second = explanation.second
    if explanation.rounds:
        yield ""
        yield from round_lines(explanation.rounds)
        yield ""
    if second is not None:
        is_best = second.worse_by >= -1e-9 * abs(explanation.objective)
        what = "second-best plan" if is_best else "this plan is not the best; a better one"
        yield f"{what}: {_change(second, explanation.unit)}: {second.what}"


def round_lines(rounds: Sequence[RoundChoice]) -> Iterator[str]:
    """The best plans for some numbers of steps between meetings, a line each."""
    yield "the best plan, if replicas meet after so many steps:"
    yield "  steps  stages  replicas   step s  with meeting s     step $  efficiency"
    for row in rounds:
        shape = f"{row.sync_every:>5}  {row.stages:>6}  {row.replicas:>8}"
        seconds = f"{row.iteration_s:>7.4g}  {row.meeting_s:>14.4g}"
        yield f"  {shape}  {seconds}  {row.cost_usd:>9.4g}  {row.efficiency:>10.0%}"


def _store_lines(explanation: Explanation) -> Iterator[str]:
    """The stores, where not all is in the default one."""
    estimate = explanation.plan.estimate
    assert estimate is not None
    if explanation.plan.stores.is_default:
        return
    taken = {item.kind: item for item in estimate.stores}
    for chosen in explanation.stores:
        yield f"{chosen.kind} in {chosen.store}: {chosen.what}"
        if (item := taken.get(chosen.kind)) is not None:
            hours = f", hours {item.hours_usd:.3g} $" if item.hours_usd else ""
            yield (
                f"  {item.puts} puts and {item.gets} gets {item.request_usd:.3g} $, {item.sent_bytes / MB:.0f} MB sent "
                f"and {item.received_bytes / MB:.0f} MB received {item.transfer_usd:.3g} ${hours}"
            )
        if chosen.default is not None:
            yield f"  the same plan with {chosen.default.what}: {_change(chosen.default, explanation.unit)}"


def _stage_lines(number: int, stage: StageExplanation, unit: str) -> Iterator[str]:
    names = stage.layers
    listed = ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, … {names[-1]}"
    again = ", recomputes" if stage.recompute else ""
    yield f"stage {number} on {stage.size}{again}: {len(names)} layers ({listed})"
    held = {
        "parameters": stage.parameter_bytes,
        "gradients": stage.gradient_bytes,
        "optimiser": stage.optimizer_bytes,
        "last meeting": stage.meeting_bytes,
    }
    computed = {
        "constants": stage.constant_bytes,
        "activations": stage.activation_bytes,
        "workspace": stage.workspace_bytes,
        "waste": stage.waste_bytes,
    }
    base, buffers, data = stage.base_bytes, stage.sync_buffer_bytes, stage.data_bytes
    if stage.device is None:
        parts = {"base": base, **held, "synchronisation buffers": buffers, **computed, "data": data}
    else:
        parts = {"base": base, "copies to sum and save": buffers, "messages": stage.message_bytes, "data": data}
    yield f"  memory   {stage.needs_bytes / MB:.0f} of {stage.memory_mb} MB = {_sum_of(parts)}"
    if (device := stage.device) is not None:
        on_device = {"context": device.context_bytes, **held, **computed}
        yield f"  GPU      {device.needs_bytes / MB:.0f} of {device.has_bytes / MB:.0f} MB = {_sum_of(on_device)}"
    load = f"load {stage.load_s:.3g} s, " if stage.load_s else ""
    copies = "" if device is None else f"to host {stage.to_host_s:.3g} s, to GPU {stage.to_device_s:.3g} s, "
    yield (
        f"  lanes    {load}compute {stage.compute_s:.3g} s, upload {stage.upload_s:.3g} s, "
        f"download {stage.download_s:.3g} s, {copies}then synchronisation {stage.sync_s:.3g} s"
    )
    if stage.smaller is None:
        yield "  smaller  there is no smaller size"
    elif stage.smaller.change is None:
        yield f"  smaller  {stage.smaller.size} lacks {stage.smaller.lacks_mb:.0f} MB"
    else:
        yield f"  smaller  {stage.smaller.size} would be {_change(stage.smaller.change, unit)}"


def _sum_of(parts: Mapping[str, int]) -> str:
    return " + ".join(f"{name} {size / MB:.0f}" for name, size in parts.items() if size)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _change(change: Alternative, unit: str) -> str:
    mark = "$" if unit == "dollars" else "s"
    if change.worse_by == float("inf"):
        verdict = "outside the limits"
    else:
        verdict = f"{abs(change.worse_by):.3g} {mark} {'worse' if change.worse_by >= 0 else 'better'} in all"
    return f"{verdict} ({change.more_s:+.3g} s, {change.more_usd:+.3g} $)"
