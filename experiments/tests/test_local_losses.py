"""The study of local steps: which runs it wants, whose losses it keeps, and the tables that its page shows."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from experiments.studies import local_losses_report as report
from experiments.studies.local_losses import (
    IN_PARTS,
    KEPT,
    OUTER,
    REPLICAS,
    SEEDS,
    SYNC_EVERY,
    Result,
    Results,
    Setting,
    fragment_of,
    headline,
    in_parts,
    read_results,
    tuned,
    wanted,
    write_results,
)
from experiments.studies.local_losses_tasks import TASKS, Task, step_means, train
from experiments.studies.local_steps_executed import KEPT as EXECUTED
from experiments.studies.local_steps_executed import read_learned
from funcpipe.core import END, Plan, ScheduleKind, Stage, Sync, Wire
from funcpipe.core.round_checks import check_meetings
from funcpipe.model.graph import trace
from funcpipe.training.batches import Step
from funcpipe.training.fragments import fragments_by_name
from funcpipe.training.plain_rounds import LocalSteps

PAGE = Path(__file__).parents[2] / "docs/local_steps.md"


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(2, 1)


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(18, 2, generator=draw), torch.randn(18, 1, generator=draw))


TASK = Task(
    model=linear,
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    data=data,
    unseen=data,
    steps=5,
    global_batch=8,
)


def test_losses_are_those_of_each_replica_on_its_share() -> None:
    """Written by hand: two replicas that meet after two steps, and in the end."""
    _, found = train(TASK, 3, 2, LocalSteps(sync_every=2))
    models, expected = [linear(3), linear(3)], []
    inputs, targets = data().tensors
    for step in TASK.batches(3, 2):
        losses = []
        for model, indices in zip(models, step.micro_batches, strict=True):
            loss = nn.functional.mse_loss(model(inputs[list(indices)]), targets[list(indices)])
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                parameter.data -= 0.1 * gradient
            losses.append(loss.item())
        expected.append(sum(losses) / 2)
        if step.number % 2:
            for pair in zip(*(model.parameters() for model in models), strict=True):
                mean = sum(one.data for one in pair) / 2
                for one in pair:
                    one.data.copy_(mean)
    assert found == pytest.approx(expected, rel=1e-5)


def test_global_batches_are_full_and_the_same_for_all_replicas() -> None:
    all_batches = [
        [sorted(i for part in step.micro_batches for i in part) for step in TASK.batches(0, replicas)]
        for replicas in (1, 2, 4)
    ]
    assert all_batches[0] == all_batches[1] == all_batches[2]
    assert [len(batch) for batch in all_batches[0]] == [8] * 5
    of_other_seed = TASK.batches(1, 1)[0]
    assert all_batches[0][0] != sorted(i for part in of_other_seed.micro_batches for i in part)


def test_losses_of_micro_batches_are_those_of_their_step() -> None:
    """The last step is a short one."""
    steps = [Step(number=number, epoch=0, micro_batches=((0,), (1,), (2,))[: 3 - number]) for number in range(2)]
    assert step_means([1.0, 3.0, 2.0, 10.0, 30.0], steps) == [2.0, 20.0]


def made_up(setting: Setting) -> Result:
    """Losses that differ in every setting; η = 0.7 and μ = 0.5 are the best."""
    away = abs(setting.outer_lr - 0.7) + abs(setting.outer_momentum - 0.5)
    every = 64 if isinstance(setting.sync_every, str) else setting.sync_every
    loss = 1 + away + every / 100 + setting.seed / 1000 + setting.fragments - 1 + setting.delay / 10
    return Result(losses=tuple(loss + 10 / (i + 1) for i in range(20)), unseen=loss, accuracy=0.5, cpu_s=1.0)


def all_made_up() -> Results:
    results: Results = {}
    for setting in wanted(list(TASKS), results):
        results[setting] = made_up(setting)
    return results


def test_each_run_is_wanted_once_and_none_that_is_there(tmp_path: Path) -> None:
    results = all_made_up()
    assert tuned("digits", results) == (0.7, 0.5)
    assert list(wanted(list(TASKS), results)) == []
    digits = [setting for setting in results if setting.task == "digits"]
    headline = len(SEEDS) * len(SYNC_EVERY)
    others = (len(REPLICAS) - 1) * (len(SYNC_EVERY) - 1)
    assert len(digits) == len(OUTER) + headline + others + 6
    assert [s.replicas for s in digits if s.sync_every == 1] == [1] * len(SEEDS)
    assert {(s.outer_lr, s.outer_momentum) for s in digits if s.sync_every == END} == {(1.0, 0.0)}
    write_results(results, tmp_path / "results.json")
    assert read_results(tmp_path / "results.json") == results


def test_parts_are_those_that_plans_may_have_and_are_compared_with_the_headline() -> None:
    results = all_made_up()
    for task, rounds in IN_PARTS.items():
        found = list(in_parts(task, results))
        assert {s.sync_every for s in found} == set(rounds)
        for every in rounds:
            parts = {(s.fragments, s.delay) for s in found if s.sync_every == every}
            assert parts == {(1, 0), (1, 1), (1, 3), (4, 0), (4, 1), *([(4, 3)] if every > 12 else [])}
            check_meetings(every, fragments=4, delay=max(delay for count, delay in parts if count == 4), sharded=False)
        assert {s for s in found if (s.fragments, s.delay) == (1, 0)} <= set(headline(task, results))
        assert len(found) == len(set(found)) == 3 * len({(s.sync_every, s.fragments, s.delay) for s in found})
    assert list(in_parts("digits", results)) == []
    (row,) = [line for line in report.parts_table(results) if line.startswith("| transformer | 8 | unseen")]
    assert row == (
        "| transformer | 8 | unseen | 1.0810 ± 0.0010 | +0.1000 ± 0.0000 | +0.3000 ± 0.0000 | +3.0000 ± 0.0000 "
        "| +3.1000 ± 0.0000 | – |"
    )
    del results[next(s for s in in_parts("transformer", results) if (s.sync_every, s.fragments) == (8, 4))]
    (row,) = [line for line in report.parts_table(results) if line.startswith("| transformer | 8 | unseen")]
    assert row.endswith("| +0.3000 ± 0.0000 |  | +3.1000 ± 0.0000 | – |"), "a seed is missing"


def test_fragments_are_those_of_functions_that_have_the_whole_model() -> None:
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 2, bias=False), nn.Linear(2, 5))
    assert fragment_of(model, 1) == dict.fromkeys(fragment_of(model, 3), 0)
    assert fragment_of(model, 3) == {"0.weight": 0, "1.weight": 1, "2.weight": 2, "2.bias": 2}
    graph = trace(model, (torch.zeros(1, 4),))
    names = tuple(layer.name for layer in graph.layers)
    plan = Plan(
        global_batch=4,
        micro_batch=1,
        replicas=2,
        schedule=ScheduleKind.GPIPE,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        stages=(Stage(first=0, stop=len(names), size="1GB", memory_mb=1024, layers=names),),
        model="Sequential",
        sync_every=4,
        sync_fragments=3,
    )
    others = fragments_by_name(graph, plan, nn.functional.mse_loss)
    assert others == {name: number for name, number in fragment_of(model, 3).items() if number}


def test_a_setting_meets_in_its_parts() -> None:
    model = nn.Linear(2, 2)
    setting = Setting(task="digits", seed=0, replicas=2, sync_every=8, outer_momentum=0.5, fragments=2, delay=1)
    assert setting.local(model) == LocalSteps(
        sync_every=8, outer_momentum=0.5, fragments=2, fragment_of={"weight": 0, "bias": 1}, delay=1
    )
    assert Setting(task="digits", seed=0, replicas=2, sync_every=END).local(model).sync_every is None


def test_tables_have_pairs_of_seeds() -> None:
    results = all_made_up()
    (row,) = [line for line in report.headline_table(results) if line.startswith("| digits | unseen")]
    assert row == (
        "| digits | unseen | 1.8120 ± 0.0016 | -0.7900 ± 0.0000 | -0.7300 ± 0.0000 | -0.4900 ± 0.0000 "
        "| +0.6300 ± 0.0000 |"
    )
    (plain,) = [line for line in report.plain_table(results) if line.startswith("| digits | 8")]
    assert plain == "| digits | 8 | 1.8810 | 1.0810 |"


def test_curves_are_read_after_steps() -> None:
    line = report.Curve(losses=(3.0, 2.0, 1.0), lowest=(), highest=())
    assert [line.after(steps) for steps in (0, 4, 8, 11.9, 100)] == [3.0, 3.0, 2.0, 1.0, 1.0]
    assert report.smooth([4.0, 2.0] * 10)[:3] == [4.0, 3.0, 3.0]


def test_the_page_shows_rows_of_the_tables_of_the_runs_that_are_kept() -> None:
    """All of the outer learning rates, and of the other tables the rows on which its advice rests."""
    results, text = read_results(KEPT), PAGE.read_text()
    tables = [table(results) for table in (report.headline_table, report.replicas_table, report.parts_table)]
    tables.append(report.equal_table(results, report.read_predicted(report.PREDICTED)))
    printed = [list(table) for table in tables]
    executed = report.executed_table(list(read_learned(EXECUTED)))
    assert all("\n".join(lines) in text for lines in (report.tuning_table(results), executed))
    assert all("\n".join(lines[:2]) in text for lines in printed)
    rows = {line for lines in printed for line in lines} | set(report.tuning_table(results))
    tasks = "|".join(TASKS)
    shown = [line for line in re.findall(rf"^\| (?:{tasks}) \| .*$", text, re.MULTILINE) if "×" not in line]
    assert len(shown) >= 3 * len(TASKS) + 4
    assert set(shown) <= rows
