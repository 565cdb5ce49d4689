"""The secret of a run: drawn at random, shown by nothing, and the source of a key for each object."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcpipe.core import WatchSpec
from funcpipe.core.run_key import RunKey
from funcpipe.errors import InvalidValue
from tests.core.test_run import spec
from tests.support.run_keys import NONCE, RUN_KEY

names = st.tuples(st.sampled_from(["message", "fingerprint", "m"]), st.text(max_size=20))


def test_no_two_keys_are_alike() -> None:
    drawn = {RunKey.new() for _ in range(100)}
    assert len(drawn) == len({key.fingerprint for key in drawn}) == 100
    assert all(len(key.text) == 64 and len(key.fingerprint) == 16 for key in drawn)


def test_a_fingerprint_does_not_tell_the_key() -> None:
    assert RunKey(RUN_KEY.text).fingerprint == NONCE
    assert NONCE not in RUN_KEY.text


@given(names, names)
def test_each_purpose_and_name_has_a_key_of_its_own(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (RUN_KEY.derive(*one) == RUN_KEY.derive(*other)) is (one == other)
    assert RunKey("0bad" * 16).derive(*one) != RUN_KEY.derive(*one)
    assert len(RUN_KEY.derive(*one)) == 32


@pytest.mark.parametrize("text", ["", "5eed", "5eed" * 17, "x" * 64, " " * 64, "5eed" * 15 + "5e d", "ä" * 64])
def test_what_is_no_key_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(InvalidValue, match="run key must be 64 hexadecimal digits") as error:
        RunKey(text)
    assert not text.strip() or text not in str(error.value)


def test_what_holds_a_key_does_not_show_it(caplog: pytest.LogCaptureFixture) -> None:
    worker = spec()
    object.__setattr__(worker, "run_key", RUN_KEY.text)
    watch = WatchSpec(storage="memory://", run_key=RUN_KEY.text)
    caplog.set_level(logging.INFO)
    for value in (RUN_KEY, worker, watch):
        logging.getLogger("test").info("%s %r", value, value)
    assert RUN_KEY.text not in caplog.text
    assert RUN_KEY.text not in f"{RUN_KEY!r} {worker!r} {watch!r}"
