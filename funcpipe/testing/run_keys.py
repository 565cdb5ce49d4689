"""A run's key for tests, which everybody knows."""

from funcpipe.core.run_key import RunKey
from funcpipe.platforms.base import Storage
from funcpipe.runstate.signed_storage import OneKey, SignedStorage

RUN_KEY = RunKey("5eed" * 16)
NONCE = RUN_KEY.fingerprint
"""The nonce of generations that have this key."""


def signed_for_tests(storage: Storage) -> SignedStorage:
    """`storage` as those see it who have RUN_KEY alone."""
    return SignedStorage(storage, OneKey(RUN_KEY))
