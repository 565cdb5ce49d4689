"""Plans in several stores: estimates equal an oracle that counts every object, and limits of stores are kept."""

import json
import math
from dataclasses import replace

import pytest

from funcpipe.analysis.predict import predict
from funcpipe.comm.collectives import pattern, transfers
from funcpipe.core import (
    OptimizerKind,
    Plan,
    PlatformSpec,
    ScheduleKind,
    Stores,
    Streams,
    Sync,
    SyncWay,
    TrainingSpec,
    find_routes,
    from_text,
    stages_of_layers,
    to_text,
)
from funcpipe.errors import Infeasible, InvalidValue, PlanError
from funcpipe.partitioner.alternatives import Changes
from funcpipe.partitioner.cost.evaluate import check_objects, evaluate
from funcpipe.partitioner.cost.stores import largest_shares, sync_bytes_each
from funcpipe.partitioner.explain import explain
from funcpipe.partitioner.explain_text import render
from funcpipe.partitioner.optimize import optimize
from funcpipe.partitioner.problem.problem import Problem, StageChoice
from funcpipe.partitioner.stores import checkpoint_usd
from tests.partitioner.instances import MB, chain, platform, store

AUTO = Stores.of("auto")


TWO = (
    store("fast", latency_s=0.001, price_put_usd=0.0, price_get_usd=0.0, price_usd_h=0.3, shared_bytes_s=2e8),
    store("near", latency_s=0.008, price_sent_usd_gb=0.0032, price_received_usd_gb=0.0006, durable=True),
)
SPEC = replace(platform(3), stores=TWO)
SYNCS = [
    (Sync.THREE_PHASE, None),
    (Sync.PIPELINED, None),
    (Sync.ALL_REDUCE, None),
    (Sync.EXCHANGE, Streams(3, 1, 1)),
    (Sync.STREAMED, Streams(4, 2, 2)),
    (Sync.STREAMED, Streams(3, 3, 3)),
    (Sync.HIERARCHICAL, None),
    (Sync.TREE, Streams(2, 2, 2)),
]


def mixed_plan(sync: Sync = Sync.STREAMED, streams: Streams | None = None, skips: int = 3) -> Plan:
    profile = chain(5, 3, 7, skips=skips)
    problem = Problem(profile=profile, spec=SPEC, training=TrainingSpec(global_batch=32))
    problem = replace(problem, stores=Stores(messages="near", sums="fast"))
    setting = problem.setting(4, sync, ScheduleKind.GPIPE, streams)
    return problem.plan(setting, [StageChoice(0, 2, 2, False), StageChoice(2, 5, 2, False)])


@pytest.mark.parametrize(("sync", "streams"), SYNCS)
def test_an_estimate_by_store_equals_a_count_of_every_object(sync: Sync, streams: Streams | None) -> None:
    plan = mixed_plan(sync, streams)
    estimate, profile = plan.estimate, chain(5, 3, 7, skips=3)
    assert estimate
    messages, sums = estimate.stores
    routes = find_routes(stages_of_layers((s.first, s.stop) for s in plan.stages), profile.tensors, profile.ties)
    sent = sum(r.payload_bytes for r in routes.activations) + sum(g.payload_bytes for g in routes.gradients)
    read = sum(r.payload_bytes * len(r.consumers) for r in routes.activations)
    read += sum(g.payload_bytes for g in routes.gradients)
    assert (messages.kind, messages.store, sums.kind, sums.store) == ("messages", "near", "sums", "fast")
    assert messages.puts == plan.micro_batches * (len(routes.activations) + len(routes.gradients))
    assert messages.sent_bytes == pytest.approx(plan.micro_batches * sent, abs=1)
    assert messages.received_bytes == pytest.approx(plan.micro_batches * read, abs=1)
    assert messages.request_usd == pytest.approx(messages.puts * 1e-6 + messages.gets * 1e-7)
    gb = 2**30
    usd = messages.sent_bytes / gb * 0.0032 + messages.received_bytes / gb * 0.0006
    assert messages.transfer_usd == pytest.approx(usd)
    assert messages.hours_usd == sums.request_usd == sums.transfer_usd == 0
    assert sums.hours_usd == pytest.approx(0.3 / 3600 * estimate.iteration_s)
    trace = predict(plan, profile, SPEC)
    moved = {"put-split", "put-merged", "put-tied", "put-tied-sum"}
    from_trace = [event for event in trace.events if event.task.partition(".")[0] in moved]
    assert sums.puts == len(from_trace)
    assert sums.sent_bytes == pytest.approx(sum(event.payload_bytes for event in from_trace), rel=1e-6)
    assert estimate.puts == messages.puts + sums.puts
    assert estimate.request_usd == pytest.approx(sum(item.request_usd + item.transfer_usd for item in estimate.stores))
    items = estimate.compute_usd + estimate.request_usd + estimate.hours_usd
    assert estimate.cost_usd == pytest.approx(items)
    assert estimate.compute_usd == pytest.approx(4 * 2 * 3 * 1.6e-5 * estimate.iteration_s)


