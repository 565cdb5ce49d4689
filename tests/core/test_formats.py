"""Files and objects that an earlier version wrote are still read: the names of their formats never change."""

import inspect

import funcpipe.core
from funcpipe.core.trace import TRACE_FORMAT

FORMATS = {
    f"funcpipe.{name}/1"
    for name in (
        *("profile", "platform", "training", "plan", "events", "bill", "probe", "machine", "layer"),
        *("worker", "report", "step", "run", "checkpoint", "lease", "function", "hand-over", "heartbeat"),
        *("restart", "halt"),
    )
}


def test_the_names_of_formats_stay() -> None:
    found = {getattr(item, "FORMAT", None) for item in vars(funcpipe.core).values() if inspect.isclass(item)}
    assert found >= FORMATS
    assert TRACE_FORMAT == "funcpipe.trace/1"
