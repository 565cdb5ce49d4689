"""The whole picture on a real model and real data: profile, plan, simulate, train in local functions, compare."""

import argparse
import importlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from torch import nn

from experiments import demo_screen
from experiments.cuts import even_cuts
from experiments.demo_clouds import estimates
from funcpipe import FuncPipe, RunResult
from funcpipe import show as render
from funcpipe.analysis.compare import Report, account, compare
from funcpipe.core import FinishedRun, ModelProfile, Pins, Plan, Resource, Trace, write, write_trace
from funcpipe.platforms.catalog import load_spec
from funcpipe.show.material import Material
from funcpipe.show.page import write_page
from funcpipe.show.terminal import Terminal

SETTINGS = {
    "digits": {"micro_batch": 16, "global_batch": 128, "epochs": 6},
    "characters": {"micro_batch": 16, "global_batch": 64, "epochs": 1},
}
STAGES = 2
TOLERATED = 1.2
TIME_VALUE = 3.84
VERIFIED_STEPS = 3
REPEATS = 15  # of each layer's timing: short ones would catch a machine at a moment that is faster or slower than most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(SETTINGS))
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--output", type=Path, default=Path("out/demo"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    module = importlib.import_module(f"experiments.models.{options.model}")
    settings = SETTINGS[options.model]
    run(module, options.output, **{**settings, "epochs": options.epochs or settings["epochs"]})


def run(module: ModuleType, output: Path, *, micro_batch: int, global_batch: int, epochs: int) -> None:
    console = Terminal()
    torch.manual_seed(0)
    pipe = FuncPipe(module.model(), loss_fn=module.loss, optimizer=module.optimizer, name=module.__name__)
    profile = profile_of(pipe, module, micro_batch)
    write(profile, output / "profile.json")
    plan, predicted = planned(pipe, profile, output, console, global_batch=global_batch)

    console.print(f"training {VERIFIED_STEPS} steps over functions and in one process, to compare", soft_wrap=True)
    checked = pipe.verify(module.train_data, steps=VERIFIED_STEPS)

    began_s = time.monotonic()
    result = pipe.train(module.train_data, epochs=epochs)
    trained_s = time.monotonic() - began_s
    comparison = compared(predicted, result.trace, output / "observed.json", console)
    outcome = demo_screen.Outcome(
        name=module.__name__.rpartition(".")[2],
        checked=checked,
        comparison=comparison,
        losses=result.losses,
        trained_s=trained_s,
        uses=account(finished(result, trained_s)),
        functions=result.bill.functions,
        cost_usd=result.bill.cost_usd,
        said=evaluate(pipe.model, module),
        why=why(pipe, module, micro_batch, comparison),
        clouds=list(estimates(profile, plan, samples=len(module.train_data()), epochs=epochs)),
        report=output / "report.html",
        yours=demo_screen.write_own(output / "yours"),
    )
    material = Material(
        plan=plan,
        profile=profile,
        spec=load_spec("local"),
        predicted=predicted,
        observed=result.trace,
        finished=finished(result, trained_s),
    )
    write_page(material, outcome.report)
    console.print("", *demo_screen.screen(outcome), sep="\n", markup=False, soft_wrap=True)


def planned(
    pipe: FuncPipe, profile: ModelProfile, output: Path, console: Console, *, global_batch: int
) -> tuple[Plan, Trace]:
    """The plan and its simulation, shown and written.

    A model this small fits one function: cuts and replicas are pinned, to show the pipeline at work.
    """
    pins = Pins(cuts=even_cuts(profile, STAGES), replicas=(replicas_for(load_spec("local").shared_cores or 1),))
    plan = pipe.optimize(global_batch=global_batch, time_value=TIME_VALUE, pins=pins)
    write(plan, output / "plan.json")
    render.draw(render.plan(plan, str(output / "plan.json")), console)
    predicted = pipe.simulate()
    write_trace(predicted, output / "predicted.json")
    return plan, predicted


def compared(predicted: Trace, observed: Trace, path: Path, console: Console) -> Report:
    """What was observed beside what was predicted, shown; the observed trace is written to `path`."""
    write_trace(observed, path)
    comparison = compare(predicted, observed)
    render.draw(render.comparison(comparison, str(path)), console)
    return comparison


def why(pipe: FuncPipe, module: ModuleType, micro_batch: int, comparison: Report) -> list[str]:
    """Why the prediction was not met, after profiling again; nothing where it was."""
    if comparison.ratio is None or is_near(comparison.ratio):
        return []
    profile_of(pipe, module, micro_batch)
    return list(explanation(comparison, pipe.simulate().duration_s))


def finished(result: RunResult, trained_s: float) -> FinishedRun:
    """What the report shows of a run that has left nothing in storage."""
    return FinishedRun(
        losses=result.losses,
        skipped_steps=result.skipped_steps,
        bill=result.bill,
        workers=result.workers,
        elapsed_s=trained_s,
        kept_bytes=0,
    )


def profile_of(pipe: FuncPipe, module: ModuleType, micro_batch: int) -> ModelProfile:
    """The layers timed on this machine, loss included."""
    inputs, target = module.train_data()[:micro_batch]
    with render.profiling() as progress:
        return pipe.profile(
            inputs,
            sample_target=target,
            platform="local",
            micro_batch=micro_batch,
            repeats=REPEATS,
            progress=progress,
        )


def replicas_for(cores: int) -> int:
    """Two where every function has a processor of its own, as in a cloud, which is what predictions assume; else one.

    Functions that share processors also share them with the threads that move their data.
    """
    return 2 if cores >= 2 * STAGES else 1


def is_near(ratio: float) -> bool:
    """Whether two durations differ by less than a fifth."""
    return 1 / TOLERATED <= ratio <= TOLERATED


def explanation(found: Report, again_s: float) -> Iterator[str]:
    """Why the observed iteration is not the predicted one; `again_s` is predicted by a profile made after training."""
    lanes = [lane for lane in found.lanes if lane.lane is Resource.COMPUTE]
    computing = sum(lane.observed.busy_s for lane in lanes) / sum(lane.predicted.busy_s for lane in lanes)
    times = found.observed_iteration_s / again_s
    yield f"Computing took {computing:.2f} times its profiled time. By a profile made after"
    yield f"training an iteration takes {again_s:.4f} s; {times:.2f} times that was observed."
    if not is_near(again_s / found.predicted_iteration_s):
        yield "So the speed of this machine changes: other programs use its processors, or its"
        yield "clock varies. Run the demo again when it is idle."
    elif not is_near(computing):
        yield "So this machine is as fast as before for one program, but slower for several"
        yield "side by side: its processors share a core, or are shared with other machines."
    else:
        yield "The rest is waiting for data: moving it takes time of the same processors here."


def evaluate(model: nn.Module, module: ModuleType) -> str:
    """Loss and accuracy of the trained model on held-out data."""
    inputs, targets = module.test_data().tensors
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(batch) for batch in inputs.split(64)])
    loss = module.loss(outputs, targets).item()
    accuracy = (outputs.argmax(-1) == targets).float().mean().item()
    return f"on unseen data accuracy {accuracy:.1%}, loss {loss:.3f}"


if __name__ == "__main__":
    main()
