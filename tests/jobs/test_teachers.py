"""A teacher, a frozen part of the model that averages another one, is what a user's script makes of it."""

import copy
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
from torch.utils.data import DataLoader

from funcpipe import EMA, FuncPipe, Teacher
from funcpipe.client.continuation import Learned, write_back
from funcpipe.client.job import Job, Learner, SampleOrder, make_job
from funcpipe.client.launch import launch
from funcpipe.client.prepare import prepare
from funcpipe.client.results import RunResult
from funcpipe.client.session import session_on
from funcpipe.client.site import Site
from funcpipe.core import FaultTolerance, RunSettings, ScheduleKind
from funcpipe.errors import InputError, InvalidValue, ModelError, PlanError, WorkerFailed
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform
from funcpipe.training.recipe import recipe_with
from funcpipe.training.verify import Reference
from tests.jobs.scripts import EQUAL, Script, job_of, run_over_functions, verify, worst_difference

WIDTH = 12


def encoder() -> nn.Sequential:
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 6))


class Distilled(nn.Module):
    """A student with a predictor, and a teacher of the same form with other weights."""

    def __init__(self, *, teacher_first: bool = False, make: Callable[[], nn.Module] = encoder) -> None:
        super().__init__()
        self.student, self.teacher = make(), make()
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


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_teacher_may_run_before_its_student(replicas: int) -> None:
    script = distilled(lambda: Distilled(teacher_first=True))
    assert_equal(script, run_script(script), stages=3, replicas=replicas, schedule=ScheduleKind.ONE_F_ONE_B)


def by_cosine(step: int) -> float:
    return 1 - (1 - 0.8) * (math.cos(math.pi * step / 6) + 1) / 2


def test_clipping_a_scheduler_recomputed_forwards_and_a_decay_by_step() -> None:
    scheduler, teacher = (
        partial(StepLR, step_size=1, gamma=0.5),
        Teacher(student="student", teacher="teacher", decay=by_cosine),
    )
    script = distilled(clip_grad_norm=0.2, scheduler=scheduler, teachers=teacher)
    expected = run_script(script, [teacher], clip=0.2, scheduler=scheduler)
    assert_equal(script, expected, stages=3, replicas=2, recompute=True)


class Partly(Distilled):
    """Parts with a parameter that the teacher's forward does not use, one that neither uses, and tied ones."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.student, self.teacher):
            for name in ("token", "unused"):
                token = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64), requires_grad=part is self.student)
                part.register_parameter(name, token)
            part[1][0].weight = part[0][0].weight

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        token = self.student.token
        assert isinstance(token, Tensor)
        return super().forward(one + token, other)


@pytest.mark.parametrize("stages", [1, 3])
def test_parameters_that_no_forward_uses_follow_too(stages: int) -> None:
    script = distilled(Partly)
    assert_equal(script, run_script(script), stages=stages, replicas=2)


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


def test_two_teachers_have_decays_of_their_own() -> None:
    teachers = [TEACHER, Teacher(student="student_head", teacher="teacher_head", decay=0.5)]
    script = distilled(WithHead, teachers=teachers)
    assert_equal(script, run_script(script, teachers), stages=3, replicas=2)


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
STEADY = FaultTolerance(heartbeat_s=0.2, lease_s=1.0, start_s=2.0, checkpoint_steps=2, keep=True)


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
        self.platform = platform
        session = session_on(Site(platform, self.storage, "memory://"), reopen=(before or platform).open)
        settings = RunSettings(name=RUN) if before is None else RunSettings(resume=RUN)
        try:
            return launch(prepare(job, session, faults=faults, settings=settings, learned=learned))
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
        learned = write_back(Threads().run(job, learned=learned), model, job.epochs)
    twice = replace(script, epochs=2)
    assert_found(twice, model.state_dict(), run_script(twice, [BY_STEP]))
