"""Keys of runs on their way to functions of a cloud."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import to_text
from funcpipe.errors import PlatformRefused
from funcpipe.platforms.base import PlainKeys
from funcpipe.platforms.shared.cloud import SECRET, KeyWrap, new_secret, unwrap_payload, wrap_of_environment
from tests.core.test_run import spec
from tests.support.run_keys import RUN_KEY

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
