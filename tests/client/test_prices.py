"""A run costs what the region asks where its functions run: estimate, limit and bill."""

import logging
from dataclasses import replace

import pytest

from funcpipe import FuncPipe
from funcpipe.client.follow.launch import launch, upload
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.job_estimate import check_limits
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare
from funcpipe.client.prepare.session import Site, prices_at, session_on
from funcpipe.core import Plan, PlatformSpec, RunLimits, RunSettings, WorkerSpec
from funcpipe.errors import PlanError
from funcpipe.platforms.catalog import load_spec
from funcpipe.runstate.keys import Keys
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.client.test_job_estimate import ITERATION, STAGE
from tests.client.threads import RUN, STEADY, job
from tests.recording import Recording
from tests.support.run_keys import NONCE

pytestmark = pytest.mark.usefixtures("traced")

HONG_KONG, TEL_AVIV = "aws-lambda://funcpipe?region=ap-east-1", "aws-lambda://funcpipe?region=il-central-1"
DEARER = 2.292e-5 / 1.66667e-5


def planned() -> Plan:
    stages = tuple(replace(stage, size="1024MB", memory_mb=1024) for stage in job().plan.stages)
    iteration = replace(ITERATION, stages=(STAGE,) * len(stages))
    return replace(job().plan, platform="aws-lambda", stages=stages, estimate=iteration)


def lambda_job() -> Job:
    return replace(job(), plan=planned(), prices=load_spec("aws-lambda"))


def prepared(url: str, *, prices: PlatformSpec | None = None, limits: RunLimits | None = None) -> PreparedRun:
    site = Site(Recording(spec=load_spec("aws-lambda"), url=url), MemoryStorage(), "memory://")
    made = lambda_job()
    made = made if prices is None else replace(made, prices=prices)
    return prepare(made, session_on(site), limits=limits or RunLimits(), settings=RunSettings(prices=prices))


def payloads(run: PreparedRun) -> list[WorkerSpec]:
    return list(upload(run, Keys(RUN, 0, NONCE)))


def test_functions_count_what_their_region_asks() -> None:
    here, there = prepared("recording://here"), prepared(HONG_KONG)
    for before, after in zip(payloads(here), payloads(there), strict=True):
        assert after.account.usd_s == pytest.approx(before.account.usd_s * DEARER)
        assert after.account.run_usd_s == pytest.approx(before.account.run_usd_s * DEARER)
        assert after.account.invocation_usd == pytest.approx(2.8e-7)
    assert here.estimate is not None
    assert there.estimate is not None
    assert there.estimate.functions_usd == pytest.approx(here.estimate.functions_usd * DEARER)
    assert here.estimate.line().endswith(")")


def test_a_limit_that_the_region_s_prices_exceed_is_refused_before_anything_starts() -> None:
    here = prepared("recording://here").estimate
    assert here is not None
    limits = RunLimits(max_usd=here.cost_usd * 1.1)
    check_limits(here, limits)
    with pytest.raises(PlanError, match="the job is expected to cost more than the limit"):
        prepared(HONG_KONG, limits=limits)


def test_what_is_not_known_of_the_region_is_said_with_what_the_job_costs() -> None:
    found = prepared(TEL_AVIV)
    note = (
        "not all prices of il-central-1 are known; those of us-east-1 are used for functions, invocations and traffic"
    )
    assert found.job.prices.price_put_usd == 5.5e-6
    assert found.estimate is not None
    assert found.estimate.line().endswith(f"; {note}")


def test_prices_that_are_given_stay_as_they_are_and_say_whose_they_are() -> None:
    own = replace(load_spec("aws-lambda"), price_put_usd=1e-6)
    found = prepared(HONG_KONG, prices=own).job.prices
    assert (found.sizes, found.price_put_usd) == (own.sizes, 1e-6)
    assert found.prices_note() == "prices of ap-east-1 are not known; those of us-east-1 are used"
    of_there = replace(own, region="ap-east-1")
    assert prepared(HONG_KONG, prices=of_there).job.prices == of_there


def test_a_plan_for_more_bandwidth_than_the_region_has_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    spec, url = load_spec("aliyun-fc"), "aliyun-fc://funcpipe?region=us-west-1"
    with caplog.at_level(logging.WARNING):
        assert prices_at(url, spec, given=False).shared_bytes_s == 625e6
    assert caplog.messages == [
        "the plan was made for ap-southeast-1, where all functions together move 2.50 GB/s; in us-west-1 they move 0.62"
        ": training may be slower than predicted; plan again with --platform 'aliyun-fc?region=us-west-1'"
    ]
    caplog.clear()
    prices_at(url, load_spec(url), given=False)
    prices_at("aliyun-fc://funcpipe?region=cn-beijing", spec, given=False)
    assert caplog.messages == []


def test_the_bill_has_the_region_s_prices_and_says_which_are_not_its_own() -> None:
    """A run of threads, on a platform whose URL is a deployment's."""
    made, storage = lambda_job(), MemoryStorage()
    platform = ThreadPlatform(load_spec("local"), storage)
    platform.url = TEL_AVIV
    prepared = prepare(made, session_on(Site(platform, storage, "memory://"), reopen=platform.open), faults=STEADY)
    bill = launch(prepared).bill
    platform.stop_all()
    assert bill.prices_note.startswith("not all prices of il-central-1 are known; those of us-east-1 are used for")
    assert bill.compute_usd == pytest.approx(bill.function_seconds * 1.66667e-5)
    (rest,) = [item for item in bill.stores if item.kind == "default"]
    asked = rest.requests
    assert rest.request_usd == pytest.approx(5.5e-6 * (asked.puts + asked.lists) + 4.4e-7 * asked.gets)


def test_a_deployment_s_url_gives_an_estimate_in_its_region() -> None:
    pipe = FuncPipe(job().graph.module, loss_fn=job().recipe.loss, optimizer=job().recipe.optimizer)
    here = pipe.estimate(24, epochs=4, plan=planned())
    there = pipe.estimate(24, epochs=4, plan=planned(), platform=HONG_KONG)
    planned_there = pipe.estimate(24, epochs=4, plan=replace(planned(), region="ap-east-1"))
    assert there.functions_usd == pytest.approx(here.functions_usd * DEARER)
    assert there == planned_there
