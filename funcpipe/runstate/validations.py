"""Objects of validations in storage besides their reports: the parts of what was measured, and the best models.

A part says that its batch is done in all stages of its replica: the batch's messages will not be read again, and an
attempt that repeats a validation begins after it.
"""

import contextlib
import math
from collections.abc import Collection

from funcpipe.comm import codec
from funcpipe.errors import CorruptMessage, KeyExists
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.documents import READS
from funcpipe.runstate.reports import ValidationKeys
from funcpipe.training.metrics import Part
from funcpipe.training.optimizers import OPTIMIZER
from funcpipe.training.state import AVERAGE, AVERAGED, SCHEDULER, StageState


def put_part(storage: Storage, key: str, part: Part) -> None:
    """Write a part, unless it is there: another attempt has then measured the same."""
    with contextlib.suppress(KeyExists):
        storage.put(key, bytes(codec.encode(part)), if_absent=True)


def get_part(storage: Storage, key: str) -> Part:
    """Return the part under `key`. Raises KeyMissing, or CorruptMessage if it stays damaged when read again."""
    for read in range(READS):
        try:
            return codec.decode(storage.get(key))
        except CorruptMessage:
            if read + 1 == READS:
                raise
    raise AssertionError("the last read returns or raises")


class BestModel:
    """The checkpoints of the best models of one generation, stage by stage."""

    def __init__(self, storage: Storage, keys: ValidationKeys) -> None:
        self._storage = storage
        self._keys = keys.best
        self._checkpoints = Checkpoints(storage, self._keys)

    def save(self, stage: int, step: int, state: StageState, *, writer: str) -> None:
        """Keep the model's part of `state`, the stage after `step` steps, unless it is kept already."""
        if self._name(stage, step) is None:
            self._checkpoints.save(stage, step, model_of(state), writer=writer)

    def delete_others(self, stage: int, steps: Collection[int]) -> None:
        """Delete the models after other steps than these, up to the last of them."""
        prefix = self._keys.checkpoint(stage, "0").removesuffix("0")
        found = {key: int(key.removeprefix(prefix)[:8]) for key in self._storage.list(prefix)}
        outdated = [key for key, step in found.items() if step < max(steps) and step not in steps]
        self._storage.delete_many(sorted(outdated, key=lambda key: not key.endswith(".json")))

    def load(self, stage: int, step: int, *, opened: bool = False) -> StageState | None:
        """Return the stage as it was after `step` steps, or only `opened`; None if that is not kept."""
        name = self._name(stage, step)
        held = 0 if opened else math.inf
        return None if name is None else self._checkpoints.load(stage, name, held_bytes=held)

    def _name(self, stage: int, step: int) -> str | None:
        prefix = self._keys.checkpoint(stage, f"{step:08d}.")
        folder = prefix.removesuffix(f"{step:08d}.")
        found = [key.removeprefix(folder) for key in self._storage.list(prefix) if key.endswith(".json")]
        return max(found, default=None)


def model_of(state: StageState) -> StageState:
    """Return `state` without that of the optimiser, the schedule and the average."""
    learning = (OPTIMIZER, f"{SCHEDULER}/", AVERAGED)
    tensors = {name: tensor for name, tensor in state.tensors.items() if not name.startswith(learning)}
    settings = {name: value for name, value in state.settings.items() if name not in (SCHEDULER, AVERAGE)}
    settings["optimizer"] = None
    return StageState(tensors=tensors, aliases=state.aliases, transient=state.transient, settings=settings)