@pytest.mark.parametrize(("sync", "streams"), SYNCS)
@pytest.mark.parametrize("replicas", [2, 3, 5, 8])
def test_largest_objects_and_bytes_are_those_of_the_transfers(
    sync: Sync, streams: Streams | None, replicas: int
) -> None:
    made = pattern(sync, replicas, streams)
    raws, merges, received = [], [], 0.0
    for me in range(replicas):
        for transfer in transfers(made, me):
            match transfer.move.value:
                case "put-split":
                    raws.append(made.raw_share(me, transfer.part))
                case "put-merged":
                    merges.append(made.merged_share(transfer.part))
                case "get-split":
                    received += made.read_share(transfer.part)
                case "get-merged":
                    received += made.merged_share(transfer.part)
    raw, merged = largest_shares(SyncWay(sync, streams), replicas)
    assert raw == pytest.approx(max(raws))
    assert merged == pytest.approx(max(merges, default=0.0))
    sent_each, received_each = sync_bytes_each(sync, replicas, 1.0, 1.0)
    assert sent_each * replicas == pytest.approx(sum(raws) + sum(merges))
    assert received_each * replicas == pytest.approx(received)


def test_the_lanes_have_the_latency_and_links_of_their_stores() -> None:
    plan = mixed_plan(skips=0)
    profile = chain(5, 3, 7)
    slow = replace(SPEC, stores=(replace(TWO[0], latency_s=1.0), TWO[1]))
    before, after = evaluate(plan, profile, SPEC), evaluate(plan, profile, slow)
    for one, other in zip(before.stages, after.stages, strict=True):
        assert other.forward_upload_s == one.forward_upload_s
        assert other.sync_s > one.sync_s + 1
    narrow = replace(SPEC, stores=(TWO[0], replace(TWO[1], bytes_s=1e6)))
    limited = evaluate(plan, profile, narrow)
    sent = profile.tensors[1].forward_bytes
    assert limited.stages[0].forward_upload_s == pytest.approx(sent / 1e6 + 0.008)
    assert limited.stages[0].sync_s == before.stages[0].sync_s
    assert predict(plan, profile, narrow).end_s > predict(plan, profile, SPEC).end_s


def test_a_shared_store_is_shared_only_by_what_goes_through_it() -> None:
    """In the simulator, sums through a store with a cap do not slow down messages through another one."""
    plan, profile = mixed_plan(skips=0), chain(5, 3, 7)
    sums_alone = predict(plan, profile, replace(SPEC, stores=(replace(TWO[0], shared_bytes_s=2e7), TWO[1])))
    unshared = predict(plan, profile, replace(SPEC, stores=(replace(TWO[0], shared_bytes_s=None), TWO[1])))

    def ends(trace: object, start: str) -> list[float]:
        return [event.end_s for event in trace.events if event.task.startswith(start)]  # type: ignore[attr-defined]

    assert ends(sums_alone, "put-activation") == pytest.approx(ends(unshared, "put-activation"))
    assert sums_alone.end_s > unshared.end_s


def test_by_default_plans_use_the_platform_s_default_store() -> None:
    profile, training = chain(4, 3, 1), TrainingSpec(global_batch=16, time_value=20.0)
    plan = optimize(profile, SPEC, training)
    assert plan.stores.is_default
    without = optimize(profile, platform(3), training)
    assert without.estimate
    assert plan.estimate == without.estimate


def test_what_was_chosen_is_explained_and_written_and_changes_with_prices() -> None:
    profile = chain(6, 3, 2)
    training = TrainingSpec(global_batch=64, time_value=60.0, stores=AUTO)
    plan = optimize(profile, SPEC, training)
    assert not plan.stores.is_default
    assert plan.solver
    read_back = from_text(Plan, to_text(plan), source="plan.json")
    assert read_back == plan
    found = explain(plan, profile, SPEC, training)
    assert found.objective == pytest.approx(plan.solver.objective)
    by_kind = {item.kind: item for item in found.stores}
    for kind in ("messages", "sums"):
        if by_kind[kind].default is not None:
            assert by_kind[kind].default.worse_by >= -1e-12  # type: ignore[union-attr]
    text = render(found)
    assert f"messages in {plan.stores.messages}: a test's" in text
    dearer = Changes(request_price=1e4).apply(SPEC)
    assert dearer.store("fast").price_usd_h == pytest.approx(3000)
    assert "fast" not in optimize(profile, dearer, training).stores.names


