"""`fit`: what it chooses, what it says, and that it trains as the user's script does."""

import contextlib
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

from funcpipe import FuncPipe, Plan
from funcpipe.api import fitting
from funcpipe.api.fitting import Wanted, choose, micro_batches
from funcpipe.client.control.commands import after_failure, after_interrupt
from funcpipe.core import Optimality, SolverReport
from funcpipe.errors import (
    DataError,
    FuncPipeError,
    Infeasible,
    InvalidValue,
    ModelError,
    PlanError,
    RunInterrupted,
    RunUnknown,
)
from funcpipe.platforms.catalog import load_spec
from funcpipe.platforms.room import Node, Offer, of_nodes
from funcpipe.runstate.owner import last_run
from funcpipe.runstate.signing import signed
from funcpipe.training.batches import sample_order
from tests.api.threads import GLOBAL_BATCH, SAMPLES, data, functions_in_threads, network, numbers, script
from tests.e2e.plans import even_plan


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(data(), batch_size=GLOBAL_BATCH, **options)


def pipe_of(model: nn.Module | None = None, **keywords: Any) -> FuncPipe:
    settings = {"loss_fn": nn.functional.cross_entropy, "optimizer": lambda p: SGD(p, lr=0.1), **keywords}
    return FuncPipe(model or network(), **settings)


def plan_of(size: int, batch: int, *, objective: float = 1.0, model: nn.Module | None = None) -> Plan:
    """A plan for micro-batches of `size` samples, which was searched for."""
    sample = (torch.zeros(size, 4, dtype=torch.float64),)
    made = even_plan(model or network(), sample, stages=1, replicas=1, micro_batch=size, micro_batches=batch // size)
    report = SolverReport(name="exact", status=Optimality.OPTIMAL, objective=objective, gap=0.0, solve_s=0.0)
    return replace(made, solver=report, platform="local", region="this machine")


def searching(found: Callable[[int], Plan]) -> Any:
    """Planning that finds what `found` makes of the size of a micro-batch, and measures nothing."""

    def planned(pipe: Any, dataset: Any, source: Any, size: int, batch: int, wanted: Any) -> Any:
        return found(size), None

    return mock.patch.object(fitting, "_planned", planned)


def test_functions_are_those_that_the_machines_at_hand_have_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour is worth so much that four functions would be best, or a larger one, if there was room."""
    roomy, small = (Offer(spec=load_spec("ray"), nodes=(Node(cpus=n, memory_bytes=n * 2**30),)) for n in (16, 2))
    plans = list[Plan]()
    for offer in (roomy, replace(small, spec=of_nodes(small.spec, small.nodes or (), shared_cores=2))):
        monkeypatch.setattr(fitting, "offer_at", lambda platform, offer=offer: offer)
        wanted = Wanted(platform="ray://local", global_batch=16, micro_batch=4, time_value=1e6)
        plans.append(choose(pipe_of(), data(), wanted).plan)
        assert offer.has_room(plans[-1])
    assert not small.has_room(plans[0])
    again = choose(pipe_of(), data(), wanted, plans[0])
    assert again.plan.stages == plans[1].stages
    assert again.lines[0].endswith("the plan that was there needs more than the machines at hand have")


def test_it_trains_as_the_script_with_the_same_loader_and_optimiser(capsys: pytest.CaptureFixture[str]) -> None:
    model, other = network(), network()
    optimizer = AdamW(model.parameters(), lr=0.01)
    with functions_in_threads():
        pipe = pipe_of(model, optimizer=optimizer)
        result = pipe.fit(loader(), epochs=2, micro_batch=4)
        said = capsys.readouterr().err.splitlines()
        with mock.patch.object(FuncPipe, "profile", side_effect=AssertionError):
            pipe.fit(loader(), epochs=1, progress=False)
    script(other, AdamW(other.parameters(), lr=0.01), epochs=3)
    assert numbers(model.state_dict()) == pytest.approx(numbers(other.state_dict()), abs=1e-12)
    assert len(result.losses) == 2 * -(-SAMPLES // GLOBAL_BATCH)
    assert said[0] == "8 samples a step, as the DataLoader has it; 4 at a time, measured here"
    assert said[1].startswith("1 function of 1024MB on local, 1 stage x 1 replica: a step takes about ")
    assert said[2].startswith("2 epochs, 6 steps, about ")
    assert len(said) == 3


def test_a_batch_whose_samples_depend_on_each_other_is_not_cut() -> None:
    """As under BatchNorm; a plan is found for each size, and the largest is taken although it is the worst."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    pipe = pipe_of(model)
    with searching(lambda size: plan_of(size, 16, objective=size, model=model)):
        assert choose(pipe, data(), Wanted(global_batch=16)).plan.micro_batch == 16


@given(batch=st.integers(1, 2000))
def test_micro_batches_divide_the_global_batch_and_grow_up_to_it(batch: int) -> None:
    sizes = list(micro_batches(batch))
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == batch
    assert [size for size in sizes if batch % size] == []
    assert all(larger >= 4 * size for size, larger in itertools.pairwise(sizes[:-1]))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({4: 8.0, 16: 6.0}, (16, "16 at a time, the best of 4, 16, measured here")),
        ({4: 8.0, 16: 7.9}, (4, "4 at a time, the best of 4, 16, measured here")),
        ({4: 8.0}, (4, "4 at a time, measured here")),
        ({2: 8.0}, (2, "2 at a time, measured here")),
    ],
)
def test_the_micro_batch_is_the_best_that_fits(values: dict[int, float], expected: tuple[int, str]) -> None:
    """Sizes without a value do not fit."""

    def found(size: int) -> Plan:
        if size not in values:
            raise Infeasible("too large")
        return plan_of(size, 16, objective=values[size])

    with searching(found):
        chosen = choose(pipe_of(), data(), Wanted(global_batch=16))
    assert (chosen.plan.micro_batch, chosen.lines[0].partition("; ")[2]) == expected


