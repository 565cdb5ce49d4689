import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given

from funcpipe.core import Resource
from funcpipe.errors import Cancelled, TaskFailed
from funcpipe.scheduler.execute import TaskResult, execute, lane_threads
from funcpipe.scheduler.graph import Graph, StepShape, build_graph
from funcpipe.scheduler.tasks import Kind, Task
from tests.examples import at_most
from tests.scheduler.shapes import shapes

FORWARD = Task(Kind.FORWARD, 0, 0, micro_batch=0)
BACKWARD = Task(Kind.BACKWARD, 0, 0, micro_batch=0)
PUT = Task(Kind.PUT_ACTIVATION, 0, 0, micro_batch=0, part=0)
GET = Task(Kind.GET_GRADIENT, 0, 0, micro_batch=0, peer=1)

ONE_EACH = {Resource.UPLOAD: 1, Resource.DOWNLOAD: 1}

PATIENCE_S = 120.0
"""How long to wait for what other threads do at once: it ends only where they never do it."""


def run(graph: Graph, do: Callable[[Task], TaskResult], cancel: threading.Event | None = None) -> list[str]:
    with lane_threads() as threads:
        events = execute(graph, do, step=0, cancel=cancel or threading.Event(), threads=threads, open_requests=ONE_EACH)
    return [event.task for event in events]


def lanes_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("funcpipe-")]


@at_most(30)
@given(shapes())
def test_every_task_of_a_worker_runs_once_after_what_it_needs(shape: StepShape) -> None:
    graph = build_graph(shape).of_worker(shape.stages - 1, 0)
    done: list[Task] = []
    lock = threading.Lock()

    def do(task: Task) -> TaskResult:
        with lock:
            assert all(graph.tasks[need] in done for need in graph.needs[graph.tasks.index(task)])
            done.append(task)
        return TaskResult(payload_bytes=7)

    with lane_threads() as threads:
        events = execute(
            graph, do, step=3, cancel=threading.Event(), threads=threads, open_requests=ONE_EACH, attempt=2
        )
    assert sorted(event.task for event in events) == sorted(map(str, graph.tasks))
    assert {(event.step, event.attempt, event.payload_bytes) for event in events} == {(3, 2, 7)}


def test_lanes_overlap() -> None:
    """Each of the three tasks ends only when all three have begun."""
    together = threading.Barrier(3, timeout=PATIENCE_S)

    def do(task: Task) -> TaskResult:
        together.wait()
        return TaskResult()

    assert len(run(Graph((FORWARD, PUT, GET), ((), (), ())), do)) == 3


@pytest.mark.parametrize("failing", [FORWARD, PUT, GET], ids=str)
def test_the_first_failure_is_raised_with_its_task_and_stops_the_other_lanes(failing: Task) -> None:
    """The others wait, as on a message that never comes, until they are told to give up."""
    cancel = threading.Event()

    def do(task: Task) -> TaskResult:
        if task == failing:
            raise ValueError("no")
        assert cancel.wait(PATIENCE_S)
        raise Cancelled("stopped waiting")

    with pytest.raises(TaskFailed, match=f"{failing}: ValueError: no") as error:
        run(Graph((FORWARD, PUT, GET, BACKWARD), ((), (), (), (0, 1, 2))), do, cancel)
    assert isinstance(error.value.__cause__, ValueError)
    assert error.value.task == str(failing)
    assert lanes_alive() == []


def test_nothing_runs_after_a_failure() -> None:
    ran: list[Task] = []

    def do(task: Task) -> TaskResult:
        ran.append(task)
        raise ValueError("no")

    with pytest.raises(TaskFailed):
        run(Graph((FORWARD, BACKWARD, PUT), ((), (0,), (0,))), do)
    assert ran == [FORWARD]


def test_an_interrupt_of_the_compute_lane_stops_the_others() -> None:
    cancel = threading.Event()

    def do(task: Task) -> TaskResult:
        if task.kind.resource is Resource.COMPUTE:
            raise KeyboardInterrupt
        assert cancel.wait(PATIENCE_S)
        raise Cancelled("stopped waiting")

    with pytest.raises(KeyboardInterrupt):
        run(Graph((FORWARD, GET), ((), ())), do, cancel)
    assert lanes_alive() == []


