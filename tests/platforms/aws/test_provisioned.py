"""Functions that are kept ready: asked for, used, and released, whatever becomes of the client."""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from funcpipe.client.control.stopping import clean
from funcpipe.client.follow.launch import launch, launch_detached
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import Estimate, RunSettings, StageEstimate
from funcpipe.core.provisioned import Provisioned
from funcpipe.errors import PlatformError, PlatformRefused
from funcpipe.platforms.aws.functions import AwsPlatform
from funcpipe.platforms.aws.provisioned import ALIAS
from funcpipe.platforms.base import Cause, State, Storage
from funcpipe.platforms.catalog import open_platform, open_storage
from tests.cloud_emulation.aws import AwsCloud
from tests.e2e import small
from tests.in_process import make_job, run_workers
from tests.platforms.aws.conftest import PLATFORM, STORAGE
from tests.platforms.aws.test_functions import ended, record_of_failure, spec, two_steps

Loss = Callable[[Any, Any], torch.Tensor]
KEY = "funcpipe-1024", ALIAS
PLAN = small.plan(2, 1)
WANTED = Provisioned(share=0.5, spare={"1024MB": 1}, released_after_s=600.0)
NO_SPARE = replace(WANTED, spare={})


def prepared(platform: AwsPlatform, storage: Storage, *, loss: Loss = torch.nn.functional.cross_entropy) -> PreparedRun:
    """A run of two functions, which are to be kept ready."""
    torch.manual_seed(0)
    job = make_job(small.model(), PLAN, two_steps, loss=loss, optimizer=small.optimizer, deadline_s=120)
    found = prepare(job, session_on(Site(platform, storage, STORAGE)))
    return replace(found, provisioned=WANTED)


@pytest.fixture
def kept(platform: AwsPlatform, cloud: AwsCloud) -> Iterator[AwsPlatform]:
    """The platform, whose functions of 1024 MB are kept ready for run-1."""
    yield platform.provision(PLAN, "run-1", WANTED)
    platform.release(PLAN, "run-1")


def test_the_choice_is_made_when_a_run_is_prepared(platform: AwsPlatform, storage: Storage) -> None:
    def chosen(step_s: float) -> PreparedRun:
        seconds: dict[str, Any] = dict.fromkeys(
            [item.name for item in fields(StageEstimate) if item.name.endswith("_s")], 0.1
        )
        stage = StageEstimate(base_bytes=1, state_bytes=8, activation_bytes=1, waste_bytes=0, **seconds)
        costs: dict[str, Any] = dict.fromkeys(("cost_usd", "compute_usd", "request_usd"), 0.0)
        counts: dict[str, Any] = dict.fromkeys(("peak_memory_bytes", "puts", "gets"), 0)
        stages = (stage,) * len(run.job.plan.stages)
        estimate = Estimate(iteration_s=step_s, bottleneck="compute", stages=stages, **costs, **counts)
        job = replace(run.job, plan=replace(run.job.plan, estimate=estimate), epochs=1)
        settings = RunSettings(provisioned=True)
        return prepare(job, session_on(Site(platform, storage, STORAGE)), settings=settings)

    run = prepared(platform, storage)
    short, long = chosen(1.0), chosen(100.0)
    assert short.provisioned is None
    assert short.estimate is not None
    assert "they are started on demand" in short.estimate.line()
    assert long.provisioned is not None
    assert long.provisioned.share < 1
    assert long.estimate is not None
    assert f"functions are kept ready, at {long.provisioned.share:.2f} of their price" in long.estimate.line()


def test_functions_are_kept_ready_and_released(platform: AwsPlatform, kept: AwsPlatform, cloud: AwsCloud) -> None:
    assert cloud.provisioned.configs == {KEY: 3}
    assert kept.url == f"{PLATFORM}&provisioned=0.5"
    assert platform.url == PLATFORM
    ((at_s, most),) = cloud.provisioned.actions.values()
    assert most == 0
    assert 500 < at_s - time.time() <= 600
    platform.release(PLAN, "run-2")
    assert cloud.provisioned.configs == {KEY: 3}
    platform.release(PLAN, "run-1")
    platform.release(PLAN, "run-1")
    assert (cloud.provisioned.configs, cloud.provisioned.targets, cloud.provisioned.actions) == ({}, {}, {})


