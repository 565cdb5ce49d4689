"""A storage in which the objects of a run are signed with the key of their generation.

    run-1/g0000-3fa9c2d11b0c77e4/heartbeats/s0.r0/00000000     {"format": …}
                                                               1d0a2f64…  the signature, as a line of text

The name of a generation holds the fingerprint of its key, so everybody knows which key an object must be signed with.
Messages are signed one by one by the channel that writes them, as they are read one by one. The statements of clients
about who owns a run, and marks for watchdogs, are not signed: nothing that they say is ever run or trained with.

The keys of runs that were started on this machine are files that only its user may read, one for each generation. They
lie in `$FUNCPIPE_KEY_DIR`, or in `funcpipe/keys` where the user's programs keep their state (`$XDG_STATE_HOME`, else
`~/.local/state`). On another machine `$FUNCPIPE_RUN_KEY` has the key of one run.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from funcpipe.comm.signature import PROOF_BYTES, Signature
from funcpipe.core.process import state_folder
from funcpipe.core.run_key import RunKey
from funcpipe.errors import CorruptMessage, InputError, RunKeyMissing
from funcpipe.platforms.base import OPEN, Gate, Storage
from funcpipe.platforms.wrappers import StorageWrapper
from funcpipe.runstate.keys import Keys, generation_of, is_message

_LINE_BYTES = 2 * PROOF_BYTES + 1


class Keyring(Protocol):
    """Knows the keys of generations."""

    def find(self, keys: Keys) -> RunKey | None:
        """Return the key of the generation that `keys` name, if it is known here."""


class OneKey:
    """Knows the key of one generation, as its functions do."""

    def __init__(self, run_key: RunKey) -> None:
        self._run_key = run_key

    def find(self, keys: Keys) -> RunKey | None:
        """Return the key, if it is that generation's."""
        return self._run_key if keys.nonce == self._run_key.fingerprint else None


class SignedStorage(StorageWrapper):
    """A storage that signs what is put, and refuses what was not signed with the key that `keyring` has.

    Raises RunKeyMissing for objects of a generation whose key is not known.
    """

    def __init__(self, storage: Storage, keyring: Keyring) -> None:
        super().__init__(storage)
        self._keyring = keyring
        self._known: dict[Keys, RunKey] = {}

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object, with a signature."""
        signature = self._signature(key)
        if signature is not None:
            data = bytes(data) + signature.of(memoryview(data), 0).hex().encode() + b"\n"
        self._store.put(key, data, if_absent=if_absent, gate=gate)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """Return the bytes of an object, without the signature; raises CorruptMessage where that is not right.

        With `stop`, the bytes are as they are, and the caller knows their hash.
        """
        data = self._store.get(key, start=start, stop=stop, gate=gate)
        signature = self._signature(key)
        if signature is None or stop is not None:
            return data
        return _verified(key, data, signature)

    def _signature(self, key: str) -> Signature | None:
        """Return the signature of the object; None for those that are not signed here."""
        generation = generation_of(key)
        if generation is None or is_message(key):
            return None
        if generation not in self._known:
            self._known[generation] = key_of(self._keyring, generation)
        return Signature(self._known[generation], key)


def key_of(keyring: Keyring, keys: Keys) -> RunKey:
    """Return the key of a generation; raises RunKeyMissing."""
    found = keyring.find(keys)
    if found is None:
        raise RunKeyMissing(keys.run)
    return found


def _verified(key: str, data: bytes, signature: Signature) -> bytes:
    text, line = memoryview(data)[:-_LINE_BYTES], data[-_LINE_BYTES:]
    try:
        proof = bytes.fromhex(line.decode("ascii"))
    except ValueError:
        proof = b""
    is_line = len(proof) == PROOF_BYTES and line == proof.hex().encode() + b"\n"  # in one spelling alone
    if not is_line or not signature.holds(proof, text, 0):
        raise CorruptMessage(f"{key} is not signed by its run: it is truncated, damaged, or from elsewhere")
    return bytes(text)


FOLDER = "FUNCPIPE_KEY_DIR"
"""The environment variable with the folder of keys."""

RUN_KEY = "FUNCPIPE_RUN_KEY"
"""The environment variable with the key of one run."""


class KeyFolder:
    """The keys in a folder, and the one in the environment."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def keep(self, keys: Keys, run_key: RunKey) -> None:
        """Keep the key of a generation, readable by this user alone. Raises InputError where nothing can be kept."""
        try:
            path = self._file(keys)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise
        except OSError as error:
            raise InputError(
                f"the key of run {keys.run} cannot be kept: {error}; without it the run cannot be watched: set "
                f"{FOLDER} to a folder that can be written and lasts as long as the run"
            ) from error
        with open(file, "w", encoding="ascii") as opened:
            opened.write(f"{run_key.text}\n")

    def find(self, keys: Keys) -> RunKey | None:
        """Return the key of a generation, if it is known here. Raises InvalidValue where that is no key."""
        given = os.environ.get(RUN_KEY)
        if given and (run_key := RunKey(given.strip())).fingerprint == keys.nonce:
            return run_key
        try:
            run_key = RunKey(self._file(keys).read_text(encoding="ascii").strip())
        except OSError:
            return None
        return run_key if run_key.fingerprint == keys.nonce else None

    def forget(self, generations: Iterable[Keys]) -> None:
        """Delete the keys of generations that are deleted."""
        for keys in generations:
            with contextlib.suppress(OSError):
                self._file(keys).unlink(missing_ok=True)

    def _file(self, keys: Keys) -> Path:
        return (self._folder or _default_folder()) / f"{keys.run}.{keys.generation:04d}-{keys.nonce}"


def signed(storage: Storage) -> Storage:
    """Return `storage` with the keys that are known on this machine."""
    return SignedStorage(storage, KeyFolder())


def _default_folder() -> Path:
    given = os.environ.get(FOLDER)
    if given:
        return Path(given)
    return state_folder() / "keys"
