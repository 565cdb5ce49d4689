"""Files and objects that an earlier version wrote are still read: the names of their formats never change."""

import inspect

import funcpipe.core
from funcpipe.core.trace import TRACE_FORMAT
from funcpipe.neighbours.parameter_server.function_connection import FunctionMessage, WorkOrder
from funcpipe.platforms.function_group import StartedFunction
from funcpipe.runstate.functions import StartedTogether

FORMATS = {
    "Base": "funcpipe.base/1",
    "Events": "funcpipe.events/1",
    "Bill": "funcpipe.bill/1",
    "Comparison": "funcpipe.comparison/1",
    "FinishedRun": "funcpipe.finished/1",
    "Halt": "funcpipe.halt/1",
    "HaltVerdict": "funcpipe.halt-verdict/1",
    "HandOver": "funcpipe.hand-over/1",
    "Heartbeat": "funcpipe.heartbeat/1",
    "InverseLoss": "funcpipe.loss-inverse/1",
    "JobEstimate": "funcpipe.job-estimate/1",
    "JobSpec": "funcpipe.job-spec/1",
    "LayerReport": "funcpipe.layer/1",
    "LeaseDocument": "funcpipe.lease/1",
    "Observation": "funcpipe.observation/1",
    "OwnerDocument": "funcpipe.owner/1",
    "MachineReport": "funcpipe.machine/1",
    "Manifest": "funcpipe.checkpoint/1",
    "Market": "funcpipe.market/1",
    "ModelProfile": "funcpipe.profile/1",
    "Pins": "funcpipe.pins/1",
    "Plan": "funcpipe.plan/1",
    "PlatformSpec": "funcpipe.platform/1",
    "ProbeSpec": "funcpipe.probe/1",
    "Provision": "funcpipe.provision/1",
    "ProvisionTable": "funcpipe.provision-table/1",
    "ReplicaMark": "funcpipe.replica-mark/1",
    "Restart": "funcpipe.restart/1",
    "RunRecord": "funcpipe.run/1",
    "ServerFunctionSpec": "funcpipe.server-function/1",
    "StepReport": "funcpipe.step/1",
    "StepSummary": "funcpipe.steps/1",
    "StorageReport": "funcpipe.storage/1",
    "TrainingSpec": "funcpipe.training/1",
    "ValidationReport": "funcpipe.validation/1",
    "WatchSpec": "funcpipe.watch/1",
    "WayRun": "funcpipe.way-run/1",
    "WeightedLoss": "funcpipe.loss-weighted/1",
    "WorkerReport": "funcpipe.report/1",
    "WorkerSpec": "funcpipe.worker/1",
}


def test_the_names_of_formats_stay() -> None:
    formats = {
        name: getattr(item, "FORMAT", None) for name, item in vars(funcpipe.core).items() if inspect.isclass(item)
    }
    found = {name: text for name, text in formats.items() if isinstance(text, str)}
    assert found == FORMATS
    assert TRACE_FORMAT == "funcpipe.trace/1"
    assert StartedFunction.FORMAT == "funcpipe.function/1"
    assert StartedTogether.FORMAT == "funcpipe.functions/1"
    assert WorkOrder.FORMAT == "funcpipe.server-work/1"
    assert FunctionMessage.FORMAT == "funcpipe.server-push/1"
