"""The states of many functions on Function Compute are listed; those of few, or where listing is refused, asked for."""

import time
from collections import Counter
from dataclasses import replace

import pytest

from funcpipe.core import PlatformSpec
from funcpipe.platforms.aliyun.account import Account
from funcpipe.platforms.aliyun.functions import ASKED_ONE_BY_ONE, AliyunPlatform
from funcpipe.platforms.base import Cause, Handle, State
from funcpipe.platforms.shared.cloud import Polling
from tests.cloud_emulation.aliyun import AliyunCloud
from tests.core.test_run import spec as payload
from tests.platforms.aliyun.conftest import SIZE, sized

EVERY_S = 2.0


class Followed:
    """So many functions that a client has started, and whose states it asks for by a clock that tests set."""

    def __init__(self, count: int, cloud: AliyunCloud, account: Account, spec: PlatformSpec) -> None:
        self.cloud, self.now_s = cloud, 0.0
        self.platform = AliyunPlatform(spec, account, polling=Polling(every_s=EVERY_S, clock=lambda: self.now_s))
        work = replace(payload(), plan=sized(payload().plan))
        cloud.run = self.begin  # type: ignore[method-assign]
        self.handles = [self.platform.invoke(replace(work, replica=number)) for number in range(count)]
        while any(self.task(handle)["status"] == "Enqueued" for handle in self.handles):
            time.sleep(0.01)

    def begin(self, name: str, task: str, payload: bytes) -> None:
        self.cloud.tasks[name, task] |= {"status": "Running", "startedTime": int(time.time() * 1000)}

    def task(self, handle: Handle) -> dict[str, object]:
        name, task = handle.name.split("/")
        return self.cloud.tasks[name, task]

    def states(self) -> tuple[list[State], Counter[str]]:
        """The state of each function after another interval, and the requests for them."""
        self.now_s += EVERY_S
        asked = len(self.cloud.calls)
        states = [self.platform.status(handle).state for handle in self.handles]
        return states, Counter(self.cloud.calls[asked:])


def test_many_are_listed_a_hundred_at_once(cloud: AliyunCloud, deployed: Account, spec: PlatformSpec) -> None:
    run = Followed(130, cloud, deployed, spec)
    assert run.states() == ([State.RUNNING] * 130, {"ListAsyncTasks": 2})
    run.task(run.handles[3])["status"] = "Succeeded"
    message = "Process exited unexpectedly before completing request, maxMemoryUsage: 1024.00 MB"
    run.task(run.handles[129]).update(status="Failed", taskErrorMessage=message)
    states, asked = run.states()
    assert states == [{3: State.DONE, 129: State.FAILED}.get(number, State.RUNNING) for number in range(130)]
    assert asked == {"ListAsyncTasks": 2}
    assert run.platform.status(run.handles[129]).cause is Cause.OUT_OF_MEMORY
    shown = [task.task_id for task in deployed.tasks(f"funcpipe-{SIZE}", since_s=0)]
    assert sorted(shown) == sorted(handle.name.split("/")[1] for handle in run.handles)
    assert list(deployed.tasks(f"funcpipe-{SIZE}", since_s=time.time() + 60)) == []


def test_one_that_waits_for_an_instance_is_asked_for_alone(
    cloud: AliyunCloud, deployed: Account, spec: PlatformSpec
) -> None:
    run = Followed(20, cloud, deployed, spec)
    waiting = run.task(run.handles[7])
    began = waiting.pop("startedTime")
    waiting["status"] = "Enqueued"
    assert run.states() == ([State.RUNNING] * 20, {"ListAsyncTasks": 1, "GetAsyncTask": 1})
    waiting.update(status="Stopped", startedTime=began)
    states, asked = run.states()
    assert (states.index(State.FAILED), asked) == (7, {"ListAsyncTasks": 1})


def test_few_are_asked_for_one_by_one(cloud: AliyunCloud, deployed: Account, spec: PlatformSpec) -> None:
    run = Followed(ASKED_ONE_BY_ONE + 2, cloud, deployed, spec)
    for handle in run.handles[:2]:
        run.task(handle)["status"] = "Succeeded"
    assert run.states()[1] == {"ListAsyncTasks": 1}
    assert run.states() == ([State.DONE] * 2 + [State.RUNNING] * ASKED_ONE_BY_ONE, {"GetAsyncTask": ASKED_ONE_BY_ONE})


def test_who_may_not_list_asks_for_each(
    cloud: AliyunCloud, deployed: Account, spec: PlatformSpec, caplog: pytest.LogCaptureFixture
) -> None:
    run = Followed(20, cloud, deployed, spec)
    cloud.refuse = lambda call: "AccessDenied" if call == "ListAsyncTasks" else None
    with caplog.at_level("INFO", logger="funcpipe"):
        assert run.states() == ([State.RUNNING] * 20, {"ListAsyncTasks": 1, "GetAsyncTask": 20})
    assert "tasks may not be listed: listing the tasks of funcpipe-1vCPU-1024MB: AccessDenied" in caplog.text
    assert run.states() == ([State.RUNNING] * 20, {"GetAsyncTask": 20})


def test_those_that_others_have_started_are_asked_for(
    cloud: AliyunCloud, deployed: Account, spec: PlatformSpec
) -> None:
    run = Followed(20, cloud, deployed, spec)
    run.platform = AliyunPlatform(spec, deployed, polling=Polling(every_s=EVERY_S, clock=lambda: run.now_s))
    assert run.states() == ([State.RUNNING] * 20, {"GetAsyncTask": 20})
