"""What a run keeps in storage while others write, delete or damage it at the same time."""

import pytest
from torch import nn

from funcpipe.core import Halt, LeaseDocument
from funcpipe.errors import CorruptMessage, KeyMissing, RunUnknown, Superseded
from funcpipe.platforms.base import OPEN, Gate, Handle
from funcpipe.platforms.function_group import StartedFunction
from funcpipe.runstate.checkpoints import Checkpoints
from funcpipe.runstate.documents import READS, get_document, get_listed_document, put_document
from funcpipe.runstate.functions import list_functions
from funcpipe.runstate.halt import halt_run
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import Lease
from funcpipe.testing.memory_storage import MemoryStorage
from funcpipe.training.norms import GradientNorm
from funcpipe.training.state import StageState, capture_state

KEYS = Keys("run-1")


class Late(MemoryStorage):
    """A storage of which the first `misses` reads of a key that ends with `end` do not find what is there."""

    def __init__(self, end: str, misses: int) -> None:
        super().__init__()
        self.end, self.misses = end, misses

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        if key.endswith(self.end) and self.misses:
            self.misses -= 1
            raise KeyMissing(key)
        return super().get(key, start=start, stop=stop, gate=gate)


def state() -> StageState:
    return capture_state(nn.Linear(3, 2), None, GradientNorm())


def test_a_document_that_is_listed_is_looked_for_again() -> None:
    storage = Late("halt", misses=2)
    put_document(storage, "halt", Halt(reason="enough"))
    assert get_listed_document(storage, Halt, "halt").reason == "enough"
    with pytest.raises(KeyMissing):
        get_listed_document(storage, Halt, "nothing")


def test_a_document_that_stays_damaged_is_told() -> None:
    storage = MemoryStorage()
    storage.put("halt", b"no document")
    with pytest.raises(CorruptMessage, match="halt"):
        get_document(storage, Halt, "halt")


def test_files_of_a_checkpoint_are_looked_for_again_and_damaged_ones_refused() -> None:
    storage = Late(".safetensors", misses=2)
    saved = Checkpoints(storage, KEYS).save(0, 1, state(), writer="w")
    ((_, name),) = Checkpoints(storage, KEYS).index().saved[0]
    assert Checkpoints(storage, KEYS).load(0, name).tensors.keys() == state().tensors.keys()
    storage.misses = READS
    with pytest.raises(KeyMissing):
        Checkpoints(storage, KEYS).load(0, name)
    key = KEYS.checkpoint(0, saved.files[0].name)
    storage.put(key, b"x" * saved.files[0].bytes)
    with pytest.raises(CorruptMessage, match="is not what its manifest says"):
        Checkpoints(storage, KEYS).load(0, name)


def test_a_checkpoint_that_is_always_deleted_before_it_is_read_is_told() -> None:
    storage = MemoryStorage()
    saved = Checkpoints(storage, KEYS).save(0, 0, state(), writer="w")
    storage.delete(KEYS.checkpoint(0, saved.files[0].name))
    with pytest.raises(RunUnknown, match="its checkpoint is damaged"):
        Checkpoints(storage, KEYS).load_latest((0, 0))


class Raced(MemoryStorage):
    """A storage in which somebody else writes a key just before it is first written here."""

    def __init__(self, key: str, other: LeaseDocument | Halt) -> None:
        super().__init__()
        self.key, self.other = key, other
        self.raced = False

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        if key == self.key and not self.raced:
            self.raced = True
            put_document(self, key, self.other)
        super().put(key, data, if_absent=if_absent, gate=gate)


def test_of_two_orders_to_end_the_first_holds_for_all() -> None:
    storage = Raced(KEYS.halt, Halt(reason="the first"))
    assert halt_run(storage, KEYS, Halt(reason="the second")) == Halt(reason="the first")


def test_a_lease_that_is_taken_away_is_lost() -> None:
    storage = MemoryStorage()
    lease = Lease(storage, KEYS, "s0.r0", 0, fresh_s=0.0)
    lease.take()
    lease.check_now()
    put_document(storage, KEYS.lease("s0.r0", 0), LeaseDocument(holder="another function"))
    with pytest.raises(Superseded, match=r"another function is attempt 0 of s0\.r0"):
        lease.check_now()


def test_a_function_whose_document_is_deleted_while_they_are_listed_is_passed_over() -> None:
    storage = Late("0b", misses=READS)
    for end in ("0a", "0b"):
        note = StartedFunction(worker="s0.r0", attempt=0, handle=Handle(worker="s0.r0", name=end), usd_s=0.0)
        put_document(storage, KEYS.function("s0.r0", 0, end), note)
    assert [function.handle.name for function in list_functions(storage, KEYS)] == ["0a"]
