"""Checkpoints of stages in the storage: tensors as safetensors files, then a manifest that names them.

The files come first, under names that no other checkpoint has, and the manifest last: whoever is interrupted at any
byte leaves the checkpoints before as they were, and at most files that no manifest names.

A stage whose optimiser is divided over its replicas is saved in parts, each by its replica under a manifest of its own.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence

import safetensors.torch
import torch
from torch import Tensor

from funcpipe.core import Manifest, StoredFile
from funcpipe.errors import CorruptMessage, KeyMissing, ModelError
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoint_index import CheckpointIndex, CheckpointPart, Worker
from funcpipe.runstate.documents import get_listed_document, put_document
from funcpipe.runstate.keys import Keys
from funcpipe.training import state as states
from funcpipe.training.state import StageState
from funcpipe.training.state_shards import combine_shards

PART_BYTES = 64 << 20
"""Tensors of a checkpoint are written in files of about so many bytes, so that no second copy of all is made."""

_MANIFEST = re.compile(r"(\d{8})\.([a-z0-9.]+)\.json", re.ASCII)
_DONE = re.compile(r"s(\d+)\.r(\d+)/(\d{8})", re.ASCII)
_READS = 3  # of an object whose bytes are not what they should be
_LOOKS = 5  # for the newest checkpoint, while others delete what was the newest


class Checkpoints:
    """The checkpoints of one generation of a run, which began with `first_step`."""

    def __init__(self, storage: Storage, keys: Keys, *, first_step: int = 0, part_bytes: int = PART_BYTES) -> None:
        self._first_step = first_step
        self._storage = storage
        self._keys = keys
        self._part_bytes = part_bytes

    def save(
        self, stage: int, step: int, state: StageState, *, writer: str, part: CheckpointPart | None = None
    ) -> Manifest:
        """Write what `stage` has learned after `step` steps, or a part of it. `writer` must be unique among all who may
        save it.
        """
        name = f"{step:08d}.{writer}" if part is None else f"{step:08d}.{part}.{writer}"
        files = []
        for number, tensors in enumerate(_parts(state.tensors, self._part_bytes)):
            data = _serialised(tensors)
            file = StoredFile(
                name=f"{name}.{number}.safetensors", bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
            )
            self._storage.put(self._keys.checkpoint(stage, file.name), data)
            files.append(file)
        manifest = Manifest(
            stage=stage,
            step=step,
            files=tuple(files),
            aliases=dict(state.aliases),
            transient=tuple(sorted(state.transient)),
            settings=states.to_text(state.settings),
        )
        put_document(self._storage, self._keys.checkpoint(stage, f"{name}.json"), manifest)
        return manifest

    def mark_done(self, worker: Worker, step: int) -> None:
        """Note that `worker` has done `step` steps, and written all that it writes in them."""
        name = f"s{worker[0]}.r{worker[1]}"
        key = self._keys.done(name, step)
        self._storage.put(key, b"")
        for other in self._storage.list(self._keys.progress(name)):
            if other < key:
                self._storage.delete(other)

    def listing(self) -> CheckpointIndex:
        """What is saved, by two requests."""
        saved: dict[int, list[tuple[int, str]]] = {}
        done: dict[Worker, int] = {}
        for key in self._storage.list(self._keys.all_progress):
            match = _DONE.fullmatch(key.removeprefix(self._keys.all_progress))
            if match is not None:
                worker = int(match[1]), int(match[2])
                done[worker] = max(done.get(worker, 0), int(match[3]))
        for key in self._storage.list(self._keys.checkpoints):
            folder, _, name = key.removeprefix(self._keys.checkpoints).rpartition("/")
            match = _MANIFEST.fullmatch(name)
            if match is not None and folder[1:].isdecimal():
                saved.setdefault(int(folder[1:]), []).append((int(match[1]), name))
        entries = {stage: tuple(sorted(found)) for stage, found in saved.items()}
        return CheckpointIndex(saved=entries, done=done, first_step=self._first_step)

    def restart(self, worker: Worker) -> tuple[int, StageState | None]:
        """Where `worker` starts again: the step, and its state then, unless nothing was saved."""
        for look in range(_LOOKS):
            listing = self.listing()
            step = listing.restart(worker)
            names = listing.names_for(worker, step)
            if not names:
                return step, None
            try:
                return step, self.load_together(worker[0], names)
            except KeyMissing:
                if look == _LOOKS - 1:
                    raise
        raise AssertionError("the last look returns or raises")

    def load_together(self, stage: int, names: Sequence[str]) -> StageState:
        """The checkpoints of those manifests as one state. Raises as `load` does."""
        return combine_shards([self.load(stage, name) for name in names])

    def load(self, stage: int, name: str) -> StageState:
        """The checkpoint whose manifest has that name. Raises KeyMissing, or CorruptMessage with the key."""
        key = self._keys.checkpoint(stage, name)
        manifest = get_listed_document(self._storage, Manifest, key)
        tensors: dict[str, Tensor] = {}
        for file in manifest.files:
            tensors |= self._tensors(stage, file)
        return StageState(
            tensors=tensors,
            aliases=manifest.aliases,
            transient=frozenset(manifest.transient),
            settings=states.from_text(manifest.settings),
        )

    def delete(self, stage: int, names: tuple[str, ...]) -> None:
        """Delete checkpoints of `stage` by the names of their manifests, which go first."""
        files = self._storage.list(f"{self._keys.checkpoints}s{stage}/")
        for name in names:
            own = self._keys.checkpoint(stage, name.removesuffix(".json")) + "."
            self._storage.delete(self._keys.checkpoint(stage, name))
            for key in files:
                if key.startswith(own):
                    self._storage.delete(key)

    def _tensors(self, stage: int, file: StoredFile) -> dict[str, Tensor]:
        key = self._keys.checkpoint(stage, file.name)
        for read in range(_READS):
            try:
                data = self._storage.get(key, stop=file.bytes)
            except KeyMissing:
                if read == _READS - 1:
                    raise
                continue
            if len(data) == file.bytes and hashlib.sha256(data).hexdigest() == file.sha256:
                return _deserialised(key, data)
        raise CorruptMessage(f"{key} is not what its manifest says: its length or its SHA-256 differs")


def _parts(tensors: Mapping[str, Tensor], part_bytes: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > part_bytes:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    if part:
        yield part


def _serialised(tensors: Mapping[str, Tensor]) -> bytes:
    alone = {name: _alone(tensor) for name, tensor in tensors.items()}
    try:
        return safetensors.torch.save(alone)
    except (ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"a checkpoint cannot hold the tensors {sorted(tensors)}: {error}") from error


def _alone(tensor: Tensor) -> Tensor:
    """`tensor` in memory that it shares with no other."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _deserialised(key: str, data: bytes) -> dict[str, Tensor]:
    try:
        return dict(safetensors.torch.load(data))
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise CorruptMessage(f"{key} is no safetensors file: {error}") from error
