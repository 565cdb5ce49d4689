"""What is refused is refused before an object is written, a function starts, or the user's module is changed."""

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from funcpipe import FuncPipe, RunSettings
from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import Progress
from funcpipe.client.prepare.job import Learner, SampleOrder
from funcpipe.client.prepare.prepared_run import PreparedRun, prepare, prepare_training
from funcpipe.client.prepare.session import Session, Site, open_session, session_on
from funcpipe.core import Estimate, FaultTolerance, Halt, Plan, StageEstimate
from funcpipe.core.settings import DEFAULT_FAULTS, NO_LIMITS, settings_with
from funcpipe.errors import (
    DataError,
    FuncPipeError,
    InputError,
    InvalidValue,
    ModelError,
    PlanError,
    PlatformError,
    PlatformRefused,
    RunHalted,
    RunUnknown,
)
from funcpipe.model.graph import isolation
from funcpipe.platforms.base import Platform, StorageUrls
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.runstate.generations import newest_record, reserve_generation, write_record
from funcpipe.runstate.halt import halt_run
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import signed
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from tests.client.halting import Halting
from tests.e2e import small
from tests.recording import Recording
from tests.run_documents import RECORD
from tests.support import chaos

QUICK = FaultTolerance(heartbeat_s=0.1, lease_s=60.0, checkpoint_steps=1, keep=True)


def never() -> Platform:
    raise AssertionError("no platform is opened for a run that is refused")


def session(storage: Any, platform: ThreadPlatform | None = None, functions: Callable[[], Platform] = never) -> Session:
    reopen = (lambda url: platform.open(url)) if platform is not None else (lambda url: never())
    return Session(storage=signed(storage), storage_url="memory://", functions=functions, reopen=reopen)


@pytest.fixture(scope="module")
def halted() -> tuple[MemoryStorage, ThreadPlatform]:
    """A run that was ended after some steps, and the platform that it ran on."""
    job = chaos.job()
    storage = Halting(job.plan.workers)
    platform = ThreadPlatform(load_spec("local"), storage)

    def order(progress: Progress) -> None:
        if progress.step == 3:
            halt_run(signed(storage), Keys.of(newest_record(signed(storage), "run-1")), Halt(reason="enough", step=5))
            storage.order()

    site = session_on(Site(platform, storage, "memory://"), reopen=platform.open)
    with pytest.raises(RunHalted):
        launch(prepare(job, site, faults=QUICK, settings=RunSettings(name="run-1")), order)
    return storage, platform


LANES = (
    *("forward_s", "forward_upload_s", "forward_download_s", "backward_s", "backward_upload_s"),
    *("backward_download_s", "sync_s"),
)


def resumed(halted: tuple[MemoryStorage, ThreadPlatform], job: Any) -> PreparedRun:
    storage, platform = halted
    return prepare(job, session(storage, platform), settings=RunSettings(resume="run-1"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 99}, "run run-1 has seed 0, not 99; resume it with what it was started with"),
        ({"samples": 16}, "run run-1 has samples 24, not 16"),
        ({"shuffle": False}, "run run-1 has shuffle True, not False"),
        (
            {"recipe": dataclasses.replace(chaos.job().recipe, clip_grad_norm=1.0)},
            "run run-1 has clip_grad_norm None, not 1.0",
        ),
    ],
)
def test_a_run_is_resumed_only_as_it_began(
    halted: tuple[MemoryStorage, ThreadPlatform], change: dict[str, Any], message: str
) -> None:
    before = halted[0].list("")
    with pytest.raises(PlanError, match=message):
        resumed(halted, dataclasses.replace(chaos.job(), **change))
    assert halted[0].list("") == before


def test_a_run_of_another_model_is_not_resumed(halted: tuple[MemoryStorage, ThreadPlatform]) -> None:
    job = chaos.job()
    other = dataclasses.replace(job, graph=_renamed(job))
    with pytest.raises(PlanError, match="the checkpoints are of another model"):
        resumed(halted, other)


def _renamed(job: Any) -> Any:
    """The same layers, with a parameter of another shape."""
    graph = job.graph
    for name, parameter in list(graph.module.named_parameters()):
        owner, _, last = name.rpartition(".")
        setattr(graph.module.get_submodule(owner), last, nn.Parameter(torch.zeros(*parameter.shape, 1)))
        break
    return graph


def test_a_name_that_is_taken_is_refused_and_an_unknown_run_is_not_resumed(
    halted: tuple[MemoryStorage, ThreadPlatform],
) -> None:
    with pytest.raises(InvalidValue, match="run is the name of a run in this storage; resume it, or clean it first"):
        prepare(chaos.job(), session(halted[0]), settings=RunSettings(name="run-1"))
    with pytest.raises(RunUnknown, match="there is no run 'run-2'"):
        prepare(chaos.job(), session(halted[0]), settings=RunSettings(resume="run-2"))


