"""The keys of runs that were started on this machine: a file for each generation, which only its user may read.

They lie in `$FUNCPIPE_KEY_DIR`, or in `funcpipe/keys` where the user's programs keep their state (`$XDG_STATE_HOME`,
else `~/.local/state`). On another machine `$FUNCPIPE_RUN_KEY` has the key of one run.
"""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from funcpipe.core.process import state_folder
from funcpipe.core.run_key import RunKey
from funcpipe.errors import InputError
from funcpipe.platforms.base import Storage
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.signed_storage import SignedStorage

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
