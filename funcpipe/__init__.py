"""Train PyTorch models on serverless functions: profiled, planned, pipelined, predicted.

Everything that users need is imported from here: `from funcpipe import FuncPipe, FaultTolerance, Plan`. All errors are
in `funcpipe.errors`, and the protocols of platforms and storages in `funcpipe.platforms.base`. Names that need torch,
numpy or a solver are loaded when they are first used, so that planning on the command line does not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from funcpipe.core import (
    Bill,
    Estimate,
    FaultTolerance,
    FunctionSize,
    InverseLoss,
    JobEstimate,
    JobSpec,
    Market,
    ModelProfile,
    Numerics,
    OnDrift,
    OnNan,
    OnOutOfMemory,
    OptimizerKind,
    Outcome,
    Pins,
    Plan,
    PlatformSpec,
    Precision,
    Provision,
    ProvisionTable,
    Recompute,
    RunLimits,
    RunSettings,
    ScheduleKind,
    Stage,
    Sync,
    Trace,
    TrainingSpec,
    Validation,
    ValidationReport,
    WeightedLoss,
    Wire,
    WorkerReport,
    read,
    write,
)
from funcpipe.errors import (
    DataError,
    FuncPipeError,
    Infeasible,
    InputError,
    ModelError,
    PlanError,
    RunError,
    RunHalted,
    RunInterrupted,
    WorkerFailed,
)

if TYPE_CHECKING:
    from funcpipe.api import FuncPipe
    from funcpipe.client.control.status import RunStatus, WorkerStatus, status
    from funcpipe.client.control.stopping import clean, stop
    from funcpipe.client.control.verdict import Verdict
    from funcpipe.client.follow.callbacks import Callback, EachStep, RunInfo
    from funcpipe.client.follow.export import export
    from funcpipe.client.follow.results import Progress, RunResult
    from funcpipe.client.prepare.session import Site, open_site
    from funcpipe.neighbours.parameter_server.on_functions import ServerFunctions
    from funcpipe.neighbours.parameter_server.on_machines import Replanner, ServerCluster, SpotPlan
    from funcpipe.neighbours.parameter_server.training import ServerResult
    from funcpipe.neighbours.parameter_server.worker_group import ServerWorker
    from funcpipe.neighbours.provisioning.compare import provision_table
    from funcpipe.platforms.catalog import load_market, load_spec, open_deployment, open_platform, open_storage
    from funcpipe.profiler.buckets import Bucket
    from funcpipe.runstate.liveness import WorkerState
    from funcpipe.scheduler.simulator.disturbances import Disturbances
    from funcpipe.sweep.candidates import Candidate
    from funcpipe.sweep.sweep import Sweep
    from funcpipe.training.averaging import EMA, SWA, Teacher
    from funcpipe.training.verify import Verification

__all__ = [
    "EMA",
    "SWA",
    "Bill",
    "Bucket",
    "Callback",
    "Candidate",
    "DataError",
    "Disturbances",
    "EachStep",
    "Estimate",
    "FaultTolerance",
    "FuncPipe",
    "FuncPipeError",
    "FunctionSize",
    "Infeasible",
    "InputError",
    "InverseLoss",
    "JobEstimate",
    "JobSpec",
    "Market",
    "ModelError",
    "ModelProfile",
    "Numerics",
    "OnDrift",
    "OnNan",
    "OnOutOfMemory",
    "OptimizerKind",
    "Outcome",
    "Pins",
    "Plan",
    "PlanError",
    "PlatformSpec",
    "Precision",
    "Progress",
    "Provision",
    "ProvisionTable",
    "Recompute",
    "Replanner",
    "RunError",
    "RunHalted",
    "RunInfo",
    "RunInterrupted",
    "RunLimits",
    "RunResult",
    "RunSettings",
    "RunStatus",
    "ScheduleKind",
    "ServerCluster",
    "ServerFunctions",
    "ServerResult",
    "ServerWorker",
    "Site",
    "SpotPlan",
    "Stage",
    "Sweep",
    "Sync",
    "Teacher",
    "Trace",
    "TrainingSpec",
    "Validation",
    "ValidationReport",
    "Verdict",
    "Verification",
    "WeightedLoss",
    "Wire",
    "WorkerFailed",
    "WorkerReport",
    "WorkerState",
    "WorkerStatus",
    "clean",
    "export",
    "load_market",
    "load_spec",
    "open_deployment",
    "open_platform",
    "open_site",
    "open_storage",
    "provision_table",
    "read",
    "status",
    "stop",
    "write",
]

_LAZY = {
    "FuncPipe": "api",
    "Callback": "client.follow.callbacks",
    "Candidate": "sweep.candidates",
    "EachStep": "client.follow.callbacks",
    "RunInfo": "client.follow.callbacks",
    "RunStatus": "client.control.status",
    "WorkerStatus": "client.control.status",
    "clean": "client.control.stopping",
    "status": "client.control.status",
    "stop": "client.control.stopping",
    "export": "client.follow.export",
    "provision_table": "neighbours.provisioning.compare",
    "Progress": "client.follow.results",
    "RunResult": "client.follow.results",
    "Replanner": "neighbours.parameter_server.on_machines",
    "SpotPlan": "neighbours.parameter_server.on_machines",
    "ServerCluster": "neighbours.parameter_server.on_machines",
    "ServerFunctions": "neighbours.parameter_server.on_functions",
    "ServerResult": "neighbours.parameter_server.training",
    "ServerWorker": "neighbours.parameter_server.worker_group",
    "Site": "client.prepare.session",
    "Sweep": "sweep.sweep",
    "open_site": "client.prepare.session",
    "load_spec": "platforms.catalog",
    "open_deployment": "platforms.catalog",
    "open_platform": "platforms.catalog",
    "open_storage": "platforms.catalog",
    "load_market": "platforms.catalog",
    "Bucket": "profiler.buckets",
    "Disturbances": "scheduler.simulator.disturbances",
    "Verdict": "client.control.verdict",
    "Verification": "training.verify",
    "EMA": "training.averaging",
    "SWA": "training.averaging",
    "Teacher": "training.averaging",
    "WorkerState": "runstate.liveness",
}
"""In which module of the package each name is that is loaded when it is first used."""

_ELSEWHERE = ("funcpipe.errors", "funcpipe.core", "funcpipe.platforms.base")
"""Modules whose names fewer users need."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from funcpipe.core.distribution import version

        return version()
    if name not in _LAZY:
        elsewhere = (module for module in _ELSEWHERE if hasattr(importlib.import_module(module), name))
        hint = next((f"; it is in {module}: from {module} import {name}" for module in elsewhere), "")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
