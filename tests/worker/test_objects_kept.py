"""How many objects lie in the storage while a run trains, and how they are deleted."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from funcpipe.client.follow.launch import launch, launch_detached
from funcpipe.client.follow.results import Progress
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, RunSettings
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.generations import newest_record
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import signed
from funcpipe.testing.faults import ClientKilled
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.support import chaos
from tests.support.census import Census

STEPS = 30
RUN = "objects"
MANY, KEPT = 30, 6
"""Steps of a long run, and how many losses of a worker may have an object of their own in it."""


@pytest.fixture
def census() -> Census:
    return Census()


@pytest.fixture
def platform(census: Census) -> Iterator[ThreadPlatform]:
    platform = ThreadPlatform(load_spec("local"), census)
    yield platform
    platform.stop_all()


def long_run(census: Census, platform: ThreadPlatform, settings: RunSettings) -> PreparedRun:
    faults = FaultTolerance(checkpoint_steps=5, retained_objects=KEPT, lease_s=30.0, keep=True)
    session = session_on(Site(platform, census, "memory://here"), reopen=platform.open)
    return prepare(replace(chaos.job(), epochs=MANY // 3), session, faults=faults, settings=settings)


def test_losses_lie_in_few_objects_and_all_who_come_later_find_them(census: Census, platform: ThreadPlatform) -> None:
    late = long_run(census, platform, RunSettings(name=RUN))  # a model cannot be traced while threads train
    launch_detached(late)
    keys = Keys.of(record := newest_record(signed(census), RUN))
    census.wait(keys.step_summary("s2.r1", 0, MANY // 2), 60.0, threading.Event())
    seen: list[Progress] = []
    told = launch(replace(late, running=record), seen.append).losses
    assert [progress.step for progress in seen] == list(range(1, MANY + 1))

    def interrupt(progress: Progress) -> None:
        if progress.step == MANY // 2:
            raise ClientKilled

    with pytest.raises(ClientKilled):
        launch(long_run(census, platform, RunSettings(name=RUN)), interrupt)
    resumed = launch(long_run(census, platform, RunSettings(resume=RUN)))
    assert resumed.losses == told == tuple(progress.loss for progress in seen)
    replicas = chaos.REPLICAS
    assert census.most["steps"] <= replicas * KEPT
    assert census.most["losses"] <= replicas * 3  # one is written before another one is deleted
    assert census.objects == 0


def test_messages_go_as_soon_as_checkpoints_cover_them() -> None:
    census = Census()
    platform = ThreadPlatform(load_spec("local"), census)
    session = session_on(Site(platform, census, "memory://here"), reopen=platform.open)
    faults = FaultTolerance(checkpoint_steps=4)
    seen: list[int] = []
    try:
        work = replace(chaos.job(), epochs=STEPS // 3)
        prepared = prepare(work, session, faults=faults, settings=RunSettings(name="objects"))
        launch(prepared, lambda progress: seen.append(census.objects))
    finally:
        platform.stop_all()
    assert len(seen) == STEPS
    put = {kind: count for kind, count in census.ever.items() if kind.startswith("messages/")}
    assert min(put.values()) >= 4 * STEPS  # without checkpoints all of them would lie there
    most = max(count for kind, count in census.most.items() if kind.startswith("messages/"))
    assert most <= FaultTolerance().retained_objects
    assert census.deletions < census.ever.total() / 4
    assert census.objects == 0
