"""What a run does not change, its base: frozen parameters, and buffers that stay as they are.

    run-1/base/5b1d….safetensors     frozen tensors of the module that was given, uploaded once
    run-1/base/90c2….json            where each lies: there, or in files of weights that the user has

Checkpoints hold none of it, and all generations of a run have the same. The run's record has the SHA-256 of the
document, which has those of the headers of the files.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from funcpipe.comm.weight_files import DTYPES, NAMES, StoredTensor, below, read_tensor
from funcpipe.core import Base, BaseTensor, RunRecord, WeightFile
from funcpipe.errors import CorruptMessage, KeyMissing, RunUnknown
from funcpipe.platforms.base import OpenStorage, Storage
from funcpipe.runstate.documents import READS, decode_document, encode_document
from funcpipe.runstate.keys import Keys


@dataclass(frozen=True, kw_only=True)
class StoredBase:
    """The tensors of a base, by all names that the model has for them; `transient` are those in no `state_dict`."""

    stored: Mapping[str, StoredTensor] = field(default_factory=dict)
    transient: frozenset[str] = frozenset()

    def below(self, folder: str) -> "StoredBase":
        """Return the same, where files of the run that are called by their names alone lie in `folder`."""
        return replace(self, stored={name: below(tensor, folder) for name, tensor in self.stored.items()})

    def state_readers(self, open_storage: OpenStorage) -> dict[str, Callable[[], Tensor]]:
        """Return what reads each tensor that is in a `state_dict`."""
        return {
            name: lambda tensor=tensor: read_tensor(tensor, open_storage)  # type: ignore[misc]
            for name, tensor in self.stored.items()
            if name not in self.transient
        }


def put_base(storage: Storage, keys: Keys, base: StoredBase) -> str:
    """Write where the tensors of `base` lie, and return the document's SHA-256; nothing, and "", if there are none."""
    if not base.stored:
        return ""
    numbers: dict[WeightFile, int] = {}
    tensors = {
        name: BaseTensor(
            file=numbers.setdefault(tensor.file, len(numbers)),
            dtype=NAMES[tensor.dtype],
            shape=tensor.shape,
            start=tensor.start,
            stop=tensor.stop,
            sha256=tensor.sha256,
        )
        for name, tensor in sorted(base.stored.items())
    }
    document = Base(files=tuple(numbers), tensors=tensors, transient=tuple(sorted(base.transient)))
    data = encode_document(document)
    digest = hashlib.sha256(data).hexdigest()
    storage.put(f"{keys.base}{digest}.json", data)
    return digest


def load_base(storage: Storage, record: RunRecord) -> StoredBase:
    """Return the base of a run. Raises RunUnknown if it is gone, CorruptMessage if it stays damaged when read again."""
    if not record.base:
        return StoredBase()
    key = f"{Keys.of(record).base}{record.base}.json"
    for _ in range(READS):
        try:
            data = storage.get(key)
        except KeyMissing as error:
            raise RunUnknown(f"run {record.run}: where its frozen tensors lie is not known: {error}") from error
        if hashlib.sha256(data).hexdigest() == record.base:
            return _stored(decode_document(Base, data, source=key))
    raise CorruptMessage(f"{key} is not what the record of the run says: its SHA-256 differs")


def _stored(base: Base) -> StoredBase:
    stored = {
        name: StoredTensor(
            file=base.files[one.file],
            dtype=DTYPES[one.dtype],
            shape=one.shape,
            start=one.start,
            stop=one.stop,
            sha256=one.sha256,
        )
        for name, one in base.tensors.items()
    }
    return StoredBase(stored=stored, transient=frozenset(base.transient))
