"""Results in a terminal; each verb imports its own renderers when it has something to show."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from funcpipe.cli.render.histories import hindsight, history, observed, observed_lines
    from funcpipe.cli.render.output import as_json, show
    from funcpipe.cli.render.plans import front, plan, platform, platforms, profile, simulation, what_if
    from funcpipe.cli.render.progress import profiling
    from funcpipe.cli.render.provisioning import loss_model, provisions
    from funcpipe.cli.render.runs import (
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
    from funcpipe.cli.render.servers import server_result
    from funcpipe.cli.render.side_by_side import beside
    from funcpipe.cli.render.storages import storage_report

__all__ = [
    "as_json",
    "beside",
    "commands_after",
    "comparison",
    "detached",
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
    "training_result",
    "verification",
    "what_if",
]

_MODULES = ("output", "runs", "progress", "histories", "plans", "provisioning", "servers", "side_by_side", "storages")


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        found = getattr(importlib.import_module(f"{__name__}.{module}"), name, None)
        if found is not None:
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
