"""A picture of a Pareto front."""

from pathlib import Path

from funcpipe.core.extras import needed_from
from funcpipe.partitioner.analysis.front import Front


def plot_front(front: Front, path: str | Path) -> None:
    """Draw `front` into the file `path`, its kind after the ending: seconds across, dollars up, marked plans named.

    Needs matplotlib, which is imported only here.
    """
    with needed_from("figures"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    points = [(p.estimate.iteration_s, p.estimate.cost_usd) for p in front.plans if p.estimate is not None]
    axes.plot(*zip(*points, strict=True), marker=".", drawstyle="steps-post", linewidth=1, label="Pareto front")
    for name, place in front.marked.items():
        axes.plot(*points[place], marker="o", linestyle="none", label=f"best for a weight of {name} MB·s per second")
    axes.plot(*points[front.recommended], marker="*", markersize=14, linestyle="none", label="recommended")
    axes.set_xlabel("seconds per iteration")
    axes.set_ylabel("dollars per iteration")
    axes.set_title(f"{front.model} on {front.platform}, batch {front.global_batch}")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
