"""What networks and busy services do, between the real clients and servers that the contract suite runs."""

import mmap
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch

from funcpipe.comm.arrival_estimator import ArrivalEstimator
from funcpipe.comm.channel import Channel
from funcpipe.errors import CorruptMessage, KeyExists, KeyMissing, StorageBusy, StorageError
from funcpipe.platforms.aliyun.oss import OssStorage
from funcpipe.platforms.aws.s3 import S3Storage
from funcpipe.platforms.base import Storage
from funcpipe.platforms.wrappers import Retried
from tests.contract.faulty_proxy import (
    Fault,
    FaultyProxy,
    answering,
    breaks_off,
    flips_a_bit,
    loses_the_answer,
    refuses,
    resets,
    stalls,
)
from tests.contract.oss_server import ACCESS_KEY, REGION, SECRET_KEY, OssServer
from tests.retries import retried
from tests.s3_servers import S3Server
from tests.support.run_keys import RUN_KEY
from tests.support.waiting import wait_until

CONTENT = bytes(range(250)) * 4
BUCKET, SILENT_S, SLOW_S = "funcpipe-faults", 0.25, 60.0
PASSING: dict[str, Fault] = {
    "500": refuses(500, "InternalError"),
    "503": refuses(503, "ServiceUnavailable"),
    "slow down": refuses(503, "SlowDown"),
    "429": refuses(429, "TooManyRequests"),
    "reset": resets,
    "lost answer": loses_the_answer,
    "stall": stalls,
}
FINAL = {
    "403": refuses(403, "AccessDenied"),
    "no bucket": refuses(404, "NoSuchBucket"),
    "501": refuses(501, "NotImplemented"),  # as servers that know no conditional put
}
REQUESTS: dict[str, Callable[[Storage], object]] = {
    "put": lambda store: store.put("new", b"1"),
    "get": lambda store: store.get("k"),
    "range": lambda store: store.get("k", start=1, stop=3),
    "delete": lambda store: store.delete("k"),
    "delete many": lambda store: store.delete_many(["k", "l"]),
    "list": lambda store: store.list(""),
    "touch": lambda store: store.touch("k"),
}


@dataclass(frozen=True)
class Spoilt:
    """A storage whose requests pass a proxy, the same without it, and how to open the first with another time-out."""

    proxy: FaultyProxy
    store: Storage
    plain: Storage
    open_within: Callable[[float], Storage]

    @property
    def retried(self) -> Retried:
        return retried(self.store)

    def under(self, fault: Fault) -> Storage:
        """The storage to try `fault` on."""
        return self.open_within(SILENT_S) if fault is stalls else self.store


@pytest.fixture(scope="module", params=["moto_server", "real_s3_server", "oss"])
def spoilt_server(request: pytest.FixtureRequest) -> Iterator[Spoilt]:
    prefix = secrets.token_hex(8)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "oss":
            server: OssServer = request.getfixturevalue("oss_server")
            patch.setenv("OSS_ACCESS_KEY_ID", ACCESS_KEY)
            patch.setenv("OSS_ACCESS_KEY_SECRET", SECRET_KEY)

            def open_at(endpoint: str, timeout_s: float) -> Storage:
                return OssStorage(
                    BUCKET, prefix, endpoint=endpoint, region=REGION, path_style=True, timeout_s=timeout_s
                )

            endpoint = server.endpoint
        else:
            s3_server: S3Server = request.getfixturevalue(request.param)
            s3_server.use(patch)
            endpoint = s3_server.endpoint
            s3_server.make_bucket(BUCKET)

            def open_at(endpoint: str, timeout_s: float) -> Storage:
                return S3Storage(BUCKET, prefix, endpoint=endpoint, timeout_s=timeout_s)

        plain = open_at(endpoint, SLOW_S)
        with answering(FaultyProxy(endpoint)) as proxy:
            yield Spoilt(proxy, open_at(proxy.endpoint, SLOW_S), plain, cache(partial(open_at, proxy.endpoint)))


@pytest.fixture
def spoilt(spoilt_server: Spoilt) -> Spoilt:
    """Holds the object k, of 1,000 bytes; nothing has been asked of it."""
    spoilt_server.plain.delete_many(spoilt_server.plain.list(""))
    spoilt_server.plain.put("k", CONTENT)
    spoilt_server.proxy.faults.clear()
    spoilt_server.proxy.requests = 0
    return spoilt_server


def test_what_nothing_spoils_passes_the_proxy(spoilt: Spoilt) -> None:
    assert spoilt.store.get("k") == spoilt.plain.get("k")
    spoilt.store.put("l", b"12")
    assert spoilt.store.list("") == ("k", "l")
    assert spoilt.proxy.requests == 3


@contextmanager
def spoiling(spoilt: Spoilt, fault: Fault) -> Iterator[None]:
    """Spoil the one request that is made, and wait until the proxy has read it: its client may have given up before."""
    before, spoilt.proxy.faults[:] = spoilt.proxy.requests, [fault]
    yield
    wait_until(lambda: spoilt.proxy.requests > before)


