"""A storage whose conditional puts replace what is there, or that reads late, is refused before anything starts."""

import dataclasses

import pytest

from funcpipe.client.follow.launch import launch
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import RunSettings
from funcpipe.errors import PlatformRefused
from funcpipe.platforms.base import OPEN, Gate, Storage
from funcpipe.platforms.wrappers import Routed, StorageWrapper
from funcpipe.runstate.generations import reserve_generation
from funcpipe.runstate.signing import signed
from funcpipe.testing.memory_storage import MemoryStorage
from tests.client.held import HeldPlatform
from tests.client.threads import RUN, smaller_job
from tests.support.hostile_storage import HostileStorage, Hostility
from tests.support.waiting import LONG_S

REFUSED = "replaces objects that a conditional put must keep, so two functions could hold one lease"


class Replacing(StorageWrapper):
    """Heeds no condition of a put."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        super().put(key, data, gate=gate)


@pytest.mark.usefixtures("traced")
def test_a_run_is_refused_before_functions_start_and_leaves_nothing(
    storage: MemoryStorage, functions: HeldPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "invoke", lambda worker: pytest.fail("a function was started"))
    job = dataclasses.replace(smaller_job(stages=2, replicas=1), prices=functions.spec)
    session = session_on(Site(functions, Replacing(storage), "memory://"), reopen=functions.open)
    with pytest.raises(PlatformRefused, match=REFUSED) as refused:
        launch(prepare(job, session, settings=RunSettings(name=RUN)))
    assert refused.value.exit_code == 2
    assert storage.list("") == ()


def test_a_storage_that_reads_late_is_refused(storage: MemoryStorage) -> None:
    """Before, functions took each other for dead there, until a run ended as after os._exit()."""
    late = HostileStorage(storage, Hostility(late_s=LONG_S))
    with pytest.raises(PlatformRefused, match=f"reads of the storage lag behind writes, .*: {RUN}/generations/0000-"):
        reserve_generation(signed(late), RUN)
    assert storage.list("") == ()


def test_a_storage_that_keeps_what_it_must_is_asked_once_more(storage: MemoryStorage) -> None:
    puts = []

    class Noting(StorageWrapper):
        """Notes each put."""

        def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
            puts.append(key)
            super().put(key, data, if_absent=if_absent, gate=gate)

    keys = reserve_generation(signed(Noting(storage)), RUN)
    assert puts == [keys.reservation] * 2
    assert storage.list("") == (keys.reservation,)


@pytest.mark.parametrize("kind", ["messages", "sums"])
def test_storages_of_messages_are_tried_too(kind: str, storage: MemoryStorage) -> None:
    apart: dict[str, Storage] = {"default": storage, kind: MemoryStorage()}
    keys = reserve_generation(signed(Routed(apart)), RUN, apart=[kind])
    assert storage.list("") == (keys.reservation,)
    assert apart[kind].list("") == ()
    storage.delete(keys.reservation)
    apart[kind] = Replacing(apart[kind])
    with pytest.raises(PlatformRefused, match=f"{REFUSED}: it did so with {RUN}/000/g0000-[0-9a-f]+/messages/s0.r0/"):
        reserve_generation(signed(Routed(apart)), RUN, apart=[kind])
    assert apart[kind].list("") == ()
