from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.errors import InvalidValue
from funcpipe.runstate.generations import is_written
from funcpipe.runstate.keys import Keys, generation_of, is_message
from funcpipe.runstate.reports import ValidationKeys

runs = st.from_regex(r"[a-z0-9][a-z0-9-]{0,20}", fullmatch=True)


def everything(keys: Keys, step: int, stage: int, worker: str) -> list[str]:
    return [
        keys.bundle(stage),
        keys.parameters(stage),
        keys.record,
        keys.halt,
        keys.message(worker, step, f"forward.{worker}"),
        keys.messages(worker),
        keys.step_report(step, worker),
        keys.step_summary(worker, step, step),
        keys.step_summaries(worker),
        keys.lease(worker, step),
        keys.heartbeat(worker, step),
        keys.verdict(step),
        keys.hand_over(worker, step),
        keys.function(worker, step, "0a"),
        keys.worker_report(worker, step),
        keys.trace(worker, step),
        keys.checkpoint(stage, f"{step:08d}.{worker}.json"),
    ]


@given(runs, runs, st.integers(0, 3), st.integers(0, 3), st.integers(0, 10**6), st.integers(0, 10**6))
def test_runs_generations_and_steps_never_share_a_key(
    run: str, other: str, generation: int, other_generation: int, step: int, other_step: int
) -> None:
    keys, others = Keys(run, generation), Keys(other, other_generation)
    assert all(generation_of(key) == keys for key in everything(keys, step, 0, "s0.r0"))
    if run != other:
        assert not set(everything(keys, step, 0, "s0.r0")) & set(everything(others, step, 0, "s0.r0"))
        assert not keys.run_prefix.startswith(others.run_prefix)
    if generation != other_generation:
        assert not set(everything(keys, step, 0, "s0.r0")) & set(
            everything(Keys(run, other_generation), step, 0, "s0.r0")
        )
    again = Keys(run, generation, "0a")
    assert not set(everything(keys, step, 0, "s0.r0")) & set(everything(again, step, 0, "s0.r0"))
    assert not again.prefix.startswith(keys.prefix)
    if (generation, step) != (other_generation, other_step):
        assert keys.message("s0.r0", step, "t") != Keys(run, other_generation).message("s0.r0", other_step, "t")


@given(runs, st.text(max_size=12), st.text(max_size=12), st.integers(0, 10**6))
def test_no_name_leads_out_of_its_generation(run: str, worker: str, name: str, step: int) -> None:
    keys = Keys(run, 3)
    makers: tuple[Callable[[], str], ...] = (
        lambda: keys.message(worker, step, name),
        lambda: keys.messages(worker),
        lambda: keys.checkpoint(step, name),
        lambda: keys.lease(worker, step),
        lambda: keys.function(worker, step, name),
        lambda: keys.step_report(step, worker),
        lambda: keys.step_summaries(worker),
    )
    for make in makers:
        try:
            key = make()
        except InvalidValue:
            continue
        assert generation_of(key) == keys
        assert all(part not in ("", ".", "..") for part in key.removesuffix("/").split("/"))


def test_a_generation_is_found_by_its_reservation_and_by_the_copies_of_its_record() -> None:
    keys, old = Keys("run-1", 12, "3fa9c2d1"), Keys("run-1", 3)
    assert [generation_of(key) for key in (keys.reservation, *keys.records)] == [keys] * 4
    assert generation_of(old.reservation) == old
    others = ("generations/other", "generations/0000-" + "a" * 17, "g0000-x/run.json", "g00000/run.json", "owner/x")
    assert [key for key in others if generation_of(f"run-1/{key}") is not None] == []
    assert generation_of(f"{'a' * 64}/g0000/run.json") is None
    with pytest.raises(InvalidValue, match="nonce must be"):
        Keys("run-1", 0, "../x")


@pytest.mark.parametrize("run", ["", "-a", "A", "a/b", "..", "a b", "a" * 64, "ä"])
def test_a_run_is_named_with_small_letters_digits_and_dashes(run: str) -> None:
    with pytest.raises(InvalidValue, match="run must be at most 63"):
        Keys(run)


def test_messages_are_spread_over_prefixes_that_no_other_stage_has() -> None:
    keys, prefixes = ValidationKeys("run-1", 0, "3fa9c2d1"), {}
    for stage in (0, 1, 200):
        workers = [f"s{stage}.r{replica}" for replica in range(128)]
        found = Counter(keys.message(worker, 7, f"put-split.{worker}.k0").split("/g0")[0] for worker in workers)
        assert sorted(found.values()) == [8] * 16
        prefixes[stage] = set(found)
        for worker in workers:
            of_batch = keys.batch_message(worker, 7, 0, "put-activation")
            assert of_batch.split("/g0")[0] == keys.messages(worker).split("/g0")[0]
    assert len(set.union(*prefixes.values())) == 3 * 16
    for name in ("server", "s0", "s0.r0.eval", ""):
        with pytest.raises(InvalidValue, match=r"worker must read like 's0\.r1'"):
            keys.message(name, 7, "put")


def test_messages_of_runs_that_earlier_versions_began_belong_to_them_too() -> None:
    keys = Keys("run-1", 3, "3fa9c2d1")
    now, before = (
        keys.message("s1.r2", 7, "put-split.s1.r2.k0"),
        f"{keys.prefix}messages/s1.r2/00000007/put-split.s1.r2.k0",
    )
    assert now == f"run-1/201/{before.removeprefix('run-1/')}"
    for key in (now, before):
        assert generation_of(key) == keys
        assert is_message(key)
        assert is_written(key)
    others = ("run-1/20/g0003/messages/s1.r2/00000007/put", "run-1/2z1/g0003/messages/s1.r2/00000007/put")
    assert not any(is_written(key) or generation_of(key) for key in others)
