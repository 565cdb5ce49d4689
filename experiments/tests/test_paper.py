"""The paper's evaluation: findings follow from numbers, and every script runs."""

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from experiments.paper import (
    bandwidth,
    beyond,
    executed,
    front,
    hand_over,
    parameter_server,
    planning,
    prediction,
    scaling,
    search,
    synchronisation,
    systems,
    trained,
)
from experiments.paper.__main__ import main as run_everything
from experiments.paper.common import (
    Answer,
    How,
    Result,
    Script,
    Settings,
    answer,
    load,
    new_figure,
    read_arguments,
    save,
    span,
)
from experiments.paper.index import page
from experiments.paper.planning import OURS, PAPER, Case, best, better, is_proved, profile_of
from funcpipe.core import (
    ModelProfile,
    Optimality,
    OptimizerKind,
    Plan,
    ScheduleKind,
    Stage,
    Sync,
    Wire,
    read,
    write,
)
from funcpipe.errors import InvalidValue
from funcpipe.partitioner.problem.cuts import merge_layers
from funcpipe.platforms.catalog import load_spec

TINY = Settings(models=("resnet101",), batches=(64,), time_values=(30.72,), specs=("aws-lambda",), execute=False)


def test_a_run_on_a_deployment_needs_a_limit_of_what_it_may_cost() -> None:
    with pytest.raises(InvalidValue, match="nothing is spent without --max-usd"):
        Settings(platform="aws-lambda://funcpipe?region=us-east-1")
    assert Settings(platform="aws-lambda://funcpipe?region=us-east-1", max_usd=1.0).max_usd == 1.0


def test_the_command_refuses_to_spend_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read_arguments(argparse.ArgumentParser(), ["--platform", "aliyun-fc://funcpipe?region=ap-southeast-1"])
    assert end.value.code == 2
    assert "--max-usd" in capsys.readouterr().err


def test_arguments_become_settings(tmp_path: Path) -> None:
    words = ["--models", "resnet101", "--batches", "16", "--like", "none", "--no-execute", "--output", str(tmp_path)]
    folder, settings = read_arguments(argparse.ArgumentParser(), words)
    assert folder == tmp_path
    assert (settings.models, settings.batches, settings.like, settings.execute) == (("resnet101",), (16,), None, False)


def test_a_span_has_the_ends_and_the_median() -> None:
    assert span([3.0, 1.0, 2.5]) == "1.00 to 3.00 (median 2.50)"
    assert span([]) == "none"


@pytest.fixture
def answered() -> Answer:
    figure = new_figure(1)
    figure.subplots().plot([1, 2], [3, 4])
    rows = ({"model": "a<b", "seconds": 1.5, "points": [1.0, 2.0]}, {"model": "c", "gain": None})

    def measure(settings: Settings) -> Result:
        return Result(how=How.SIMULATED, on="paper & pencil", rows=rows, findings=("It is < 2.",), figure=figure)

    return answer(Script(name="one", question="How many?", measure=measure), TINY)


def test_an_answer_is_read_back_as_it_was_written(answered: Answer, tmp_path: Path) -> None:
    save(answered, tmp_path)
    found = load(tmp_path, "one")
    assert found == answered
    assert "currentColor" in found.svg


def test_the_page_is_whole_and_needs_no_network(answered: Answer) -> None:
    text = page([answered], took_s=120, machine="2 processors")
    assert "2 minutes" in text
    assert "It is &lt; 2." in text
    assert "a&lt;b" in text
    assert "simulated" in text
    assert "<svg" in text
    outside = {url for url in re.findall(r'(?:src|href)="([^"]+)"', text) if not url.startswith("#")}
    assert not outside, f"the page loads {outside}"


def test_findings_about_systems_count_ties_and_losses() -> None:
    row = {"model": "m", "platform": "p", "batch": 64, "baseline": "lambdaml", "system": OURS, "proved": True}
    rows = [
        {**row, "workers": 4, "speedup": 2.5, "saving": 0.1},
        {**row, "workers": 1, "speedup": 1.0, "saving": 0.0},
        {**row, "workers": 4, "speedup": None, "saving": 0.05},
    ]
    first, last = systems.findings(rows)
    assert "1.00x to 2.50x" in first
    assert "in 3 settings; it is no faster in 1 of them; it has no plan as cheap in 1 of them" in first
    assert "reaches 2.2x or 77 % in 1 of 3 settings, and neither 1.3x nor 7 % in 2" in last
    assert "in 1 of these lambdaml is a single function" in last


