"""How many objects, and bytes, a long run keeps in storage, and what the checkpoints take that let messages go.

A small job of 3 stages x 2 replicas is trained over functions that are threads, with requests that take `--latency`
seconds and checkpoints at the interval that the workers choose themselves. A look at the storage after every step.
"""

import argparse
import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from funcpipe.client.launch import launch
from funcpipe.client.prepare import prepare
from funcpipe.client.results import Progress
from funcpipe.client.session import session_on
from funcpipe.client.site import Site
from funcpipe.core import FaultTolerance, RunSettings
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.local.throttle import Throttled
from funcpipe.testing.census import Census
from funcpipe.testing.chaos import EPOCHS, SAMPLES, job
from funcpipe.testing.thread_platform import ThreadPlatform

STEPS_PER_EPOCH = SAMPLES // 8
STYLE = {"all objects": "black", "messages": "tab:blue", "reports of steps": "tab:orange", "checkpoints": "tab:green"}


@dataclass(frozen=True, slots=True)
class Look:
    """What lies in the storage after a step: objects by what they are, the messages of one worker at most, bytes."""

    step: int
    seconds: float
    objects: dict[str, int]
    of_one_worker: int
    bytes: int


def watch(steps: int, faults: FaultTolerance, latency_s: float) -> tuple[list[Look], Census]:
    """Train so many steps, and look after each."""
    census, looks, began_s = Census(), list[Look](), time.monotonic()
    storage = Throttled(census, latency_s=latency_s) if latency_s else census
    work = replace(job(), epochs=max(steps // STEPS_PER_EPOCH, EPOCHS), message_deadline_s=60.0)
    platform = ThreadPlatform(load_spec("local"), storage)
    session = session_on(Site(platform, storage, "memory://here"), reopen=platform.open)

    def look(progress: Progress) -> None:
        now = dict(census.now)
        of_workers = [count for kind, count in now.items() if kind.startswith("messages/")]
        objects = {
            "all objects": census.objects,
            "messages": sum(of_workers),
            "reports of steps": now.get("steps", 0) + now.get("losses", 0),
            "checkpoints": now.get("checkpoints", 0),
        }
        passed_s = time.monotonic() - began_s
        looks.append(Look(progress.step, passed_s, objects, max(of_workers, default=0), census.bytes_now))

    try:
        launch(prepare(work, session, faults=faults, settings=RunSettings(name="objects")), look)
    finally:
        platform.stop_all()
    return looks, census


def checkpoint_share(lines: list[str], seconds: float) -> tuple[int, float]:
    """How many checkpoints the log tells of, and which share of the time the stage with most of them spent saving."""
    spent: dict[str, float] = {}
    for line in lines:
        match = re.search(r"saved stage (\d+) after step .* bytes in ([0-9.]+) s", line)
        if match:
            spent[match[1]] = spent.get(match[1], 0.0) + float(match[2])
    return sum("saved stage" in line for line in lines), max(spent.values(), default=0.0) / seconds


def draw(looks: list[Look], path: Path) -> None:
    """Write the figure, as PNG and as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (objects, size) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), constrained_layout=True)
    steps = [look.step for look in looks]
    for name, color in STYLE.items():
        objects.plot(steps, [look.objects[name] for look in looks], color=color, linewidth=0.8, label=name)
    objects.plot(
        steps, [look.of_one_worker for look in looks], color="tab:red", linewidth=0.8, label="messages of one worker"
    )
    objects.set_ylabel("objects in storage")
    objects.legend(loc="upper left", fontsize="small")
    size.plot(steps, [look.bytes / 1e3 for look in looks], color="black", linewidth=0.8)
    size.set_ylabel("kB in storage")
    size.set_xlabel("step")
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds that each request takes")
    parser.add_argument("--checkpoint", type=int, help="fix the interval instead")
    parser.add_argument("--output", type=Path, default=Path("out/objects_kept"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with logged() as lines:
        looks, census = watch(options.steps, FaultTolerance(checkpoint_steps=options.checkpoint), options.latency)
    print(f"{'step':>6} " + " ".join(f"{name:>18}" for name in STYLE) + f" {'of one worker':>18} {'kB':>10}")
    for step in sorted({1, 2, 5, 10, 20, 50, *range(100, len(looks) + 1, max(len(looks) // 15, 1)), len(looks)}):
        look = looks[min(step, len(looks)) - 1]
        cells = " ".join(f"{look.objects[name]:>18}" for name in STYLE)
        print(f"{look.step:>6} {cells} {look.of_one_worker:>18} {look.bytes / 1e3:>10.1f}")
    most = max(count for kind, count in census.most.items() if kind.startswith("messages/"))
    checkpoints, share = checkpoint_share(lines, looks[-1].seconds)
    print(
        f"{len(looks)} steps in {looks[-1].seconds:.1f} s; at most {most} messages of one worker at any time, at most "
        f"{max(look.objects['all objects'] for look in looks)} objects in all; {checkpoints} checkpoints, which took "
        f"{share:.1%} of the time of a stage; {census.deletions} requests to delete; left: {census.objects} objects"
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw(looks, options.output)
    rows = [[look.step, look.objects, look.of_one_worker, look.bytes] for look in looks]
    options.output.with_suffix(".json").write_text(json.dumps(rows) + "\n")
    print(f"written: {options.output}.png, .svg, .json")


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that are logged of checkpoints while this context lasts."""
    lines: list[str] = []
    logger, handler = logging.getLogger("funcpipe.runstate.checkpoints"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


if __name__ == "__main__":
    main()