def test_where_nothing_fits_the_reason_is_that_of_one_sample() -> None:
    def found(size: int) -> Plan:
        raise Infeasible(f"{size} are too many")

    with searching(found), pytest.raises(Infeasible, match="1 are too many"):
        choose(pipe_of(), data(), Wanted(global_batch=16))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (lambda: loader(), "8 samples a step, as the DataLoader has it"),
        (lambda: loader, "8 samples a step, as the DataLoader has it"),
        (lambda: DataLoader(data(), batch_size=64), "20 samples a step, as the DataLoader has it"),
        (data, "20 samples a step, by default"),
    ],
)
def test_the_samples_of_a_step_are_those_of_the_loader(given: Callable[[], Any], expected: str) -> None:
    batch = int(expected.split()[0])
    with searching(lambda size: plan_of(size, batch)):
        chosen = choose(pipe_of(), given(), Wanted())
    assert chosen.plan.global_batch == batch
    assert chosen.lines[0].startswith(expected)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"global_batch": 16}, ""),
        ({"global_batch": 8}, "; the plan that was there has the global batch 16, not 8"),
        ({"global_batch": 16, "micro_batch": 8}, "; the plan that was there has the micro-batch 4, not 8"),
        (
            {"global_batch": 16, "like": "aws-lambda"},
            "; the plan that was there has the platform local, not aws-lambda",
        ),
    ],
)
def test_a_plan_that_is_there_is_taken_if_it_is_for_this(wanted: dict[str, Any], reason: str) -> None:
    pipe, kept = pipe_of(), plan_of(4, 16)
    with searching(lambda size: plan_of(size, wanted["global_batch"])):
        chosen = choose(pipe, data(), Wanted(**wanted), kept)
    assert (chosen.plan is kept) == (not reason)
    assert re.search(f"{reason or 'by the plan that was there'}$", chosen.lines[0])


def test_a_plan_for_another_model_is_made_anew() -> None:
    other = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3)).double()
    kept = plan_of(4, 16, model=other)
    kept = replace(kept, stages=tuple(replace(stage, parameter_bytes=600) for stage in kept.stages))
    with searching(lambda size: plan_of(size, 16)):
        chosen = choose(pipe_of(), data(), Wanted(global_batch=16), kept)
    assert f"has the bytes of parameters 600, not {8 * (4 * 8 + 8 + 8 * 3 + 3)}" in chosen.lines[0]