def test_findings_about_search_tell_where_another_policy_is_better() -> None:
    row = {"model": "m", "platform": "p", "batch": 64, "search_s": 0.1}
    rows = [
        {**row, "time_value": value, "policy": policy, "objective": objective}
        for value, policy, objective in (
            (0.0, "funcpipe", 1.0),
            (1.0, "funcpipe", 2.0),
            (0.0, "tpdmp", 1.5),
            (1.0, "tpdmp", 1.9),
            (0.0, "bayes", None),
            (1.0, "bayes", 2.0),
        )
    ]
    assert search.excess(rows, "tpdmp") == pytest.approx([0.5, -0.05])
    text = search.findings(rows)
    assert "better in 1" in text[0]
    assert "it has no plan for 1" in text[2]


def test_findings_about_synchronisation_name_where_pipelining_loses() -> None:
    row = {"workers": 8, "link_MB_s": synchronisation.LINK_MB_S, "executed_s": None}
    rows = [
        {**row, "MB": size, "sync": sync, "simulated_s": seconds}
        for size, sync, seconds in ((4, "three-phase", 1.0), (4, "pipelined", 1.2), (64, "three-phase", 4.0))
    ]
    rows.append({**row, "MB": 64, "sync": "pipelined", "simulated_s": 3.0})
    (found,) = synchronisation.findings(rows)
    assert "takes 25 % less time" in found
    assert "more in 1 of 2 combinations: 8 workers with 4 MB" in found


def test_findings_about_executed_systems_compare_losses_and_predictions() -> None:
    row = {"steps": 2, "predicted_s": 2.0, "observed_usd": 0.1}
    rows: list[dict[str, Any]] = [
        {**row, "system": "lambdaml", "observed_s": 4.0, "losses": (3.0, 2.0)},
        {**row, "system": PAPER, "observed_s": 2.1, "losses": (3.0, 2.0), "observed_usd": 0.05},
        {"system": "hybridps", "plan": None},
    ]
    gain, losses, off = executed.findings(rows)
    assert "1.90x as fast as lambdaml at 0.50 of its cost" in gain
    assert "2.0000 to 2.0000: the same" in losses
    assert "1 of 2 are within 10 %" in off
    rows[0]["losses"] = (3.0, 2.5)
    assert "DIFFER" in executed.findings(rows)[1]


def test_the_recommended_point_is_compared_with_the_best_in_each_respect() -> None:
    found = front.against((2.0, 4.0), {"lambdaml": (6.0, 2.0), "hybridps": (4.0, 8.0)})
    assert found == {
        "speedup_lambdaml": 3.0,
        "saving_lambdaml": -1.0,
        "speedup_fastest": 2.0,
        "saving_cheapest": -1.0,
    }


def test_a_profile_for_another_platform_has_the_same_seconds_of_one_processor() -> None:
    spec, lambdas = load_spec("aliyun-fc"), load_spec("aws-lambda")
    before, after = profile_of("resnet101", "aws-lambda"), profile_of("resnet101", "aliyun-fc")
    assert after.sizes == tuple(size.name for size in spec.sizes)
    for size, seconds in zip(spec.sizes, after.layers[3].forward_s, strict=True):
        assert seconds * size.vcpu == pytest.approx(before.layers[3].forward_s[0] * lambdas.sizes[0].vcpu)


def test_the_papers_system_is_what_the_paper_fixes() -> None:
    plan = best(Case(model="resnet101", spec="aws-lambda", batch=64), PAPER, time_value=30.72)
    assert plan is not None
    assert (plan.schedule, plan.sync, plan.wire) == (ScheduleKind.GPIPE, Sync.PIPELINED, Wire.FP32)
    assert not any(stage.recompute for stage in plan.stages)


@pytest.mark.usefixtures("small_model")
def test_of_a_search_that_was_cut_short_and_the_papers_plan_the_better_is_taken() -> None:
    plan = best(Case(model="resnet101", spec="aws-lambda", batch=64), PAPER, time_value=30.72)
    assert plan is not None
    assert plan.solver is not None
    worse = replace(plan, solver=replace(plan.solver, objective=2 * plan.solver.objective, status=Optimality.FEASIBLE))
    assert is_proved(plan)
    assert not is_proved(worse)
    assert better(worse, plan) is plan
    assert better(plan, worse) is plan
    assert better(None, plan) is plan
    assert better(None, None) is None


def test_links_are_scaled_in_both_directions() -> None:
    spec = load_spec("aws-lambda")
    found = bandwidth.with_links(spec, 2.0).sizes[0]
    assert found.upload_bytes_s == 2 * spec.sizes[0].upload_bytes_s
    assert found.download_bytes_s == 2 * spec.sizes[0].download_bytes_s


