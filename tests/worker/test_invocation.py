"""Payloads that no function understands."""

import pytest

from funcpipe.errors import FormatError
from funcpipe.platforms.base import Platform, Storage
from funcpipe.worker.invocation import main


def opens_nothing(url: str) -> Storage:
    raise AssertionError("nothing is opened for a payload that is not understood")


def opens_no_platform(url: str) -> Platform:
    raise AssertionError("nothing is opened for a payload that is not understood")


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("no JSON", "field 'format' is missing"),
        ("[]", "field 'format' is missing"),
        ("{}", "field 'format' is missing"),
        ('{"format": "other/1"}', "field 'format' is 'other/1', expected 'funcpipe"),
    ],
)
def test_what_is_no_payload_is_refused(payload: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        main(payload, open_storage=opens_nothing, open_platform=opens_no_platform)
