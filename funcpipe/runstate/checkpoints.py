"""Checkpoints of stages in storage: tensors as safetensors files, and a manifest that names them.

The files are written first, under names that no other checkpoint has, then read back, and the manifest comes last. A
writer that is interrupted at any byte leaves earlier checkpoints intact, and at most files that no manifest names.

A stage whose optimiser is divided over its replicas is saved in parts, each by its replica with its own manifest.
"""

import collections
import functools
import hashlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import safetensors.torch
import torch
from torch import Tensor

from funcpipe.comm.weight_files import entries_of, read_head
from funcpipe.core import Manifest, ReplicaMark, StoredFile, WorkerId, worker_name
from funcpipe.errors import CorruptMessage, KeyMissing, ModelError, RunUnknown
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoint_index import CheckpointIndex, CheckpointPart, read_index
from funcpipe.runstate.documents import READS, encode_document, get_listed_document, put_document
from funcpipe.runstate.keys import Keys
from funcpipe.training.sharding import combine_shards
from funcpipe.training.state import StageState, settings_from_text, settings_to_text
from funcpipe.training.state_dict import StateDict, united

_log = logging.getLogger(__name__)

_PAIRS = "complex128:"
"""The prefix of tensors that are saved as pairs of real numbers, for which safetensors has no dtype."""


def in_files(tensors: Mapping[str, Tensor], file_bytes: int) -> Iterator[dict[str, Tensor]]:
    """`tensors`, in order, as the files of a checkpoint hold them: each up to `file_bytes`, or with one tensor."""
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


def serialised(tensors: Mapping[str, Tensor]) -> bytes:
    """Return `tensors` as a file. Raises ModelError for those that safetensors cannot hold."""
    stored = dict(_storable(name, tensor) for name, tensor in tensors.items())
    owners = {tensor.untyped_storage().data_ptr(): name for name, tensor in stored.items()}
    for name, tensor in stored.items():  # safetensors refuses two tensors in the same memory
        if owners[tensor.untyped_storage().data_ptr()] != name:
            stored[name] = tensor.clone()
    try:
        return safetensors.torch.save(stored)
    except (ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"a checkpoint cannot hold the tensors {sorted(tensors)}: {error}") from error


