"""Whether an account has room for a plan's functions, and for their successors."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import to_text
from funcpipe.errors import PlatformBusy, PlatformError, PlatformRefused
from funcpipe.platforms.base import PlainKeys
from funcpipe.platforms.shared.cloud import (
    BUSY_FOR_S,
    SECRET,
    Capacity,
    KeyWrap,
    OutageTolerance,
    Polling,
    check_capacity,
    new_secret,
    unwrap_payload,
    wrap_of_environment,
)
from tests.core.test_run import spec
from tests.platforms.clock import Clock
from tests.support.run_keys import RUN_KEY


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


OURS = KeyWrap("the secret of a deployment")
REFUSED = "the key of the run was not wrapped for this deployment of functions"


def test_a_key_is_unwrapped_by_its_deployment_alone() -> None:
    wrapped = OURS.wrap(RUN_KEY.text)
    assert RUN_KEY.text not in wrapped
    assert OURS.unwrap(wrapped) == KeyWrap("the secret of a deployment").unwrap(wrapped) == RUN_KEY.text
    with pytest.raises(PlatformRefused, match=REFUSED):
        KeyWrap(new_secret()).unwrap(wrapped)


def test_a_key_is_never_wrapped_twice_alike() -> None:
    assert len({OURS.wrap(RUN_KEY.text) for _ in range(20)}) == 20
    assert len({new_secret() for _ in range(20)}) == 20


@given(st.integers(0), st.integers(1, 255))
def test_what_was_changed_on_its_way_is_refused(place: int, wrong: int) -> None:
    wrapped = bytearray.fromhex(OURS.wrap(RUN_KEY.text))
    for length in (0, 11, 12, place % len(wrapped)):
        with pytest.raises(PlatformRefused, match=REFUSED):
            OURS.unwrap(wrapped[:length].hex())
    wrapped[place % len(wrapped)] ^= wrong
    with pytest.raises(PlatformRefused, match=REFUSED):
        OURS.unwrap(wrapped.hex())


@given(st.text(max_size=100))
def test_what_nobody_has_wrapped_is_refused(text: str) -> None:
    with pytest.raises(PlatformRefused, match=REFUSED):
        OURS.unwrap(text)


def test_a_function_unwraps_by_the_secret_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = json.loads(to_text(spec())) | {"run_key": OURS.wrap(RUN_KEY.text)}
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(PlatformRefused, match="has no secret: it was made by an earlier version; deploy again"):
        unwrap_payload(json.dumps(payload))
    monkeypatch.setenv(SECRET, "the secret of a deployment")
    assert json.loads(unwrap_payload(json.dumps(payload))) == payload | {"run_key": RUN_KEY.text}
    assert wrap_of_environment().unwrap(payload["run_key"]) == RUN_KEY.text
    monkeypatch.setenv(SECRET, "of another deployment")
    with pytest.raises(PlatformRefused, match=REFUSED):
        unwrap_payload(json.dumps(payload))
    with pytest.raises(PlatformRefused, match=REFUSED):
        unwrap_payload(json.dumps(payload | {"run_key": RUN_KEY.text}))  # as it is: nobody sends it so


@pytest.mark.parametrize("payload", ["{}", "[]", "no JSON", '{"format": "funcpipe.probe/1"}', '{"run_key": ""}'])
def test_a_payload_without_a_key_stays_as_it_is(payload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    assert unwrap_payload(payload) == payload


def test_where_nothing_is_wrapped_nothing_is_unwrapped() -> None:
    assert PlainKeys().wrap_key(RUN_KEY.text) == ""
    with pytest.raises(PlatformRefused, match="not wrapped on this platform"):
        PlainKeys().unwrap_key(RUN_KEY.text)


def polling_by(clock: Clock) -> Polling:
    return Polling(every_s=1.0, clock=clock, sleep=clock.sleep)


def test_functions_that_nobody_can_tell_of_for_a_while_are_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    outages = OutageTolerance(polling_by(clock))

    def busy() -> None:
        raise PlatformBusy("too many requests")

    for _ in range(3):
        outages.ask(busy)
        clock.now_s += BUSY_FOR_S / 3 - 1
    assert len(caplog.messages) == 1
    outages.ask(lambda: None)
    clock.now_s += BUSY_FOR_S
    outages.ask(busy)
    clock.now_s += BUSY_FOR_S
    with pytest.raises(PlatformBusy, match="too many requests"):
        outages.ask(busy)


def test_a_function_that_the_cloud_does_not_know_is_told_at_once() -> None:
    def unknown() -> None:
        raise PlatformError("no such task")

    with pytest.raises(PlatformError, match="no such task"):
        OutageTolerance(polling_by(Clock())).ask(unknown)
