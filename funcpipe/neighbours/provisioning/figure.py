"""A picture of all ways: dollars over time, with each way's front."""

from collections.abc import Mapping
from pathlib import Path

from funcpipe.core.distribution import needed_from
from funcpipe.core.provision import Provision, ProvisionTable


def draw(table: ProvisionTable, fronts: Mapping[str, tuple[Provision, ...]], path: str | Path) -> None:
    """Draw `fronts` into the file `path`, its kind after the ending; what `table` holds is marked, its choice starred.

    Needs matplotlib, which is imported only here.
    """
    with needed_from("figures"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, front in fronts.items():
        points = [(one.seconds / 3600, one.usd) for one in front]
        (line,) = axes.plot(*zip(*points, strict=True), marker=".", drawstyle="steps-post", linewidth=1, label=name)
        (chosen,) = [one for one in table.provisions if one.way == name]
        marker, size = ("*", 14) if name == table.recommended else ("o", 6)
        axes.plot(
            chosen.seconds / 3600, chosen.usd, marker=marker, markersize=size, linestyle="none", color=line.get_color()
        )
    if table.job.deadline_s is not None:
        axes.axvline(table.job.deadline_s / 3600, linestyle="--", linewidth=1, color="grey", label="deadline")
    if table.job.budget_usd is not None:
        axes.axhline(table.job.budget_usd, linestyle=":", linewidth=1, color="grey", label="budget")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("hours for the whole job")
    axes.set_ylabel("dollars for the whole job")
    axes.set_title(f"{table.model} to {table.job.goal}: {table.platform}, {table.market}; star: recommended")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