def test_what_a_dead_client_has_left_is_released_when_it_was_planned(kept: AwsPlatform, cloud: AwsCloud) -> None:
    cloud.provisioned.pass_to(time.time() + 300)
    assert cloud.provisioned.configs == {KEY: 3}
    cloud.provisioned.pass_to(time.time() + 600)
    assert cloud.provisioned.configs == {}


def test_a_run_trains_on_functions_that_are_kept_ready(
    platform: AwsPlatform, storage: Storage, cloud: AwsCloud
) -> None:
    run = prepared(platform, storage)
    result = launch(run)
    reference: dict[str, torch.Tensor] = {}
    for worker in run_workers(run.job, open_storage(STORAGE + "-reference")).values():
        reference |= worker.computation.state().state_dict()
    assert all(torch.equal(result.tensors[name], reference[name]) for name in reference)
    used = [environment.function for environment in cloud.environments]
    assert {(function.alias, function.kept_ready) for function in used} == {(ALIAS, True)}
    assert "$LATEST" not in {function.version for function in used}
    assert cloud.provisioned.spilled == 0
    assert (cloud.provisioned.configs, cloud.provisioned.targets) == ({}, {})
    usd_s = platform.spec.size("1024MB").price_usd_s
    assert result.bill.compute_usd == pytest.approx(0.5 * usd_s * result.bill.function_seconds, rel=1e-6)


def test_a_run_whose_functions_cannot_be_kept_ready_is_started_on_demand(
    platform: AwsPlatform, storage: Storage, cloud: AwsCloud, caplog: pytest.LogCaptureFixture
) -> None:
    cloud.provisioned.fails = "no capacity is left"
    result = launch(prepared(platform, storage))
    assert "are started on demand, as they are not kept ready: funcpipe-1024 cannot be kept ready: no ca" in caplog.text
    assert {environment.function.alias for environment in cloud.environments} == {None}
    assert cloud.provisioned.configs == {}
    usd_s = platform.spec.size("1024MB").price_usd_s
    assert result.bill.compute_usd == pytest.approx(usd_s * result.bill.function_seconds, rel=1e-6)


def test_what_others_keep_ready_stays(platform: AwsPlatform, kept: AwsPlatform, cloud: AwsCloud) -> None:
    with pytest.raises(PlatformRefused, match=r"funcpipe-1024 has provisioned concurrency already, for another run"):
        platform.provision(PLAN, "run-2", NO_SPARE)
    assert cloud.provisioned.configs == {KEY: 3}
    again = platform.provision(PLAN, "run-1", replace(NO_SPARE, share=0.25))
    assert cloud.provisioned.configs == {KEY: 2}
    assert again.url == f"{PLATFORM}&provisioned=0.25"


def test_more_than_the_account_has_is_refused_and_nothing_is_kept(platform: AwsPlatform, cloud: AwsCloud) -> None:
    cloud.limits.concurrency = 101
    with pytest.raises(PlatformError, match=r"keeping 2 of funcpipe-1024 ready: .* below its minimum value of \[100\]"):
        platform.provision(PLAN, "run-1", NO_SPARE)
    assert (cloud.provisioned.configs, cloud.provisioned.targets) == ({}, {})


def test_an_event_that_fails_there_is_not_tried_again_and_is_recorded(kept: AwsPlatform, cloud: AwsCloud) -> None:
    handle = kept.invoke(spec(open_storage(STORAGE), small.failing_loss))
    status = ended(kept, handle)
    assert (status.state, status.cause) == (State.FAILED, Cause.CRASHED)
    assert record_of_failure(cloud)["requestContext"]["requestId"] == handle.name.split("/")[1]
    assert len(cloud.environments) == 1


def test_a_detached_run_keeps_its_functions_until_it_is_removed(
    platform: AwsPlatform, storage: Storage, cloud: AwsCloud
) -> None:
    run = prepared(platform, storage, loss=small.sleeping_loss)
    launch_detached(run)
    assert cloud.provisioned.configs == {KEY: 3}
    clean(storage, run.name, open_platform)
    assert (cloud.provisioned.configs, cloud.provisioned.targets) == ({}, {})
