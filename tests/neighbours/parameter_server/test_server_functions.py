"""Whole runs around a parameter server whose workers are local functions: processes of this machine."""

import logging
import os
import signal
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import RunLimits, RunSettings
from funcpipe.core.settings import NO_LIMITS
from funcpipe.errors import InvalidValue, PlanError, RunHalted
from funcpipe.neighbours.parameter_server import on_functions
from funcpipe.neighbours.parameter_server.function_group import FunctionsUsed, FunctionWorkerGroup
from funcpipe.neighbours.parameter_server.loops import Watch, nothing_changes
from funcpipe.neighbours.parameter_server.on_functions import ServerFunctions, _Bill, train_on_functions
from funcpipe.neighbours.parameter_server.training import ServerResult, ServerRun
from funcpipe.neighbours.parameter_server.worker_group import Updates, WorkerGroup
from funcpipe.platforms.catalog import load_market, load_spec, open_storage
from funcpipe.platforms.wrappers import Counted
from funcpipe.runstate.generations import reserve_generation
from funcpipe.runstate.signing import signed
from funcpipe.testing.memory_storage import MemoryStorage
from tests.neighbours.parameter_server.conftest import GLOBAL_BATCH, MICRO_BATCH, adam_job, adam_recipe, make_job
from tests.neighbours.parameter_server.functions import wait_for_all
from tests.neighbours.parameter_server.test_function_group import assert_same_parameters
from tests.recording import Recording
from tests.redis_servers import redis_server

MARKET = load_market("aws")
TWO = ServerFunctions(workers=2, memory_mb=900, server=MARKET.server)


def train(
    job: Job,
    functions: ServerFunctions = TWO,
    *,
    updates: Updates = Updates.BSP,
    limits: RunLimits = NO_LIMITS,
    save_every: int = 0,
    watch: Watch = nothing_changes,
    **settings: str | bool | None,
) -> ServerResult:
    run = ServerRun(
        global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, updates=updates, save_every=save_every, watch=watch
    )
    told = RunSettings(message_deadline_s=60, **settings)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "functions with more vCPUs")
        return train_on_functions(job, functions, run, told, MARKET, limits=limits)


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    time.sleep(0.15)
    return nn.functional.cross_entropy(output, target)


def test_local_functions_train_as_one_process_does_and_are_billed() -> None:
    began_s = time.monotonic()
    result = train(adam_job())
    took_s = time.monotonic() - began_s
    assert_same_parameters(result.state, adam_job())
    assert result.lost == ()
    usd = {item.name: item.usd for item in result.bill}
    size = load_spec("local").sizes[0]
    assert usd.keys() == {"f0", "f1", "server"}, "requests to a folder cost nothing"
    assert result.seconds * size.price_usd_s < usd["f0"] < took_s * size.price_usd_s
    assert usd["server"] >= result.seconds * MARKET.machine(MARKET.server).on_demand_usd_h / 3600


@dataclass(frozen=True)
class Unused:
    """A group that has done nothing yet."""

    lifetime_s: float = 0.0

    def used(self) -> dict[str, FunctionsUsed]:
        return {}


def test_a_server_outside_the_functions_region_pays_for_what_it_downloads() -> None:
    """One on a machine of the market is in the region, where nothing is asked."""
    prices = load_spec("aws-lambda")
    memory = MemoryStorage()
    session = session_on(Site(Recording(), memory, "s3://bucket/prefix"))
    memory.put("a", bytes(3 << 20))
    Counted(memory, session.meter).get("a")
    sums = {}
    for functions in (TWO, replace(TWO, server="")):
        group = cast("FunctionWorkerGroup", Unused())
        bill = _Bill(functions, prices.sizes[0], prices, MARKET, session, group).items()
        sums[functions.server] = {item.name: item.usd for item in bill}
    assert sums[MARKET.server].keys() == {"requests", "server"}
    assert sums[""].keys() == {"requests", "traffic"}
    assert sums[""]["traffic"] == pytest.approx(3 / 1024 * 0.09)


