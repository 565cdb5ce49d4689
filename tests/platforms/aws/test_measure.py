"""Functions on AWS that measure: the platform, and a model's layers."""

from pathlib import Path

import pytest

from funcpipe.cli import main
from funcpipe.core import ModelProfile, PlatformSpec, read
from funcpipe.errors import PlatformRefused
from funcpipe.platforms.aws.account import Account
from funcpipe.platforms.aws.functions import AwsPlatform
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import load_spec
from tests.cloud_emulation.aws import AwsCloud
from tests.cloud_emulation.processes import in_clean_folder
from tests.platforms.aws.conftest import PLATFORM


@pytest.mark.long
def test_the_sizes_that_are_deployed_measure_themselves(storage: Storage, cloud: AwsCloud, tmp_path: Path) -> None:
    cloud.start = in_clean_folder  # as memory and start are measured
    assert main(["platforms", "measure", PLATFORM, "--max-usd", "0.01", "-o", str(tmp_path / "found.json")]) == 0
    found = read(PlatformSpec, tmp_path / "found.json")
    assert [size.name for size in found.sizes] == ["1024MB"]
    assert found.sources["vcpu"].startswith("measured by functions")
    assert found.sources["cold_start_s"].startswith("measured by functions")
    assert found.cold_start_s > 0
    assert found.latency_s > 0
    assert found.sizes[0].upload_bytes_s != load_spec("aws-lambda").sizes[0].upload_bytes_s
    assert 100 << 20 < (found.base_memory_bytes or 0) < 600 << 20


def test_a_model_s_layers_are_timed_in_functions(storage: Storage, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    model = ["tests.e2e.small:model", "--sample", "tests.e2e.small:sample", "--micro-batch", "2"]
    assert main(["profile", *model, "--on", PLATFORM, "--max-usd", "0.01", "-o", str(path)]) == 0
    found = read(ModelProfile, path)
    assert not found.estimated
    assert (found.platform, found.sizes) == ("aws-lambda", ("1024MB",))
    assert all(layer.forward_s[0] > 0 for layer in found.layers)


def test_without_a_function_nothing_can_be_measured(deployed: Account) -> None:
    other = AwsPlatform(load_spec("aws-lambda"), deployed, deployment="other")
    with pytest.raises(PlatformRefused, match="there are no functions of other in us-east-1; `funcpipe deploy aws"):
        other.of_deployed_sizes()
