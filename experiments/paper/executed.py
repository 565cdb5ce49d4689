"""All systems train one model of 10.7 million parameters to the same loss: time, money, requests, beside predictions.

Local functions have the memory, processors, links and latency of AWS Lambda's, in sizes that relate to this model as
Lambda's sizes relate to the paper's models, and that two processors can hold: 512 to 896 MB, four functions at most.
The model is profiled in such functions first. HybridPS has a real server process; on a deployment there is no machine
for it, so there it is only simulated.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from experiments.paper import parameter_server, trained
from experiments.paper.common import LOCAL, How, Result, Row, Script, Settings, new_figure, percent, run
from experiments.paper.planning import BASELINES, OURS, PAPER, best_on, dollars, estimate_of, seconds, shape
from funcpipe import FuncPipe
from funcpipe.analysis.compare import compare, typical_step
from funcpipe.client.prepare.session import Site, open_site
from funcpipe.core import FunctionSize, ModelProfile, Plan, PlatformSpec, Resource, RunLimits, Trace
from funcpipe.partitioner.baselines import Server
from funcpipe.platforms.catalog import load_spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES_MB = (512, 640, 768, 896)
MOST_FUNCTIONS = 4
COLD_START_S = 1.0
FULL_LINK_MB = 1769  # the memory with one vCPU, and with the whole link
REPEATS = 4


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the systems are planned with: the model, its profile on the functions, and their platform."""

    pipe: FuncPipe
    profile: ModelProfile
    spec: PlatformSpec


def measure(settings: Settings) -> Result:
    rows = executed_rows(settings.platform, settings.like, settings.max_usd, settings.steps) if settings.execute else ()
    how = How.EXECUTED if settings.execute else How.SIMULATED
    place = f"{settings.place}, sizes {SIZES_MB[0]} to {SIZES_MB[-1]} MB; {trained.NAME}, batch {trained.BATCH}"
    return Result(how=how, on=place, rows=rows, findings=findings(rows), figure=draw(rows))


@functools.cache
def executed_rows(platform: str, like: str | None, max_usd: float | None, steps: int) -> tuple[Row, ...]:
    """A row for each system; executed once in a process, whichever scripts ask."""
    measured = prepare(platform, like, max_usd)
    limits = RunLimits(max_usd=max_usd, allow_partial=False)
    return tuple(_rows(measured, platform, limits, steps))


def prepare(platform: str, like: str | None, max_usd: float | None) -> Measured:
    """Profile the model where it will be trained."""
    pipe = FuncPipe(trained.model(), loss_fn=trained.loss, optimizer=trained.optimizer, blocks=trained.BLOCKS)
    inputs, targets = trained.sample()
    with _site(platform, like) as site:
        profile = pipe.profile(
            (inputs,),
            sample_target=targets,
            micro_batch=trained.MICRO_BATCH,
            repeats=REPEATS,
            on=site,
            max_usd=max_usd,
        )
        return Measured(pipe=pipe, profile=profile, spec=site.platform.spec)


def _site(platform: str, like: str | None) -> AbstractContextManager[Site]:
    if platform != LOCAL:
        return open_site(platform)
    return open_site(LOCAL, like=small_spec(load_spec(like or "aws-lambda")))


def small_spec(spec: PlatformSpec) -> PlatformSpec:
    """`spec` with small sizes: vCPUs, link and price by the memory, as those of the sizes that AWS Lambda offers."""
    largest = spec.sizes[-1]
    processors, price = largest.vcpu / largest.memory_mb, largest.price_usd_s / largest.memory_mb
    sizes = tuple(
        FunctionSize(
            name=f"{memory_mb}MB",
            memory_mb=memory_mb,
            vcpu=processors * memory_mb,
            upload_bytes_s=largest.upload_bytes_s * min(1.0, memory_mb / FULL_LINK_MB),
            download_bytes_s=largest.download_bytes_s * min(1.0, memory_mb / FULL_LINK_MB),
            price_usd_s=price * memory_mb,
            cold_start_s=COLD_START_S,
        )
        for memory_mb in SIZES_MB
    )
    return replace(spec, sizes=sizes, cold_start_s=COLD_START_S, max_functions=MOST_FUNCTIONS)


def _rows(measured: Measured, platform: str, limits: RunLimits, steps: int) -> Iterator[Row]:
    for system, plan in plans(measured).items():
        row = {"system": system, "steps": steps}
        if plan is None:
            yield {**row, "plan": None}
            continue
        sizes = "/".join(str(stage.memory_mb) for stage in plan.stages)
        estimate = estimate_of(plan)
        row |= {"plan": f"{shape(plan)} of {sizes} MB", "predicted_s": seconds(plan), "predicted_usd": dollars(plan)}
        row["predicted_requests"] = estimate.puts + estimate.gets
        if system.startswith("hybridps") and plan.replicas > 1:
            yield row | (served(plan, measured.spec, steps) if platform == LOCAL else {})
        else:
            yield row | train(measured, plan, platform, limits, steps)


