import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.comm.keys import Keys
from funcpipe.errors import InvalidValue

runs = st.from_regex(r"[a-z0-9][a-z0-9-]{0,20}", fullmatch=True)


def everything(keys: Keys, step: int, stage: int, worker: str) -> list[str]:
    return [
        keys.bundle(stage),
        keys.parameters(stage),
        keys.message(step, f"forward.{worker}"),
        keys.step_report(step, worker),
        keys.worker_report(worker),
        keys.trace(worker),
        keys.result(stage),
    ]


@given(runs, runs, st.integers(0, 3), st.integers(0, 3), st.integers(0, 10**6), st.integers(0, 10**6))
def test_runs_attempts_and_steps_never_share_a_key(
    run: str, other: str, attempt: int, other_attempt: int, step: int, other_step: int
) -> None:
    keys, others = Keys(run, attempt), Keys(other, other_attempt)
    assert all(key.startswith(keys.prefix) for key in everything(keys, step, 0, "s0.r0"))
    if run != other:
        assert not set(everything(keys, step, 0, "s0.r0")) & set(everything(others, step, 0, "s0.r0"))
        assert not keys.prefix.startswith(others.prefix)
    if (attempt, step) != (other_attempt, other_step):
        assert Keys(run, attempt).message(step, "t") != Keys(run, other_attempt).message(other_step, "t")


@pytest.mark.parametrize("run", ["", "-a", "A", "a/b", "..", "a b", "a" * 64, "ä"])
def test_a_run_is_named_with_small_letters_digits_and_dashes(run: str) -> None:
    with pytest.raises(InvalidValue, match="run must be at most 63"):
        Keys(run)
