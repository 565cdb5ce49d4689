"""Replicas that train alone and meet every few steps have the bits of the reference in one process."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler

from funcpipe.client.prepare.job import Job
from funcpipe.core import Interval, Plan, Streams, Sync, Wire
from funcpipe.model.graph import trace
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.batches import Batches, Step
from funcpipe.training.computation import Computation
from funcpipe.training.fragments import Fragments
from funcpipe.training.local_steps import Meetings
from funcpipe.training.parameter_hooks import hooks_of
from funcpipe.training.plain import PlainTraining
from funcpipe.training.plain_rounds import LocalSteps, Tensors, added_in_order, train_in_turn
from funcpipe.training.recipe import Recipe
from funcpipe.worker.loop import Worker
from tests.e2e.int8_sums import Int8Sums
from tests.e2e.plans import even_plan, momentum
from tests.e2e.reference import largest_difference
from tests.examples import in_long_run
from tests.in_process import make_job, run_workers, states
from tests.support.in_turn import InTurn, even_bounds
from tests.training import test_ties
from tests.training.test_wire_sync import SAMPLES, WAYS, adam, assert_every_worker_has, model, plan_of, vectors

sgd: Callable[..., optim.Optimizer] = partial(optim.SGD, lr=0.1)


def local_plan(
    way: tuple[Sync, Streams | None] = WAYS[1], replicas: int = 2, wire: Wire = Wire.FP32, **options: Any
) -> Plan:
    return plan_of(way, replicas, wire, **{"sync_every": 2, **options})


def job_of(plan: Plan, optimizer: Callable[..., Any] = momentum, *, epochs: int = 2, **recipe: Any) -> Job:
    made = make_job(model(plan.wire_sync), plan, vectors, loss=F.cross_entropy, optimizer=optimizer, epochs=epochs)
    return replace(made, recipe=replace(made.recipe, **recipe))


def in_turn(job: Job, add: Callable[[Sequence[Tensors]], Tensors] = added_in_order) -> nn.Module:
    """What the reference has after the steps of `job`."""
    plan, local = job.plan, job.local_steps()
    assert local is not None
    return train_in_turn(
        model(plan.wire_sync),
        job.graph,
        vectors(),
        list(job.batches.steps_from(0, job.epochs)),
        recipe=job.recipe,
        seed=job.seed,
        replicas=plan.replicas,
        local=local,
        add=add,
    )


def assert_equal_to_the_reference(
    workers: dict[str, Worker], job: Job, add: Callable[[Sequence[Tensors]], Tensors] = added_in_order
) -> None:
    expected = in_turn(job, add).state_dict()
    assert_every_worker_has(workers, expected)
    start = model(job.plan.wire_sync).state_dict()
    assert any(not torch.equal(start[name], tensor) for name, tensor in expected.items() if "weight" in name)


@pytest.mark.parametrize(
    ("way", "replicas", "every", "optimizer", "outer"),
    [
        (WAYS[0], 2, 2, sgd, {}),
        (WAYS[1], 4, 4, momentum, {"outer_lr": 0.7, "outer_momentum": 0.9}),
        (WAYS[2], 2, "end", adam, {"outer_lr": 0.5}),
        (WAYS[3], 4, 2, adam, {"outer_momentum": 0.5}),
        (WAYS[4], 2, 4, sgd, {"outer_lr": 0.7, "outer_momentum": 0.9}),
    ],
)
def test_every_way_of_summing_has_the_bits_of_the_reference(
    way: tuple[Sync, Streams | None], replicas: int, every: int | str, optimizer: Callable[..., Any], outer: Any
) -> None:
    """The last step of an epoch is short: some replicas have no samples in it. One parameter has no gradient."""
    job = job_of(local_plan(way, replicas, sync_every=every, **outer), optimizer)
    assert_equal_to_the_reference(run_workers(job, MemoryStorage()), job)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_groups_add_first(delay: int) -> None:
    """Four replicas in two groups; if sums are late, what is added over groups waits for what is added within them."""

    def in_groups(contributions: Sequence[Tensors]) -> Tensors:
        return added_in_order([added_in_order(contributions[:2]), added_in_order(contributions[2:])])

    job = job_of(local_plan(WAYS[5], 4, sync_every=3, sync_delay=delay))
    assert_equal_to_the_reference(run_workers(job, MemoryStorage()), job, in_groups)


@pytest.mark.parametrize(
    ("way", "replicas", "every", "fragments", "options"),
    [
        (WAYS[4], 2, 4, 2, {"outer_lr": 0.7, "outer_momentum": 0.9}),
        (WAYS[1], 4, 2, 2, {}),
        (WAYS[3], 2, 5, 3, {"outer_momentum": 0.5}),
        pytest.param(WAYS[0], 2, 3, 3, {"outer_lr": 0.8}, marks=pytest.mark.long),
        pytest.param(WAYS[2], 4, 6, 4, {"outer_momentum": 0.5}, marks=pytest.mark.long),
    ],
)
def test_fragments_meet_at_their_own_steps_as_in_the_reference(
    way: tuple[Sync, Streams | None], replicas: int, every: int, fragments: int, options: Any
) -> None:
    """Stages have a few parameters each, so that some of many fragments hold none."""
    job = job_of(local_plan(way, replicas, sync_every=every, sync_fragments=fragments, **options), adam, epochs=3)
    assert_equal_to_the_reference(run_workers(job, MemoryStorage()), job)
    whole = replace(job, plan=replace(job.plan, sync_fragments=1))
    together, apart = in_turn(whole).state_dict(), in_turn(job).state_dict()
    assert any(not torch.equal(values, apart[name]) for name, values in together.items())


@pytest.mark.parametrize(
    ("way", "replicas", "every", "fragments", "delay", "options"),
    [
        (WAYS[4], 2, 3, 1, 2, {"outer_lr": 0.7, "outer_momentum": 0.9}),
        (WAYS[1], 4, 4, 2, 1, {}),
        (WAYS[3], 2, 4, 1, 3, {"outer_momentum": 0.5}),  # of which two are left when the run ends
        pytest.param(WAYS[0], 2, 5, 2, 2, {"outer_lr": 0.8}, marks=pytest.mark.long),
        pytest.param(WAYS[2], 4, 4, 3, 1, {"outer_momentum": 0.5}, marks=pytest.mark.long),
    ],
)
def test_meetings_that_are_late_go_on_beside_the_next_steps_as_in_the_reference(
    way: tuple[Sync, Streams | None], replicas: int, every: int, fragments: int, delay: int, options: Any
) -> None:
    plan = local_plan(way, replicas, sync_every=every, sync_fragments=fragments, sync_delay=delay, **options)
    job = job_of(plan, adam)
    assert_equal_to_the_reference(run_workers(job, MemoryStorage()), job)
    at_once, late = in_turn(replace(job, plan=replace(plan, sync_delay=0))).state_dict(), in_turn(job).state_dict()
    assert any(not torch.equal(values, late[name]) for name, values in at_once.items())


@pytest.mark.parametrize(("wire", "delay"), [(Wire.BF16, 0), (Wire.INT8, 0), (Wire.INT8, 1)])
def test_fragments_are_rounded_each_by_itself(wire: Wire, delay: int) -> None:
    """In 8 bits each keeps its own errors, in blocks that begin with it, also where all meet."""
    meets = {"sync_every": 4, "sync_fragments": 2, "sync_delay": delay, "outer_momentum": 0.5}
    job = job_of(local_plan(WAYS[4], 2, wire, **meets), epochs=3)
    workers = run_workers(job, MemoryStorage())
    add = rounded_to_bf16 if wire is Wire.BF16 else rounded_to_int8(workers, job.plan)
    assert_equal_to_the_reference(workers, job, add)


def rounded_to_bf16(contributions: Sequence[Tensors]) -> Tensors:
    """The rounded sum of what each replica contributes, rounded."""
    through = [{name: values.bfloat16().float() for name, values in one.items()} for one in contributions]
    return {name: values.bfloat16().float() for name, values in added_in_order(through).items()}


def rounded_to_int8(workers: dict[str, Worker], plan: Plan) -> Callable[[Sequence[Tensors]], Tensors]:
    """The same in 8 bits: each stage cuts its own parameters into blocks, and what rounding takes is fed back."""
    parameters = dict(model(plan.wire_sync).named_parameters())
    held = [workers[f"s{stage}.r0"].computation.state().tensors for stage in range(len(plan.stages))]
    fragments: dict[tuple[str, ...], Int8Sums] = {}

    def add(contributions: Sequence[Tensors]) -> Tensors:
        names = tuple(contributions[0])
        if names not in fragments:  # each has blocks and errors of its own
            stages = [[i for i, name in enumerate(names) if f"model/{name}" in own] for own in held]
            fragments[names] = Int8Sums([own for own in stages if own], [parameters[name].numel() for name in names])
        total = fragments[names]([[one[name] for name in names] for one in contributions])
        return {name: values for name, values in zip(names, total, strict=True) if values is not None}

    return add


@pytest.mark.parametrize("wire", [Wire.BF16, Wire.INT8])
@pytest.mark.parametrize(
    ("way", "replicas", "every"), [(WAYS[1], 2, 2), (WAYS[4], 4, 2), *in_long_run([(WAYS[2], 2, 1000)])]
)
def test_what_is_rounded_on_its_way_is_rounded_in_meetings_alone(
    way: tuple[Sync, Streams | None], replicas: int, every: int, wire: Wire
) -> None:
    job = job_of(local_plan(way, replicas, wire, sync_every=every, outer_momentum=0.5), epochs=3)
    workers = run_workers(job, MemoryStorage())
    add = rounded_to_bf16 if wire is Wire.BF16 else rounded_to_int8(workers, job.plan)
    assert_equal_to_the_reference(workers, job, add)


@pytest.mark.parametrize(("replicas", "by"), [(2, Interval.STEP), (4, Interval.EPOCH)])
def test_each_replica_clips_by_its_own_norm_and_steps_its_own_schedule(replicas: int, by: Interval) -> None:
    schedule = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
    plan = local_plan(WAYS[0], replicas, sync_every=2)
    job = job_of(plan, adam, epochs=3, scheduler=schedule, scheduler_interval=by, clip_grad_norm=0.3)
    workers = run_workers(job, MemoryStorage())
    assert_equal_to_the_reference(workers, job)
    by_value = job_of(plan, clip_grad_value=0.01)
    assert_equal_to_the_reference(run_workers(by_value, MemoryStorage()), by_value)


@pytest.mark.parametrize(
    ("wire", "changed"),
    [
        (Wire.FP32, {}),
        (Wire.INT8, {}),
        (Wire.FP32, {"sync_fragments": 2}),
        (Wire.FP32, {"sync_delay": 1}),
        (Wire.FP32, {"shard_optimizer": True}),
    ],
)
def test_copies_of_tied_parameters_stay_equal_though_one_stage_sums_them(wire: Wire, changed: dict[str, Any]) -> None:
    """In a step, tied parameters sum over the stages of their replica; where replicas meet, their first holder does.

    They are in the first fragment of all stages that hold them. If replicas divide the outer step, those of the first
    holder's stage update a part each, which goes to the other holders.
    """
    torch.manual_seed(4)
    made = test_ties.TiedThrice().double() if wire is Wire.FP32 else test_ties.TiedThrice()
    ids = torch.zeros(2, 3, dtype=torch.long)
    plan = even_plan(made, (ids,), stages=3, replicas=2, micro_batch=2, micro_batches=2, wire_sync=wire)
    plan = replace(plan, sync_every=2, outer_lr=0.8, outer_momentum=0.6, **changed)
    job = make_job(
        copy.deepcopy(made), plan, test_ties.data, loss=test_ties.loss, optimizer=momentum, clip_grad_norm=1.0
    )
    workers = run_workers(job, MemoryStorage())
    held = [worker.computation.state().state_dict() for worker in workers.values()]
    tied = [state[name] for state in held for name in ("words.weight", "middle.weight", "head.weight") if name in state]
    assert len({tensor.data_ptr() for tensor in tied}) > 2
    assert all(torch.equal(one, tied[0]) for one in tied)
    if wire is Wire.FP32:
        steps = list(job.batches.steps_from(0, 1))
        local = job.local_steps()
        assert local is not None
        trained = train_in_turn(
            made, job.graph, test_ties.data(), steps, recipe=job.recipe, seed=0, replicas=2, local=local
        )
        assert largest_difference(states(workers), trained.state_dict()) < 1e-12


class LocalInTurn(InTurn):
    """The same without threads, which share a generator of random numbers."""

    def __init__(self, *args: Any, meetings: Meetings) -> None:
        self.meetings = meetings
        super().__init__(*args)

    def worker(self, stage: int, replica: int) -> Computation:
        return Computation(
            self.modules[stage][replica],
            recipe=self.recipes[stage][replica],
            seed=self.plain.seed,
            recompute=True,
            replica=replica,
            replicas=self.replicas,
            stage_number=stage,
            norm=self.plain.recipe.gradient_norm(),
            hooks=hooks_of(self.stages[stage].named_parameters()),
            meetings=self.meetings,
        )

    def synchronise(self, step: Step) -> None:
        """Nothing: each replica has its own gradients."""

    def update(self, step: Step, stage: int, replica: int) -> None:
        if replica or not self.meetings.is_after(step.number):
            if not self.meetings.is_after(step.number):
                super().update(step, stage, replica)
            return
        row = self.workers[stage]
        for worker in row:
            worker.local_update()
            worker.flatten()
        total = reduce(torch.add, [worker.vector().vector for worker in row])
        for worker in row:
            worker.vector().vector.copy_(total)
            worker.update()


class Drawing(nn.Module):
    """Draws in its forward, and has a hook of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.2)
        )
        self.last = nn.Linear(8, 5)
        self.last.bias.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Any:
        return self.last(self.layers(x))


