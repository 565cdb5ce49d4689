"""The verbs in a shell, one after the other, each reading what the one before wrote."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from funcpipe.cli import main
from funcpipe.core import MB, LayerProfile, ModelProfile, Plan, read, read_trace, to_text, write
from funcpipe.partitioner import solvers
from funcpipe.platforms.catalog import load_spec
from tests.support.plans import chain_profile

MODEL, SAMPLE, DATA = "tests.e2e.small:model", "tests.e2e.small:sample", "tests.e2e.small:data"


def test_from_a_profile_to_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "profile",
                MODEL,
                "--sample",
                SAMPLE,
                "--micro-batch",
                "2",
                "--platform",
                "local",
                "--set",
                "model.repeats=1",
            ]
        )
        == 0
    )
    assert read(ModelProfile, "profile.json").micro_batch == 2
    assert main(["optimize", "profile.json", "--global-batch", "8", "--replicas", "2"]) == 0
    assert read(Plan, "plan.json").replicas == 2
    assert main(["simulate", "plan.json", "profile.json", "--trace", "predicted.json", "--gantt"]) == 0
    assert "s0.r1 compute" in capsys.readouterr().out
    words = ["--plan", "plan.json", "--data", DATA, "--trace", "observed.json", "-o", "model.pt"]
    assert main(["train", MODEL, *words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["losses"]) == 8
    assert torch.load("model.pt")["0.weight"].shape == (8, 4)
    assert len(read_trace("observed.json").steps()) == 8
    assert main(["verify", MODEL, *words[:4], "--steps", "2", "-q"]) == 0
    assert "all 6 tensors agree" in capsys.readouterr().out
    assert main(["report", "observed.json", "predicted.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "funcpipe.comparison/1"
    words = ["--figure", "both.png", "--perfetto", "both.json"]
    assert main(["report", "predicted.json", "observed.json", *words]) == 0
    assert "ratio" in capsys.readouterr().out
    assert Path("both.png").stat().st_size > 10_000
    names = {entry["args"].get("name") for entry in json.loads(Path("both.json").read_text())["traceEvents"]}
    assert {"predicted: stage 0 replica 0", "observed: stage 0 replica 1"} <= names
    assert main(["report", "observed.json", "plan.json", "profile.json", "-o", "report.html"]) == 0
    assert 'id="timeline"' in Path("report.html").read_text()
    capsys.readouterr()
    assert main(["report", "observed.json", "observed.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["observed.json"]["steps"] == "8"
    assert main(["report", "plan.json", "-o", "plan.html"]) == 0
    assert 'id="spent"' in Path("plan.html").read_text()


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A chain of six layers on AWS Lambda, in the file profile.json of the current folder."""
    spec = load_spec("aws-lambda")
    layers = tuple(
        LayerProfile(
            name=f"layer{i}",
            parameter_bytes=40_000_000,
            activation_bytes=30_000_000,
            forward_s=tuple(0.2 / size.vcpu for size in spec.sizes),
            backward_s=tuple(0.4 / size.vcpu for size in spec.sizes),
        )
        for i in range(6)
    )
    measured = chain_profile(layers, spec, sent_bytes=10**6, micro_batch=4, base_memory_bytes=300 * MB)
    monkeypatch.chdir(tmp_path)
    write(measured, "profile.json")
    return "profile.json"


