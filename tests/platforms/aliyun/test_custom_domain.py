"""Objects of accounts that OSS refuses its public endpoint: by a custom domain, and what is told without one."""

import pytest

from funcpipe.core import PlatformSpec
from funcpipe.errors import InvalidValue, PlatformRefused, StorageError
from funcpipe.platforms.aliyun.deployment import Deployer
from funcpipe.platforms.aliyun.template import container_package, shape_of
from funcpipe.platforms.base import StorageUrls
from funcpipe.platforms.catalog import open_deployment, open_storage
from tests.cloud_emulation.aliyun import AliyunCloud
from tests.contract.oss_server import OssServer

BUCKET = "funcpipe-1000-cn-test"
DOMAIN = "objects.example.com"
BY_DOMAIN = f"oss://{BUCKET}/runs?domain=http://{DOMAIN}&region=cn-test"
ADVICE = r"PublicEndpointForbidden \(400\): .*use CNAME.*only by a custom domain of the bucket.*ap-southeast-1"


@pytest.fixture
def new_account(oss: OssServer) -> OssServer:
    """OSS, which refuses its public endpoint."""
    oss.new_account = True
    return oss


@pytest.fixture
def domain(new_account: OssServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A custom domain of the bucket, and a proxy that finds it."""
    new_account.domains[DOMAIN] = BUCKET
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", new_account.endpoint)


@pytest.mark.usefixtures("domain")
def test_a_storage_opens_by_a_custom_domain(new_account: OssServer) -> None:
    storage = open_storage(BY_DOMAIN)
    for number in range(5):
        storage.put(f"run-1/{number}", b"123")
    assert set(new_account.objects) == {f"{BUCKET}/runs/run-1/{number}" for number in range(5)}
    assert storage.get("run-1/0", start=1, stop=2) == b"2"
    assert storage.list("run-1/") == tuple(f"run-1/{number}" for number in range(5))
    storage.delete("run-1/0")
    storage.delete_many([f"run-1/{number}" for number in range(5)])
    assert storage.list("") == ()


def test_without_a_custom_domain_the_error_says_what_to_do(new_account: OssServer, url: str) -> None:
    storage = open_storage(url)
    for request in (
        lambda: storage.put("k", b"1"),
        lambda: storage.get("k"),
        lambda: storage.delete("k"),
        lambda: storage.delete_many(["k"]),
        lambda: storage.list(""),
    ):
        with pytest.raises(StorageError, match=ADVICE):
            request()


def test_a_deployment_is_made_without_a_domain_and_removed_once_its_bucket_is_empty(
    deployer: Deployer, cloud: AliyunCloud, new_account: OssServer, spec: PlatformSpec
) -> None:
    shape = shape_of(spec, name="funcpipe", sizes=("1vCPU-1024MB",), repository="registry.test/you/funcpipe")
    deployer.deploy(shape, container_package())
    new_account.objects[f"{BUCKET}/runs/run-1/left"] = b"1"
    with pytest.raises(PlatformRefused, match=r"PublicEndpointForbidden .*empty the bucket in the console"):
        deployer.destroy("funcpipe")
    new_account.objects.clear()
    deployer.destroy("funcpipe")
    assert (cloud.functions, new_account.buckets, cloud.logs.projects) == ({}, {}, {})


def test_clients_of_a_platform_with_a_domain_use_it_and_functions_do_not(cloud: AliyunCloud, oss: OssServer) -> None:
    url = f"aliyun-fc://funcpipe?region=cn-test&endpoint={cloud.endpoint}&domain=https://{DOMAIN}"
    platform = open_deployment(url)
    assert platform.storage_urls == StorageUrls(
        client=f"oss://{BUCKET}/runs?domain=https://{DOMAIN}&region=cn-test",
        functions=f"oss://{BUCKET}/runs?endpoint=https://oss-cn-test-internal.aliyuncs.com&region=cn-test",
    )
    assert platform.url == url
    assert platform.storage_urls == open_deployment(platform.url).storage_urls


@pytest.mark.parametrize("options", ["domain=http://a", "region=cn-test", "endpoint=http://a&domain=http://b&region=c"])
def test_a_storage_has_a_region_and_either_endpoint_or_domain(options: str) -> None:
    with pytest.raises(InvalidValue, match="storage must read oss://BUCKET/PREFIX"):
        open_storage(f"oss://bucket/runs?{options}")
