"""Whole runs of replicas that train alone: disturbed in every way, and resumed, they keep the bits of the reference."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.job import Job
from funcpipe.core import Outcome, Streams, Sync, Validation
from funcpipe.errors import PlanError
from funcpipe.platforms.catalog import load_spec
from funcpipe.testing.faults import FunctionFaults
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.testing.thread_platform import ThreadPlatform, one_at_a_time
from funcpipe.training.plain_rounds import train_in_turn
from funcpipe.worker import hand_over
from tests.client import validated
from tests.client.test_learning import STEADY, halted, job, run
from tests.examples import in_long_run
from tests.training.learning import all_steps, data, difference, network

DIVIDED: dict[str, Any] = {"shard_optimizer": True}


def local(every: int | str = 4, stages: int = 2, replicas: int = 2, **plan: Any) -> Job:
    """With fragments or a delay, nothing is clipped: norms of doubles, added stage by stage, may be off by a digit."""
    clip = 0.5 if plan.get("sync_fragments", 1) == 1 and not plan.get("sync_delay") else None
    made = job(stages, replicas, average=None, clip_grad_norm=clip)
    return replace(made, plan=replace(made.plan, sync_every=every, outer_lr=0.8, outer_momentum=0.5, **plan))


@functools.cache
def expected(every: int | str = 4, replicas: int = 2, **plan: Any) -> dict[str, Tensor]:
    made = local(every, 2, replicas, **plan)
    steps = made.local_steps()
    assert steps is not None
    trained = train_in_turn(
        network(), made.graph, data(), all_steps(), recipe=made.recipe, seed=0, replicas=replicas, local=steps
    )
    return trained.state_dict()


@functools.cache
def quiet(fragments: int = 1) -> Mapping[str, Tensor]:
    """What replicas have that divide what they keep between meetings."""
    return run(local(sync_fragments=fragments, **DIVIDED)).state_dict()


STREAMED = {"sync": Sync.STREAMED, "streams": Streams(3, 1, 2)}


@pytest.mark.parametrize(("way", "replicas"), [({}, 2), (STREAMED, 4), *in_long_run([({}, 4), (STREAMED, 2)])])
def test_a_divided_outer_step_is_the_same_up_to_rounding(way: dict[str, Any], replicas: int) -> None:
    """It takes the mean of parameters where the reference takes that of their changes."""
    result = run(local(4, 2, replicas, **DIVIDED, **way))
    assert difference(result.state_dict(), expected(4, replicas)) < 1e-12


def assert_same_bits(result: RunResult, other: Mapping[str, Tensor]) -> None:
    assert all(torch.equal(tensor, other[name]) for name, tensor in result.state_dict().items())


def test_hand_overs_cost_no_bit_of_meetings_that_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a meeting has exchanged beside a step is exchanged again by each function that takes over."""
    monkeypatch.setattr(hand_over, "leaves_at_s", lambda *_: 0.0)  # after one step each
    late = {"sync_fragments": 1, "sync_delay": 2}
    result = run(local(3, **late), replace(STEADY, lifetime_s=600.0))
    assert sum(report.outcome is Outcome.HANDED_OVER for report in result.workers) == 4 * (len(result.losses) - 1)
    assert_same_bits(result, expected(3, **late))


@pytest.mark.parametrize(("divided", "fragments"), [(False, 1), (True, 2), *in_long_run([(True, 1), (False, 2)])])
def test_hand_overs_cost_no_bit(monkeypatch: pytest.MonkeyPatch, divided: bool, fragments: int) -> None:
    monkeypatch.setattr(hand_over, "leaves_at_s", lambda *_: 0.0)  # after one step each
    result = run(local(shard_optimizer=divided, sync_fragments=fragments), replace(STEADY, lifetime_s=600.0))
    assert sum(report.outcome is Outcome.HANDED_OVER for report in result.workers) == 4 * (len(result.losses) - 1)
    assert_same_bits(result, quiet(fragments) if divided else expected(sync_fragments=fragments))
    assert difference(result.state_dict(), expected(sync_fragments=fragments)) < 1e-12


IN_A_ROUND = (2, ("put-gradient", 11))  # the second one
IN_A_MEETING = (3, ("put-merged", 2))  # the second one
SAVING = (1, ("/checkpoints/s0/", 3))


@pytest.mark.parametrize(
    ("number", "writing", "divided"),
    [
        *[(*IN_A_ROUND, True), (*IN_A_MEETING, False), (*SAVING, True)],
        *in_long_run([(*IN_A_ROUND, False), (*IN_A_MEETING, True), (*SAVING, False)]),
    ],
)
def test_a_killed_function_costs_no_bit(number: int, writing: tuple[str, int], divided: bool) -> None:
    storage, faulty = MemoryStorage(), FunctionFaults(killed_writing=writing)
    platform = ThreadPlatform(
        load_spec("local"), storage, faults_of=lambda started: faulty if started == number else FunctionFaults()
    )
    result = run(local(shard_optimizer=divided), platform=platform, storage=storage)
    assert result.bill.functions > 4
    assert_same_bits(result, quiet() if divided else expected())


@pytest.mark.parametrize(("every", "stages"), [(3, 2), (4, 4), *in_long_run([(4, 2), ("end", 2)])])
def test_a_halted_run_goes_on_with_each_replica_s_own(every: int | str, stages: int) -> None:
    """After four steps: in the middle of a round, at the end of one, where stages may be other ones, and before any."""
    before, storage = halted(local(every))
    result = run(local(every, stages), storage=storage, before=before)
    assert_same_bits(result, expected(every))