def test_asynchronous_local_functions_exchange_through_redis(tmp_path: Path) -> None:
    job = adam_job()
    with redis_server(tmp_path) as port:
        url = f"redis://127.0.0.1:{port}/0"
        left = reserve_generation(storage := signed(open_storage(url)), "asp")
        storage.put(left.bundle(0), b"of a client that has died")
        result = train(job, updates=Updates.ASP, storage=url, name="asp", keep_model=False)
        assert open_storage(url).list("") == ()
    assert sum(push.samples for push in result.pushes) == job.epochs * job.samples
    assert {push.worker for push in result.pushes} == {"f0", "f1"}


def test_functions_with_limits_hand_over_before_their_life_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty-four steps of 0.3 s and more, of functions that are told they live for 6 s, after a cold start of 0.2 s.

    They are killed at 60 s, as a busy machine may need more than 6 s to start one. There an order may come too late for
    one that leaves: it is given to another, and nothing else is lost.
    """
    job, payload = make_job(replace(adam_recipe(), loss=slow_loss), epochs=8), on_functions._payload
    monkeypatch.setattr(on_functions, "_payload", lambda *given: replace(payload(*given), lifetime_s=6.0))
    like = replace(load_spec("aws-lambda"), cold_start_s=0.2, latency_s=0.002, lifetime_s=60.0)
    with caplog.at_level(logging.INFO, "funcpipe.neighbours.parameter_server"):
        result = train(job, replace(TWO, like=like))
    started = [record.getMessage() for record in caplog.records if "started function" in record.getMessage()]
    assert len(started) >= 4
    assert [line for line in result.lost if "its function left, as its lifetime was over" not in line] == []
    assert_same_parameters(result.state, job)
    assert {item.name for item in result.bill} == {"f0", "f1", "requests", "server"}


def test_a_killed_process_is_followed_by_another_and_changes_no_bit() -> None:
    killed: list[int] = []

    def kill(group: WorkerGroup, done: float) -> None:
        assert isinstance(group, FunctionWorkerGroup)
        wait_for_all(group, done)
        if done >= 0.3 and not killed:
            killed.append(int(group._pool.connections[0].function.started.handle.name.rsplit(" ", 1)[1]))
            os.kill(killed[0], signal.SIGKILL)

    job = adam_job()
    result = train(job, watch=kill)
    assert result.lost == ("f0: killed by SIGKILL",)
    assert result.computed_by[-1].keys() == {"f0", "f1"}
    assert_same_parameters(result.state, job)


def test_a_run_ends_before_it_exceeds_its_limit_and_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions are billed for a second for each update."""
    used = FunctionWorkerGroup.used

    def by_updates(group: FunctionWorkerGroup) -> dict[str, FunctionsUsed]:
        return {name: replace(own, seconds=float(group.progress().version)) for name, own in used(group).items()}

    monkeypatch.setattr(FunctionWorkerGroup, "used", by_updates)
    job, url = adam_job(), (tmp_path / "objects").as_uri()
    functions = replace(TWO, server="")
    limit = RunLimits(max_usd=(10 + 2.5) * 2 * load_spec("local").sizes[0].price_usd_s)
    with pytest.raises(RunHalted, match=r"run r was stopped after 3 updates: it would cost more than \$0.0004"):
        train(job, functions, limits=limit, storage=url, name="r")
    result = train(job, functions, storage=url, name="r", save_every=10)
    assert len(result.losses) == job.steps - 3
    assert_same_parameters(result.state, job)
    kept = open_storage(url).list("")
    assert kept
    assert all(key.startswith("r/server/checkpoints/") for key in kept)


def test_functions_that_do_not_fit_are_refused() -> None:
    job = adam_job()
    with pytest.raises(PlanError, match="has 4 micro-batches of 2, and of 5 functions some would have nothing to do"):
        train(job, replace(TWO, workers=5))
    with pytest.raises(PlanError, match="functions of 9000 MB are asked for, and the largest of local have 8192"):
        train(job, replace(TWO, memory_mb=9000))
    with pytest.raises(InvalidValue, match="workers must be"):
        replace(TWO, workers=0)
    with pytest.raises(InvalidValue, match="run must be at most 63 small letters"):
        train(job, name="No Name")


def test_a_mistake_in_a_function_is_told_with_its_traceback() -> None:
    def wrong(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError(f"no target {target.shape}")

    job = make_job(replace(adam_recipe(), loss=wrong))
    with pytest.raises(Exception, match=r"worker f. failed: ValueError: no target") as caught:
        train(job)
    assert "Traceback" in str(caught.value)
    assert torch.get_num_threads() == 1
