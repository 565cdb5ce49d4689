"""Whether an account has room for a plan's functions, and for their successors."""

import logging

import pytest

from funcpipe.errors import PlatformRefused
from funcpipe.platforms.shared.cloud import Capacity, check_capacity


def capacity(needed: int, allowed: int) -> Capacity:
    return Capacity(
        needed=needed,
        allowed=allowed,
        limit=f"this account may run {allowed}",
        fewer="plan with --max-functions",
        more=lambda wanted: f"request {wanted}",
    )


def test_more_functions_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(
        PlatformRefused,
        match=r"^the plan needs 11 functions at once, this account may run 10; plan with --max-functions 10, "
        "or request 11$",
    ):
        check_capacity([capacity(11, 10)], lifetime_s=None, run_s=None)


@pytest.mark.parametrize(
    ("needed", "allowed", "lifetime_s", "run_s"),
    [(10, 10, None, None), (10, 10, None, 1e6), (10, 10, 900.0, 899.0), (10, 20, 900.0, 1e6), (10, 20, 900.0, None)],
)
def test_functions_that_have_room_for_all_that_they_will_need_are_neither_refused_nor_warned_of(
    needed: int, allowed: int, lifetime_s: float | None, run_s: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    check_capacity([capacity(needed, allowed)], lifetime_s=lifetime_s, run_s=run_s)
    assert not caplog.records


def test_a_run_that_hands_over_is_refused_without_room_for_a_successor() -> None:
    with pytest.raises(PlatformRefused) as refusal:
        check_capacity([capacity(10, 10)], lifetime_s=900.0, run_s=3600.0)
    assert str(refusal.value) == (
        "the run takes about 3600 s, a function at most 900 s: each runs beside its successor while it hands over, so "
        "that the plan's 10 functions become up to 20, and 11 at least; this account may run 10; "
        "plan with --max-functions 5, or request 20"
    )


@pytest.mark.parametrize(("allowed", "run_s"), [(11, 3600.0), (19, 3600.0), (10, None), (19, None)])
def test_a_run_whose_successors_must_wait_for_room_is_warned_of(
    allowed: int, run_s: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_capacity([capacity(10, allowed)], lifetime_s=900.0, run_s=run_s)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "10 functions become up to 20" in said
    assert f"this account may run {allowed}" in said
    assert f"successors wait until functions have ended, up to {20 - allowed} at once, as" in said
    assert f"plan with --max-functions {allowed // 2}, or request 20" in said
    assert ("if the run takes longer than 900 s" in said) == (run_s is None)


def test_one_function_without_room_for_a_successor_is_not_told_to_become_fewer() -> None:
    with pytest.raises(PlatformRefused, match=r"this account may run 1; request 2$"):
        check_capacity([capacity(1, 1)], lifetime_s=900.0, run_s=3600.0)


def test_every_room_is_looked_at() -> None:
    with pytest.raises(PlatformRefused, match="needs 3 functions at once, this account may run 2"):
        check_capacity([capacity(1, 10), capacity(3, 2)], lifetime_s=None, run_s=None)