def test_the_best_of_some_plans_by_simulation_is_taken(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["optimize", profile, "--global-batch", "64", "--time-value", "30"]
    assert main([*words, "--set", "plan.simulate=3"]) == 0
    shown = capsys.readouterr().out
    assert "simulated: iteration" in shown
    assert re.search(r"the best of [123] plans that were simulated", " ".join(shown.split()))
    solver = read(Plan, "plan.json").solver
    assert solver
    assert solver.simulated_plans in (1, 2, 3)
    for wrong in (["--pareto"], ["--set", "plan.policy=lambdaml"], ["--set", "plan.solver=highs"]):
        assert main([*words, "--set", "plan.simulate=3", *wrong]) == 2
        assert "plan.simulate compares the plans of one search" in capsys.readouterr().err


def test_a_step_is_simulated_under_disturbances(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", profile, "--global-batch", "64", "--replicas", "2", "--set", "plan.cut=layer3"]) == 0

    def seconds(*words: str) -> float:
        capsys.readouterr()
        assert main(["simulate", "plan.json", profile, "--json", *words]) == 0
        found: float = json.loads(capsys.readouterr().out)["iteration_s"]
        return found

    alone = seconds()
    assert seconds("--set", "simulation.cold=true") == pytest.approx(alone + load_spec("aws-lambda").cold_start_s)
    assert alone < seconds("--set", "simulation.clip-grad-norm=true") < alone + 1
    assert seconds("--set", "simulation.straggler=s0.r0=3") > 1.5 * alone
    assert seconds("--set", "simulation.death=s1.r1@1") > alone + 1
    noisy = [
        seconds(
            "--set",
            "simulation.compute-jitter=0.3",
            "--set",
            "simulation.transfer-jitter=0.3",
            "--set",
            f"simulation.seed={seed}",
        )
        for seed in (1, 1, 2)
    ]
    assert noisy[0] == noisy[1] != noisy[2]
    for words, message in (
        (["--set", "simulation.death=s1.r1"], "s0.r1@2.5"),
        (["--set", "simulation.straggler=s9.r0=2"], "s9.r0"),
    ):
        assert main(["simulate", "plan.json", profile, *words]) == 2
        assert message in capsys.readouterr().err


def test_a_plan_follows_the_wish_and_the_pins(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", profile, "--global-batch", "64"]) == 0
    cheapest = read(Plan, "plan.json")
    words = ["--time-value", "300", "--set", "plan.cut=layer3", "--replicas", "2,4", "--max-memory", "5120"]
    assert main(["optimize", profile, "--global-batch", "64", *words]) == 0
    pinned = read(Plan, "plan.json")
    assert 3 in [stage.first for stage in pinned.stages]
    assert pinned.replicas in (2, 4)
    assert all(stage.memory_mb <= 5120 for stage in pinned.stages)
    assert cheapest.estimate is not None
    assert pinned.estimate is not None
    assert cheapest.estimate.cost_usd <= pinned.estimate.cost_usd
    assert main(["explain", "plan.json"]) == 0
    text = capsys.readouterr().out
    assert "stage 0" in text
    assert "second-best plan: " in text
    deadline = pinned.estimate.iteration_s * 10
    assert main(["optimize", profile, "--global-batch", "64", "--deadline", str(deadline), "--steps", "10"]) == 0
    in_time = read(Plan, "plan.json").estimate
    assert in_time is not None
    assert in_time.iteration_s <= pinned.estimate.iteration_s * 1.000001
    assert main(["optimize", profile, "--global-batch", "64", "--deadline", "0.001"]) == 2
    sized = ["--set", "plan.size=layer0=10240MB", "--set", "plan.together=layer0,layer1"]
    assert main(["optimize", profile, "--global-batch", "64", *sized]) == 0
    assert read(Plan, "plan.json").stages[0].size == "10240MB"


def test_what_if_sets_the_plan_there_is_beside_the_best_after_the_changes(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["optimize", profile, "--global-batch", "64"]
    assert main(words) == 0
    now = read(Plan, "plan.json")
    capsys.readouterr()
    changes = ["--what-if", "bandwidth=2x", "--what-if", "sizes=1024MB,2048MB"]
    assert main([*words, *changes, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["now"]["stages"] == json.loads(to_text(now))["stages"]
    best = read(Plan, "plan.json")
    assert {stage.size for stage in best.stages} <= {"1024MB", "2048MB"}
    assert best != now
    assert json.loads(to_text(best))["estimate"] == found["best"]["estimate"]
    assert main([*words, *changes]) == 0
    assert "best plan, changed" in capsys.readouterr().out
    write(replace(read(ModelProfile, profile), base_memory_bytes=800 * MB), "other.json")
    assert main([*words, "--what-if", "profile=other.json"]) == 0
    assert main([*words, "--what-if", "profile=nowhere.json"]) == 2
    assert main([*words, "--what-if", "speed=2x"]) == 2
    assert main([*words, "--what-if", "bandwidth=2x", "--pareto"]) == 2
    assert "cannot be combined with --pareto" in capsys.readouterr().err


def test_replicas_that_meet_every_few_steps_are_planned_explained_and_simulated(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = [
        "--set",
        "plan.sync-every=auto",
        "--set",
        "plan.sync-every-at-most=6",
        "--set",
        "plan.outer-lr=0.7",
        "--set",
        "plan.outer-momentum=0.9",
    ]
    assert main(["optimize", profile, "--global-batch", "8", "--replicas", "2", *rounds, "-q"]) == 0
    plan = read(Plan, "plan.json")
    assert (plan.sync_every, plan.outer_lr, plan.outer_momentum) == (6, 0.7, 0.9)
    capsys.readouterr()
    assert main(["explain", "plan.json"]) == 0
    told = capsys.readouterr().out
    assert "replicas meet every 6 steps" in told
    assert [line.split()[0] for line in told.split("meet after so many steps:")[1].splitlines()[2:6]] == list("1246")
    assert main(["explain", "plan.json", "--json"]) == 0
    assert [row["sync_every"] for row in json.loads(capsys.readouterr().out)["rounds"]] == [1, 2, 4, 6]
    assert main(["simulate", "plan.json", "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert 0 < simulated["iteration_s"] < simulated["meeting_s"]
    assert main(["simulate", "plan.json"]) == 0
    assert "in the mean" in capsys.readouterr().out
    words = ["optimize", profile, "--global-batch", "8", "--replicas", "2", *rounds]
    assert main([*words, "--what-if", "bandwidth=2x"]) == 0
    assert "the best plan, if replicas meet after so many steps" in capsys.readouterr().out


def test_planning_in_a_shell_loads_neither_torch_nor_a_solver(profile: str) -> None:
    code = (
        "import sys; from funcpipe.cli import main;"
        f"assert main(['optimize', {profile!r}, '--global-batch', '64', '--json']) == 0;"
        "print([name for name in ('torch', 'pyomo', 'highspy', 'gurobipy', 'scipy') if name in sys.modules])"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": root}
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.long
def test_every_solver_can_be_named_in_a_shell(profile: str) -> None:
    short = read(ModelProfile, profile)
    write(replace(short, layers=short.layers[:3], tensors=short.tensors[:2]), profile)
    words = ["optimize", profile, "--global-batch", "64", "--replicas", "4", "--set", "plan.memory=10240"]
    for solver in set(solvers()) - {"paper"}:
        assert main([*words, "--set", f"plan.solver={solver}"]) == 0


def test_the_papers_programme_says_what_it_needs_in_a_shell(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["optimize", profile, "--global-batch", "64", "--replicas", "4", "--set", "plan.solver=paper"]
    assert main(words) == 2
    assert "must be 'never' in the paper's form" in capsys.readouterr().err


def test_the_front_is_drawn_and_its_recommended_plan_written(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["optimize", profile, "--global-batch", "64", "--pareto", "--figure", "front.png"]
    assert main([*words, "--json"]) == 0
    front = json.loads(capsys.readouterr().out)
    times = [plan["estimate"]["iteration_s"] for plan in front["plans"]]
    costs = [plan["estimate"]["cost_usd"] for plan in front["plans"]]
    assert times == sorted(times)
    assert costs == sorted(costs, reverse=True)
    assert read(Plan, "plan.json").estimate is not None
    assert Path("front.png").read_bytes().startswith(b"\x89PNG")
    assert main(words) == 0
    assert "recommended" in capsys.readouterr().out


def test_platforms_are_listed_and_shown_in_the_form_that_spec_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["platforms"]) == 0
    assert "aws-lambda" in capsys.readouterr().out
    assert main(["platforms", "show", "aws-lambda", "--json"]) == 0
    path = tmp_path / "spec.json"
    path.write_text(capsys.readouterr().out)
    assert main(["platforms", "show", str(path)]) == 0
    assert "10240MB" in capsys.readouterr().out
