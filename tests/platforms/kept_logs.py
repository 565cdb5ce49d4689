"""What every platform must keep of what functions log and print: one test, for each platform's own."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from funcpipe.client.follow.launch import upload
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import Plan
from funcpipe.core.logs import BEGINS, PRINTED, LogLine, merged
from funcpipe.platforms.base import Platform, State, Status, Storage
from funcpipe.runstate.keys import Keys
from tests.e2e import small
from tests.in_process import make_job
from tests.support.run_keys import NONCE


def talking_loss(output: Tensor, target: Tensor) -> Tensor:
    print("the loss is asked for\nin two lines")
    return torch.nn.functional.cross_entropy(output, target)


def failing_loss(output: Tensor, target: Tensor) -> Tensor:
    print("what was said before the end")
    raise MemoryError


def one_step() -> list[tuple[Tensor, Tensor]]:
    return small.data()[:4]


def assert_logs_are_kept(
    platform: Platform, storage: Storage, url: str, *, plan: Plan, wait: Callable[[], None]
) -> None:
    """Two runs of one function, one after the other, are told apart, though they may run in one environment."""
    began_s = time.time()
    assert list(platform.logs("run-1")) == []
    for run, loss, ends in (("run-1", talking_loss, State.DONE), ("run-10", failing_loss, State.FAILED)):
        status = train(platform, storage, url, plan, run, loss)
        assert status.state is ends, status.reason
        wait()
    first, second = logs_of(platform, "run-1"), logs_of(platform, "run-10")
    for run, lines in (("run-1", first), ("run-10", second)):
        assert {(line.run, line.worker, line.attempt) for line in lines} == {(run, "s0.r0", 0)}, lines
        assert [line.text for line in lines].count(f"funcpipe.core.logs: {BEGINS}") == 1
        assert all(a.time_s <= b.time_s for a, b in pairwise(lines))
        assert began_s - 2 <= lines[0].time_s <= lines[-1].time_s <= time.time() + 2
    printed = [line.text for line in first if line.level == PRINTED]
    assert (printed.count("the loss is asked for"), printed.count("in two lines")) == (2, 2)  # of two micro-batches
    assert "what was said before the end" in [line.text for line in second]
    assert "what was said before the end" not in [line.text for line in first]
    assert list(platform.logs("run-unknown")) == []


def train(platform: Platform, storage: Storage, url: str, plan: Plan, run: str, loss: Callable[..., Tensor]) -> Status:
    """One function of `run`, as it ended; its objects are deleted."""
    torch.manual_seed(0)
    job = make_job(small.model(), plan, one_step, loss=loss, optimizer=small.optimizer)
    job = replace(job, prices=platform.spec)
    (spec,) = upload(prepare(job, session_on(Site(platform, storage, url))), Keys(run, 0, NONCE))
    handle = platform.invoke(spec)
    while (status := platform.status(handle)).state is State.RUNNING:
        time.sleep(0.1)
    for key in storage.list(f"{run}/"):
        storage.delete(key)
    return status


def logs_of(platform: Platform, run: str) -> tuple[LogLine, ...]:
    return merged(run, platform.logs(run))
