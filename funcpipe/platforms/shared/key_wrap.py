"""Keys of runs on their way to functions of a cloud, which only functions of the same deployment can read.

Clouds keep the events of functions that fail, and so what invoked them, where others than the functions can read: the
bucket, for one. Each deployment has a secret in its functions' environment, with which keys are wrapped (AES-256-GCM).
"""

import hashlib
import json
import os
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from funcpipe.errors import PlatformRefused

SECRET = "FUNCPIPE_SECRET"
"""The environment variable of functions with their deployment's secret."""

_NONCE_BYTES = 12


def new_secret() -> str:
    """Return the secret of a new deployment."""
    return secrets.token_hex(32)


class KeyWrap:
    """Wraps and unwraps keys with the `secret` of a deployment."""

    def __init__(self, secret: str) -> None:
        self._cipher = AESGCM(hashlib.sha256(secret.encode()).digest())

    def wrap(self, run_key: str) -> str:
        """Return a text that stands for `run_key` where others may read it."""
        nonce = os.urandom(_NONCE_BYTES)
        return (nonce + self._cipher.encrypt(nonce, run_key.encode(), None)).hex()

    def unwrap(self, wrapped: str) -> str:
        """Invert `wrap`. Raises PlatformRefused for a text that this deployment has not wrapped."""
        try:
            data = bytes.fromhex(wrapped)
            return self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], None).decode()
        except (ValueError, InvalidTag):
            raise PlatformRefused("the key of the run was not wrapped for this deployment of functions") from None


def wrap_of_environment() -> KeyWrap:
    """Return the unwrapping of a function. Raises PlatformRefused where its deployment has no secret."""
    secret = os.environ.get(SECRET)
    if not secret:
        raise PlatformRefused("this deployment has no secret: it was made by an earlier version; deploy again")
    return KeyWrap(secret)


def unwrap_payload(payload: str) -> str:
    """Return the payload of a worker with the run's key as it is; any other payload stays. Raises PlatformRefused."""
    try:
        invocation = json.loads(payload)
    except ValueError:
        return payload  # which is refused, and the error says why
    if not isinstance(invocation, dict) or not invocation.get("run_key"):
        return payload
    return json.dumps(invocation | {"run_key": wrap_of_environment().unwrap(str(invocation["run_key"]))})
