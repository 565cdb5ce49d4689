"""Checkpoints of stages in storage: tensors as safetensors files, and a manifest that names them.

The files are written first, under names that no other checkpoint has, and the manifest last. A writer that is
interrupted at any byte leaves earlier checkpoints intact, and at most files that no manifest names.

A stage whose optimiser is divided over its replicas is saved in parts, each by its replica with its own manifest.
"""

import hashlib
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence

import safetensors.torch
import torch
from torch import Tensor

from funcpipe.core import Manifest, StoredFile, WorkerId, worker_name
from funcpipe.errors import CorruptMessage, KeyMissing, ModelError
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoint_index import CheckpointIndex, CheckpointPart
from funcpipe.runstate.documents import READS, get_listed_document, put_document
from funcpipe.runstate.keys import Keys
from funcpipe.training.state import StageState, settings_from_text, settings_to_text
from funcpipe.training.state_shards import combine_shards

_log = logging.getLogger(__name__)

FILE_BYTES = 64 << 20
"""About how large the files of a checkpoint are: only one file at a time is copied in memory."""

_MANIFEST = re.compile(r"(\d{8})\.([a-z0-9.]+)\.json", re.ASCII)
_DONE = re.compile(r"s(\d+)\.r(\d+)/(\d{8})", re.ASCII)
_LOOKUPS = 5
"""How often the newest checkpoint is looked up, if others delete the one that was found before it is read."""


class Checkpoints:
    """The checkpoints of one generation of a run, which began with `first_step`."""

    def __init__(self, storage: Storage, keys: Keys, *, first_step: int = 0, file_bytes: int = FILE_BYTES) -> None:
        self._first_step = first_step
        self._storage = storage
        self._keys = keys
        self._file_bytes = file_bytes

    def save(
        self, stage: int, step: int, state: StageState, *, writer: str, part: CheckpointPart | None = None
    ) -> Manifest:
        """Write the state of `stage` after `step` steps, or a part of it. No two writers may have the same `writer`."""
        began_s = time.monotonic()
        name = f"{step:08d}.{writer}" if part is None else f"{step:08d}.{part}.{writer}"
        files = []
        for number, tensors in enumerate(_files(state.tensors, self._file_bytes)):
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
            settings=settings_to_text(state.settings),
        )
        put_document(self._storage, self._keys.checkpoint(stage, f"{name}.json"), manifest)
        _log.info(
            "saved stage %d after step %d as %s: %d bytes in %.2f s",
            stage,
            step,
            name,
            sum(file.bytes for file in files),
            time.monotonic() - began_s,
        )
        return manifest

    def mark_done(self, worker: WorkerId, step: int) -> None:
        """Record that `worker` has finished `step` steps, including all its writes."""
        name = worker_name(*worker)
        key = self._keys.done(name, step)
        self._storage.put(key, b"")
        for other in self._storage.list(self._keys.progress(name)):
            if other < key:
                self._storage.delete(other)

    def index(self) -> CheckpointIndex:
        """What is saved, found with two requests."""
        saved: dict[int, list[tuple[int, str]]] = {}
        done: dict[WorkerId, int] = {}
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

    def load_latest(self, worker: WorkerId) -> tuple[int, StageState | None]:
        """Where `worker` restarts: the step, and its state after it; the state is None if nothing was saved."""
        for _ in range(_LOOKUPS - 1):
            try:
                return self._load_newest(worker)
            except KeyMissing as error:
                _log.info("a checkpoint was deleted while it was read, looking for a newer one: %s", error)
        return self._load_newest(worker)

    def load_combined(self, stage: int, names: Sequence[str]) -> StageState:
        """The checkpoints whose manifests have these names, combined into one state. Raises as `load` does."""
        return combine_shards([self.load(stage, name) for name in names])

    def load(self, stage: int, name: str) -> StageState:
        """The checkpoint whose manifest is called `name`. Raises KeyMissing, or CorruptMessage with the key."""
        began_s = time.monotonic()
        key = self._keys.checkpoint(stage, name)
        manifest = get_listed_document(self._storage, Manifest, key)
        tensors: dict[str, Tensor] = {}
        for file in manifest.files:
            tensors |= self._tensors(stage, file)
        size, took_s = sum(file.bytes for file in manifest.files), time.monotonic() - began_s
        _log.info("loaded checkpoint %s of stage %d: %d bytes in %.2f s", name, stage, size, took_s)
        return StageState(
            tensors=tensors,
            aliases=manifest.aliases,
            transient=frozenset(manifest.transient),
            settings=settings_from_text(manifest.settings),
        )

    def delete(self, stage: int, names: tuple[str, ...]) -> None:
        """Delete checkpoints of `stage` by the names of their manifests, which are deleted first."""
        files = self._storage.list(f"{self._keys.checkpoints}s{stage}/")
        for name in names:
            prefix = self._keys.checkpoint(stage, name.removesuffix(".json")) + "."
            self._storage.delete(self._keys.checkpoint(stage, name))
            for key in files:
                if key.startswith(prefix):
                    self._storage.delete(key)
            _log.debug("deleted checkpoint %s of stage %d", name, stage)

    def _load_newest(self, worker: WorkerId) -> tuple[int, StageState | None]:
        index = self.index()
        step = index.restart_step(worker)
        manifests = index.manifests_for(worker, step)
        return step, self.load_combined(worker[0], manifests) if manifests else None

    def _tensors(self, stage: int, file: StoredFile) -> dict[str, Tensor]:
        key = self._keys.checkpoint(stage, file.name)
        for read in range(1, READS + 1):
            try:
                data = self._storage.get(key, stop=file.bytes)
            except KeyMissing:
                if read == READS:
                    raise
                continue
            if len(data) == file.bytes and hashlib.sha256(data).hexdigest() == file.sha256:
                return _deserialised(key, data)
            _log.warning("read %d of %d of %s has another length or SHA-256 than its manifest", read, READS, key)
        raise CorruptMessage(f"{key} is not what its manifest says: its length or its SHA-256 differs")


def _files(tensors: Mapping[str, Tensor], file_bytes: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > file_bytes:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    if part:
        yield part


def _serialised(tensors: Mapping[str, Tensor]) -> bytes:
    try:
        return safetensors.torch.save({name: _unshared(tensor) for name, tensor in tensors.items()})
    except (ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"a checkpoint cannot hold the tensors {sorted(tensors)}: {error}") from error


def _unshared(tensor: Tensor) -> Tensor:
    """`tensor`, contiguous and in memory of its own, as safetensors demands."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _deserialised(key: str, data: bytes) -> dict[str, Tensor]:
    try:
        return dict(safetensors.torch.load(data))
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise CorruptMessage(f"{key} is no safetensors file: {error}") from error
