"""Proofs that a message is whole, and within a run that it is the run's own.

A signature is GMAC (NIST SP 800-38D): AES-GCM of no text, with the message as additional data. Today's processors
compute it about as fast as they copy. Its key is derived from the run's for the one object that the message lies in,
and the place there, so a message does not pass anywhere else: not as another task's, step's, worker's or run's. Its
nonce is drawn at random, as GCM must never see one twice with a key.
"""

import os
from typing import Protocol

import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from funcpipe.core.run_key import RunKey

PROOF_BYTES = 28
_NONCE_BYTES = 12


class Proof(Protocol):
    """Proves that the bytes of a message at some offset of an object are those that were written there."""

    def of(self, data: memoryview, offset: int) -> bytes:
        """PROOF_BYTES that prove `data`."""

    def holds(self, proof: bytes, data: memoryview, offset: int) -> bool:
        """Return True if `proof` proves `data`."""


class Checksum:
    """Proves that nothing was lost or changed by accident."""

    def of(self, data: memoryview, offset: int) -> bytes:
        """Return the XXH3 of `data`, wherever it lies."""
        return xxhash.xxh3_64_digest(data).ljust(PROOF_BYTES, b"\0")

    def holds(self, proof: bytes, data: memoryview, offset: int) -> bool:
        """Return True if `proof` is the XXH3 of `data`."""
        return proof == self.of(data, offset)


class Signature:
    """Proves that a holder of `key` wrote a message to the object `name`."""

    def __init__(self, key: RunKey, name: str) -> None:
        self._key = key
        self._name = name

    def of(self, data: memoryview, offset: int) -> bytes:
        """Return the nonce and the tag of `data` at `offset`."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher(offset).encrypt(nonce, b"", data)

    def holds(self, proof: bytes, data: memoryview, offset: int) -> bool:
        """Return True if `proof` holds nonce and tag of `data` at `offset`."""
        try:
            self._cipher(offset).decrypt(proof[:_NONCE_BYTES], proof[_NONCE_BYTES:], data)
        except InvalidTag:
            return False
        return True

    def _cipher(self, offset: int) -> AESGCM:
        return AESGCM(self._key.derive("message", f"{self._name}@{offset}"))


CHECKSUM = Checksum()
