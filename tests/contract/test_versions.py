"""Buckets that keep versions: S3's are warned of, and OSS heeds no condition of a put there."""

from typing import Any

import boto3
import pytest

from funcpipe.core import logs
from funcpipe.errors import PlatformRefused
from funcpipe.platforms.aliyun.oss import OssStorage
from funcpipe.platforms.catalog import open_storage
from funcpipe.runstate.generations import reserve_generation
from funcpipe.runstate.signing import signed
from tests.contract.oss_server import ACCESS_KEY, REGION, SECRET_KEY, OssServer
from tests.s3_servers import S3Server


@pytest.fixture
def buckets(moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of S3."""
    moto_server.use(monkeypatch)
    return boto3.session.Session().client("s3", endpoint_url=moto_server.endpoint, region_name="us-east-1")


@pytest.mark.parametrize(("status", "warned"), [(None, 0), ("Enabled", 1), ("Suspended", 0)])
def test_a_client_is_warned_once_of_a_bucket_that_keeps_versions(
    buckets: Any, moto_server: S3Server, caplog: pytest.LogCaptureFixture, status: str | None, warned: int
) -> None:
    name = f"funcpipe-versions-{status}".lower()
    buckets.create_bucket(Bucket=name)
    if status is not None:
        buckets.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": status})
    store = open_storage(f"s3://{name}?endpoint={moto_server.endpoint}")
    for number in range(3):
        store.put(f"run-1/{number}", b"1")
    told = [record for record in caplog.records if "keeps versions: what runs delete" in record.message]
    assert [record.levelname for record in told] == ["WARNING"] * warned
    assert reserve_generation(signed(store), "run-1").run == "run-1"  # S3 heeds conditions all the same


def test_functions_warn_nobody(
    buckets: Any, moto_server: S3Server, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets.create_bucket(Bucket="funcpipe-versions-too")
    buckets.put_bucket_versioning(Bucket="funcpipe-versions-too", VersioningConfiguration={"Status": "Enabled"})
    monkeypatch.setenv(logs.FILE, str(tmp_path / "lines"))
    with logs.in_function(run="run-1", worker="s0.r0", attempt=0):
        open_storage(f"s3://funcpipe-versions-too?endpoint={moto_server.endpoint}").put("k", b"1")
    said = (tmp_path / "lines").read_text()
    assert " INFO run=run-1 worker=s0.r0 attempt=0 funcpipe.platforms.aws.s3: the bucket funcpipe-versions-too" in said
    assert not logs.is_function()


@pytest.mark.parametrize("versioned", [False, True])
def test_a_bucket_of_oss_with_versions_is_refused(
    oss_server: OssServer, monkeypatch: pytest.MonkeyPatch, versioned: bool
) -> None:
    monkeypatch.setenv("OSS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", SECRET_KEY)
    monkeypatch.setattr(oss_server, "versioned", {"versions"} if versioned else set())
    store = OssStorage("versions", "runs", endpoint=oss_server.endpoint, region=REGION, path_style=True)
    if not versioned:
        keys = reserve_generation(signed(store), "run-1")
        assert store.list("") == (keys.reservation,)
        store.delete(keys.reservation)
        return
    with pytest.raises(PlatformRefused, match="on OSS, a bucket that has never had versioning"):
        reserve_generation(signed(store), "run-1")
    assert store.list("") == ()
