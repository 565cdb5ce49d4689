"""The page on architecture names the keys and functions that the code has."""

import ast
import re
from pathlib import Path

from funcpipe.core import Routes, ScheduleKind, Sync
from funcpipe.runstate import generations as run_objects
from funcpipe.scheduler.graph import StepShape, build_graph
from funcpipe.training import gradients

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()


def keys_below(place: str) -> list[str]:
    """The keys in the first column of the table below `place`."""
    table = PAGE.split(f"Below `{place}`", 1)[1].split("|---|---|\n", 1)[1].split("\n\n", 1)[0]
    return [key for row in table.splitlines() for key in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_it_has_each_key_of_a_run_once() -> None:
    assert sorted(keys_below("RUN/")) == sorted(run_objects.OF_RUN)
    assert sorted(keys_below("RUN/gGENERATION/")) == sorted(run_objects.OF_GENERATION)


def test_each_stop_of_a_value_is_in_its_file() -> None:
    stops = re.findall(r"^\| \d+\. `(?:(\w+)\.)?(\w+)` \| `([\w/]+\.py)` \|", PAGE, flags=re.MULTILINE)
    assert len(stops) >= 9 + 10 + 16
    for owner, name, file in stops:
        body = ast.parse((ROOT / "funcpipe" / file).read_text()).body
        classes = {node.name: node.body for node in body if isinstance(node, ast.ClassDef)}
        if owner == "FuncPipe":  # whose verbs are those of its bases, by files
            classes[owner] = [node for own in classes.values() for node in own]
        found = classes.get(owner, []) if owner else body
        assert name in {node.name for node in found if isinstance(node, ast.FunctionDef)}, (owner, name, file)


def test_the_picture_of_a_gradient_has_the_tasks_of_the_first_of_two_rounds() -> None:
    shape = StepShape(
        stages=1,
        replicas=2,
        micro_batches=2,
        routes=Routes(activations=(), gradients=()),
        schedule=ScheduleKind.GPIPE,
        sync=Sync.STREAMED,
        norms=True,
    )
    tasks = list(map(str, build_graph(shape).of_worker(0, 0).tasks))
    assert gradients.__doc__ is not None
    shown = re.findall(r"^    ([a-z-]+\.s0\.r0\S*)", gradients.__doc__, flags=re.MULTILINE)
    assert sorted(shown) == sorted(
        task for task in tasks if "forward" not in task and ("k1" not in task or "backward" in task)
    )
