"""A teacher, a frozen part of the model that averages another one, is what a user's script makes of it."""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from funcpipe import EMA, FuncPipe, Pins, Teacher
from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import RunResult, write_back
from funcpipe.client.prepare.job import Job, Learned, Learner, SampleOrder, make_job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import Site, session_on
from funcpipe.core import FaultTolerance, RunSettings, ScheduleKind
from funcpipe.errors import ModelError, PlanError, WorkerFailed
from funcpipe.neighbours.parameter_server.loops import History, LoopConfig, train_synchronously
from funcpipe.neighbours.parameter_server.training import check_servable, stored_job
from funcpipe.neighbours.parameter_server.worker_group import ServerWorker, Updates
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.recipe import recipe_with
from funcpipe.training.verify import Reference
from tests.jobs.scripts import EQUAL, Script, job_of, run_over_functions, verify, worst_difference
from tests.support.server_group import InTurnWorkerGroup

WIDTH = 12


def encoder() -> nn.Sequential:
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 6))


class Distilled(nn.Module):
    """A student with a predictor, and a teacher of the same form with other weights."""

    def __init__(self, *, teacher_first: bool = False, make: Callable[[], nn.Module] = encoder) -> None:
        super().__init__()
        self.student: nn.Module = make()
        self.teacher: nn.Module = make()
        self.predictor = nn.Linear(6, 6)
        self.teacher.requires_grad_(False)
        self.teacher_first = teacher_first
        self.double()

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        if self.teacher_first:
            wanted = self.taught(other)
            return self.predictor(self.student(one)), wanted
        found = self.predictor(self.student(one))
        return found, self.taught(other)

    @torch.no_grad()
    def taught(self, other: Tensor) -> Tensor:
        wanted: Tensor = self.teacher(other)
        return wanted


def distance(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    found, wanted = output
    return (2 - 2 * F.cosine_similarity(found, wanted.detach(), dim=-1)).mean()


def views(samples: int = 42) -> list[tuple[Tensor, Tensor, Tensor]]:
    drawn = torch.randn(samples, 2, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [(one, other, torch.tensor(0)) for one, other in drawn]


TEACHER = Teacher(student="student", teacher="teacher", decay=0.9)


def distilled(make: Callable[[], nn.Module] = Distilled, **recipe: Any) -> Script:
    """Three steps in each of two epochs, the third of a shorter batch."""
    return Script(make=lambda: (make(), distance), samples=views, epochs=2, recipe={"teachers": TEACHER, **recipe})


def run_script(
    script: Script,
    teachers: Sequence[Teacher] = (TEACHER,),
    *,
    clip: float | None = None,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    after_step: Callable[[nn.Module], None] = lambda model: None,
    skip_nan: bool = False,
) -> nn.Module:
    """The script, with its line for teachers as in those of BYOL and DINO."""
    model, loss_fn = script.made()
    model.train()
    optimizer = script.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    schedule = None if scheduler is None else scheduler(optimizer)
    number = 0
    for _ in range(script.epochs):
        for *inputs, target in DataLoader(script.samples(), batch_size=script.global_batch):
            optimizer.zero_grad()
            loss = loss_fn(model(*inputs), target)
            number += 1
            if skip_nan and not math.isfinite(loss.item()):
                continue
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            with torch.no_grad():
                for one in teachers:
                    m = one.decay(number - 1) if callable(one.decay) else one.decay
                    parts = (model.get_submodule(path).parameters() for path in (one.student, one.teacher))
                    for param_q, param_k in zip(*parts, strict=True):
                        param_k.data.mul_(m).add_((1 - m) * param_q.detach().data)
            after_step(model)
        if schedule is not None:
            schedule.step()
    return model


def assert_equal(script: Script, expected: nn.Module, **how: Any) -> None:
    difference, name = worst_difference(script, run_over_functions(script, **how), expected)
    assert difference < EQUAL, name


@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (2, 1), (3, 2)])
def test_a_teacher_follows_its_student_wherever_the_model_is_cut(stages: int, replicas: int) -> None:
    script = distilled()
    assert_equal(script, run_script(script), stages=stages, replicas=replicas)


def test_a_teacher_may_run_before_its_student() -> None:
    script = distilled(lambda: Distilled(teacher_first=True))
    assert_equal(script, run_script(script), stages=3, replicas=2, schedule=ScheduleKind.ONE_F_ONE_B)


def by_cosine(step: int) -> float:
    return 1 - (1 - 0.8) * (math.cos(math.pi * step / 6) + 1) / 2


