"""Training around a parameter server, in a terminal."""

from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console

from funcpipe.cli.render.table import Column, print_table
from funcpipe.core.provision import Provision
from funcpipe.core.texts import time_text, usd_text

if TYPE_CHECKING:
    from funcpipe.neighbours.parameter_server.server_run import ServerResult


def server_result(result: "ServerResult", way: Provision, output: str, console: Console) -> None:
    """The work of each worker, the losses, the cost beside the predicted one, and the model's file."""
    samples: dict[str, int] = {}
    staleness: dict[str, list[int]] = {}
    for step in result.computed_by:
        for worker, count in step.items():
            samples[worker] = samples.get(worker, 0) + count
    for push in result.pushes:
        samples[push.worker] = samples.get(push.worker, 0) + push.samples
        staleness.setdefault(push.worker, []).append(push.staleness)
    billed = {item.name: item.usd for item in result.bill}
    columns = (Column("worker", text=True), Column("samples"), Column("mean staleness"), Column("$"))
    rows = [
        (
            name,
            str(count),
            f"{sum(staleness[name]) / len(staleness[name]):.2f}" if name in staleness else "-",
            usd_text(billed[name]) if name in billed else "-",
        )
        for name, count in sorted(samples.items())
    ]
    print_table(console, f"run {result.run}: {way.text}, {result.updates.value}", columns, rows)
    losses = result.losses or tuple(push.loss for push in result.pushes)
    if losses:
        console.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} updates", soft_wrap=True)
    for line in result.lost:
        console.print(f"lost: {line}", soft_wrap=True)
    if result.step_s:
        predicted_s = (way.seconds - way.start_s) / way.iterations
        console.print(f"a step took {fmean(result.step_s):.3g} s, {predicted_s:.3g} s predicted", soft_wrap=True)
    console.print(
        f"took {time_text(result.seconds)} and {usd_text(result.usd)} here; {time_text(way.seconds)} and "
        f"{usd_text(way.usd)} predicted for what {way.way} rents",
        soft_wrap=True,
    )
    console.print(f"the model is in {output}", soft_wrap=True)