@pytest.mark.parametrize("replicas", [2, 4])
def test_each_replica_draws_the_numbers_of_its_micro_batches_and_runs_hooks_on_its_gradients(replicas: int) -> None:
    torch.manual_seed(6)
    made = Drawing()
    plan = local_plan(WAYS[1], replicas, sync_every=2, outer_lr=0.9, outer_momentum=0.4)
    batches = Batches(samples=SAMPLES, global_batch=plan.global_batch, micro_batch=2, seed=0)
    steps = tuple(batches.steps_from(0, 3))
    plain = PlainTraining(
        model=made,
        graph=trace(made, (torch.zeros(2, 5),)),
        dataset=vectors(),
        steps=steps,
        recipe=Recipe(loss=F.cross_entropy, optimizer=adam, clip_grad_norm=0.5),
        seed=0,
        replicas=replicas,
        local=LocalSteps.of(plan, {}),
    )
    cut = LocalInTurn(plain, even_bounds(plain.graph, 2), replicas, meetings=Meetings(plan=plan, steps=len(steps)))
    found, expected = cut.train(), plain.run().end
    for name, tensor in expected.items():
        if "running" in name:
            assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-7), name
        else:
            assert torch.equal(found[name], tensor), name


def test_a_step_that_is_given_up_begins_no_round_and_ends_none() -> None:
    """If it is the first of a round, there is none afterwards; else that goes on from where it began."""
    layer = nn.Linear(2, 1)
    named = dict(layer.named_parameters())
    plan = local_plan(WAYS[1], 2, sync_every=4, sync_fragments=2)
    fragments = Fragments(Meetings(plan=plan, steps=8), named, [*named.values()], {})
    fragments.begin_step()
    assert fragments.goes_on
    fragments.undo_step()
    assert not fragments.goes_on
    assert {id(tensor) for tensor in fragments.shared} == {id(parameter) for parameter in named.values()}
    began = {tuple(parameter.shape): parameter.detach().clone() for parameter in named.values()}
    fragments.begin_step()
    with torch.no_grad():
        layer.weight.add_(1.0)
    fragments.begin_step()
    fragments.undo_step()
    assert fragments.goes_on
    assert all(torch.equal(tensor, began[tuple(tensor.shape)]) for tensor in fragments.shared)


def test_replicas_that_divide_the_outer_step_meet_without_momentum_too() -> None:
    """Each updates the elements that it sums, from their mean: as the reference, but for rounding."""
    job = job_of(local_plan(WAYS[1], 2, sync_every=2, outer_lr=0.7, shard_optimizer=True))
    found = states(run_workers(job, MemoryStorage()))
    assert largest_difference(found, in_turn(job).state_dict()) < 1e-5
    assert largest_difference(found, in_turn(replace(job, plan=replace(job.plan, outer_lr=1.0))).state_dict()) > 1e-4
