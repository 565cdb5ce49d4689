"""Ways to do a job, and loss models, in a terminal."""

import math

from rich.console import Console

from funcpipe.cli.render.table import Column, print_table
from funcpipe.core.loss_model import InverseLoss, LossModel
from funcpipe.core.provision import ProvisionTable
from funcpipe.core.texts import time_text, usd_text
from funcpipe.errors import Infeasible


def provisions(table: ProvisionTable, console: Console) -> None:
    """All ways, the cheapest first, why some cannot, and the one to take."""
    job = table.job
    limits = [] if job.deadline_s is None else [f"within {time_text(job.deadline_s)}"]
    limits += [] if job.budget_usd is None else [f"for at most ${job.budget_usd:g}"]
    columns = (
        *(Column("way", text=True), Column("rents", text=True), Column("time"), Column("$")),
        *(Column("chance to miss"), Column("binds", text=True, drop=1)),
    )
    rows = [
        (
            ("* " if one.way == table.recommended else "  ") + one.way,
            one.text,
            time_text(one.seconds),
            usd_text(one.usd),
            "-" if one.miss_chance is None else f"{one.miss_chance:.1%}",
            one.binds,
        )
        for one in table.provisions
    ]
    goal = " ".join([f"{table.model} to {job.goal} of {job.samples} samples", *limits])
    print_table(console, f"{goal}: {table.platform} and machines of {table.market}", columns, rows)
    for refusal in table.refusals:
        console.print(f"cannot: {refusal.reason}", soft_wrap=True)
    console.print(f"recommended: {table.recommended or 'none'}: {table.why}", soft_wrap=True)
    for text in table.assumptions:
        console.print(f"assumed: {text}", style="dim", soft_wrap=True)
    if table.market_assumptions:
        names = ", ".join(text.partition(":")[0] for text in table.market_assumptions)
        console.print(f"assumed in the market {table.market} (--json says how): {names}", style="dim", soft_wrap=True)


def loss_model(found: LossModel, path: str, target: float | None, batch: float, console: Console) -> None:
    """The coefficients with their standard deviations, and how long a loss takes."""
    if isinstance(found, InverseLoss):
        names = {"scale": found.scale, "floor": found.floor}
        form = "loss = scale / steps + floor"
    else:
        names = {"γ1": found.gamma1, "γ2": found.gamma2, "γ3": found.gamma3, "γ5": found.gamma5}
        if len(found.covariance) == 5:
            names["γ4"] = found.gamma4
        form = "equation (3) of spotDNN"
    spread = [math.sqrt(max(row[i], 0.0)) for i, row in enumerate(found.covariance)]
    values = ", ".join(f"{name} {value:.5g} ± {s:.2g}" for (name, value), s in zip(names.items(), spread, strict=True))
    console.print(f"{form}: {values}; losses lie {found.residual:.2g} around it", soft_wrap=True)
    if target is not None:
        console.print(_duration(found, target, batch), soft_wrap=True)
    console.print(f"written to {path}", soft_wrap=True)


def _duration(found: LossModel, target: float, batch: float) -> str:
    try:
        if isinstance(found, InverseLoss):
            steps, spread = found.steps(target), found.spread(target)
        else:
            steps = found.steps(target, batch=batch, workers=1, convergence=0.0)
            spread = found.spread(target, batch=batch, workers=1, convergence=0.0)
    except Infeasible as error:
        return str(error)
    return f"a loss of {target:g} takes {steps:.0f} steps ± {steps * spread:.0f} of {batch:.0f} samples on one worker"