@pytest.mark.parametrize(("every", "stages", "replicas"), [(3, 2, 2), (4, 2, 2), (4, 4, 2), (4, 1, 4)])
def test_so_does_one_that_divides_what_it_keeps(every: int, stages: int, replicas: int) -> None:
    """At the end of a round with other stages and replicas: what each has kept is put together, and cut otherwise."""
    before, storage = halted(local(every, **DIVIDED))
    result = run(local(every, stages, replicas, **DIVIDED), storage=storage, before=before)
    if replicas == 2:
        assert difference(result.state_dict(), expected(every)) < 1e-12


@pytest.mark.parametrize("divided", [False, True])
def test_a_halted_run_goes_on_with_the_same_fragments(divided: bool) -> None:
    """After four steps the first fragment has met, and the second is in the middle of its round."""
    before, storage = halted(local(4, sync_fragments=2, shard_optimizer=divided))
    result = run(local(4, sync_fragments=2, shard_optimizer=divided), storage=storage, before=before)
    assert difference(result.state_dict(), expected(4, sync_fragments=2)) < 1e-12
    if not divided:
        assert_same_bits(result, expected(4, sync_fragments=2))


@pytest.mark.parametrize("every", [3, 4])
def test_a_halted_run_goes_on_with_what_is_late(every: int) -> None:
    """After four steps: in the middle of the steps beside which the meeting goes on, and before the first of them."""
    before, storage = halted(local(every, sync_delay=2))
    result = run(local(every, sync_delay=2), storage=storage, before=before)
    assert_same_bits(result, expected(every, sync_delay=2))


@pytest.mark.parametrize("other", [{"sync_fragments": 4}, {"sync_fragments": 2, "sync_delay": 1}])
def test_it_does_not_with_other_meetings(other: dict[str, int]) -> None:
    before, storage = halted(local(4, sync_fragments=2))
    with pytest.raises(PlanError, match=r"after step 4, in the middle of a round of sync_every=4, .*sync_fragments"):
        run(local(4, **other), storage=storage, before=before)


@pytest.mark.parametrize("divided", [False, True])
def test_what_is_kept_is_divided_from_the_end_of_a_round_on_or_not_any_more(divided: bool) -> None:
    before, storage = halted(local(4, shard_optimizer=divided))
    result = run(local(4, shard_optimizer=not divided), storage=storage, before=before)
    assert difference(result.state_dict(), expected(4)) < 1e-12


@pytest.mark.parametrize(
    "other", [{"shard_optimizer": True}, {"replicas": 4}, {"stages": 3}, {"every": 4}, {"every": 1}]
)
def test_in_the_middle_of_a_round_a_run_is_resumed_with_its_own_replicas_alone(other: dict[str, Any]) -> None:
    before, storage = halted(local(3))
    objects = storage.list("")
    changed = local(**{"every": 3, **other}) if other != {"every": 1} else job(average=None, clip_grad_norm=0.5)
    with pytest.raises(PlanError, match=r"after step 4, in the middle of a round of sync_every=3, .*--from-start"):
        run(changed, storage=storage, before=before)
    assert storage.list("") == objects


def test_at_the_end_of_a_round_other_replicas_go_on() -> None:
    """Two go on as four: the third has the optimiser of the first, and the fourth that of the second."""
    before, storage = halted(local(4))
    result = run(local(4, 1, 4), storage=storage, before=before)
    assert len(result.losses) == len(all_steps())
    found = result.state_dict()
    assert any(not torch.equal(found[name], tensor) for name, tensor in expected(4).items())
    before, storage = halted(local(4))
    assert len(run(job(average=None, clip_grad_norm=0.5), storage=storage, before=before).losses) == len(all_steps())


@pytest.mark.parametrize(
    ("killed", "meets"),
    [
        (None, {"sync_every": "end"}),
        (("put-gradient", 9), {"sync_every": "end"}),
        (("put-gradient", 9), {"sync_every": 2, "sync_fragments": 2}),
    ],
)
def test_a_round_ends_before_each_validation(killed: tuple[str, int] | None, meets: dict[str, Any]) -> None:
    """The model draws, and has running statistics. Six steps are validated after every second one."""
    made = validated.job(Validation(data=validated.held_out, every_steps=2))
    plan = replace(made.plan, outer_lr=0.8, outer_momentum=0.5, **meets)
    made = replace(made, plan=plan)
    local_steps = made.local_steps()
    assert local_steps is not None
    steps = list(made.batches.steps_from(0, made.epochs))
    trained = train_in_turn(
        *(validated.net(), made.graph, validated.data(), steps),
        recipe=made.recipe,
        seed=made.seed,
        replicas=plan.replicas,
        local=local_steps,
        ends=(1, 3),
    )
    storage = MemoryStorage()
    faults = FunctionFaults() if killed is None else FunctionFaults(killed_writing=killed)
    platform = ThreadPlatform(
        load_spec("local"), storage, faults_of=lambda number: faults if number == 3 else FunctionFaults()
    )
    with one_at_a_time():
        result = validated.run(made, storage, platform)
    assert difference(result.state_dict(), trained.state_dict()) < 1e-12
    assert [report.step for report in result.validations] == [2, 4, 6]
    found = validated.mean_loss(validated.net(), trained.state_dict(), validated.held_out())
    assert result.validations[-1].values["val_loss"] == pytest.approx(found, abs=1e-12)
    assert (result.bill.functions > plan.workers) is (killed is not None)