def plans(measured: Measured) -> Mapping[str, Plan | None]:
    """Each baseline's plan; for both of FuncPipe's systems the fastest that costs no more than LambdaML."""
    profile, spec, batch = measured.profile, measured.spec, trained.BATCH
    found = {baseline: best_on(profile, spec, batch, baseline) for baseline in BASELINES}
    rival = found["lambdaml"] or found["lambdaml-ga"]
    for system in (PAPER, OURS):
        within = None if rival is None else best_on(profile, spec, batch, system, budget_usd=dollars(rival))
        found[system] = within or best_on(profile, spec, batch, system, time_value=30.72)
    return found


def train(measured: Measured, plan: Plan, platform: str, limits: RunLimits, steps: int) -> dict[str, Any]:
    """Train by a plan of ours: what a step took, by the traces of the functions, and what the run is billed."""
    pipe = FuncPipe(trained.model(), loss_fn=trained.loss, optimizer=trained.optimizer, blocks=trained.BLOCKS)
    result = pipe.train(
        trained.data(steps),
        plan=plan,
        shuffle=False,
        platform=platform,
        like=measured.spec if platform == LOCAL else None,
        limits=limits,
        prices=measured.spec,
        progress=False,
    )
    simulated = measured.pipe.simulate(plan)
    report = compare(simulated, result.trace)
    return {
        "simulated_s": report.predicted_iteration_s,
        "observed_s": report.observed_iteration_s,
        "observed_usd": sum(lane.observed.usd or 0.0 for lane in report.lanes),
        "observed_requests": requests(result.trace),
        "losses": result.losses,
        "run_usd": result.bill.cost_usd,
        "run_requests": result.bill.puts + result.bill.gets + result.bill.lists,
        "peak_mb": max(worker.peak_memory_bytes for worker in result.workers) / 2**20,
    }


def requests(trace: Trace) -> int:
    """How many messages a typical step puts and gets."""
    return sum(event.lane in (Resource.UPLOAD, Resource.DOWNLOAD) for event in typical_step(trace).events)


def served(plan: Plan, spec: PlatformSpec, steps: int) -> dict[str, Any]:
    """Train around a parameter server; its requests cost nothing, but the machine does."""
    server = Server()
    found = parameter_server.train(plan, spec, steps, server)
    price = plan.replicas * spec.size(plan.stages[0].size).price_usd_s + server.price_usd_s
    messages = found.traffic.puts + found.traffic.gets
    return {
        "observed_s": found.iteration_s,
        "observed_usd": price * found.iteration_s,
        "observed_requests": messages // steps,
        "losses": found.losses,
        "run_usd": found.functions_usd + found.server_usd,
        "run_requests": messages,
        "peak_mb": found.peak_bytes / 2**20,
    }


def findings(rows: Sequence[Row]) -> tuple[str, ...]:
    done = {row["system"]: row for row in rows if "observed_s" in row}
    if not done:
        return ("Nothing was executed.",)
    found = [_gain(done, system) for system in (PAPER, OURS) if system in done and "lambdaml" in done]
    last = [row["losses"][-1] for row in done.values()]
    steps = next(iter(done.values()))["steps"]
    found.append(
        f"After {steps} steps the {len(last)} systems' losses are {min(last):.4f} to {max(last):.4f}: "
        f"{'the same' if max(last) - min(last) < 1e-3 else 'they DIFFER'}."
    )
    off = [row["observed_s"] / row.get("simulated_s", row["predicted_s"]) - 1 for row in done.values()]
    within = sum(abs(share) <= 0.10 for share in off)
    found.append(f"Observed steps take {percent(off)} more than predicted; {within} of {len(off)} are within 10 %.")
    return tuple(found)


def _gain(done: Mapping[str, Row], system: str) -> str:
    ours, rivals = done[system], {name: row for name, row in done.items() if name in BASELINES}
    each = ", ".join(
        f"{row['observed_s'] / ours['observed_s']:.2f}x as fast as {name} at "
        f"{ours['observed_usd'] / row['observed_usd']:.2f} of its cost"
        for name, row in rivals.items()
    )
    return f"Executed, {system} is {each}."


def draw(rows: Sequence[Row]) -> "Figure":
    figure = new_figure(2, width=4.8)
    done = [row for row in rows if "observed_s" in row]
    for axes, name, label in zip(
        figure.subplots(1, 2), ("s", "usd"), ("seconds of a step", "dollars of a step"), strict=True
    ):
        for place, row in enumerate(done):
            observed = axes.bar(place + 0.2, row[f"observed_{name}"], 0.4, color="tab:blue")
            predicted = axes.bar(place - 0.2, row[f"predicted_{name}"], 0.4, color="tab:gray")
        axes.set_xticks(range(len(done)), [row["system"] for row in done], rotation=30, ha="right")
        axes.set_ylabel(label)
    if done:
        figure.axes[1].set_yscale("log")
        figure.axes[0].legend([predicted, observed], ["predicted", "observed"])
    return figure


SCRIPT = Script(
    name="executed",
    question="Executed side by side: what do all systems take for the same training?",
    measure=measure,
)

if __name__ == "__main__":
    run(SCRIPT)
