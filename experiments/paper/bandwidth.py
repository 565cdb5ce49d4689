"""What would slower or faster links change?

The links of all sizes are multiplied by a factor. For each the best baseline of the four is taken: FuncPipe's fastest
plan that costs no more than the fastest of them, and its cheapest that takes no longer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from experiments.paper.common import How, Result, Row, Script, Settings, new_figure, run
from experiments.paper.planning import (
    BASELINES,
    OURS,
    PAPER,
    best_on,
    dollars,
    profile_of,
    seconds,
    simulated_on,
)
from funcpipe.core import PlatformSpec
from funcpipe.platforms.catalog import load_spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
BATCH = 64


def measure(settings: Settings) -> Result:
    spec = settings.specs[0]
    batch = BATCH if BATCH in settings.batches else settings.batches[0]
    rows = tuple(row for model in settings.models for factor in FACTORS for row in compare(model, spec, batch, factor))
    return Result(how=How.SIMULATED, on=simulated_on((spec,)), rows=rows, findings=findings(rows), figure=draw(rows))


def with_links(spec: PlatformSpec, factor: float) -> PlatformSpec:
    """The platform with links so many times as fast."""
    sizes = tuple(
        replace(size, upload_bytes_s=factor * size.upload_bytes_s, download_bytes_s=factor * size.download_bytes_s)
        for size in spec.sizes
    )
    return replace(spec, sizes=sizes)


def compare(model: str, name: str, batch: int, factor: float) -> Iterator[Row]:
    """A row for each system."""
    profile, spec = profile_of(model, name), with_links(load_spec(name), factor)
    plans = [plan for baseline in BASELINES if (plan := best_on(profile, spec, batch, baseline)) is not None]
    if not plans:
        return
    rival = min(plans, key=seconds)
    for system in (PAPER, OURS):
        fast = best_on(profile, spec, batch, system, budget_usd=dollars(rival) * (1 + 1e-9))
        cheap = best_on(profile, spec, batch, system, deadline_s=seconds(rival) * (1 + 1e-9))
        yield {
            "model": model,
            "platform": spec.name,
            "batch": batch,
            "links": factor,
            "system": system,
            "baseline_s": seconds(rival),
            "stages": None if fast is None else len(fast.stages),
            "speedup": None if fast is None else seconds(rival) / seconds(fast),
            "saving": None if cheap is None else 1 - dollars(cheap) / dollars(rival),
        }


def findings(rows: Sequence[Row]) -> tuple[str, ...]:
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for system in (PAPER, OURS):
            mine = [row for row in rows if (row["model"], row["system"]) == (model, system)]
            slow, fast = mine[0], mine[-1]
            found.append(
                f"{model}: with links {slow['links']:g} times as fast {system} {_gain(slow)}; "
                f"with {fast['links']:g} times it {_gain(fast)}."
            )
    return tuple(found)


def _gain(row: Row) -> str:
    speedup, saving = row["speedup"], row["saving"]
    fast = "has no plan as cheap" if speedup is None else f"is {speedup:.2f}x as fast at no more cost"
    if saving is None:
        return f"{fast} and no plan as fast"
    return f"{fast} and {100 * abs(saving):.0f} % {'dearer' if saving < 0 else 'cheaper'} in no more time"


def draw(rows: Sequence[Row]) -> "Figure":
    figure = new_figure(1, width=7.0)
    axes = figure.subplots()
    for number, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        for system, style in ((PAPER, ":"), (OURS, "-")):
            mine = [row for row in rows if (row["model"], row["system"]) == (model, system) and row["speedup"]]
            points = [(row["links"], row["speedup"]) for row in mine]
            label = model if system == OURS else None
            axes.plot(*zip(*points, strict=True), "o" + style, ms=3, color=f"C{number}", label=label)
    axes.set(xscale="log", xlabel="links, times those of today", ylabel="times as fast as the fastest baseline")
    axes.legend(title="solid: this project; dotted: the paper's system")
    return figure


SCRIPT = Script(name="bandwidth", question="What do slower or faster links change?", measure=measure)

if __name__ == "__main__":
    run(SCRIPT)