def test_a_plan_for_an_optimiser_that_keeps_less_is_made_anew() -> None:
    with searching(lambda size: plan_of(size, 16)):
        chosen = choose(pipe_of(optimizer=AdamW), data(), Wanted(global_batch=16), plan_of(4, 16))
    assert chosen.lines[0].endswith("the plan that was there has the optimiser momentum, not adam")


def failing(output: Any, target: Any) -> Any:
    raise ValueError("this loss fails")


@pytest.mark.parametrize(
    ("pipe", "fields", "kind", "message"),
    [
        ({}, {"global_batch": 21}, DataError, "has 20 samples, too few for one global batch of 21"),
        ({}, {"global_batch": 8, "micro_batch": 3}, InvalidValue, "micro_batch must divide the global batch of 8 sam"),
        ({}, {"time_value": -1}, InvalidValue, "time_value must be at least 0, got -1"),
        ({}, {"epochs": 0}, InvalidValue, "epochs must be a whole number of at least 1"),
        ({}, {"platform": "aws-lamda"}, InvalidValue, "platform must be one of aliyun-fc, .*aws-lambda"),
        ({}, {"resume": "x", "storage": "file:///tmp/nothing"}, RunUnknown, "there is no run 'x'"),
        ({"loss_fn": failing}, {}, DataError, "the loss function fails on the first micro-batch, .*this loss fails"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(
    pipe: dict[str, Any], fields: dict[str, Any], kind: type[FuncPipeError], message: str
) -> None:
    with (
        functions_in_threads(),
        mock.patch.object(FuncPipe, "profile", side_effect=AssertionError),
        pytest.raises(kind, match=message),
    ):
        pipe_of(**pipe).fit(data(), **fields)


def test_a_model_without_an_optimiser_is_refused() -> None:
    with pytest.raises(PlanError, match="the model has no optimizer"):
        FuncPipe(network(), loss_fn=nn.functional.cross_entropy).fit(data())


def test_a_run_that_is_resumed_goes_on_by_its_own_plan() -> None:
    with functions_in_threads():
        first = pipe_of()
        first.train(data(), epochs=1, plan=plan_of(4, 8), run="again", progress=False)
        with mock.patch.object(FuncPipe, "profile", side_effect=AssertionError):
            model = network()
            pipe_of(model).fit(data(), epochs=2, global_batch=8, resume="again", progress=False)
    assert numbers(model.state_dict()) != numbers(first.model.state_dict())


def test_the_run_that_was_begun_last_is_resumed() -> None:
    """Also if it is not the newest by its name: a run that is resumed counts."""
    with functions_in_threads() as storage:
        for run in ("b", "a"):
            pipe_of().train(data(), epochs=1, plan=plan_of(4, 8), run=run, progress=False)
        assert last_run(signed(storage)) == "a"
        found = pipe_of().train(data(), epochs=2, plan=plan_of(4, 8), resume="last", progress=False)
        assert found.run == "a"
        pipe_of().train(data(), epochs=2, plan=plan_of(4, 8), resume="b", progress=False)
        model = network()
        found = pipe_of(model).fit(data(), epochs=3, global_batch=8, resume="last", progress=False)
        assert found.run == "b"
        assert len(found.losses) == 9
    at_once = network()
    with functions_in_threads():
        pipe_of(at_once).train(data(), epochs=3, plan=plan_of(4, 8), progress=False)
    assert numbers(model.state_dict()) == numbers(at_once.state_dict())


def test_where_there_is_no_run_none_was_the_last() -> None:
    with (
        functions_in_threads(),
        pytest.raises(RunUnknown, match="there is no run in this storage to resume; train wit"),
    ):
        pipe_of().train(data(), plan=plan_of(4, 8), resume="last")


def test_no_run_is_called_last() -> None:
    with pytest.raises(InvalidValue, match="run must be another name: this one is for the run that was begun last"):
        pipe_of().train(data(), plan=plan_of(4, 8), run="last")


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_last_batch_is_dropped_as_the_loader_drops_it(shuffle: bool) -> None:
    """Each epoch drops samples of its own: what the order of that epoch ends with."""
    model, other, steps = network(), network(), list[int]()
    with functions_in_threads():
        pipe = pipe_of(model)
        pipe._plan = plan_of(4, GLOBAL_BATCH)
        result = pipe.fit(loader(drop_last=True, shuffle=shuffle), epochs=3, run="drops", progress=False)
        with pytest.raises(PlanError, match="run drops has drop_last True, not False; resume it with what it was star"):
            pipe.fit(loader(shuffle=shuffle), epochs=4, resume="drops", progress=False)
    inputs, targets = data().tensors
    optimizer = SGD(other.parameters(), lr=0.1)
    for epoch in range(3):
        order = sample_order(SAMPLES, 0, epoch) if shuffle else tuple(range(SAMPLES))
        for first in range(0, SAMPLES - GLOBAL_BATCH + 1, GLOBAL_BATCH):
            chosen = list(order[first : first + GLOBAL_BATCH])
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(other(inputs[chosen]), targets[chosen]))
            optimizer.step()
            steps += [first]
    assert len(result.losses) == len(steps) == 6
    assert numbers(model.state_dict()) == pytest.approx(numbers(other.state_dict()), abs=1e-12)


def test_a_loader_that_drops_everything_is_refused() -> None:
    with pytest.raises(DataError, match="has 20 samples, too few for one global batch of 64"):
        pipe_of().fit(DataLoader(data(), batch_size=64, drop_last=True))


def test_nothing_is_dropped_of_what_a_model_is_validated_on() -> None:
    with functions_in_threads(), pytest.raises(DataError, match="to evaluate on has drop_last=True, but every sample"):
        pipe_of().train(data(), plan=plan_of(4, 8), validation=loader(drop_last=True))


def test_a_profile_that_is_there_is_used_for_its_micro_batch_and_platform() -> None:
    pipe, measured = pipe_of(), list[tuple[str, int]]()
    known = pipe.profile(torch.zeros(4, 4, dtype=torch.float64), platform="local", micro_batch=4, repeats=1)

    def measure(*_: Any, micro_batch: int, platform: Any, **__: Any) -> Any:
        measured.append((platform.name, micro_batch))
        pipe._profile = replace(known, micro_batch=micro_batch)
        return pipe._profile

    with mock.patch.object(pipe, "profile", measure):
        assert choose(pipe, data(), Wanted(global_batch=8, micro_batch=4)).plan.micro_batch == 4
        assert measured == []
        choose(pipe, data(), Wanted(global_batch=8, micro_batch=8))
        choose(pipe, data(), Wanted(global_batch=16, micro_batch=8))
        assert measured == [("local", 8)]
        with contextlib.suppress(FuncPipeError):  # what was measured for one platform is no plan for another
            choose(pipe, data(), Wanted(global_batch=8, micro_batch=8, like="aws-lambda"))
    assert measured == [("local", 8), ("aws-lambda", 8)]


def test_a_model_whose_weights_lie_in_files_is_tried_without_them(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(network().state_dict(), file)
    pipe = FuncPipe(network, loss_fn=nn.functional.cross_entropy, optimizer=AdamW, weights=str(file))
    with searching(lambda size: plan_of(size, 8)):
        assert choose(pipe, data(), Wanted(global_batch=8)).plan.micro_batch == 4
    pipe._plan = None
    wrong = TensorDataset(torch.zeros(20, 5, dtype=torch.float64), torch.zeros(20, dtype=torch.long))
    with searching(lambda size: plan_of(size, 8)), pytest.raises(ModelError, match="the model fails on the first mic"):
        choose(pipe, wrong, Wanted(global_batch=8))


def test_a_run_of_fit_that_ends_early_goes_on_by_fit() -> None:
    end = RunInterrupted("mine", running=False, kept=True, storage="file:///runs", saved_step=5, steps=9)
    said = list[tuple[str, ...]]()

    def train(*_: Any, **__: Any) -> None:
        said.extend((after_interrupt(end), after_failure("mine", "file:///runs")))
        raise end

    with functions_in_threads(), mock.patch.object(FuncPipe, "train", train), pytest.raises(RunInterrupted):
        pipe_of().fit(loader(), micro_batch=4, progress=False)
    resume = "  resume it:  funcpipe fit ... --resume mine --storage file:///runs"
    in_python = "  in Python:  pipe.fit(dataset, ..., resume='mine', storage='file:///runs')"
    assert [lines[:2] for lines in said] == [
        (resume, in_python),
        (resume, "  status:     funcpipe run status mine --storage file:///runs"),
    ]
    assert after_failure("mine", "file:///runs")[0] == resume.replace("fit", "train")
