"""The values that flow from profile to report: frozen, checked where they are made, written to JSON and read back."""

from funcpipe.core.json_form import from_text, read, to_text, write
from funcpipe.core.plan import (
    Estimate,
    Optimality,
    OptimizerKind,
    Plan,
    Recompute,
    ScheduleKind,
    SolverReport,
    Stage,
    StageEstimate,
    Streams,
    Sync,
    TrainingSpec,
    Wire,
    usual_streams,
)
from funcpipe.core.platform import MB, FunctionSize, PlatformSpec
from funcpipe.core.profile import LayerProfile, ModelProfile, TensorProfile, TiedParameter
from funcpipe.core.routes import ActivationRoute, GradientRoute, Routes, TieRoute, find_routes
from funcpipe.core.run import Bill, StepReport, WorkerReport, WorkerSpec
from funcpipe.core.trace import Event, Resource, Source, Trace, read_trace, write_trace

__all__ = [
    "MB",
    "ActivationRoute",
    "Bill",
    "Estimate",
    "Event",
    "FunctionSize",
    "GradientRoute",
    "LayerProfile",
    "ModelProfile",
    "Optimality",
    "OptimizerKind",
    "Plan",
    "PlatformSpec",
    "Recompute",
    "Resource",
    "Routes",
    "ScheduleKind",
    "SolverReport",
    "Source",
    "Stage",
    "StageEstimate",
    "StepReport",
    "Streams",
    "Sync",
    "TensorProfile",
    "TieRoute",
    "TiedParameter",
    "Trace",
    "TrainingSpec",
    "Wire",
    "WorkerReport",
    "WorkerSpec",
    "find_routes",
    "from_text",
    "read",
    "read_trace",
    "to_text",
    "usual_streams",
    "write",
    "write_trace",
]