class Partly(Distilled):
    """Parts with a parameter that the teacher's forward does not use, one that neither uses, and tied ones."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.student, self.teacher):
            for name in ("token", "unused"):
                token = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64), requires_grad=part is self.student)
                part.register_parameter(name, token)
            one, two = (part.get_submodule(path) for path in ("0.0", "1.0"))
            two.weight = one.weight

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        token = self.student.token
        assert isinstance(token, Tensor)
        return super().forward(one + token, other)


def test_parameters_that_no_forward_uses_follow_too() -> None:
    script = distilled(Partly)
    assert_equal(script, run_script(script), stages=3, replicas=2)


class WithHead(Distilled):
    def __init__(self) -> None:
        super().__init__()
        self.student_head, self.teacher_head = (nn.Linear(6, 6).double() for _ in range(2))
        self.teacher_head.requires_grad_(False)

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        found, wanted = super().forward(one, other)
        with torch.no_grad():
            wanted = self.teacher_head(wanted)
        return self.student_head(found), wanted


def test_two_teachers_with_clipping_a_scheduler_recomputed_forwards_and_a_decay_by_step() -> None:
    head = Teacher(student="student_head", teacher="teacher_head", decay=by_cosine)
    scheduler = partial(StepLR, step_size=1, gamma=0.5)
    script = distilled(WithHead, clip_grad_norm=0.2, scheduler=scheduler, teachers=[TEACHER, head])
    expected = run_script(script, [TEACHER, head], clip=0.2, scheduler=scheduler)
    assert_equal(script, expected, stages=3, replicas=2, recompute=True)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6, momentum=0.5))


def test_buffers_of_a_teacher_are_its_own() -> None:
    script = Script(
        make=lambda: (Distilled(make=normalised), distance),
        samples=lambda: views(32),
        micro_batch=16,
        recipe={"teachers": TEACHER},
    )
    assert_equal(script, run_script(script), stages=2)


def test_a_step_that_is_left_out_teaches_nothing() -> None:
    def with_a_gap() -> Any:
        samples = views()
        samples[20][0].fill_(math.nan)
        return samples

    script = Script(
        make=lambda: (Distilled(), distance),
        samples=with_a_gap,
        epochs=2,
        recipe={"teachers": TEACHER, "on_nan": "skip"},
    )
    assert_equal(script, run_script(script, skip_nan=True), stages=2, replicas=2)


def test_verify_teaches_too() -> None:
    found = verify(replace(distilled(), epochs=1), replicas=2)
    assert (found.agrees, found.reference) == (True, Reference.WHOLE)


RUN, BY_STEP = "taught", Teacher(student="student", teacher="teacher", decay=by_cosine)
STEADY = FaultTolerance(heartbeat_s=0.2, lease_s=60.0, checkpoint_steps=2, keep=True)


class Threads:
    """Storage, and the platform that the run's functions were on last; they are threads."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.platform: ThreadPlatform | None = None

    def run(
        self,
        job: Job,
        faults: FaultTolerance = STEADY,
        *,
        fails: FunctionFaults | None = None,
        learned: Learned | None = None,
    ) -> RunResult:
        """Train, or go on with the run that is in the storage; the second function `fails`."""
        before, platform = (
            self.platform,
            ThreadPlatform(
                load_spec("local"),
                self.storage,
                faults_of=lambda number: fails if fails and number == 1 else FunctionFaults(),
            ),
        )
        session = session_on(Site(platform, self.storage, "memory://"), reopen=(before or platform).open)
        settings = RunSettings(name=RUN) if before is None else RunSettings(resume=RUN)
        try:
            prepared = prepare(job, session, faults=faults, settings=settings, learned=learned)
            self.platform = platform
            return launch(prepared)
        finally:
            platform.stop_all()


def assert_found(script: Script, found: Mapping[str, Tensor], expected: nn.Module) -> None:
    difference, name = worst_difference(script, found, expected)
    assert difference < EQUAL, name


def test_a_function_that_is_replaced_goes_on_with_the_teacher() -> None:
    script = distilled(teachers=BY_STEP)
    result = Threads().run(job_of(script, stages=3), fails=FunctionFaults(killed_at=60))
    assert result.bill.functions > 3
    assert_found(script, result.state_dict(), run_script(script, [BY_STEP]))


def test_a_run_is_resumed_by_another_plan_with_the_teachers_that_it_began_with() -> None:
    script, threads = distilled(teachers=BY_STEP), Threads()
    fails = FunctionFaults(killed_writing=("/checkpoints/s1/00000006", 1))
    with pytest.raises(WorkerFailed):
        threads.run(job_of(script, stages=2, replicas=1), replace(STEADY, max_attempts=1), fails=fails)
    message = "has teachers teacher of student by a function, not None; resume it with what it was started with"
    with pytest.raises(PlanError, match=message):
        threads.run(job_of(replace(script, recipe={}), stages=2))
    result = threads.run(job_of(script, stages=3, replicas=2))
    assert_found(script, result.state_dict(), run_script(script, [BY_STEP]))


def test_training_again_goes_on_with_the_teacher() -> None:
    script = replace(distilled(teachers=BY_STEP), epochs=1)
    model, loss = script.made()
    recipe = recipe_with(loss, script.optimizer, {"teachers": BY_STEP})
    learned, data, plan = None, script.samples(), job_of(script, stages=3).plan
    for _ in range(2):
        learner = Learner(model=model, recipe=recipe, learned=learned)
        job = make_job(learner, data, plan, SampleOrder(shuffle=False), RunSettings())
        learned = write_back(Threads().run(job, learned=learned), model, loss, job.epochs)
    twice = replace(script, epochs=2)
    assert_found(twice, model.state_dict(), run_script(twice, [BY_STEP]))


