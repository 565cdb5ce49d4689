"""The demo's last screen: what it says, that it fits, and that its commands work as they stand there."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import demo_screen
from experiments.demo_clouds import CLOUDS, estimates, scaled
from funcpipe.analysis.compare import LaneReport, LaneUse, Report, StageUse
from funcpipe.cli import main
from funcpipe.core import LayerProfile, ModelProfile, Plan, Resource, ScheduleKind, Stage, Sync, Use, Wire
from funcpipe.platforms.catalog import load_spec
from funcpipe.training.verify import TensorDifference, Verification, Yardstick

USE = LaneUse(busy_s=0.15, wait_s=0.0, idle_s=0.1, usd=None, idle_usd=None)
PROFILE = ModelProfile(
    model="digits",
    micro_batch=16,
    platform="local",
    sizes=("1024MB", "2048MB"),
    base_memory_bytes=200 << 20,
    layers=tuple(
        LayerProfile(
            name=str(i),
            parameter_bytes=1 << 20,
            activation_bytes=1 << 20,
            forward_s=(0.25, 0.25),
            backward_s=(0.5, 0.5),
        )
        for i in range(2)
    ),
    tensors=(),
)
NOTHING = dict.fromkeys(Use, 0.0)
PLAN = Plan(
    global_batch=128,
    micro_batch=16,
    replicas=2,
    schedule=ScheduleKind.GPIPE,
    sync=Sync.PIPELINED,
    wire=Wire.FP32,
    stages=(Stage(first=0, stop=2, size="1024MB", memory_mb=1024),),
    platform="local",
)
AGREES = Verification(
    steps=3,
    tolerance=1e-4,
    tensors=(
        TensorDifference(name="a", layer="0", difference=9.75e-05),
        TensorDifference(name="b", layer="0", difference=0.02, allowed=0.03, yardstick=Yardstick.ROUNDING),
    ),
)


def outcome(folder: Path, *, stages: int = 2, why: tuple[str, ...] = ()) -> demo_screen.Outcome:
    lanes = tuple(
        LaneReport(stage=stage, lane=lane, predicted=USE, observed=USE)
        for stage in range(stages)
        for lane in (Resource.COMPUTE, Resource.UPLOAD, Resource.DOWNLOAD)
    )
    return demo_screen.Outcome(
        name="digits",
        checked=AGREES,
        comparison=Report(run="run-1", steps=18, predicted_iteration_s=0.146, observed_iteration_s=0.25, lanes=lanes),
        losses=(2.5, 0.125),
        trained_s=4.5,
        uses=tuple(
            StageUse(stage=stage, seconds={**NOTHING, Use.START: 2.0, Use.COMPUTE: 0.5, Use.SAVE: 0.25}, usd=None)
            for stage in range(stages)
        ),
        functions=stages,
        cost_usd=0.0044,
        said="on unseen data accuracy 91.7%, loss 0.243",
        why=why,
        clouds=tuple(estimates(PROFILE, PLAN, samples=1536, epochs=6)),
        report=folder / "report.html",
        yours=folder / "yours",
    )


@pytest.fixture(autouse=True)
def imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What importing torch takes need not be measured."""
    monkeypatch.setattr("experiments.demo_clouds.base_memory_bytes", lambda *, forked: (50 if forked else 250) << 20)


def test_the_screen_answers_what_a_person_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    lines = demo_screen.screen(outcome(Path("out/digits")))
    said = " ".join(" ".join(lines).split())
    assert "yes: after 3 steps, all 2 tensors agree. The worst differs by 9.7e-05 of what training changed" in said
    assert "(1e-04 is allowed); 1 by more, as rounding alone does in one process" in said
    assert "of a function's 2.8 s, its start took 2.0 s, 2 steps 0.5 s, saving and ending 0.2 s" in said
    assert "A step took 0.250 s (predicted 0.146 s); of it stage 0 computes 60%" in said
    assert "stage 1 computes 60%, waits 40%, sends 60%, receives 60%" in said
    assert "AWS Lambda: " in said
    assert "Alibaba FC: " in said
    assert "These are estimates" in said
    assert "out/digits/report.html" in said
    assert lines[-4].endswith(":$PATH && cd out/digits/yours")


def test_the_screen_fits_a_terminal_of_80_by_40(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(tmp_path / ".venv" / "bin" / "python"))
    why = ("Computing took 1.47 times its profiled time, and so on and on, in words that fill a line.",) * 4
    lines = demo_screen.screen(outcome(Path("out/digits"), why=why))
    assert len(lines) < demo_screen.HEIGHT
    assert max(map(len, lines)) <= demo_screen.WIDTH


def test_a_difference_is_not_hidden() -> None:
    off = TensorDifference(name="blocks.0.conv1.weight", layer="0", difference=0.5)
    differs = replace(AGREES, tensors=(*AGREES.tensors, off))
    assert demo_screen.equality(differs) == (
        "NO: after 3 steps, blocks.0.conv1.weight is off by 5.0e-01 of what training changed in it"
    )


def test_a_cloud_s_times_are_those_of_this_machine_over_its_vcpus() -> None:
    for name in CLOUDS.values():
        spec = load_spec(name)
        there = scaled(PROFILE, spec)
        assert there.estimated
        assert there.sizes == tuple(size.name for size in spec.sizes)
        assert there.layers[0].backward_s == tuple(0.5 / size.vcpu for size in spec.sizes)
        assert there.base_memory_bytes > PROFILE.base_memory_bytes


def test_the_three_lines_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one in a shell, the others in this process."""
    monkeypatch.chdir(tmp_path)
    yours = demo_screen.write_own(tmp_path / "yours")
    enter, *others = demo_screen.try_commands(yours)
    done = paste([enter, "pwd", "command -v funcpipe"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(yours), str(Path(sys.executable).parent / "funcpipe")]
    monkeypatch.chdir(yours)
    monkeypatch.setattr("sys.path", sys.path[:])
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    for command in " && ".join(others).split(" && "):
        program, *words = shlex.split(command)
        assert program == "funcpipe"
        assert main(words) == 0
    assert "written to plan.json" in capsys.readouterr().out
    assert (yours / "trained.safetensors").exists()


@pytest.mark.long
def test_the_three_lines_work_when_they_are_pasted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    yours = demo_screen.write_own(tmp_path / "yours")
    done = paste(demo_screen.try_commands(yours), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "written to plan.json" in done.stdout
    assert (yours / "trained.safetensors").exists()


def paste(lines: Iterable[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """What a shell in the folder makes of the lines."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = ["bash", "-c", "\n".join(("set -e", *lines))]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
