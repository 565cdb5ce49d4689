"""The values that flow from profile to report: frozen, checked where they are made, written to JSON and read back."""

from funcpipe.core.bill import Bill, StoreBill, store_bills
from funcpipe.core.choices import (
    SYNC_WIRES,
    Interval,
    OptimizerKind,
    Recompute,
    ScheduleKind,
    Sync,
    Wire,
)
from funcpipe.core.comparison import ComparedWay, Comparison, WayRun
from funcpipe.core.estimate import Estimate, Optimality, SolverReport, StageEstimate, StoreEstimate
from funcpipe.core.job_estimate import JobEstimate, JobItem
from funcpipe.core.job_spec import JobSpec
from funcpipe.core.json_form import from_text, read, to_text, write
from funcpipe.core.loss_model import InverseLoss, LossModel, WeightedLoss
from funcpipe.core.market import Gpu, Machine, Market
from funcpipe.core.names import WorkerId, stage_of, worker_name
from funcpipe.core.numerics import Coupled, Numerics, OnNan, Precision, Reduction
from funcpipe.core.observation import Observation, Quantity
from funcpipe.core.plan import Plan, Stage, TrainingSpec
from funcpipe.core.plan_request import NO_PINS, Pins, PlanRequest
from funcpipe.core.platform import LIST_KEYS, MB, FunctionSize, PlatformSpec
from funcpipe.core.probe import LayerReport, MachineReport, ProbeSpec
from funcpipe.core.profile import DataProfile, LayerProfile, ModelProfile, ProfiledBucket, TensorProfile, TiedParameter
from funcpipe.core.provision import CostItem, CurvePoint, Provision, ProvisionTable, Refusal, Rented
from funcpipe.core.requests import CountsByKind, RequestCounts
from funcpipe.core.routes import ActivationRoute, GradientRoute, Routes, TieRoute, find_routes, stages_of_layers
from funcpipe.core.run import FinishedRun, Invocation, StepReport, StepSummary, WorkerReport, WorkerSpec
from funcpipe.core.runstate import (
    Busy,
    FunctionDocument,
    Halt,
    HaltVerdict,
    HandOver,
    Heartbeat,
    LeaseDocument,
    Manifest,
    Outcome,
    OwnerDocument,
    ReplicaMark,
    Restart,
    RunAccount,
    RunRecord,
    StoredFile,
)
from funcpipe.core.server_function import ServerFunctionSpec
from funcpipe.core.settings import FaultTolerance, OnDrift, OnOutOfMemory, RunLimits, RunSettings
from funcpipe.core.shard_order import ShardOrder
from funcpipe.core.storage_report import RequestTimes, StorageReport
from funcpipe.core.stores import DEFAULT_STORES, Stores, StoreSpec
from funcpipe.core.sync_way import Streams, SyncWay, usual_streams
from funcpipe.core.trace import (
    Event,
    Events,
    Prices,
    Resource,
    Source,
    Trace,
    prices_of,
    read_trace,
    write_side_by_side,
    write_trace,
)
from funcpipe.core.use import Use
from funcpipe.core.validation import Monitor, MonitorMode, Validation, ValidationReport
from funcpipe.core.watch import MARKS, WatchSpec

__all__ = [
    "DEFAULT_STORES",
    "LIST_KEYS",
    "MARKS",
    "MB",
    "NO_PINS",
    "SYNC_WIRES",
    "ActivationRoute",
    "Bill",
    "Busy",
    "ComparedWay",
    "Comparison",
    "CostItem",
    "CountsByKind",
    "Coupled",
    "CurvePoint",
    "DataProfile",
    "Estimate",
    "Event",
    "Events",
    "FaultTolerance",
    "FinishedRun",
    "FunctionDocument",
    "FunctionSize",
    "Gpu",
    "GradientRoute",
    "Halt",
    "HaltVerdict",
    "HandOver",
    "Heartbeat",
    "Interval",
    "InverseLoss",
    "Invocation",
    "JobEstimate",
    "JobItem",
    "JobSpec",
    "LayerProfile",
    "LayerReport",
    "LeaseDocument",
    "LossModel",
    "Machine",
    "MachineReport",
    "Manifest",
    "Market",
    "ModelProfile",
    "Monitor",
    "MonitorMode",
    "Numerics",
    "Observation",
    "OnDrift",
    "OnNan",
    "OnOutOfMemory",
    "Optimality",
    "OptimizerKind",
    "Outcome",
    "OwnerDocument",
    "Pins",
    "Plan",
    "PlanRequest",
    "PlatformSpec",
    "Precision",
    "Prices",
    "ProbeSpec",
    "ProfiledBucket",
    "Provision",
    "ProvisionTable",
    "Quantity",
    "Recompute",
    "Reduction",
    "Refusal",
    "Rented",
    "ReplicaMark",
    "RequestCounts",
    "RequestTimes",
    "Resource",
    "Restart",
    "Routes",
    "RunAccount",
    "RunLimits",
    "RunRecord",
    "RunSettings",
    "ScheduleKind",
    "ServerFunctionSpec",
    "ShardOrder",
    "SolverReport",
    "Source",
    "Stage",
    "StageEstimate",
    "StepReport",
    "StepSummary",
    "StorageReport",
    "StoreBill",
    "StoreEstimate",
    "StoreSpec",
    "StoredFile",
    "Stores",
    "Streams",
    "Sync",
    "SyncWay",
    "TensorProfile",
    "TieRoute",
    "TiedParameter",
    "Trace",
    "TrainingSpec",
    "Use",
    "Validation",
    "ValidationReport",
    "WatchSpec",
    "WayRun",
    "WeightedLoss",
    "Wire",
    "WorkerId",
    "WorkerReport",
    "WorkerSpec",
    "find_routes",
    "from_text",
    "prices_of",
    "read",
    "read_trace",
    "stage_of",
    "stages_of_layers",
    "store_bills",
    "to_text",
    "usual_streams",
    "worker_name",
    "write",
    "write_side_by_side",
    "write_trace",
]
