"""The whole picture on a real model and real data: profile, plan, simulate, train over local functions, report."""

import argparse
import importlib
import time
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from torch import nn

from experiments.cuts import even_cuts
from funcpipe import FuncPipe
from funcpipe.cli import render
from funcpipe.core import write, write_trace
from funcpipe.partitioner.problem.pins import Pins
from funcpipe.report.compare import compare

SETTINGS = {"digits": {"micro_batch": 8, "epochs": 6}, "characters": {"micro_batch": 16, "epochs": 1}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(SETTINGS))
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--output", type=Path, default=Path("out/demo"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    module = importlib.import_module(f"experiments.models.{options.model}")
    epochs = options.epochs or SETTINGS[options.model]["epochs"]
    run(module, options.output, micro_batch=SETTINGS[options.model]["micro_batch"], epochs=epochs)


def run(module: ModuleType, output: Path, *, micro_batch: int, epochs: int) -> None:
    console = Console(highlight=False)
    torch.manual_seed(0)
    pipe = FuncPipe(module.model(), loss_fn=module.loss, optimizer=module.optimizer, name=module.__name__)
    with render.profiling() as progress:
        profile = pipe.profile(module.sample(), platform="local", micro_batch=micro_batch, progress=progress)
    write(profile, output / "profile.json")

    # A model this small fits one function: a cut and two replicas are pinned, to show the pipeline at work.
    plan = pipe.optimize(global_batch=64, time_value=3.84, pins=Pins(cuts=even_cuts(profile, 2), replicas=(2,)))
    write(plan, output / "plan.json")
    render.plan(plan, str(output / "plan.json"), console)
    predicted = pipe.simulate()
    write_trace(predicted, output / "predicted.json")

    began_s = time.monotonic()
    with render.training(quiet=False) as on_progress:
        result = pipe.train(module.train_data, epochs=epochs, on_progress=on_progress)
    trace = output / "observed.json"
    write_trace(result.trace, trace)
    console.print(
        f"trained {len(result.losses)} steps in {time.monotonic() - began_s:.1f} s, ${result.bill.cost_usd:.6f}"
    )
    console.print(evaluate(pipe.model, module))
    render.comparison(compare(predicted, result.trace), str(trace), console)


def evaluate(model: nn.Module, module: ModuleType) -> str:
    """What the trained model makes of data that it has not seen."""
    inputs, targets = module.test_data().tensors
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(batch) for batch in inputs.split(64)])
    loss = module.loss(outputs, targets).item()
    accuracy = (outputs.argmax(-1) == targets).float().mean().item()
    return f"on unseen data: loss {loss:.4f}, accuracy {accuracy:.2%}"


if __name__ == "__main__":
    main()
