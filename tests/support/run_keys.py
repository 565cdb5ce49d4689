"""Runs' keys for tests: one that everybody knows, and keys that are kept in memory and never forgotten."""

import contextlib
from collections.abc import Iterable, Iterator
from unittest import mock

from funcpipe.core.run_key import RunKey
from funcpipe.platforms.base import Storage
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signing import KeyFolder, OneKey, SignedStorage

RUN_KEY = RunKey("5eed" * 16)
NONCE = RUN_KEY.fingerprint
"""The nonce of generations that have this key."""

_REMEMBERED: dict[Keys, RunKey] = {}


def signed_for_tests(storage: Storage) -> SignedStorage:
    """`storage` as those see it who have RUN_KEY alone."""
    return SignedStorage(storage, OneKey(RUN_KEY))


class RememberedKeys:
    """In place of the keys in a folder, for programs that are run again and again: keeping a key twice is no error."""

    def keep(self, keys: Keys, run_key: RunKey) -> None:
        """Remember the key of a generation."""
        _REMEMBERED[keys] = run_key

    def find(self, keys: Keys) -> RunKey | None:
        """The key of a generation."""
        return _REMEMBERED.get(keys)

    def forget(self, generations: Iterable[Keys]) -> None:
        """Nothing is forgotten: the next time the program runs, it may be needed."""


@contextlib.contextmanager
def remembered_keys() -> Iterator[None]:
    """Meanwhile the keys of runs lie in memory."""
    with contextlib.ExitStack() as stack:
        for name in ("keep", "find", "forget"):
            stack.enter_context(mock.patch.object(KeyFolder, name, getattr(RememberedKeys, name)))
        yield
