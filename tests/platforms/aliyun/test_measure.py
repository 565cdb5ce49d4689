"""Functions on Function Compute that measure: the platform, and a model's layers."""

import pytest
from torch.nn import functional as F

from funcpipe.api import FuncPipe
from funcpipe.client.prepare.session import Site
from funcpipe.errors import PlatformRefused
from funcpipe.platforms.aliyun.account import Account
from funcpipe.platforms.aliyun.functions import AliyunPlatform
from funcpipe.platforms.catalog import load_spec, open_storage
from tests.e2e import small
from tests.platforms.aliyun.conftest import OFTEN, SIZE


@pytest.fixture
def site(deployed: Account, url: str) -> Site:
    platform = AliyunPlatform(load_spec("aliyun-fc"), deployed, polling=OFTEN).of_deployed_sizes()
    return Site(platform, open_storage(url), url)


@pytest.mark.long
def test_the_sizes_that_are_deployed_measure_themselves(site: Site) -> None:
    found = site.measure(max_usd=0.01)
    assert [size.name for size in found.sizes] == [SIZE]
    assert found.sources["vcpu"].startswith("measured by functions")
    assert found.cold_start_s > 0
    assert found.latency_s > 0
    assert found.sizes[0].upload_bytes_s != load_spec("aliyun-fc").size(SIZE).upload_bytes_s
    assert site.storage.list("") == ()


def test_a_model_s_layers_are_timed_in_functions(site: Site) -> None:
    pipe = FuncPipe(small.model(), loss_fn=F.cross_entropy, optimizer=small.optimizer)
    found = pipe.profile(small.sample(), micro_batch=2, on=site, max_usd=0.01)
    assert not found.estimated
    assert (found.platform, found.sizes) == ("aliyun-fc", (SIZE,))
    assert all(layer.forward_s[0] > 0 for layer in found.layers)
    assert site.storage.list("") == ()


def test_without_a_function_nothing_can_be_measured(account: Account) -> None:
    platform = AliyunPlatform(load_spec("aliyun-fc"), account)
    with pytest.raises(PlatformRefused, match="there are no functions of funcpipe in cn-test; `funcpipe deploy aliyun"):
        platform.of_deployed_sizes()