def test_a_name_that_is_taken_is_refused_before_the_data_is_read_and_the_model_run(
    halted: tuple[MemoryStorage, ThreadPlatform],
) -> None:
    def data() -> Any:
        raise AssertionError("the data is read")

    learner = Learner(model=nn.Linear(2, 2), recipe=chaos.job().recipe)
    with pytest.raises(InvalidValue, match="run is the name of a run in this storage"):
        prepare_training(
            learner,
            data,
            chaos.job().plan,
            SampleOrder(),
            session(halted[0]),
            faults=DEFAULT_FAULTS,
            limits=NO_LIMITS,
            settings=RunSettings(name="run-1"),
        )


def test_a_job_that_cannot_run_writes_nothing_and_opens_no_platform() -> None:
    storage, job = MemoryStorage(), chaos.job()
    lock = threading.Lock()

    def unsendable(output: Tensor, target: Tensor) -> Tensor:
        with lock:
            return F.cross_entropy(output, target)

    sharded = dataclasses.replace(job.plan, shard_optimizer=True)
    for wrong, error in (
        (dataclasses.replace(job, recipe=dataclasses.replace(job.recipe, loss=unsendable)), ModelError),
        (dataclasses.replace(job, samples=3), DataError),
        (dataclasses.replace(job, plan=sharded, recipe=dataclasses.replace(job.recipe, clip_grad_norm=1.0)), PlanError),
    ):
        with pytest.raises(error):
            prepare(wrong, session(storage))
    assert storage.list("") == ()


def test_sizes_that_the_imposed_platform_does_not_have_are_refused() -> None:
    where = dataclasses.replace(session(MemoryStorage()), like=load_spec("aws-lambda"))
    with pytest.raises(PlanError, match="the platform aws-lambda has no size"):
        prepare(dataclasses.replace(chaos.job(), plan=_of_size(chaos.job().plan, "7MB")), where)


def _of_size(plan: Plan, size: str) -> Plan:
    return dataclasses.replace(plan, stages=tuple(dataclasses.replace(stage, size=size) for stage in plan.stages))


class Refusing(ThreadPlatform):
    def check(self, plan: Plan, *, run_s: float | None = None) -> None:
        raise PlatformRefused("too many functions at once")


def test_what_the_platform_refuses_leaves_nothing_in_storage() -> None:
    storage = MemoryStorage()
    platform = Refusing(load_spec("local"), storage)
    with pytest.raises(PlatformRefused, match="too many functions at once"):
        prepare(chaos.job(), session(storage, functions=lambda: platform))
    assert storage.list("") == ()


class Asked(ThreadPlatform):
    """A platform that notes what a run was expected to take."""

    run_s: float | None = -1.0

    def check(self, plan: Plan, *, run_s: float | None = None) -> None:
        self.run_s = run_s


def test_the_platform_is_told_what_the_steps_that_are_left_will_take(
    halted: tuple[MemoryStorage, ThreadPlatform],
) -> None:
    storage, before = halted
    asked, job = Asked(load_spec("local"), storage), chaos.job()
    prepare(job, session(MemoryStorage(), functions=lambda: asked))
    assert asked.run_s is None
    seconds: dict[str, Any] = dict.fromkeys(LANES, 0.1)
    stage = StageEstimate(base_bytes=1, state_bytes=8, activation_bytes=1, waste_bytes=0, **seconds)
    estimate = Estimate(
        iteration_s=2.0,
        cost_usd=0.0,
        compute_usd=0.0,
        request_usd=0.0,
        peak_memory_bytes=0,
        puts=0,
        gets=0,
        bottleneck="compute",
        stages=(stage,) * len(job.plan.stages),
        overhead_s=0.5,
    )
    job = dataclasses.replace(job, plan=dataclasses.replace(job.plan, estimate=estimate))
    prepare(job, session(MemoryStorage(), functions=lambda: asked))
    assert asked.run_s == job.steps * 2.5
    prepare(job, session(storage, before, lambda: asked), settings=RunSettings(resume="run-1"))
    assert asked.run_s == (job.steps - 5) * 2.5


def test_a_resumed_run_knows_what_it_has_learned_cost_and_taken(halted: tuple[MemoryStorage, ThreadPlatform]) -> None:
    storage, platform = halted
    prepared = prepare(chaos.job(), session(storage, platform, lambda: platform), settings=RunSettings(resume="run-1"))
    assert prepared.resumed is not None
    assert prepared.resumed.step == 5
    assert prepared.account.spent_usd > 0
    assert prepared.account.elapsed_s > 0
    assert all(prepared.state_of(stage) is not None for stage in range(3))


def test_a_run_whose_platform_is_gone_is_resumed(halted: tuple[MemoryStorage, ThreadPlatform]) -> None:
    storage, platform = halted

    def gone(url: str) -> Platform:
        raise PlatformError(f"there is no platform {url} any more")

    where = dataclasses.replace(session(storage, functions=lambda: platform), reopen=gone)
    prepared = prepare(chaos.job(), where, settings=RunSettings(resume="run-1"))
    assert prepared.running is None
    assert prepared.resumed is not None


