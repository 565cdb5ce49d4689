"""The names of documents' formats are in files that people keep: they never change with a class or its module."""

import inspect

import funcpipe.core as core

NAMES = {
    "Bill": "funcpipe.bill/1",
    "ModelProfile": "funcpipe.profile/1",
    "Plan": "funcpipe.plan/1",
    "PlatformSpec": "funcpipe.platform/1",
    "ProbeSpec": "funcpipe.probe/1",
    "StepReport": "funcpipe.step/1",
    "WorkerReport": "funcpipe.report/1",
    "WorkerSpec": "funcpipe.worker/1",
}


def test_formats_keep_their_names() -> None:
    assert {name: getattr(core, name).FORMAT for name in NAMES} == NAMES


def test_no_format_has_the_name_of_another() -> None:
    values = (value for name in core.__all__ if inspect.isclass(value := getattr(core, name)))
    formats = [vars(value)["FORMAT"] for value in values if "FORMAT" in vars(value)]
    assert len(formats) == len(set(formats))
