"""Results for people and machines: in a terminal, in a notebook, as a page.

Each verb of the command line loads what draws its result when it has something to show.
"""

import importlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from funcpipe.core.json_form import to_plain
from funcpipe.core.process import write_out

if TYPE_CHECKING:
    from funcpipe.show.describe import Description
    from funcpipe.show.jobs import hindsight, history, loss_model, observed, observed_lines, provisions, server_result
    from funcpipe.show.plans import front, plan, platform, platforms, profile, simulation, storage_report, what_if
    from funcpipe.show.runs import (
        commands_after,
        comparison,
        detached,
        evaluation,
        job_estimate,
        predictions,
        run_status,
        training_result,
        verification,
    )
    from funcpipe.show.side_by_side import beside
    from funcpipe.show.sweeps import sweep, sweep_status
    from funcpipe.show.terminal import draw, profiling

__all__ = [
    "as_json",
    "beside",
    "commands_after",
    "comparison",
    "detached",
    "draw",
    "evaluation",
    "front",
    "hindsight",
    "history",
    "job_estimate",
    "loss_model",
    "observed",
    "observed_lines",
    "plan",
    "platform",
    "platforms",
    "predictions",
    "profile",
    "profiling",
    "provisions",
    "run_status",
    "server_result",
    "show",
    "simulation",
    "storage_report",
    "sweep",
    "sweep_status",
    "training_result",
    "verification",
    "what_if",
]

_MODULES = ("runs", "plans", "jobs", "sweeps", "side_by_side", "terminal")


def as_json(value: Any) -> str:
    """`value` as one JSON text."""
    return json.dumps(to_plain(value), indent=1, allow_nan=False) + "\n"


def show(machine: bool, text: str, *describing: "Callable[[], str | Description]") -> None:
    """Print `text` for machines, or for people the texts and descriptions that `describing` return."""
    if machine:
        write_out(text, end="")
        return
    from funcpipe.show.terminal import Terminal, draw

    console = Terminal()
    for describe in describing:
        draw(describe(), console)


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        found = getattr(importlib.import_module(f"{__name__}.{module}"), name, None)
        if found is not None:
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