def test_an_optimiser_that_cannot_be_divided_is_refused() -> None:
    job = chaos.job()
    plan = dataclasses.replace(job.plan, shard_optimizer=True)
    with pytest.raises(PlanError, match="the state of this optimiser cannot be divided over replicas"):
        prepare(
            dataclasses.replace(job, plan=plan, recipe=dataclasses.replace(job.recipe, optimizer=WholeNorm)),
            session(MemoryStorage()),
        )


class WholeNorm(torch.optim.SGD):
    """It updates a parameter by the norm of the whole parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= 0.1 * parameter.grad.norm()


@dataclasses.dataclass
class InCloud(Recording):
    """A deployment whose storage is a folder."""

    folder: str = ""

    @property
    def storage_urls(self) -> StorageUrls:
        return StorageUrls(client=self.folder, functions="s3://bucket/runs")


def test_a_deployment_brings_its_own_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = InCloud(folder=tmp_path.as_uri())
    monkeypatch.setattr("funcpipe.client.prepare.session.open_deployment", lambda url, **_: cloud)
    with open_session("aws-lambda://x", None, RunSettings()) as found:
        assert found.lasts
        assert found.storage_url == "s3://bucket/runs"
        assert found.functions() is cloud
        found.storage.put("a", b"1")
    assert (tmp_path / "a").exists()


class Counting:
    """A dataset's factory that notes its calls, with the weights that it saw."""

    def __init__(self, model: nn.Module, error: Exception | None) -> None:
        self.model, self.error, self.calls = model, error, 0

    def __call__(self) -> list[tuple[Tensor, Tensor]]:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return small.data()


@pytest.mark.parametrize("error", [DataError("no data"), None])
def test_the_module_is_untouched_when_a_resume_is_refused(
    error: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "_others_work", lambda: False)  # or else what is refused is tried again
    pipe = FuncPipe(small.model(), loss_fn=F.cross_entropy, optimizer=small.optimizer)
    before = {name: tensor.clone() for name, tensor in pipe.model.state_dict().items()}
    data, storage = Counting(pipe.model, error), signed(open_storage(tmp_path.as_uri()))
    keys = reserve_generation(storage, RECORD.run)
    write_record(storage, keys, dataclasses.replace(RECORD, nonce=keys.nonce))
    with pytest.raises(FuncPipeError, match="no data" if error else "has seed 0, not 1"):
        pipe.train(data, plan=small.plan(2, 1), seed=1, storage=tmp_path.as_uri(), resume=RECORD.run)
    assert data.calls == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in pipe.model.state_dict().items())


def test_settings_may_be_given_by_keyword() -> None:
    given = settings_with(RunSettings(storage="file:///a", name="x"), {"run": "y", "message_deadline_s": 5.0})
    assert given == RunSettings(name="y", storage="file:///a", message_deadline_s=5.0)
    pipe = FuncPipe(small.model(), loss_fn=F.cross_entropy, optimizer=small.optimizer)
    with pytest.raises(InputError, match="train takes no storge=; did you mean storage="):
        pipe.train(small.data, plan=small.plan(), storge="file:///a")  # type: ignore[call-arg]


def test_a_session_is_refused_where_its_settings_contradict_each_other(tmp_path: Path) -> None:
    like = load_spec("aws-lambda")
    with (
        pytest.raises(InvalidValue, match="like is for the platform 'local'"),
        open_session("aws-lambda://x", like, RunSettings()),
    ):
        pass
    with (
        pytest.raises(InvalidValue, match="resume needs the storage that the run lies in"),
        open_session("local", None, RunSettings(resume="run-1")),
    ):
        pass
    with open_session("local", None, RunSettings(storage=tmp_path.as_uri())) as found:
        assert found.lasts
        assert found.storage_url == tmp_path.as_uri()
    with open_session("local", "aws-lambda", RunSettings()) as found:
        assert not found.lasts
        assert found.like == like
        folder = found.storage_url
        open_storage(folder).put("a", b"")
    assert not Path(folder.removeprefix("file://")).exists()


def test_a_run_that_is_left_to_itself_needs_a_storage() -> None:
    pipe = FuncPipe(small.model(), loss_fn=F.cross_entropy, optimizer=small.optimizer)
    with pytest.raises(InvalidValue, match="storage must be given for a run that is left to itself"):
        pipe.start(small.data, plan=small.plan())


def test_a_pipe_without_a_plan_says_so() -> None:
    pipe = FuncPipe(small.model(), loss_fn=F.cross_entropy, optimizer=small.optimizer)
    with pytest.raises(PlanError, match="there is no plan yet"):
        pipe.train(small.data)
