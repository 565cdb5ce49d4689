"""The server's state in object storage: the two newest checkpoints, each a file of tensors and one of JSON.

The JSON is written last and holds the SHA-256 of the tensors: without it, there is no checkpoint.
"""

import hashlib
import json
from collections.abc import Mapping

from funcpipe.core.texts import error_text
from funcpipe.errors import CorruptMessage
from funcpipe.neighbours.parameter_server.server import ParameterServer
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoints import deserialised, serialised
from funcpipe.training.state import StageState, settings_from_text, settings_to_text

_KEPT = 2
_FIELDS = ("version", "samples", "below")


class ServerCheckpoints:
    """The checkpoints of the server of `run`."""

    def __init__(self, storage: Storage, run: str) -> None:
        self._storage = storage
        self._prefix = f"{run}/server/checkpoints/"

    def save(self, server: ParameterServer) -> None:
        """Write a checkpoint, and delete all but the newest ones."""
        state, progress = server.state()
        name = f"{self._prefix}{progress['version']:010d}"
        tensors = serialised(state.tensors)
        document = {
            "sha256": hashlib.sha256(tensors).hexdigest(),
            "aliases": dict(state.aliases),
            "transient": sorted(state.transient),
            "settings": settings_to_text(state.settings),
            "progress": progress,
        }
        self._storage.put(f"{name}.safetensors", tensors)
        self._storage.put(f"{name}.json", json.dumps(document).encode())
        for old in self._names()[:-_KEPT]:
            self._storage.delete(f"{old}.json")
            self._storage.delete(f"{old}.safetensors")

    def restore_into(self, server: ParameterServer) -> bool:
        """Bring `server` to the newest checkpoint; False if there is none. Raises CorruptMessage."""
        names = self._names()
        if not names:
            return False
        server.restore(*self._read(names[-1]))
        return True

    def _names(self) -> list[str]:
        found = sorted(self._storage.list(self._prefix))
        return [key.removesuffix(".json") for key in found if key.endswith(".json")]

    def _read(self, name: str) -> tuple[StageState, Mapping[str, object]]:
        try:
            document = json.loads(self._storage.get(f"{name}.json"))
            data = self._storage.get(f"{name}.safetensors")
            if hashlib.sha256(data).hexdigest() != document["sha256"]:
                raise CorruptMessage(f"{name}.safetensors is not what {name}.json names: its SHA-256 differs")
            progress = document["progress"]
            if not all(isinstance(progress[field], int) for field in _FIELDS) or not isinstance(
                progress["beyond"], list
            ):
                raise CorruptMessage(f"{name}.json does not say how far the run has come")
            state = StageState(
                tensors=deserialised(f"{name}.safetensors", data),
                aliases=dict(document["aliases"]),
                transient=frozenset(document["transient"]),
                settings=settings_from_text(document["settings"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptMessage(f"{name}.json is no checkpoint: {error_text(error)}") from error
        return state, progress
