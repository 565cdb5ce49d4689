"""What Ray raises for tasks that ended badly."""

import pytest

from funcpipe.errors import WorkerFailed
from funcpipe.platforms.base import Cause, State, Status


@pytest.mark.parametrize(
    ("name", "arguments", "reason", "cause"),
    [
        (
            "OutOfMemoryError",
            ("Task was killed\nmore",),
            "killed by Ray, as its node was out of memory: Task",
            "OUT_OF_MEMORY",
        ),
        ("WorkerCrashedError", (), "its process died", "CRASHED"),
        ("NodeDiedError", ("node a",), "NodeDiedError: node a", "CRASHED"),
        ("RayTaskError", ("f", "trace\nback", WorkerFailed("exit code 1")), "exit code 1", "EXITED"),
        ("RayTaskError", ("f", "trace", ValueError("no")), "ValueError: no", "EXITED"),
    ],
)
def test_a_function_s_end_is_told_by_its_cause(
    name: str, arguments: tuple[object, ...], reason: str, cause: str
) -> None:
    from ray import exceptions

    from funcpipe.platforms.ray.host import of_error

    status = of_error(getattr(exceptions, name)(*arguments))
    assert status.state is State.FAILED
    assert status.reason.startswith(reason)
    assert "\n" not in status.reason
    assert status.cause is Cause[cause]


def test_a_task_that_was_cancelled_was_stopped() -> None:
    from ray.exceptions import TaskCancelledError

    from funcpipe.platforms.ray.host import of_error

    assert of_error(TaskCancelledError()) == Status(state=State.FAILED, reason="stopped")
