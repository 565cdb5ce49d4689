"""What does it cost that functions live for a while only, and hand over to successors?

Predicted for FuncPipe's plans of long training: the share that starting and handing over add to time and cost, for
lives of 5 minutes, of AWS Lambda's 15, and of an hour. Executed: a small model over local functions that live for 1.2
seconds, and over such that live for ever, which must end with the same bits.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from experiments.paper.common import How, Result, Row, Script, Settings, new_figure, percent, run
from experiments.paper.planning import OURS, PAPER, best_on, estimate_of, profile_of, seconds, simulated_on
from funcpipe import FuncPipe
from funcpipe.client.follow.results import RunResult
from funcpipe.core import FaultTolerance, Outcome, Plan, ScheduleKind, Sync, Wire
from funcpipe.model.graph import trace
from funcpipe.partitioner.cost.evaluate import hand_over_time_s
from funcpipe.platforms.catalog import load_spec
from tests.support.plans import even_stages

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIVES_S = (300.0, 900.0, 3600.0)
EXECUTED_LIFE_S, COLD_START_S = 1.2, 0.3
TIME_VALUE = 30.72
SAMPLES, EPOCHS, STEP_S, WIDTH = 80, 20, 0.1, 256


def measure(settings: Settings) -> Result:
    spec, batch = settings.specs[0], settings.batches[len(settings.batches) // 2]
    rows = [row for model in settings.models for life_s in LIVES_S for row in predicted(model, spec, batch, life_s)]
    if settings.execute:
        rows.append(executed())
    how = How.BOTH if settings.execute else How.SIMULATED
    place = simulated_on((spec,)) + ("; executed on local functions" if settings.execute else "")
    return Result(how=how, on=place, rows=tuple(rows), findings=findings(rows), figure=draw(rows))


def predicted(model: str, name: str, batch: int, life_s: float) -> Iterator[Row]:
    """A row for each system whose functions live for `life_s`."""
    spec = replace(load_spec(name), lifetime_s=life_s)
    for system in (PAPER, OURS):
        plan = best_on(profile_of(model, name), spec, batch, system, time_value=TIME_VALUE)
        if plan is not None:
            estimate = estimate_of(plan)
            yield {
                "model": model,
                "platform": spec.name,
                "batch": batch,
                "system": system,
                "how": How.SIMULATED.value,
                "life_s": life_s,
                "iteration_s": seconds(plan),
                "overhead": estimate.overhead_s / estimate.iteration_s,
                "overhead_usd": estimate.overhead_usd / estimate.cost_usd,
            }


def executed() -> Row:
    """Two hundred steps over functions with short lives, and over functions that live for ever."""
    undisturbed = train(FaultTolerance(heartbeat_s=1.0))
    short = train(FaultTolerance(heartbeat_s=1.0, lifetime_s=EXECUTED_LIFE_S, cold_start_s=COLD_START_S))
    states = undisturbed.state_dict(), short.state_dict()
    handed = sum(report.outcome is Outcome.HANDED_OVER for report in short.workers)
    more_s = lasted_s(short) - lasted_s(undisturbed)
    return {
        "model": "a perceptron",
        "platform": "local",
        "how": How.EXECUTED.value,
        "life_s": EXECUTED_LIFE_S,
        "steps": len(short.losses),
        "hand_overs": handed,
        "each_s": more_s / max(handed, 1),
        "charged_s": charged_s(),
        "overhead": more_s / lasted_s(undisturbed),
        "same_bits": all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items()),
    }


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [(torch.randn(16, generator=draw), torch.tensor(i % 4)) for i in range(SAMPLES)]


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    """The cross entropy, after half a step."""
    time.sleep(STEP_S / 2)
    return nn.functional.cross_entropy(output, target)


def plan() -> Plan:
    names = [layer.name for layer in trace(model(), (torch.zeros(2, 16),)).layers]
    return Plan(
        global_batch=8,
        micro_batch=2,
        replicas=2,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        platform="local",
        stages=even_stages(names, 2),
    )


def train(faults: FaultTolerance) -> RunResult:
    pipe = FuncPipe(model(), loss_fn=slow_loss, optimizer=optimizer)
    return pipe.train(data, epochs=EPOCHS, plan=plan(), faults=faults, message_deadline_s=60)


def lasted_s(result: RunResult) -> float:
    """From the first worker's start to the last one's end."""
    reports = result.workers
    return max(r.ended_at_s for r in reports) - min(r.started_at_s for r in reports)


def charged_s() -> float:
    """What the cost model takes for a hand-over: the slowest stage's state goes up and comes down again."""
    spec, state = load_spec("local"), dict(model().named_parameters())
    size = spec.sizes[0]
    largest = max(p.nbytes for p in state.values()) * 3  # the weight that decides, and two moments
    return hand_over_time_s(largest / size.upload_bytes_s + largest / size.download_bytes_s, spec.latency_s)


def findings(rows: Sequence[Row]) -> tuple[str, ...]:
    found = []
    for life_s in LIVES_S:
        mine = [row for row in rows if row["how"] == How.SIMULATED.value and row["life_s"] == life_s]
        if mine:
            found.append(
                f"Predicted, lives of {life_s:g} s add {percent(row['overhead'] for row in mine)} to the time and "
                f"{percent(row['overhead_usd'] for row in mine)} to the cost."
            )
    for row in rows:
        if row["how"] == How.EXECUTED.value:
            bits = "the bits are the same" if row["same_bits"] else "the bits DIFFER"
            found.append(
                f"Executed, {row['hand_overs']} hand-overs in {row['steps']} steps took {row['each_s']:.2f} s each, "
                f"{row['charged_s']:.2f} s are charged for one; {bits}."
            )
    return tuple(found)


def draw(rows: Sequence[Row]) -> "Figure":
    figure = new_figure(1, width=5.5)
    axes = figure.subplots()
    mine = [row for row in rows if row["how"] == How.SIMULATED.value]
    for number, model in enumerate(dict.fromkeys(row["model"] for row in mine)):
        for system, style in ((PAPER, ":"), (OURS, "-")):
            points = [(r["life_s"], 100 * r["overhead"]) for r in mine if (r["model"], r["system"]) == (model, system)]
            label = model if system == OURS else None
            axes.plot(*zip(*points, strict=True), "o" + style, ms=3, color=f"C{number}", label=label)
    axes.set(xscale="log", yscale="log", xlabel="seconds that functions live", ylabel="% more time")
    axes.legend(title="solid: this project; dotted: the paper's system")
    return figure


SCRIPT = Script(name="hand_over", question="What does it cost that functions hand over to successors?", measure=measure)

if __name__ == "__main__":
    run(SCRIPT)
