"""The log service when it is slow, refuses, or is not there."""

import pytest

from funcpipe.errors import PlatformError, PlatformRefused
from funcpipe.platforms.aliyun.account import Account
from funcpipe.platforms.aliyun.endings import read_logs
from funcpipe.platforms.aliyun.resources import LogService
from tests.cloud_emulation.aliyun import AliyunCloud

INSTANCE = {"functionName": "f", "logConfig": {"project": "logs-1", "logstore": "functions"}}


@pytest.fixture
def service(account: Account) -> LogService:
    return LogService(account, "logs-1", sleep=lambda s: None)


def found(service: LogService) -> list[str]:
    return [entry["message"] for entry in service.search("functions", '"run-1"', since_s=0, until_s=100)]


def test_a_search_goes_through_all_pages_in_order(service: LogService, cloud: AliyunCloud) -> None:
    assert found(service) == []
    assert service.ensure("functions", days=3)
    assert not service.ensure("functions", days=3)
    cloud.logs.keep(INSTANCE, "c-1", [(number / 10, f"run-1 {number}") for number in range(250)])
    cloud.logs.unfinished = 3
    assert found(service) == [f"run-1 {number}\n" for number in range(250)]
    service.remove()
    service.remove()
    assert cloud.logs.projects == {}


def test_what_does_not_work_is_told(service: LogService, cloud: AliyunCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    service.ensure("functions", days=3)
    cloud.logs.unfinished = 1000
    with pytest.raises(PlatformError, match="a search is not complete after 30 requests"):
        found(service)
    cloud.refuse = lambda call: "Unauthorized" if call == "GetLogs" else None
    with pytest.raises(PlatformRefused, match=r"the log project logs-1: Unauthorized: .*ask for the permission"):
        found(service)
    cloud.refuse = lambda call: "ProjectNotExist" if call == "CreateLogStore" else None
    with pytest.raises(PlatformError, match="the log project logs-1 is not there 30 s after it was made"):
        service.ensure("others", days=3)
    monkeypatch.setenv("OSS_ACCESS_KEY_SECRET", "wrong")
    with pytest.raises(PlatformRefused, match=r"SignatureNotMatch: .*the credentials are not valid"):
        service.remove()


def test_a_service_that_cannot_be_reached_is_told(cloud: AliyunCloud) -> None:
    nowhere = Account(region="cn-test", endpoint="http://127.0.0.1:9")
    with pytest.raises(PlatformError, match="is the region right, and this machine on line"):
        LogService(nowhere, "logs-1").remove()


def test_functions_that_keep_no_logs_are_told(account: Account) -> None:
    with pytest.raises(PlatformRefused, match="functions of funcpipe keep no logs, or there are none in cn-test"):
        list(read_logs(account, "funcpipe", "run-1"))
