"""One suite for every storage back-end."""

import functools
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcpipe.platforms.aliyun.oss import OssStorage
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.local.files import FileStorage
from funcpipe.platforms.local.throttle import OwnPace, Throttled
from funcpipe.platforms.wrappers import Counted
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.storage_contract import StorageContract
from tests.contract.express_proxy import BUCKET, ExpressProxy
from tests.contract.oss_server import ACCESS_KEY, REGION, SECRET_KEY, OssServer
from tests.s3_servers import S3Server

BACK_ENDS: dict[str, Callable[[Path], Storage]] = {
    "memory": lambda folder: MemoryStorage(),
    "files": FileStorage,
    "counted files": lambda folder: Counted(FileStorage(folder)),
    "several files": lambda folder: open_storage(
        f"default={(folder / 'd').as_uri()},messages={(folder / 'm').as_uri()},sums={(folder / 's').as_uri()}"
    ),
    "throttled memory": lambda folder: Throttled(MemoryStorage(), latency_s=0.0001, upload=[OwnPace(1e9)]),
}

keys = (
    st.lists(st.text("abcXYZ0189-_.", min_size=1, max_size=8), min_size=1, max_size=3)
    .map("/".join)
    .filter(lambda key: not any(part.strip(".") == "" for part in key.split("/")))
)


SERVERS = {"s3 on moto": "moto_server", "s3 on a real server": "real_s3_server"}


REMOTE = [*SERVERS, "oss", "redis", "s3 express"]


@pytest.fixture(params=[*BACK_ENDS, *REMOTE])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param in BACK_ENDS:
        return BACK_ENDS[request.param](tmp_path / "objects")
    return emptied(request)


@pytest.fixture(params=REMOTE)
def server_store(request: pytest.FixtureRequest) -> Storage:
    return emptied(request)


def emptied(request: pytest.FixtureRequest) -> Storage:
    """The storage on a server that all tests have; it takes longer to open than most tests."""
    store: Storage = request.getfixturevalue("open_server")(request.param)
    store.delete_many(store.list(""))
    return store


@pytest.fixture(scope="module")
def open_server(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Storage]]:
    """Opens a storage on a server, by its name among `REMOTE`."""
    with pytest.MonkeyPatch.context() as patch:
        yield functools.cache(functools.partial(opened, request, patch))


def opened(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch, name: str) -> Storage:
    prefix = secrets.token_hex(8)
    if name == "oss":
        oss_server: OssServer = request.getfixturevalue("oss_server")
        patch.setenv("OSS_ACCESS_KEY_ID", ACCESS_KEY)
        patch.setenv("OSS_ACCESS_KEY_SECRET", SECRET_KEY)
        return OssStorage("funcpipe-contract", prefix, endpoint=oss_server.endpoint, region=REGION, path_style=True)
    if name == "redis":
        return open_storage(f"{request.getfixturevalue('real_redis_server')}?prefix={prefix}")
    if name == "s3 express":
        express: ExpressProxy = request.getfixturevalue("express_proxy")
        request.getfixturevalue("moto_server").use(patch)
        return open_storage(f"s3://{BUCKET}/{prefix}?endpoint={express.endpoint}")
    server: S3Server = request.getfixturevalue(SERVERS[name])
    server.use(patch)
    server.make_bucket("funcpipe-contract")
    return open_storage(f"s3://funcpipe-contract/{prefix}?endpoint={server.endpoint}")


class TestEveryBackEnd(StorageContract):
    """Each of them, by the fixture above."""


_PROPERTY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def got_as_it_was_put(store: Storage, key: str, data: bytes, start: int, length: int) -> None:
    store.put(key, data)
    assert store.get(key) == data
    assert store.get(key, start=start) == data[start:]
    assert store.get(key, start=start, stop=start + length) == data[start : start + length]
    store.delete(key)


@_PROPERTY
@given(key=keys, data=st.binary(max_size=300), start=st.integers(0, 310), length=st.integers(0, 310))
def test_any_key_and_any_bytes_are_got_as_they_were_put(
    tmp_path: Path, key: str, data: bytes, start: int, length: int
) -> None:
    for open_it in BACK_ENDS.values():
        got_as_it_was_put(open_it(tmp_path / "objects"), key, data, start, length)


@settings(_PROPERTY, max_examples=25)  # of which each is five requests to a server
@given(key=keys, data=st.binary(max_size=300), start=st.integers(0, 310), length=st.integers(0, 310))
def test_servers_too(server_store: Storage, key: str, data: bytes, start: int, length: int) -> None:
    got_as_it_was_put(server_store, key, data, start, length)
