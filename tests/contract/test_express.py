"""Where directory buckets differ from others: which requests are made, and that the emulator refuses the others."""

from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from funcpipe.errors import InvalidValue
from funcpipe.platforms.base import DELETE_BATCH
from funcpipe.platforms.catalog import open_storage
from tests.contract.express_proxy import BUCKET, PAGE, ExpressProxy
from tests.s3_servers import S3Server


@pytest.fixture
def proxy(express_proxy: ExpressProxy, moto_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> ExpressProxy:
    moto_server.use(monkeypatch)
    return express_proxy


def client(proxy: ExpressProxy, **options: Any) -> Any:
    config = Config(retries={"total_max_attempts": 1}, **options)
    return boto3.session.Session().client("s3", endpoint_url=proxy.endpoint, region_name="us-east-1", config=config)


def test_a_list_asks_for_the_folder_and_sorts_what_comes_in_another_order(proxy: ExpressProxy) -> None:
    store = open_storage(f"s3://{BUCKET}/lists?endpoint={proxy.endpoint}")
    names = [f"run/a-{number:03d}" for number in range(PAGE + 20)]
    for name in (*names, "run/b", "run-2/a", "other"):
        store.put(name, b"1")
    pages = client(proxy).get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="lists/run/")
    order = [item["Key"] for page in pages for item in page["Contents"]]
    assert order != sorted(order)
    assert len(order) == len(names) + 1
    proxy.folders_listed.clear()
    assert store.list("run/a") == tuple(names)
    assert store.list("run") == ("run-2/a", *names, "run/b")
    assert set(proxy.folders_listed) == {"lists/run/", "lists/"}
    assert open_storage(f"s3://{BUCKET}?endpoint={proxy.endpoint}").list("lists/o") == ("lists/other",)
    store.delete_many([*store.list(""), *(f"never/{number}" for number in range(DELETE_BATCH))])
    assert store.list("") == ()


def test_one_session_serves_many_requests(proxy: ExpressProxy) -> None:
    before = len(proxy.sessions)
    store = open_storage(f"s3://{BUCKET}/one?endpoint={proxy.endpoint}")
    for number in range(5):
        store.put("k", bytes([number]))
        assert store.get("k") == bytes([number])
    assert len(proxy.sessions) == before + 1


@pytest.mark.parametrize(
    ("operation", "words", "reason"),
    [
        ("list_objects_v2", {"Prefix": "run"}, "a prefix must end in the delimiter"),
        ("list_objects_v2", {"StartAfter": "a"}, "start-after are not supported"),
        ("list_objects_v2", {"Delimiter": "-"}, "another delimiter than /"),
        ("list_objects", {}, "directory buckets are listed by ListObjectsV2"),
        ("put_object", {"Key": "k", "Body": b"", "ACL": "private"}, "x-amz-acl is not supported"),
        ("put_object", {"Key": "k", "Body": b"", "Tagging": "a=b"}, "x-amz-tagging is not supported"),
    ],
)
def test_the_emulator_refuses_what_express_refuses(
    proxy: ExpressProxy, operation: str, words: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ClientError, match=reason):
        getattr(client(proxy), operation)(Bucket=BUCKET, **words)


def test_the_emulator_wants_a_session(proxy: ExpressProxy) -> None:
    with pytest.raises(ClientError, match="a request needs the token of a session"):
        client(proxy, s3={"disable_s3_express_session_auth": True}).get_object(Bucket=BUCKET, Key="k")


def test_the_region_of_a_directory_bucket_must_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host's name holds it; other buckets are found without."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    with pytest.raises(InvalidValue, match="add its region"):
        open_storage(f"s3://{BUCKET}")
    open_storage(f"s3://{BUCKET}?region=us-east-1")
