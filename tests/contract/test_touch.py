"""An object that is touched is as young as one that is written now, where a service or a system tells its age."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from funcpipe.core import RequestCounts
from funcpipe.errors import KeyMissing, StorageError
from funcpipe.platforms.aliyun import oss
from funcpipe.platforms.aliyun.oss import OssStorage
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.local.files import FileStorage
from funcpipe.platforms.wrappers import Counted
from funcpipe.testing.memory_storage import MemoryStorage
from tests.contract.express_proxy import BUCKET, ExpressProxy
from tests.contract.oss_server import ACCESS_KEY, REGION, SECRET_KEY, OssServer
from tests.contract.test_storage import SERVERS
from tests.s3_servers import S3Server

KB = 1024
TIMEOUT_S = 60.0


def client(endpoint: str) -> Any:
    config = Config(retries={"total_max_attempts": 1})
    return boto3.session.Session().client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)


@pytest.fixture(params=[*SERVERS, "express"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The endpoint and the name of a bucket on a server that speaks S3."""
    if request.param == "express":
        request.getfixturevalue("moto_server").use(monkeypatch)
        proxy: ExpressProxy = request.getfixturevalue("express_proxy")
        return proxy.endpoint, BUCKET
    server: S3Server = request.getfixturevalue(SERVERS[request.param])
    server.use(monkeypatch)
    server.make_bucket("funcpipe-touch")
    return server.endpoint, "funcpipe-touch"


def test_s3_counts_the_age_of_a_touched_object_anew(bucket: tuple[str, str]) -> None:
    """Its clock ticks once a second."""
    endpoint, name = bucket
    store, own = open_storage(f"s3://{name}/touched?endpoint={endpoint}"), client(endpoint)
    store.put("run/a b+ä", b"123")
    place = {"Bucket": name, "Key": "touched/run/a b+ä"}
    first, until_s = own.head_object(**place)["LastModified"], time.monotonic() + TIMEOUT_S
    while own.head_object(**place)["LastModified"] == first:
        assert time.monotonic() < until_s
        time.sleep(0.2)
        store.touch("run/a b+ä")
    assert own.head_object(**place)["LastModified"] > first
    assert store.get("run/a b+ä") == b"123"
    store.delete("run/a b+ä")


def test_the_emulator_of_s3_refuses_a_copy_that_changes_nothing(
    moto_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    moto_server.use(monkeypatch)
    moto_server.make_bucket("funcpipe-touch")
    own, place = client(moto_server.endpoint), {"Bucket": "funcpipe-touch", "Key": "k"}
    own.put_object(**place, Body=b"1")
    with pytest.raises(ClientError, match="copy an object to itself without changing"):
        own.copy_object(**place, CopySource=place)


def test_a_touched_file_has_the_time_of_now(tmp_path: Path) -> None:
    store = FileStorage(tmp_path)
    store.put("run/a", b"1")
    os.utime(tmp_path / "run/a", (1.0, 1.0))
    before_s = time.time()
    store.touch("run/a")
    assert (tmp_path / "run/a").stat().st_mtime > before_s - 10  # file systems' clocks may be coarse
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(StorageError, match="leads through a link"):
        store.touch("link/a")


@pytest.fixture
def store(oss_server: OssServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[OssStorage]:
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", SECRET_KEY)
    yield OssStorage("touched", "runs", endpoint=oss_server.endpoint, region=REGION, path_style=True)
    oss_server.one_copy_bytes = 2**30


def test_oss_counts_the_age_of_a_touched_object_anew(store: OssStorage, oss_server: OssServer) -> None:
    for key in ("run/a b+ä", "run/later"):
        store.put(key, key.encode())
    store.touch("run/a b+ä")
    ages = {key.removeprefix("touched/runs/"): number for key, number in oss_server.written.items()}
    assert ages["run/a b+ä"] > ages["run/later"]
    assert store.get("run/a b+ä") == "run/a b+ä".encode()


@pytest.mark.parametrize("size", [300 * KB, 300 * KB + 1, 450 * KB])
def test_what_is_too_large_for_one_copy_is_copied_in_parts(
    store: OssStorage, oss_server: OssServer, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(oss, "ONE_COPY_BYTES", 150 * KB)
    oss_server.one_copy_bytes = 150 * KB
    body = bytes(range(251)) * (size // 251 + 1)
    store.put("run/large", body[:size])
    before = oss_server.written["touched/runs/run/large"]
    store.touch("run/large")
    assert store.get("run/large") == body[:size]
    assert oss_server.written["touched/runs/run/large"] > before
    assert oss_server.uploads == {}


def test_a_copy_in_parts_that_fails_leaves_no_parts(
    store: OssStorage, oss_server: OssServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its parts would be paid for."""
    monkeypatch.setattr(oss, "ONE_COPY_BYTES", 200 * KB)
    oss_server.one_copy_bytes = 150 * KB  # less than each part has
    store.put("run/large", bytes(500 * KB))
    with pytest.raises(StorageError, match="too large"):
        store.touch("run/large")
    assert oss_server.uploads == {}
    assert store.get("run/large") == bytes(500 * KB)


def test_a_touch_is_billed_as_a_put_also_of_nothing() -> None:
    store = Counted(MemoryStorage())
    store.put("k", b"123")
    store.touch("k")
    with pytest.raises(KeyMissing):
        store.touch("none")
    assert store.traffic == RequestCounts(puts=3, sent_bytes=3)
