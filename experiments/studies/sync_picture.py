"""Draws what moves when: the lanes of every replica, one panel for each synchronisation."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from funcpipe.core import Event, Resource

_COLOURS = {"put-split": "tab:blue", "get-split": "tab:cyan", "put-merged": "tab:red", "get-merged": "tab:orange"}


def draw(ways: Mapping[str, Sequence[Event]], path: Path, *, columns: int = 1) -> None:
    """A bar from each request to the end of its body; requests that are open at once lie over each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    rows = -(-len(ways) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5 + 5 * columns, 2.6 * rows), sharex=True, squeeze=False)
    for axis, (name, events) in zip(axes.flat, ways.items(), strict=False):
        first_s = min(event.start_s for event in events)
        replicas = sorted({event.replica for event in events})
        for event in events:
            row = 2 * event.replica + (event.lane is Resource.DOWNLOAD)
            start_s = event.start_s + event.waited_s - first_s
            colour = _COLOURS[event.task.split(".")[0]]
            width_s = event.end_s - event.start_s - event.waited_s
            axis.barh(row, width_s, left=start_s, height=0.8, color=colour, alpha=0.35, edgecolor=colour)
        axis.set_yticks(range(2 * len(replicas)), [f"r{r} {lane}" for r in replicas for lane in ("up", "down")])
        axis.invert_yaxis()
        axis.set_title(f"{name}: {max(event.end_s for event in events) - first_s:.2f} s", loc="left", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in _COLOURS.items()], ncols=4, loc="lower center"
    )
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