@pytest.mark.parametrize("fault", PASSING)
def test_a_failure_that_passes_is_told_as_such_and_retried(spoilt: Spoilt, fault: str) -> None:
    store = spoilt.under(PASSING[fault])
    for name, work in REQUESTS.items():
        spoilt.plain.put("k", CONTENT)
        expected, before = work(spoilt.plain), spoilt.proxy.requests
        spoilt.plain.put("k", CONTENT)
        with spoiling(spoilt, PASSING[fault]), pytest.raises(StorageBusy) as busy:
            work(store)
        assert spoilt.proxy.requests == before + 1, name
        assert SECRET_KEY not in str(busy.value), name
        spoilt.proxy.faults[:] = [PASSING[fault]] * 2
        assert work(retried(store, deadline_s=600.0)) == expected, name  # a busy server is slower than SILENT_S, too
        assert spoilt.proxy.requests == before + 4 or store is not spoilt.store, name
        spoilt.plain.delete_many(["new", "k"])


@pytest.mark.parametrize("fault", FINAL)
def test_a_refusal_is_final(spoilt: Spoilt, fault: str) -> None:
    for name, work in REQUESTS.items():
        before = spoilt.proxy.requests
        spoilt.proxy.faults[:] = [FINAL[fault]] * 2
        with pytest.raises(StorageError) as refused:
            work(spoilt.retried)
        assert not isinstance(refused.value, StorageBusy | KeyMissing), name
        assert spoilt.proxy.requests == before + 1, name


@pytest.mark.parametrize("start", [0, 100])
def test_a_body_that_breaks_off_is_read_again_whole(spoilt: Spoilt, start: int) -> None:
    spoilt.proxy.faults[:] = [breaks_off]
    with pytest.raises(StorageBusy):
        spoilt.store.get("k", start=start)
    spoilt.proxy.faults[:] = [breaks_off, resets, breaks_off]
    assert spoilt.retried.get("k", start=start) == spoilt.plain.get("k")[start:]


def test_the_gate_is_left_whatever_happens(spoilt: Spoilt) -> None:
    passed = []

    @contextmanager
    def gate() -> Iterator[None]:
        passed.append("in")
        try:
            yield
        finally:
            passed.append("out")

    for fault in (resets, stalls, refuses(503, "SlowDown"), breaks_off):
        with spoiling(spoilt, fault), pytest.raises(StorageBusy):
            spoilt.under(fault).get("k", gate=gate())
    for fault in (resets, stalls, refuses(503, "SlowDown"), loses_the_answer):
        with spoiling(spoilt, fault), pytest.raises(StorageBusy):
            spoilt.under(fault).put("l", bytes(100), gate=gate())
    assert passed == ["in", "out"] * 5  # only the last of the gets had a body


def test_a_conditional_put_whose_answer_was_lost_has_succeeded(spoilt: Spoilt) -> None:
    spoilt.proxy.faults[:] = [loses_the_answer]
    spoilt.retried.put("lease", b"mine", if_absent=True)
    assert spoilt.plain.get("lease") == b"mine"
    spoilt.proxy.faults[:] = [loses_the_answer]
    with pytest.raises(KeyExists):
        spoilt.retried.put("lease", b"yours", if_absent=True)
    assert spoilt.plain.get("lease") == b"mine"


def test_a_service_that_stays_busy_is_an_error(spoilt: Spoilt) -> None:
    spoilt.proxy.faults[:] = [refuses(503, "SlowDown")] * 4
    with pytest.raises(StorageBusy, match="SlowDown"):
        spoilt.retried.get("k")
    assert spoilt.proxy.requests == 4


def test_what_is_too_large_for_one_put_is_refused_before_it_is_sent(spoilt: Spoilt) -> None:
    too_large = r"/large: .* larger than the 5368709120 .* more stages"
    with (
        mmap.mmap(-1, 5 * 2**30 + 1) as memory,  # of which no page is touched
        memoryview(memory) as large,
        pytest.raises(StorageError, match=too_large) as refused,
    ):
        spoilt.retried.put("large", large)
    assert not isinstance(refused.value, StorageBusy)
    assert spoilt.proxy.requests == 0


def test_a_changed_bit_is_noticed_by_the_reader_who_reads_again(spoilt: Spoilt) -> None:
    channel = Channel(spoilt.retried, ArrivalEstimator(deadline_s=20), run_key=RUN_KEY, cancel=threading.Event())
    sent = torch.randn(100)
    channel.put("m", {"x": sent})
    spoilt.proxy.faults[:] = [flips_a_bit] * 2
    assert torch.equal(channel.get("m").tensors["x"], sent)
    spoilt.proxy.faults[:] = [flips_a_bit] * 3
    with pytest.raises(CorruptMessage, match=r"^m: a message of 576 bytes is not as it was written"):
        channel.get("m")
