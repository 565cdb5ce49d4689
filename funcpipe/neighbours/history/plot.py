"""A picture of prediction errors, run after run, before and after correction."""

from collections.abc import Sequence
from pathlib import Path

from funcpipe.core.distribution import needed_from
from funcpipe.errors import InputError
from funcpipe.neighbours.history.learned import Errors


def plot_errors(found: Sequence[Errors], path: str | Path) -> None:
    """Draw `found` into the file `path`, its kind after the ending: runs across, errors in per cent up.

    Needs matplotlib, which is imported only here. Raises InputError where there is nothing to draw.
    """
    drawn = [one for one in found if len(one.before) > 1]
    if not drawn:
        raise InputError("no prediction has been compared with two runs or more: there are no errors to draw")
    with needed_from("figures"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.2 * len(drawn)), layout="constrained")
    for axes, one in zip(figure.subplots(len(drawn), squeeze=False)[:, 0], drawn, strict=True):
        runs = range(1, len(one.before) + 1)
        axes.plot(runs, [100 * error for error in one.before], marker="o", color="tab:gray", label="as modelled")
        axes.plot(runs, [100 * error for error in one.after], marker="o", color="tab:blue", label="as observed here")
        place = one.platform if one.ran_on == one.platform else f"{one.platform} on {one.ran_on}"
        model = f" of {one.model}" if one.model else ""
        axes.set_title(f"{one.quantity.value}{model}, {place}, {one.size}", fontsize="medium")
        axes.set_xlabel("run")
        axes.set_ylabel("error, %")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
