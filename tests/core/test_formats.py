"""Files and objects that an earlier version wrote are still read: the names of their formats never change."""

import inspect

import funcpipe.core
from funcpipe.core.trace import TRACE_FORMAT

FORMATS = {
    "Events": "funcpipe.events/1",
    "Bill": "funcpipe.bill/1",
    "FunctionDocument": "funcpipe.function/1",
    "Halt": "funcpipe.halt/1",
    "HandOver": "funcpipe.hand-over/1",
    "Heartbeat": "funcpipe.heartbeat/1",
    "LayerReport": "funcpipe.layer/1",
    "LeaseDocument": "funcpipe.lease/1",
    "MachineReport": "funcpipe.machine/1",
    "Manifest": "funcpipe.checkpoint/1",
    "ModelProfile": "funcpipe.profile/1",
    "Plan": "funcpipe.plan/1",
    "PlatformSpec": "funcpipe.platform/1",
    "ProbeSpec": "funcpipe.probe/1",
    "Restart": "funcpipe.restart/1",
    "RunRecord": "funcpipe.run/1",
    "StepReport": "funcpipe.step/1",
    "TrainingSpec": "funcpipe.training/1",
    "WorkerReport": "funcpipe.report/1",
    "WorkerSpec": "funcpipe.worker/1",
}


def test_the_names_of_formats_stay() -> None:
    classes = {name: item for name, item in vars(funcpipe.core).items() if inspect.isclass(item)}
    found = {name: getattr(item, "FORMAT", None) for name, item in classes.items()}
    assert {name: text for name, text in found.items() if isinstance(text, str)} == FORMATS
    assert TRACE_FORMAT == "funcpipe.trace/1"
