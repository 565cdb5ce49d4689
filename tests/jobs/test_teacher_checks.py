"""Teachers that cannot follow their students are refused before anything starts."""

import itertools
from functools import partial

import pytest
from torch import nn

from funcpipe import FuncPipe, Teacher
from funcpipe.cli.commands import parse
from funcpipe.cli.training import teachers_of
from funcpipe.errors import InputError, InvalidValue, ModelError
from funcpipe.training.averaging import check_decays, warn_of_copies
from tests.jobs.scripts import SGD, job_of
from tests.jobs.test_teachers import TEACHER, WIDTH, Distilled, Threads, distance, distilled


def refused(error: type[Exception], message: str, *teachers: Teacher, model: nn.Module | None = None) -> None:
    with pytest.raises(error, match=message):
        FuncPipe(model or Distilled(), loss_fn=distance, optimizer=SGD, teachers=teachers)


def test_what_cannot_follow_is_refused_when_a_funcpipe_is_made() -> None:
    teacher = partial(Teacher, student="student", teacher="teacher", decay=0.9)
    refused(ModelError, r"has no module 'tutor' for a Teacher; named_modules\(\) lists", teacher(teacher="tutor"))
    refused(
        ModelError,
        "have the same parameters, and only one of them has teacher.0.0.weight;",
        teacher(student="predictor"),
    )
    model = Distilled()
    student, taught = (model.get_submodule(path) for path in ("student", "teacher"))
    assert isinstance(student, nn.Sequential)
    assert isinstance(taught, nn.Sequential)
    taught.requires_grad_(True)
    way_out = r"freeze the teacher before: model.get_submodule\('teacher'\).requires_grad_\(False\)"
    refused(ModelError, f"teacher.0.0.weight is trainable, .* {way_out}", teacher(), model=model)
    model.get_submodule("teacher").requires_grad_(False)
    FuncPipe(model, loss_fn=distance, optimizer=SGD, teachers=teacher())
    taught[2] = nn.Linear(WIDTH, 5).requires_grad_(False)
    shapes = r"teacher.2.weight has shape \[5, 12\] of torch.float32, but student.2.weight, .* \[6, 12\] of torch.f"
    refused(ModelError, shapes, teacher(), model=model)
    taught[2] = student[2].requires_grad_(False)
    refused(ModelError, "teacher.2.weight and student.2.weight are one parameter; make", teacher(), model=model)
    refused(InvalidValue, "must not share parameters with the teacher 'teacher' of another", teacher(), teacher())
    with pytest.raises(InvalidValue, match="teachers must be one Teacher or several"):
        FuncPipe(model, loss_fn=distance, optimizer=SGD, teachers=0.9)  # type: ignore[arg-type]
    for changes, message in (
        ({"decay": 1.5}, "decay must be between 0 and 1, or a function of the step, got 1.5"),
        ({"teacher": "student.0"}, "teacher must be beside its student 'student', not inside it"),
        ({"student": ""}, "student must be the path of a module in the model"),
    ):
        with pytest.raises(InvalidValue, match=message):
            teacher(**changes)


def test_a_decay_that_is_no_function_of_the_step_is_refused() -> None:
    decays, drawn = [0.9] * 5, itertools.count()
    for decay, message in (
        (decays.__getitem__, "after step 5 of 6, counted from 0, cannot be found: IndexError"),
        (lambda step: 0.5 + step, "after step 1 of 6, counted from 0, is 1.5; it must be between 0 and 1"),
        (lambda step: 1 / (next(drawn) + 2), "the teacher 'teacher' is another one when it is asked again"),
    ):
        teacher = Teacher(student="student", teacher="teacher", decay=decay)
        with pytest.raises(InputError, match=message):
            check_decays([teacher], 0, 6)
    with pytest.raises(InputError, match=message):
        Threads().run(job_of(distilled(teachers=teacher)))


def test_a_frozen_copy_that_nothing_updates_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def copied() -> nn.Module:
        model = Distilled()
        model.teacher.load_state_dict(model.student.state_dict())
        return model

    warn_of_copies([TEACHER], copied())
    warn_of_copies([], Distilled())
    assert "frozen copy" not in caplog.text
    job_of(distilled(copied, teachers=()))
    assert "teacher is a frozen copy of student, and stays as it is while that is trained" in caplog.text
    assert "teachers=Teacher(student='student', teacher='teacher', decay=…)" in caplog.text


def test_teachers_on_the_command_line() -> None:
    words = [
        "profile",
        "my:model",
        "--sample",
        "my:sample",
        "--set",
        "model.teacher=student:teacher:0.9",
        "--set",
        "model.teacher=a.b:c:1",
    ]
    options = parse(words)
    assert teachers_of(options.teachers) == [TEACHER, Teacher(student="a.b", teacher="c", decay=1.0)]
    for text in ("student:teacher", "student:teacher:much"):
        with pytest.raises(
            InputError, match=f"--set model.teacher={text}: give STUDENT:TEACHER:DECAY, such as student:teacher:"
        ):
            teachers_of([text])
