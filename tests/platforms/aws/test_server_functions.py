"""λDNN's way on AWS: functions around a parameter server in the client's process."""

import pytest

from funcpipe.core import RunSettings
from funcpipe.core.settings import NO_LIMITS
from funcpipe.errors import PlatformRefused
from funcpipe.neighbours.parameter_server.on_functions import ServerFunctions, train_on_functions
from funcpipe.neighbours.parameter_server.training import ServerRun
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import load_market
from tests.cloud_emulation.aws import AwsCloud
from tests.neighbours.parameter_server.conftest import GLOBAL_BATCH, MICRO_BATCH, adam_job
from tests.neighbours.parameter_server.test_function_group import assert_same_parameters
from tests.platforms.aws.conftest import PLATFORM
from tests.support.waiting import wait_until

MARKET = load_market("aws")
RUN = ServerRun(global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH)
SETTINGS = RunSettings(message_deadline_s=60, keep_model=False)


def test_functions_train_around_a_server_through_the_deployment_s_bucket(storage: Storage, cloud: AwsCloud) -> None:
    functions = ServerFunctions(workers=2, memory_mb=600, platform=PLATFORM, server=MARKET.server)
    result = train_on_functions(adam_job(), functions, RUN, SETTINGS, MARKET, limits=NO_LIMITS)
    assert_same_parameters(result.state, adam_job())
    assert result.lost == ()
    assert {samples for step in result.computed_by for samples in step} == {"f0", "f1"}
    usd = {item.name: item.usd for item in result.bill}
    assert usd.keys() == {"f0", "f1", "requests", "server"}
    assert all(value > 0 for value in usd.values())
    wait_until(lambda: not any(environment.busy for environment in cloud.environments))  # all have said their last word


def test_sizes_that_are_not_deployed_are_refused(storage: Storage) -> None:
    functions = ServerFunctions(workers=2, memory_mb=2048, platform=PLATFORM)
    with pytest.raises(PlatformRefused, match="there is no function funcpipe-2048"):
        train_on_functions(adam_job(), functions, RUN, SETTINGS, MARKET, limits=NO_LIMITS)