def test_an_average_is_that_of_torch_teachers_included() -> None:
    script = distilled(average=EMA(decay=0.7))
    kept: list[AveragedModel] = []

    def average(model: nn.Module) -> None:
        if not kept:
            kept.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7)))  # type: ignore[no-untyped-call]
        kept[0].update_parameters(model)

    run_script(script, after_step=average)
    found = Threads().run(job_of(script, stages=3, replicas=2)).averaged_state_dict()
    assert_found(script, found, kept[0].module)


def test_a_divided_optimiser_needs_teacher_and_student_in_one_stage() -> None:
    script = distilled()
    job = job_of(script, stages=1, replicas=2)
    found = Threads().run(replace(job, plan=replace(job.plan, shard_optimizer=True)))
    assert_found(script, found.state_dict(), run_script(script))
    job = job_of(script, stages=2, replicas=2)
    message = "where stages share parameters, as 0 and 1 share student.* keep its layers together"
    with pytest.raises(PlanError, match=message):
        Threads().run(replace(job, plan=replace(job.plan, shard_optimizer=True)))


def test_plans_count_the_copies_of_students(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = importlib.import_module("funcpipe.profiler.profile")
    monkeypatch.setattr(measuring, "base_memory_bytes", lambda **_: 100 << 20)
    script = distilled()
    model, loss = script.made()
    samples = tuple(torch.stack(part) for part in list(zip(*views(4), strict=True))[:2])
    pipe = FuncPipe(model, loss_fn=loss, optimizer=script.optimizer, teachers=TEACHER)
    pipe.profile(samples, platform="local", repeats=1, layers=20)
    plan = pipe.optimize(global_batch=16, replicas=2, pins=Pins(cuts=("teacher.0.0",)))
    taught = [size for stage in plan.stages if (size := stage.parameter_bytes) is not None]
    of_student = sum(parameter.nbytes for parameter in model.get_submodule("student").parameters())
    of_predictor = sum(parameter.nbytes for parameter in model.get_submodule("predictor").parameters())
    assert taught == [of_student + of_predictor, of_student]
    order = SampleOrder(epochs=2, shuffle=False)
    learner = Learner(model=model, recipe=recipe_with(loss, script.optimizer, {"teachers": TEACHER}))
    found = Threads().run(make_job(learner, script.samples(), plan, order, RunSettings())).state_dict()
    assert_found(script, found, run_script(script))


def test_a_parameter_server_updates_teachers_in_synchronous_steps() -> None:
    script, storage = distilled(), MemoryStorage()
    job = job_of(script, stages=1)
    group = InTurnWorkerGroup(
        stored_job(job, storage, RUN), storage, RUN, [ServerWorker(name=name) for name in ("a", "b")]
    )
    train_synchronously(group, LoopConfig(batches=job.batches, epochs=job.epochs), History())
    assert_found(script, group.server.state_dict(), run_script(script))
    with pytest.raises(PlanError, match="a teacher that follows asynchronous updates depends on their order"):
        check_servable(job, Updates.ASP)


class Contrast(nn.Module):
    """MoCo: a queue of earlier keys, which each forward changes; as published, it also updates the encoder there."""

    def __init__(self, *, inside: bool = False) -> None:
        super().__init__()
        self.inside = inside
        self.encoder_q, self.encoder_k = nn.Linear(WIDTH, 6).double(), nn.Linear(WIDTH, 6).double()
        self.encoder_k.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(6, 32, dtype=torch.float64), dim=0))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        q = F.normalize(self.encoder_q(one), dim=1)
        with torch.no_grad():
            if self.inside:
                for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                    param_k.data = param_k.data * 0.9 + param_q.data * 0.1
            k = F.normalize(self.encoder_k(other), dim=1)
        assert isinstance(self.queue, Tensor)
        queue = self.queue.clone().detach()
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue], dim=1) / 0.2
        self.queue.copy_(torch.cat([queue[:, k.shape[0] :], k.T], dim=1))
        return logits


def test_a_queue_is_that_of_a_script_with_one_replica_and_whole_batches() -> None:
    teacher = Teacher(student="encoder_q", teacher="encoder_k", decay=0.9)
    script = Script(
        make=lambda: (Contrast(), F.cross_entropy),
        samples=views,
        micro_batch=16,
        recipe={"teachers": teacher},
    )
    assert_equal(script, run_script(script, [teacher]), stages=2)
    with pytest.raises(PlanError, match=r"each forward of Contrast leaves queue .* plan with replicas=\(1,\)"):
        run_over_functions(replace(script, micro_batch=4), replicas=2)
    with pytest.raises(ModelError, match=r"changes the parameter encoder_k.weight, .* FuncPipe\(teachers=…\)"):
        job_of(replace(script, make=lambda: (Contrast(inside=True), F.cross_entropy), recipe={}))