def test_checkpoints_go_only_where_they_last() -> None:
    profile = chain(4, 3, 1)
    training = TrainingSpec(global_batch=16, time_value=20.0)
    quick = replace(SPEC, stores=(TWO[0], replace(TWO[1], price_sent_usd_gb=0.0, latency_s=0.0, price_put_usd=0.0)))
    plan = optimize(profile, quick, replace(training, stores=Stores(checkpoints="auto")))
    assert plan.stores == Stores(checkpoints="near")
    with pytest.raises(InvalidValue, match="must be a store that keeps what it has acknowledged, got 'fast'"):
        optimize(profile, SPEC, replace(training, stores=Stores(checkpoints="fast")))


def test_checkpoints_of_replicas_that_train_alone_have_a_part_of_each() -> None:
    """For each parameter the first replica saves two values, the model and a momentum; of four replicas that train
    alone it saves its own parameters besides, and so do the others, with their momentum.
    """
    profile = chain(5, 3, 7)
    dear = replace(SPEC, stores=(replace(TWO[1], price_sent_usd_gb=1e6, price_put_usd=0.0),))
    problem = Problem(profile=profile, spec=dear, training=TrainingSpec(global_batch=32))
    alike = replace(mixed_plan(skips=0), optimizer=OptimizerKind.MOMENTUM, stores=Stores())
    parameters = profile.parameter_bytes(0, 5)
    for changes, values in (({}, 2), ({"shard_optimizer": True}, 2), ({"sync_every": 4}, 3 + 3 * 2)):
        plan = replace(alike, **changes)
        sent_usd = values * parameters / 2**30 * 1e6
        assert checkpoint_usd(plan, problem, "near") == pytest.approx(sent_usd, rel=1e-3)


def test_no_plan_for_want_of_room_in_a_store_names_the_store() -> None:
    """No function holds the whole model, so stages have to send each other activations."""
    drawn = chain(5, 3, 7)
    profile = replace(drawn, layers=tuple(replace(layer, constant_bytes=700 * MB) for layer in drawn.layers))
    small = replace(SPEC, stores=(replace(TWO[0], largest_bytes=1000), TWO[1]))
    training = TrainingSpec(global_batch=32, stores=Stores(messages="fast"))
    with pytest.raises(Infeasible, match="takes objects of 1000 bytes at most in 'fast', where messages are; choose"):
        optimize(profile, small, training)


def test_objects_too_large_for_a_store_are_refused() -> None:
    small = replace(SPEC, stores=(replace(TWO[0], largest_bytes=1000), TWO[1]))
    with pytest.raises(PlanError, match=r"stage 0 writes an object that is too large for 'near', .* or 'fast'"):
        check_objects(mixed_plan(skips=0), chain(5, 3, 7), small)
    check_objects(mixed_plan(skips=0), chain(5, 3, 7), SPEC)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("express", "stores must be 'default', 'auto', or a store for some of its kinds, got 'express'"),
        ({"letters": "near"}, "stores must name kinds among messages, sums, checkpoints, got 'letters'"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(asked: object, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        Stores.of(asked)  # type: ignore[arg-type]


def test_a_store_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidValue, match="store must be one of default, fast, near, which test has, got 'far'"):
        optimize(chain(3, 3, 1), SPEC, TrainingSpec(global_batch=16, stores=Stores(sums="far")))


def test_older_plans_and_platforms_read_back() -> None:
    plan = optimize(chain(3, 3, 1), platform(3), TrainingSpec(global_batch=16))
    older = json.loads(to_text(plan))
    del older["stores"], older["made_for"]["stores"], older["estimate"]["stores"], older["estimate"]["hours_usd"]
    read = from_text(Plan, json.dumps(older), source="plan.json")
    assert read.stores == Stores()
    spec = json.loads(to_text(platform(3)))
    for name in ("stores", "puts_s", "gets_s", "largest_bytes"):
        del spec[name]
    assert from_text(PlatformSpec, json.dumps(spec), source="platform.json") == platform(3)
    assert math.isclose(platform(3).store("default").latency_s, 0.04)
