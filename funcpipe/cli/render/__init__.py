"""How results look in a terminal."""

from funcpipe.cli.render.history import hindsight, history, observed, observed_lines
from funcpipe.cli.render.output import as_json, show
from funcpipe.cli.render.plans import front, plan, platform, platforms, profile, simulation, what_if
from funcpipe.cli.render.progress import profiling
from funcpipe.cli.render.provisions import loss_model, provisions
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
