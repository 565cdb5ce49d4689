"""Invocations that Lambda does not simply carry out: of functions that have slept, and late in a chain of functions."""

import time

import pytest
import torch

from funcpipe.client.follow.launch import launch
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.errors import DeadlineExceeded, FuncPipeError
from funcpipe.platforms.aws.account import Account
from funcpipe.platforms.aws.functions import AwsPlatform
from funcpipe.platforms.base import Handle, State, Status, Storage
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.platforms.shared.cloud import Polling
from tests.cloud_emulation import lineage
from tests.cloud_emulation.aws import AwsCloud
from tests.e2e import small
from tests.in_process import make_job
from tests.platforms.aws.conftest import STORAGE
from tests.platforms.aws.test_functions import ended, spec, two_steps


def test_functions_that_have_slept_for_weeks_are_awake_when_a_run_begins(
    platform: AwsPlatform, storage: Storage, cloud: AwsCloud
) -> None:
    cloud.states.fall_asleep("funcpipe-1024")
    job = make_job(
        small.model(), small.plan(1, 1), two_steps, loss=torch.nn.functional.cross_entropy, optimizer=small.optimizer
    )
    assert launch(prepare(job, session_on(Site(platform, storage, STORAGE)))).tensors
    invocations = [call for call in cloud.calls if call.endswith("/invocations")]
    assert len(invocations) == 2  # the first only wakes
    cloud.states.fall_asleep("funcpipe-1024")
    assert platform.of_deployed_sizes().spec.sizes
    assert cloud.states.states == {}


def hurried(deployed: Account) -> AwsPlatform:
    """A platform by whose clock each look at it takes 10 s."""
    now_s = iter(range(0, 100_000, 10))
    polling = Polling(every_s=0, clock=lambda: float(next(now_s)), sleep=lambda s: None)
    return AwsPlatform(load_spec("aws-lambda"), deployed, polling=polling)


def test_a_function_that_fell_asleep_after_the_check_is_invoked_again(
    platform: AwsPlatform, deployed: Account, cloud: AwsCloud
) -> None:
    cloud.states.fall_asleep("funcpipe-1024")
    assert ended(platform, platform.invoke(spec(open_storage(STORAGE)))).state is State.DONE
    cloud.states.requests = 10**6
    cloud.states.fall_asleep("funcpipe-1024")
    with pytest.raises(DeadlineExceeded, match=r"funcpipe-1024 has not become Active within 300 s"):
        hurried(deployed).invoke(spec(open_storage(STORAGE)))


@pytest.mark.parametrize(
    ("requests", "restorable", "message"),
    [
        (
            10**6,
            True,
            r"funcpipe-1024 has not become Active within 300 s: it is Pending: The function is being restored",
        ),
        (
            2,
            False,
            r"funcpipe-1024 is Inactive: The image is gone\. \(ImageDeleted\).*funcpipe destroy aws --name funcpipe",
        ),
    ],
    ids=["never", "lost"],
)
def test_a_function_that_cannot_be_woken_is_told(
    deployed: Account, cloud: AwsCloud, requests: int, restorable: bool, message: str
) -> None:
    cloud.states.requests, cloud.states.restorable = requests, restorable
    cloud.states.fall_asleep("funcpipe-1024")
    with pytest.raises(FuncPipeError, match=message):
        hurried(deployed).check(small.plan(1, 1))


def test_an_event_that_only_wakes_does_nothing(platform: AwsPlatform, cloud: AwsCloud) -> None:
    request = cloud.invoke("funcpipe-1024", b"{}")
    handle = Handle(worker="none", name=f"funcpipe-1024/{request}/{int(time.time())}")
    assert ended(platform, handle).state is State.DONE


def late_in_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a function that Lambda has invoked as the last of a chain."""
    trace = lineage.longer(None)
    for _ in range(lineage.LONGEST - 1):
        trace = lineage.longer(trace)
    monkeypatch.setenv("AWS_LAMBDA_FUNCTION_NAME", "funcpipe-1024")
    monkeypatch.setenv("_X_AMZN_TRACE_ID", trace)


def test_a_chain_of_functions_may_be_longer_than_lambda_allows_by_itself(
    platform: AwsPlatform, cloud: AwsCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_in_a_chain(monkeypatch)
    assert ended(platform, platform.invoke(spec(open_storage(STORAGE)))) == Status(state=State.DONE)
    assert cloud.chains == [17]


def test_a_function_that_does_not_allow_loops_is_dropped_late_in_a_chain(
    platform: AwsPlatform, cloud: AwsCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_in_a_chain(monkeypatch)
    monkeypatch.setattr("tests.cloud_emulation.aws.allows_loops", lambda template, name: False)
    status = ended(platform, platform.invoke(spec(open_storage(STORAGE))))
    assert (status.state, status.reason) == (State.FAILED, "failed: the function was invoked in a loop")
    assert not cloud.environments
