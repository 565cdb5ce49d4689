"""Optuna's study of a sweep, and its journal: a series of objects in the storage of the sweep.

    digits/g0000-3fa9c2d11b0c77e4/journal/00000000     logs of Optuna's, and the sampler as it was after them
    digits/g0000-3fa9c2d11b0c77e4/journal/00000001

An object is put only where there is none, so several processes may write one journal, as Optuna wants. A sweep owns its
study, and holds logs back until it needs them in storage: a wave of trials is one object, and so are all reports that
came while the last object was on its way.
"""

import base64
import contextlib
import json
import pickle
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import cloudpickle
import optuna
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import FrozenTrial, TrialState

from funcpipe.core.texts import usd_text
from funcpipe.errors import InvalidValue, KeyExists, KeyMissing, RunTaken
from funcpipe.platforms.base import Storage
from funcpipe.runstate.keys import Keys

Direction = Literal["minimize", "maximize"]


_EXHAUSTED = "exhausted"


class JournalKeys(Keys):
    """The keys of a study's journal."""

    __slots__ = ()

    def journal(self, number: int) -> str:
        """Return the key of the object of that number."""
        return self._key("journal", f"{number:08d}")


class StorageJournal(BaseJournalBackend):
    """A journal in object storage, for Optuna's JournalStorage.

    An `owner` of the study, the only one that writes, holds its logs back until `flush`; `sampler` is what the newest
    object has of it.
    """

    def __init__(self, storage: Storage, keys: JournalKeys, *, owner: bool = False) -> None:
        self._storage, self._keys, self._owner = storage, keys, owner
        self._lock, self._writing = threading.RLock(), threading.Lock()
        self._logs: list[dict[str, Any]] = []
        self._held: list[dict[str, Any]] = []
        self._objects = 0
        self.sampler: str | None = None
        self._pull()

    def read_logs(self, log_number_from: int) -> Iterable[dict[str, Any]]:
        """Return the logs from that number on, with those that are held back."""
        with self._lock:
            if not self._owner:
                self._pull()
            return [*self._logs, *self._held][log_number_from:] if self._held else self._logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Add `logs`; without an owner they are in storage afterwards."""
        with self._lock:
            self._held += logs
        if not self._owner:
            self.flush()

    def flush(self, sampler: str | None = None) -> None:
        """Put what is held back into storage. Threads that come meanwhile share the next object.

        Raises RunTaken if another client has written, though this one owns the study.
        """
        with self._writing:
            while True:
                with self._lock:
                    held, number = list(self._held), self._objects
                if not held:
                    return
                kept = sampler or self.sampler
                text = json.dumps({"logs": held, "sampler": kept}, separators=(",", ":"))
                try:
                    self._storage.put(self._keys.journal(number), text.encode(), if_absent=True)
                except KeyExists:
                    if self._owner:
                        raise RunTaken(self._keys.run, "another client, which goes on with the sweep") from None
                    self._pull()
                    continue
                with self._lock:
                    self._logs += held
                    del self._held[: len(held)]
                    self._objects, self.sampler = number + 1, kept
                return

    def _pull(self) -> None:
        while True:
            with self._lock:
                number = self._objects
            try:
                found = json.loads(self._storage.get(self._keys.journal(number)))
            except KeyMissing:
                return
            with self._lock:
                if self._objects == number:
                    self._logs += found["logs"]
                    self.sampler, self._objects = found["sampler"], number + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStatus:
    """A trial: its values, and how far it has come after `step` steps. `run` is the name of its run.

    `value` is its best so far. It is "waiting" or "running", or was "finished", "pruned", "failed" with an `error`, or
    "stopped" at a limit, to go on when the sweep does. Pruning it has saved `saved_usd`, at the pace of its steps.
    """

    number: int
    state: str
    run: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    value: float | None = None
    step: int = 0
    usd: float = 0.0
    seconds: float = 0.0
    saved_usd: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """A sweep of the name `run`: its trials so far of `wanted`, its dollars, and its seconds since it was started.

    `usd` is all that it has cost, with the `client_usd` of the client's own requests.
    """

    FORMAT: ClassVar[str] = "funcpipe.sweep/1"

    run: str
    metric: str
    direction: str
    wanted: int
    trials: tuple[TrialStatus, ...]
    usd: float
    client_usd: float
    elapsed_s: float
    max_usd: float | None = None

    @property
    def best(self) -> TrialStatus | None:
        """The finished trial with the best value."""
        found = [trial for trial in self.trials if trial.state == "finished" and trial.value is not None]
        sign = 1 if self.direction == "minimize" else -1
        return min(found, key=lambda trial: sign * (trial.value or 0.0), default=None)

    @property
    def counts(self) -> dict[str, int]:
        """The number of trials in each state."""
        return dict(Counter(trial.state for trial in self.trials))

    @property
    def saved_usd(self) -> float:
        """The dollars that pruning has saved."""
        return sum(trial.saved_usd for trial in self.trials)

    def line(self) -> str:
        """Return the sweep in one line."""
        best, counts = self.best, ", ".join(f"{count} {state}" for state, count in sorted(self.counts.items()))
        found = (
            "no trial has finished" if best is None else f"best {self.metric} {best.value:.6g} (trial {best.number})"
        )
        cap = "" if self.max_usd is None else f" of ${self.max_usd:g}"
        saved = f", pruning saved ${usd_text(self.saved_usd)}" if self.saved_usd else ""
        return f"{found}; of {self.wanted}: {counts or 'none yet'}; ${usd_text(self.usd)}{cap}{saved}"


ENDED = ("finished", "pruned", "failed")
"""The states of trials that are over for good."""

_STATES = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


def status_of(trial: FrozenTrial, run: str) -> TrialStatus:
    """Return the status of a trial that does not run, by what the study has of it."""
    known = trial.user_attrs
    seen = trial.intermediate_values
    return TrialStatus(
        number=trial.number,
        state=_STATES.get(trial.state, "stopped" if "usd" in known else "waiting"),
        run=run,
        settings=trial.params,
        value=trial.value if trial.state is TrialState.COMPLETE else None if not seen else seen[max(seen)],
        step=max(seen, default=0),
        usd=known.get("usd", 0.0),
        seconds=known.get("seconds", 0.0),
        saved_usd=known.get("saved_usd", 0.0),
        error=known.get("error", ""),
    )


class SweepStudy:
    """A study as its sweep uses it: trials are asked for, told and saved by several threads in turn."""

    def __init__(
        self,
        storage: Storage,
        keys: JournalKeys,
        *,
        direction: Direction,
        sampler: optuna.samplers.BaseSampler | None,
        pruner: optuna.pruners.BasePruner | None,
    ) -> None:
        self._lock = threading.RLock()
        self._journal = StorageJournal(storage, keys, owner=True)
        before = self._journal.sampler
        if before is not None:
            sampler = _unpickled(before, sampler)
        with _quiet():
            self.optuna = optuna.create_study(
                storage=optuna.storages.JournalStorage(self._journal),
                study_name=keys.run,
                direction=direction,
                sampler=sampler,
                pruner=pruner or optuna.pruners.NopPruner(),
                load_if_exists=True,
            )
        if self.direction != direction:
            raise InvalidValue("direction", direction, f"must be {self.direction}, as when the sweep {keys.run} began")

    @property
    def prunes(self) -> bool:
        """True if trials may be pruned."""
        return not isinstance(self.optuna.pruner, optuna.pruners.NopPruner)

    def trials(self) -> Sequence[FrozenTrial]:
        """Return all trials so far."""
        with self._lock:
            return self.optuna.get_trials(deepcopy=False)

    def waiting(self) -> int:
        """Return the number of trials that are enqueued."""
        return sum(trial.state is TrialState.WAITING for trial in self.trials())

    def enqueue(self, values: Iterable[dict[str, Any]]) -> None:
        """Have trials of these values come next."""
        with self._lock, _quiet():
            for value in values:
                self.optuna.enqueue_trial(value)

    def ask(self) -> optuna.Trial:
        """Return the next trial; it is in storage once it is saved."""
        with self._lock, _quiet():
            return self.optuna.ask()

    def again(self, trial: FrozenTrial) -> optuna.Trial:
        """Return a trial that ran when its client ended, with the values it has; the sampler draws nothing."""
        with self._lock, _quiet():
            study = optuna.load_study(
                study_name=self.optuna.study_name,
                storage=self.optuna._storage,
                sampler=optuna.samplers.RandomSampler(),
                pruner=self.optuna.pruner,
            )
            return optuna.Trial(study, trial._trial_id)

    @property
    def direction(self) -> str:
        """Either "minimize" or "maximize"."""
        return self.optuna.direction.name.lower()

    def best(self) -> int | None:
        """Return the number of the best trial of those that have finished."""
        with self._lock:
            try:
                return self.optuna.best_trial.number
            except ValueError:
                return None

    def copy(self) -> optuna.Study:
        """Return the study in memory."""
        with _quiet():
            copied = optuna.create_study(
                study_name=self.optuna.study_name,
                direction=self.optuna.direction,
                sampler=self.optuna.sampler,
                pruner=self.optuna.pruner,
            )
            copied.add_trials(self.trials())
        return copied

    def note(self, trial: optuna.Trial, **attributes: Any) -> None:
        """Note what is known of a trial that is to go on later."""
        with self._lock:
            for name, attribute in attributes.items():
                trial.set_user_attr(name, attribute)

    @property
    def is_exhausted(self) -> bool:
        """True if the sampler has no other values to try, as that of a grid."""
        return bool(self.optuna.user_attrs.get(_EXHAUSTED, False))

    @property
    def client_usd(self) -> float:
        """The dollars of the requests of all clients, as of when it was last saved."""
        return float(self.optuna.user_attrs.get("client_usd", 0.0))

    def save(self, client_usd: float) -> None:
        """Put all that is new into storage, with the sampler's state and what the client's requests have cost."""
        with self._lock:
            self.optuna.set_user_attr("client_usd", client_usd)
            try:
                sampler = base64.b64encode(cloudpickle.dumps(self.optuna.sampler)).decode()
            except (pickle.PicklingError, TypeError, AttributeError):
                sampler = None
        self._journal.flush(sampler)

    def report(self, trial: optuna.Trial, value: float, step: int) -> bool:
        """Note a value of a trial; return True if it is to be pruned."""
        with self._lock, _quiet():
            if step not in self.optuna._storage.get_trial(trial._trial_id).intermediate_values:
                trial.report(value, step)
            return self.prunes and trial.should_prune()

    def tell(self, trial: optuna.Trial, state: TrialState, value: float | None = None, **attributes: Any) -> None:
        """Note how a trial has ended, in storage too."""
        with self._lock, _quiet():
            self.note(trial, **attributes)
            self.optuna._thread_local.in_optimize_loop = True  # or samplers of finite spaces cannot end the study
            self.optuna.tell(trial, value if state is TrialState.COMPLETE else None, state=state)
            if self.optuna._stop_flag:
                self.optuna.set_user_attr(_EXHAUSTED, True)
        self._journal.flush()


def _unpickled(text: str, given: optuna.samplers.BaseSampler | None) -> optuna.samplers.BaseSampler:
    """Return the sampler as it was saved, in an object that the sweep has signed; raises InvalidValue for another."""
    saved: optuna.samplers.BaseSampler = pickle.loads(base64.b64decode(text))  # noqa: S301 - the sweep's own, signed
    if given is not None and type(given) is not type(saved):
        rule = f"must be a {type(saved).__name__}, as when the sweep began"
        raise InvalidValue("sampler", type(given).__name__, rule)
    return saved


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Have Optuna say nothing of trials, which the sweep shows itself."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