def test_small_sizes_cost_and_compute_as_much_for_each_megabyte() -> None:
    spec = load_spec("aws-lambda")
    for size in executed.small_spec(spec).sizes:
        assert size.price_usd_s / size.memory_mb == pytest.approx(spec.sizes[0].price_usd_s / 1024, rel=1e-4)
        assert size.vcpu / size.memory_mb == pytest.approx(spec.sizes[0].vcpu / 1024, rel=1e-3)
        assert size.upload_bytes_s / size.memory_mb == pytest.approx(spec.sizes[0].upload_bytes_s / 1024, rel=1e-3)


def test_workers_of_a_server_divide_the_samples_of_a_step_among_them() -> None:
    told = parameter_server.ServedWorker(
        run="r",
        number=0,
        workers=2,
        steps=2,
        batch=16,
        micro_batch=4,
        accumulates=True,
        size="896MB",
        memory_mb=896,
        storage="file:///x",
        platform="local",
    )
    parts = [replace(told, number=number).micro_batches(1) for number in range(2)]
    assert sorted(place for part in parts for samples in part for place in samples) == list(range(16, 32))


@pytest.fixture
def small_model(small_profiles: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ResNet-101 has four layers. Searches of so few end by themselves, whatever a machine needs for that."""
    monkeypatch.setattr(planning, "PROFILES", small_profiles)
    for module, name in ((planning, "LIMIT_S"), (planning, "FRONT_LIMIT_S"), (beyond, "LIMIT_S")):
        monkeypatch.setattr(module, name, math.inf)
    forget()
    yield
    forget()


@pytest.fixture(scope="module")
def small_profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiles")
    write(merge_layers(read(ModelProfile, planning.PROFILES / "resnet101.json"), 4), folder / "resnet101.json")
    return folder


def forget() -> None:
    """What was planned for a model of the same name."""
    for known in (planning.profile_of, planning._best, planning.front):
        known.cache_clear()


PLANS = pytest.mark.parametrize(
    "module", [systems, front, search, prediction, scaling, bandwidth, hand_over, beyond], ids=lambda m: m.SCRIPT.name
)


@pytest.mark.usefixtures("small_model")
@PLANS
def test_what_only_plans_answers_with_findings_rows_and_a_figure(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_answer(module, monkeypatch, tmp_path)


@pytest.mark.long
@PLANS
def test_the_whole_model_is_planned_and_answers_too(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_answer(module, monkeypatch, tmp_path)


def check_answer(module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(search, "POLICIES", ("funcpipe", "uniform"))
    monkeypatch.setattr(search, "OTHERS", ("uniform",))
    found = answer(module.SCRIPT, TINY)
    assert found.how == "simulated"
    assert all(found.findings)
    assert found.rows
    save(found, tmp_path)
    assert load(tmp_path, found.name).svg == found.svg


def test_simulated_synchronisation_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synchronisation, "WORKERS", (2, 8))
    monkeypatch.setattr(synchronisation, "MEGABYTES", (4, 64))
    found = answer(synchronisation.SCRIPT, TINY)
    assert len(found.rows) == 2 * 2 * 2


@pytest.mark.long
def test_simulated_synchronisation_of_all_workers_and_sizes_answers() -> None:
    found = answer(synchronisation.SCRIPT, TINY)
    assert len(found.rows) == 2 * len(synchronisation.WORKERS) * len(synchronisation.MEGABYTES)


@pytest.mark.long
def test_functions_around_a_parameter_server_learn_what_one_process_learns() -> None:
    spec = executed.small_spec(load_spec("aws-lambda"))
    plan = Plan(
        global_batch=4,
        micro_batch=2,
        replicas=2,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.THREE_PHASE,
        wire=Wire.FP32,
        optimizer=OptimizerKind.SGD,
        stages=(Stage(first=0, stop=1, size="896MB", memory_mb=896),),
    )
    found = parameter_server.train(plan, spec, steps=2)
    model, data = trained.model(), trained.data(2, 4)
    optimizer, losses = trained.optimizer(model.parameters()), []
    for step in range(2):
        pairs = [data[place] for place in range(4 * step, 4 * step + 4)]
        inputs, targets = (torch.stack(column) for column in zip(*pairs, strict=True))
        loss = trained.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert found.losses == pytest.approx(losses, rel=1e-5)
    assert (found.traffic.puts, found.traffic.gets - found.traffic.empty_gets) == (4, 4)
    assert found.server_usd > 0


@pytest.mark.usefixtures("small_model")
def test_everything_writes_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a script that only plans, which a process of its own runs, and of one that might execute."""
    words = ["--only", "systems", "prediction", "--models", "resnet101", "--batches", "64", "--no-execute"]
    run_everything([*words, "--specs", "aws-lambda", "--output", str(tmp_path)])
    text = (tmp_path / "index.html").read_text()
    assert text.count("<section") == 2
    assert "written:" in capsys.readouterr().out
