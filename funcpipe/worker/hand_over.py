"""How a worker goes on beyond the life of its function: it starts a successor in time, saves its stage, and leaves."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from funcpipe.core import HandOver, WorkerSpec
from funcpipe.errors import KeyMissing
from funcpipe.platforms.base import Platform, Storage
from funcpipe.runstate.documents import get_document, put_document
from funcpipe.runstate.functions import start_function
from funcpipe.runstate.keys import Keys

_RESERVE = 0.02  # of a life, for what takes longer than it ever has
_STARTS = 1.5  # cold starts that a successor is given to become warm
_LOOK_S = 0.2


class Successor:
    """When a function starts its successor, and when it must leave; `age_s` is the function's age."""

    def __init__(
        self, spec: WorkerSpec, storage: Storage, keys: Keys, open_platform: Callable[[str], Platform], began_s: float
    ) -> None:
        """`began_s` is when the function began, by the monotonic clock."""
        self._spec = spec
        self._storage = storage
        self._keys = keys
        self._open_platform = open_platform
        self._began_s = began_s
        self._started = False

    @property
    def age_s(self) -> float:
        """Seconds since the function began."""
        return time.monotonic() - self._began_s

    def prepare(self, *, step_s: float, leaving_s: float, spent_usd: float) -> None:
        """Start the successor, once, when it is time: it should be warm when this function leaves."""
        lifetime_s = self._spec.faults.lifetime_s
        if lifetime_s is None or self._started:
            return
        warm_s = _STARTS * self._spec.faults.cold_start_s + 2 * step_s
        if self.age_s + warm_s >= self._leaves_at_s(lifetime_s, step_s, leaving_s):
            self._started = True
            start_function(self._open_platform(self._spec.platform), self._storage, self._keys, self._next(spent_usd))

    def due(self, *, step_s: float, leaving_s: float) -> bool:
        """Whether another step might not end before the function's life does."""
        lifetime_s = self._spec.faults.lifetime_s
        return lifetime_s is not None and self.age_s >= self._leaves_at_s(lifetime_s, step_s, leaving_s)

    def leave(self, step: int) -> None:
        """Tell the successor that `step` steps are done and saved."""
        put_document(self._storage, self._keys.hand_over(self._spec.worker, self._spec.attempt), HandOver(step=step))

    @staticmethod
    def _leaves_at_s(lifetime_s: float, step_s: float, leaving_s: float) -> float:
        return lifetime_s * (1 - _RESERVE) - 2 * step_s - 2 * leaving_s

    def _next(self, spent_usd: float) -> WorkerSpec:
        account = self._spec.account
        left_s = (self._spec.faults.lifetime_s or 0.0) - self.age_s
        older = replace(account, spent_usd=spent_usd, elapsed_s=account.elapsed_s + self.age_s)
        return replace(self._spec, attempt=self._spec.attempt + 1, follows_within_s=max(left_s, _LOOK_S), account=older)


def await_predecessor(spec: WorkerSpec, storage: Storage, keys: Keys) -> None:
    """Return when the attempt before has handed over, or its life must be over."""
    if spec.follows_within_s is None or spec.attempt == 0:
        return
    key = keys.hand_over(spec.worker, spec.attempt - 1)
    never = threading.Event()
    until_s = time.monotonic() + spec.follows_within_s
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            get_document(storage, HandOver, key)
        except KeyMissing:
            storage.wait(key, left_s if storage.watches else min(left_s, _LOOK_S), never)
            continue
        return