def test_a_stop_from_outside_is_not_taken_for_the_end() -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled, match="stopped from outside"):
        run(Graph((FORWARD,), ((),)), lambda task: TaskResult(), cancel)


class Stopped(threading.Event):
    """Set from outside when the upload lane has looked, and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Event()

    def is_set(self) -> bool:
        if threading.current_thread().name.startswith("funcpipe-lane"):  # the only one beside the compute lane
            self.looked.set()
        return super().is_set()


class StopsBefore(tuple[tuple[int, ...], ...]):
    """What tasks need; somebody sets `cancel` from outside just when the compute lane looks what its second needs."""

    cancel: Stopped

    def __getitem__(self, position: Any) -> Any:
        if position == 1:
            self.cancel.set()
        return super().__getitem__(position)


def test_a_lane_that_gives_up_tells_the_others() -> None:
    """Else the upload lane would wait for ever for a task that the compute lane does not begin any more."""
    needs, cancel = StopsBefore(((), (), (1,))), Stopped()
    needs.cancel = cancel
    ended = threading.Event()

    def do(task: Task) -> TaskResult:
        assert cancel.looked.wait(PATIENCE_S)
        return TaskResult()

    def train() -> None:
        with contextlib.suppress(Cancelled):
            run(Graph((FORWARD, BACKWARD, PUT), needs), do, cancel)
        ended.set()

    threading.Thread(target=train, daemon=True).start()
    assert ended.wait(PATIENCE_S)


@pytest.mark.parametrize("failing", [FORWARD, PUT])
def test_threads_are_kept_from_step_to_step_also_after_one_that_failed(failing: Task) -> None:
    """Twice as many as lanes, if at each new step those of the step before are not quite idle yet."""

    def fail(task: Task) -> TaskResult:
        if task is failing:
            raise ValueError("no")
        return TaskResult()

    graph = Graph((FORWARD, PUT), ((), ()))
    with lane_threads() as threads:
        with pytest.raises(TaskFailed):
            execute(graph, fail, step=0, cancel=threading.Event(), threads=threads, open_requests=ONE_EACH)
        for step in range(1, 10):
            events = execute(
                graph,
                lambda task: TaskResult(),
                step=step,
                cancel=threading.Event(),
                threads=threads,
                open_requests=ONE_EACH,
            )
            assert len(events) == 2
        assert 1 <= len(lanes_alive()) <= 2
    assert lanes_alive() == []


def test_executions_that_share_threads_do_not_wait_for_each_other() -> None:
    """No lane of the one ends before all of the other have begun."""
    together = threading.Barrier(6, timeout=PATIENCE_S)
    graph = Graph((FORWARD, PUT, GET), ((), (), ()))

    def do(task: Task) -> TaskResult:
        together.wait()
        return TaskResult()

    with lane_threads() as threads, ThreadPoolExecutor(2) as both:
        runs = [
            both.submit(execute, graph, do, step=0, cancel=threading.Event(), threads=threads, open_requests=ONE_EACH)
            for _ in range(2)
        ]
        assert [len(run.result()) for run in runs] == [3, 3]


def test_an_interrupt_in_a_lane_beside_is_raised_and_hangs_no_lane() -> None:
    def do(task: Task) -> TaskResult:
        if task is GET:
            raise KeyboardInterrupt
        return TaskResult()

    with pytest.raises(KeyboardInterrupt):
        run(Graph((FORWARD, GET, BACKWARD), ((), (), (0, 1))), do)
    assert lanes_alive() == []


@pytest.mark.parametrize("task", [FORWARD, GET])
def test_sys_exit_in_a_lane_is_a_failure_like_any_other_and_hangs_no_lane(task: Task) -> None:
    def do(other: Task) -> TaskResult:
        if other is task:
            raise SystemExit(3)
        return TaskResult()

    with pytest.raises(TaskFailed, match=f"{task}: SystemExit: 3"):
        run(Graph((FORWARD, GET, BACKWARD), ((), (), (0, 1))), do)
    assert lanes_alive() == []