def _storable(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    if tensor.dtype is torch.complex128:
        return _PAIRS + name, _unshared(torch.view_as_real(tensor.resolve_conj()))
    return name, _unshared(tensor)


def _loaded(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    if name.startswith(_PAIRS):
        return name.removeprefix(_PAIRS), torch.view_as_complex(tensor)
    return name, tensor


def _unshared(tensor: Tensor) -> Tensor:
    """Return `tensor`, contiguous and in memory of its own, as safetensors demands."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def deserialised(key: str, data: bytes) -> dict[str, Tensor]:
    """Return the inverse of `serialised`; raises CorruptMessage, which names `key`, for anything else."""
    try:
        return dict(_loaded(name, tensor) for name, tensor in safetensors.torch.load(data).items())
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise CorruptMessage(f"{key} is no safetensors file: {error}") from error


FILE_BYTES = 64 << 20
"""About how large the files of a checkpoint are: only one file at a time is copied in memory."""

_BLOCK_BYTES = 8 << 20
"""The bytes of a file that are read back at a time."""

_LOOKUPS = 5
"""The number of lookups of the newest checkpoint, if others delete the one that was found before it is read."""


@dataclass(frozen=True, slots=True)
class UnpublishedCheckpoint:
    """A checkpoint whose files are written, since `began_s`, and whose manifest will be called `name`."""

    name: str
    manifest: Manifest
    began_s: float


def read_all(state: StageState) -> None:
    """Read a state that was only opened once, so that whatever is damaged or gone is found."""
    collections.deque(state.tensors.values(), maxlen=0)


class Checkpoints:
    """The checkpoints of one generation of a run, which began with `first_step`, for an attempt of a worker."""

    def __init__(
        self, storage: Storage, keys: Keys, *, first_step: int = 0, attempt: int = 0, file_bytes: int = FILE_BYTES
    ) -> None:
        self._first_step = first_step
        self._attempt, self._turn = attempt, 0
        self._storage = storage
        self._keys = keys
        self._file_bytes = file_bytes
        self._marks: dict[str, frozenset[str]] = {}

    def save(
        self, stage: int, step: int, state: StageState, *, writer: str, part: CheckpointPart | None = None
    ) -> Manifest:
        """Write the state of `stage` after `step` steps, or a part of it. No two writers may have the same `writer`.

        Raises CorruptMessage if it reads back otherwise.
        """
        written = self.write_files(stage, step, state, writer=writer, part=part)
        self.publish(written)
        return written.manifest

    def write_files(
        self, stage: int, step: int, state: StageState, *, writer: str, part: CheckpointPart | None = None
    ) -> UnpublishedCheckpoint:
        """Write what `save` writes, but for the manifest: the checkpoint does not exist until it is published."""
        began_s = time.monotonic()
        name = f"{step:08d}.{writer}" if part is None else f"{step:08d}.{part}.{writer}"
        files = [
            self._write(stage, f"{name}.{number}.safetensors", tensors)
            for number, tensors in enumerate(in_files(state.tensors, self._file_bytes))
        ]
        manifest = Manifest(
            stage=stage,
            step=step,
            files=tuple(files),
            aliases=dict(state.aliases),
            transient=tuple(sorted(state.transient)),
            settings=settings_to_text(state.settings),
        )
        return UnpublishedCheckpoint(name, manifest, began_s)

    def _write(self, stage: int, name: str, tensors: Mapping[str, Tensor]) -> StoredFile:
        data = serialised(tensors)
        self._storage.put(self._keys.checkpoint(stage, name), data)
        return StoredFile(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def publish(self, written: UnpublishedCheckpoint) -> None:
        """Read the files back, and write their manifest. Raises CorruptMessage if they are not what was written."""
        name, manifest = written.name, written.manifest
        for file in manifest.files:
            self._read_back(self._keys.checkpoint(manifest.stage, file.name), file)
        key = self._keys.checkpoint(manifest.stage, f"{name}.json")
        put_document(self._storage, key, manifest)
        get_listed_document(self._storage, Manifest, key)
        _log.info(
            "saved stage %d after step %d as %s: %d bytes in %.2f s",
            manifest.stage,
            manifest.step,
            name,
            sum(file.bytes for file in manifest.files),
            time.monotonic() - written.began_s,
        )

    def mark_done(self, worker: WorkerId, step: int, mark: ReplicaMark | None = None) -> None:
        """Record that `worker` has finished `step` steps, including all its writes, and what it holds.

        The mark before is kept, so that slower replicas can compare theirs with it, and so are those of later steps,
        which tell the next attempt that they were done. What attempts before have left is listed once; one of them
        that puts another mark later, which does not count, leaves it there.
        """
        name = worker_name(*worker)
        key = self._keys.done(name, self._attempt, self._turn, step)
        self._storage.put(key, b"" if mark is None else encode_document(mark))
        marks = self._marks[name] if name in self._marks else frozenset(self._storage.list(self._keys.progress(name)))
        outdated = sorted(other for other in marks if other < key and _step_of(other) <= step)[:-1]
        if outdated:
            self._storage.delete_many(outdated)
        self._marks[name] = marks.difference(outdated) | {key}

    def take_over_marks(self, worker: WorkerId) -> None:
        """Let only marks from now on count for `worker`; the first is that of the step from which it restarts.

        An attempt does this before it restores a checkpoint. Otherwise others would delete messages that it will read:
        if an attempt before, which is asleep or slow, put another mark, or if another replica published a checkpoint
        of steps that were done before and are repeated.
        """
        self._turn += 1
        name, marked = worker_name(*worker), -1
        while True:  # again if there is another mark or checkpoint meanwhile, which others may have seen
            marks = {_step_of(key): key for key in self._storage.list(self._keys.progress(name))}
            step = self.index().restart_step(worker, max(marks, default=self._first_step))
            if step == marked:
                return
            try:
                mark = self._storage.get(marks[step]) if step in marks else b""
            except KeyMissing:  # deleted by an attempt before, which still runs
                continue
            self._storage.put(self._keys.done(name, self._attempt, self._turn, step), mark)
            self._marks.pop(name, None)
            marked = step

    def index(self) -> CheckpointIndex:
        """Return the index of checkpoints, read with two requests."""
        return read_index(self._storage, self._keys, first_step=self._first_step)

    def load_latest(
        self, worker: WorkerId, restore: Callable[[StageState], None] = read_all
    ) -> tuple[int, StageState | None]:
        """Return the step at which `worker` restarts, and its state after it; the state is None if nothing was saved.

        `restore` gets the state, which is only opened if it is large, and once more a newer one if others delete it
        meanwhile. Raises RunUnknown if that is damaged. An older checkpoint would not do, as the messages since are
        deleted: the run as a whole can go back to it, this worker alone cannot.
        """
        for lookup in range(1, _LOOKUPS + 1):
            try:
                step, state = self._open_newest(worker)
                if state is not None:
                    restore(state)
                return step, state
            except KeyMissing as error:
                if lookup == _LOOKUPS:
                    raise self._unreadable(worker, error) from error
                _log.info("a checkpoint was deleted while it was read, looking for a newer one: %s", error)
            except CorruptMessage as error:
                raise self._unreadable(worker, error) from error
        raise AssertionError("the last lookup returns or raises")

    def load_combined(self, stage: int, names: Sequence[str], *, held_bytes: float = math.inf) -> StageState:
        """Return the checkpoints whose manifests have these names, combined into one state. As `load` does."""
        return combine_shards([self.load(stage, name, held_bytes=held_bytes) for name in names])

    def load(self, stage: int, name: str, *, held_bytes: float = math.inf) -> StageState:
        """Return the checkpoint whose manifest is called `name`. Raises KeyMissing, or CorruptMessage with the key.

        One of more than `held_bytes` is only opened: its tensors are read when they are asked for, which raises the
        same; one file at a time is in memory.
        """
        began_s = time.monotonic()
        manifest = get_listed_document(self._storage, Manifest, self._keys.checkpoint(stage, name))
        size = sum(file.bytes for file in manifest.files)
        tensors: Mapping[str, Tensor] = {}
        if size <= held_bytes:
            tensors = united(self._tensors(stage, file) for file in manifest.files)
            took_s = time.monotonic() - began_s
            _log.info("loaded checkpoint %s of stage %d: %d bytes in %.2f s", name, stage, size, took_s)
        else:
            tensors = self._opened(stage, manifest.files)
        return StageState(
            tensors=tensors,
            aliases=manifest.aliases,
            transient=frozenset(manifest.transient),
            settings=settings_from_text(manifest.settings),
        )

    def _opened(self, stage: int, files: Sequence[StoredFile]) -> StateDict:
        newest: list[tuple[str, dict[str, Tensor]]] = []

        def read(file: StoredFile, tensor: str) -> Tensor:
            if not newest or newest[0][0] != file.name:
                newest.clear()
                newest.append((file.name, self._tensors(stage, file)))
            return newest[0][1][tensor]

        readers: dict[str, Callable[[], Tensor]] = {}
        for file in files:
            key = self._keys.checkpoint(stage, file.name)
            try:
                names = [one.removeprefix(_PAIRS) for one in entries_of(read_head(self._storage, key))]
            except (ValueError, AttributeError) as error:
                raise CorruptMessage(f"{key} is no safetensors file: {error}") from error
            readers |= {one: functools.partial(read, file, one) for one in names}
        return StateDict(readers)

    def delete(self, stage: int, names: Collection[str], index: CheckpointIndex) -> None:
        """Delete checkpoints of `stage` by the names of their manifests, which go first; then their files.

        `index` knows all of these, as they were there before the manifests that it has found.
        """
        if not names:
            return
        self._storage.delete_many([self._keys.checkpoint(stage, name) for name in names])
        self._storage.delete_many([self._keys.checkpoint(stage, file) for file in index.files_of(stage, names)])
        _log.debug("deleted checkpoints %s of stage %d", ", ".join(names), stage)

    def _open_newest(self, worker: WorkerId) -> tuple[int, StageState | None]:
        index = self.index()
        step = index.restart_step(worker)
        manifests = index.manifests_for(worker, step)
        return step, self.load_combined(worker[0], manifests, held_bytes=FILE_BYTES) if manifests else None

    def _unreadable(self, worker: WorkerId, error: Exception) -> RunUnknown:
        return RunUnknown(
            f"worker {worker_name(*worker)} cannot restart, as its checkpoint is damaged: {error}; an earlier "
            f"checkpoint of the whole run may be left: funcpipe train ... --resume {self._keys.run}"
        )

    def _read_back(self, key: str, file: StoredFile) -> None:
        """Raise CorruptMessage unless the object under `key` is `file`; only a block of it is in memory at a time."""
        for read in range(1, READS + 1):
            digest = hashlib.sha256()
            try:
                for start in range(0, file.bytes, _BLOCK_BYTES):
                    digest.update(self._storage.get(key, start=start, stop=min(start + _BLOCK_BYTES, file.bytes)))
            except KeyMissing:
                digest.update(b"nothing")
            if digest.hexdigest() == file.sha256:
                return
            _log.warning("read %d of %d of %s is not what was written", read, READS, key)
        raise CorruptMessage(f"{key} reads back otherwise than it was written; the checkpoint before it stays")

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
                return deserialised(key, data)
            _log.warning("read %d of %d of %s has another length or SHA-256 than its manifest", read, READS, key)
        raise CorruptMessage(f"{key} is not what its manifest says: its length or its SHA-256 differs")


def _step_of(key: str) -> int:
    return int(key.rpartition(".")[2])
