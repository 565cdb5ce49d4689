"""What is said where a library is missing that only some users need."""

import importlib

import pytest

from funcpipe.core.distribution import DISTRIBUTION, install_command, needed_from, version
from funcpipe.errors import InputError


def test_a_missing_library_is_told_with_the_command_that_installs_it() -> None:
    with (
        pytest.raises(InputError, match=rf"no_such_sdk is not installed; run: pip install '{DISTRIBUTION}\[aws\]'"),
        needed_from("aws"),
    ):
        importlib.import_module("no_such_sdk")


def test_a_mistake_of_our_own_is_not_called_a_missing_library() -> None:
    with pytest.raises(ModuleNotFoundError), needed_from("aws"):
        importlib.import_module("funcpipe.no_such_module")


def test_the_version_and_the_command() -> None:
    assert version()[0].isdecimal()
    assert install_command("figures") == f"pip install '{DISTRIBUTION}[figures]'"
