"""What every platform must do, as a suite for pytest: its functions run funcpipe's own entry.

A test module of a platform gives the fixtures `platform`, `storage` and `storage_url`, by which functions open that
storage, and inherits the suite. Functions are those that measure: they need no model.
"""

import time

from funcpipe.core import ProbeSpec
from funcpipe.core.logs import BEGINS, merged
from funcpipe.platforms.base import Cause, Handle, Platform, State, Status, Storage

WITHIN_S = 120.0
"""A function that takes longer to end has failed the suite."""

_POLL_S = 0.05


class PlatformContract:
    """Inherit this; the methods take the fixtures `platform`, `storage` and `storage_url`."""

    def test_a_function_that_ends_well_is_done(self, platform: Platform, storage: Storage, storage_url: str) -> None:
        """It has no time to measure anything."""
        handle = platform.invoke(_probe(platform, storage_url, run="run-a", time_s=1e-9))
        assert handle.worker == "probe0"
        assert ended(platform, handle).state is State.DONE
        platform.stop(handle)
        assert platform.status(handle).state is State.DONE

    def test_a_function_that_fails_is_seen_and_so_is_what_it_logged(
        self, platform: Platform, storage: Storage, storage_url: str
    ) -> None:
        """What it is to measure is not in the storage."""
        handle = platform.invoke(_probe(platform, storage_url, run="run-b", time_s=60.0))
        status = ended(platform, handle)
        assert status.state is State.FAILED
        assert status.cause in (Cause.CRASHED, Cause.EXITED)  # how a process ended is not told everywhere
        assert status.reason
        lines = merged("run-b", platform.logs("run-b"))
        assert BEGINS in lines[0].text
        assert {(line.run, line.worker) for line in lines} == {("run-b", "probe0")}
        assert not list(platform.logs("run-unknown"))
        for key in storage.list(""):
            storage.delete(key)

    def test_stop_ends_a_function_and_may_be_repeated(
        self, platform: Platform, storage: Storage, storage_url: str
    ) -> None:
        """It returns when nothing runs any more."""
        handle = platform.invoke(_probe(platform, storage_url, run="run-c", time_s=60.0, layers=()))
        platform.stop(handle)
        platform.stop(handle)
        assert platform.status(handle).state is not State.RUNNING
        for key in storage.list(""):
            storage.delete(key)


def ended(platform: Platform, handle: Handle) -> Status:
    """How a function has ended; waits for it."""
    until_s = time.monotonic() + WITHIN_S
    while (status := platform.status(handle)).state is State.RUNNING:
        assert time.monotonic() < until_s, f"{handle.name} has not ended within {WITHIN_S:g} s"
        time.sleep(_POLL_S)
    return status


def _probe(
    platform: Platform, storage_url: str, *, run: str, time_s: float, layers: tuple[int, ...] = (0,)
) -> ProbeSpec:
    size = platform.spec.sizes[0]
    return ProbeSpec(
        run=run,
        number=0,
        size=size.name,
        memory_mb=size.memory_mb,
        storage=storage_url,
        platform=platform.url,
        time_s=time_s,
        layers=layers,
        code={str(number): "0" for number in layers},
    )
