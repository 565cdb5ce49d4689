"""Summaries of plans, profiles, traces and provisions, in Python and in notebooks."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from funcpipe.core.summary import HUES, Summary, escape, figure
from funcpipe.core.texts import counted, number_text, time_text, usd_text, worker_name

if TYPE_CHECKING:
    from funcpipe.core.plan import Plan
    from funcpipe.core.profile import ModelProfile
    from funcpipe.core.provision import Provision, ProvisionTable
    from funcpipe.core.trace import Event, Trace

MB = 1 << 20
_MOST_LANES = 24
_MOST_EVENTS = 1500
_ROW, _LEFT, _WIDTH = 14, 92, 640


def plan_summary(plan: "Plan") -> Summary:
    """Return the cuts, the functions of the stages, and the prediction for an iteration."""
    found, wires = plan.estimate, "/".join(dict.fromkeys(wire.value for wire in plan.wires))
    where = f"{plan.model or 'a model'} on {plan.platform or 'no platform'}"
    size = f"{counted(len(plan.stages), 'stage')} x {counted(plan.replicas, 'replica')}"
    facts = [
        ("batch", f"{plan.global_batch} samples in micro-batches of {plan.micro_batch}"),
        ("order", f"{plan.schedule.value}; sums {plan.sync.value}; sent as {wires}"),
    ]
    if plan.joint_loss:
        facts.append(("loss", f"computed for {plan.loss_of}"))
    if found is not None:
        took = f"{found.iteration_s:.4g} s, ${usd_text(found.cost_usd)}; bottleneck {found.bottleneck}"
        facts.append(("iteration, predicted", took))
    if plan.prices_note:
        facts.append(("prices", plan.prices_note))
    if plan.solver is not None:
        facts.append(("solver", f"{plan.solver.name}: {plan.solver.status.value}"))
    stages = () if found is None or len(found.stages) != len(plan.stages) else found.stages
    rows = []
    for i, stage in enumerate(plan.stages):
        own = stages[i] if stages else None
        memory = f"{stage.memory_mb}" if own is None else f"{own.memory_bytes / MB:.0f} of {stage.memory_mb}"
        seconds = ("",) * 3 if own is None else (own.forward_s, own.backward_s, own.sync_s)
        layers = f"{stage.first}..{stage.stop - 1}"
        texts = (text if isinstance(text, str) else number_text(text, 4) for text in seconds)
        rows.append((str(i), layers, stage.size, memory, *texts))
    return Summary(
        title=f"Plan of {where}: {size}",
        facts=tuple(facts),
        columns=("stage", "layers", "function", "memory MB", "forward s", "backward s", "sync s"),
        rows=tuple(rows),
        texts=("layers", "function"),
    )


def profile_summary(profile: "ModelProfile") -> Summary:
    """Return the layers, with times on the largest size."""
    layers = profile.layers
    forward_s, backward_s = (
        sum(layer.forward_s[-1] for layer in layers),
        sum(layer.backward_s[-1] for layer in layers),
    )
    scaled = ", scaled from another machine" if profile.estimated else ""
    parameters = profile.parameter_bytes(0, len(layers)) / MB
    activations = sum(layer.activation_bytes for layer in layers) / MB
    return Summary(
        title=f"Profile of {profile.model} on {profile.platform}: {counted(len(layers), 'layer')}",
        facts=(
            ("micro-batch", f"{counted(profile.micro_batch, 'sample')}, {profile.precision.value}"),
            ("memory", f"parameters {parameters:.1f} MB, activations {activations:.1f} MB"),
            ("time", f"forward {forward_s:.4g} s, backward {backward_s:.4g} s on {profile.sizes[-1]}{scaled}"),
        ),
        columns=("layer", "parameters MB", "activations MB", "forward s", "backward s"),
        rows=tuple(
            (
                layer.name,
                number_text(layer.parameter_bytes / MB, 2),
                number_text(layer.activation_bytes / MB, 2),
                number_text(layer.forward_s[-1], 5),
                f"{layer.backward_s[-1]:.5f}",
            )
            for layer in layers
        ),
    )


def trace_summary(trace: "Trace") -> Summary:
    """Return the load of the lanes, and the step in the middle over time."""
    steps = trace.steps()
    busy_s: dict[str, float] = defaultdict(float)
    for event in trace.events:
        busy_s[event.lane.value] += event.busy_s
    workers = {(event.stage, event.replica) for event in trace.events}
    lanes = ", ".join(f"{lane} {seconds:.4g} s" for lane, seconds in busy_s.items())
    middle = trace.of_step(steps[len(steps) // 2]).events if steps else ()
    return Summary(
        title=f"Trace ({trace.source.value}): {trace.run}, {counted(len(trace.events), 'event')}",
        facts=(
            ("steps", f"{len(steps)}, numbers {_stretches(steps)}" if len(steps) > 1 else str(len(steps))),
            ("duration", f"{trace.steps_s:.4g} s of {counted(len(workers), 'worker')}"),
            ("lanes at work", lanes or "none"),
        ),
        figure=_lanes(middle),
    )


def _stretches(steps: Sequence[int]) -> str:
    """Return the numbers of steps, from 1, as text: first and last of those that follow each other."""
    known = set(steps)
    firsts = [step for step in steps if step - 1 not in known]
    lasts = [step for step in steps if step + 1 not in known]
    return ", ".join(f"{first + 1} to {last + 1}" for first, last in zip(firsts, lasts, strict=True))


def provision_summary(provision: "Provision") -> Summary:
    """Return the resources of one provision, and the prediction for them."""
    missed = "" if provision.miss_chance is None else f", missed with a chance of {provision.miss_chance:.1%}"
    return Summary(
        title=f"Provision by {provision.way}: {provision.text}",
        facts=(
            ("takes", f"{time_text(provision.seconds)} for {provision.iterations:.0f} iterations{missed}"),
            ("costs", f"${usd_text(provision.usd)}"),
            ("binds", provision.binds),
            ("why", provision.why),
        ),
        columns=("item", "$"),
        rows=tuple((item.name, usd_text(item.usd)) for item in provision.cost),
    )


def provisions_summary(table: "ProvisionTable") -> Summary:
    """Return all ways side by side, and the recommended one."""
    refused = ", ".join(refusal.way for refusal in table.refusals)
    facts = [("recommended", f"{table.recommended or 'none'}: {table.why}")]
    facts += [("cannot", refused)] if refused else []
    return Summary(
        title=f"Provisions for {table.model} to {table.job.goal} of {table.job.samples} samples: "
        f"{counted(len(table.provisions), 'way')} on {table.platform} and {table.market}",
        facts=tuple(facts),
        columns=("way", "rents", "time", "$", "chance to miss", "binds"),
        rows=tuple(
            (
                f"{'* ' if one.way == table.recommended else ''}{one.way}",
                *(one.text, time_text(one.seconds), usd_text(one.usd)),
                "-" if one.miss_chance is None else f"{one.miss_chance:.1%}",
                one.binds,
            )
            for one in table.provisions
        ),
        texts=("rents", "binds"),
    )


def _lanes(events: tuple["Event", ...]) -> str:
    """Return one step over time: a row for each lane of each worker, as far as there is room."""
    if not events:
        return ""
    rows: dict[tuple[int, int, str], list[Event]] = defaultdict(list)
    for event in events:
        rows[event.stage, event.replica, event.lane.value].append(event)
    drawn = sorted(rows, key=lambda row: (*row[:2], list(HUES).index(row[2])))[:_MOST_LANES]
    began_s = min(event.start_s for event in events)
    scale = (_WIDTH - _LEFT) / max(max(event.end_s for event in events) - began_s, 1e-12)
    parts, room = [], _MOST_EVENTS
    for number, row in enumerate(drawn):
        top = number * _ROW
        parts.append(f'<text x="0" y="{top + 10}">{escape(f"{worker_name(*row[:2])} {row[2]}")}</text>')
        for event in rows[row][:room]:
            x, width = _LEFT + (event.start_s - began_s) * scale, max((event.end_s - event.start_s) * scale, 0.5)
            title = f"{event.task}: {event.busy_s:.4g} s" + (
                f", waited {event.waited_s:.4g} s" if event.waited_s else ""
            )
            faint = 0.35 if event.waited_s > event.busy_s else 0.9
            parts.append(
                f'<rect x="{x:.1f}" y="{top + 2}" width="{width:.1f}" height="{_ROW - 3}" fill="{HUES[row[2]]}" '
                f'opacity="{faint}"><title>{escape(title)}</title></rect>'
            )
        room = max(room - len(rows[row]), 0)
    if len(drawn) < len(rows):
        parts.append(f'<text x="0" y="{len(drawn) * _ROW + 10}">and {len(rows) - len(drawn)} more lanes</text>')
    return figure("".join(parts), _WIDTH, (len(drawn) + (len(drawn) < len(rows))) * _ROW + 2)
