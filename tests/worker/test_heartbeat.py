"""The thread that sends a worker's heartbeats."""

import threading
from dataclasses import replace

from funcpipe.core import Heartbeat
from funcpipe.platforms.base import OPEN, Gate
from funcpipe.runstate.documents import decode_document
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease
from funcpipe.runstate.liveness import newest_heartbeat
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.worker.heartbeat import HaltOrders, HeartbeatThread
from tests.run_documents import BEAT
from tests.support.waiting import LONG_S

KEYS = Keys("run-1")
LAST = 2


class SlowFirst(MemoryStorage):
    """A storage in which the first heartbeat arrives after the last one, unless that waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.last = threading.Event(), threading.Event()

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        is_beat = key.startswith(KEYS.heartbeats(BEAT.worker))
        number = decode_document(Heartbeat, bytes(data), source=key).step if is_beat else None
        if number == 1:
            self.begun.set()
            self.last.wait(0.3)
        super().put(key, data, if_absent=if_absent, gate=gate)
        if number == LAST:
            self.last.set()


def test_the_last_heartbeat_comes_after_all_others() -> None:
    storage = SlowFirst()
    lease = Lease(storage, KEYS, BEAT.worker, 0, fresh_s=10.0)
    lease.take()
    heartbeat = HeartbeatThread(
        storage,
        KEYS,
        lease,
        HaltOrders(storage, KEYS, lease, notice_steps=lambda: 1),
        describe=lambda number: replace(BEAT, attempt=0, step=number),
        exceeded=lambda: None,
        grace_s=lambda: 0.0,
        after_beat=lambda: None,
        heartbeat_s=60.0,
        cancel=threading.Event(),
    )
    with heartbeat:
        assert storage.begun.wait(LONG_S)
        heartbeat.beat_last()
    found = newest_heartbeat(storage, KEYS, BEAT.worker)
    assert found is not None
    assert found.step == LAST
