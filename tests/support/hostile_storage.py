"""A storage that is not ours alone: others have objects in it, it ages, reads late, tears what it takes, or refuses."""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from funcpipe.errors import KeyMissing, StorageBusy
from funcpipe.platforms.base import OPEN, Gate, Storage
from funcpipe.platforms.wrappers import Answer
from tests.support.ageing_storage import AgeingStorage

_LOOK_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostility:
    """What a storage does that it should not.

    Objects expire `keep_days` days after they were written, of which each lasts `requests_a_day` requests. A
    `late_share` of what is written is found by reads `late_s` later, by listings too if they are `lists_late`. Of the
    objects whose key contains the first part of `torn`, the nth keeps only its first half, though the put succeeds.
    With `ignores_conditions`, a conditional put replaces what is there. From the request `unwritable_from` on nothing
    can be written or deleted.
    """

    keep_days: int | None = None
    requests_a_day: int = 100
    late_s: float = 0.0
    late_share: float = 1.0
    lists_late: bool = False
    torn: tuple[str, int] | None = None
    ignores_conditions: bool = False
    unwritable_from: int | None = None


class HostileStorage(AgeingStorage):
    """`store`, which is hostile until it is `healed`; what others have in it is watched.

    `happened` holds the names of what it has done; `touched` what was done to objects of others.
    """

    def __init__(self, store: Storage, hostility: Hostility) -> None:
        super().__init__(store, keep_days=hostility.keep_days or 1)
        self.watches = not hostility.late_s and store.watches
        self._hostility = hostility
        self._requests = self._torn = 0
        self._draw = random.Random(0)
        self._counted = threading.Lock()
        self._late: dict[str, tuple[float, bytes | None]] = {}
        self._of_others: dict[str, bytes] = {}
        self._due: list[tuple[int, Callable[[], None]]] = []
        self.happened: set[str] = set()
        self.touched: list[str] = []

    def heal(self) -> None:
        """Do what a storage should from now on; what is damaged or gone stays so."""
        self._hostility = Hostility()
        self._late.clear()

    def becomes(self, **changes: Any) -> None:
        """Do some of it otherwise from now on."""
        self._hostility = replace(self._hostility, **changes)

    def put_of_others(self, objects: Mapping[str, bytes]) -> None:
        """Write objects of others, which no run may change."""
        for key, data in objects.items():
            self._of_others[key] = data
            self._store.put(key, data)

    def at_request(self, number: int, happens: Callable[[], None]) -> None:
        """Let something happen at the request of that number."""
        self._due.append((number, happens))

    def own(self) -> list[str]:
        """The keys of what lies there but for what others have."""
        return [key for key in self._store.list("") if key not in self._of_others]

    def lost_of_others(self) -> list[str]:
        """The keys of what others had and is gone or has changed, or was written again."""
        there = set(self._store.list(""))
        changed = [k for k, data in self._of_others.items() if k not in there or self._store.get(k) != data]
        return sorted({*changed, *self.touched})

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object, or what is left of it."""
        self._note_others([key])
        if if_absent and self._hostility.ignores_conditions:
            self.happened.add("ignored a condition")
            if_absent = False
        if self._is_torn(key):
            data = bytes(data)[: len(data) // 2]
            self.happened.add(f"tore {key}")
        is_late = bool(self._hostility.late_s) and self._draw.random() < self._hostility.late_share
        before = self._found(key) if is_late else None
        super().put(key, data, if_absent=if_absent, gate=gate)
        if is_late:
            self._late[key] = (time.monotonic() + self._hostility.late_s, before)

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """The bytes [start, stop) of an object, maybe as it was a moment ago."""
        until_s, before = self._late.get(key, (0.0, None))
        data = super().get(key, start=start, stop=stop, gate=gate)
        if time.monotonic() >= until_s:
            return data
        self.happened.add("read late")
        if before is None:
            raise KeyMissing(key)
        return before[start:stop]

    def list(self, prefix: str) -> tuple[str, ...]:
        """The keys that begin with `prefix`, maybe as they were a moment ago."""
        found = super().list(prefix)
        if not self._hostility.lists_late:
            return found
        now_s = time.monotonic()
        seen = tuple(
            key for key in found if not (key in self._late and now_s < self._late[key][0] and self._is_new(key))
        )
        if seen != found:
            self.happened.add("listed late")
        return seen

    def touch(self, key: str) -> None:
        """Make an object young; raises KeyMissing."""
        self._note_others([key])
        super().touch(key)

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._note_others([key])
        self._late.pop(key, None)
        super().delete(key)

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects."""
        self._note_others(keys)
        for key in keys:
            self._late.pop(key, None)
        super().delete_many(keys)

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """Pause until the object may be there."""
        if self._hostility.late_s:
            cancel.wait(min(timeout_s, self._hostility.late_s / 2 + _LOOK_S))
            return
        super().wait(key, timeout_s, cancel)

    def _ask(self, what: str, request: Callable[[], Answer]) -> Answer:
        with self._counted:
            self._requests += 1
            number, hostility = self._requests, self._hostility
            due = [happens for at, happens in self._due if at == number]
        for happens in due:
            happens()
        if hostility.keep_days is not None and number % hostility.requests_a_day == 0:
            before = len(self.expired)
            self.pass_to(number // hostility.requests_a_day)
            self.happened |= {"let objects expire"} if len(self.expired) > before else set()
        writes = what.startswith(("put ", "delete ", "touch "))
        if hostility.unwritable_from is not None and number >= hostility.unwritable_from and writes:
            self.happened.add("refused to write")
            raise StorageBusy(f"{what}: Read-only file system")
        return request()

    def _is_torn(self, key: str) -> bool:
        torn = self._hostility.torn
        if torn is None or torn[0] not in key:
            return False
        with self._counted:
            self._torn += 1
            return self._torn == torn[1]

    def _is_new(self, key: str) -> bool:
        return self._late[key][1] is None

    def _found(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except KeyMissing:
            return None

    def _note_others(self, keys: Sequence[str]) -> None:
        self.touched += [key for key in keys if key in self._of_others]
