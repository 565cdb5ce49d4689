"""Callbacks: the events of a run for a user's program, a progress bar or a logger.

They are called in the client's process, one after another, between the client's polls of the run; functions do not wait
for them.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from funcpipe.client.follow.export import SavedModel, read_saved
from funcpipe.client.follow.results import OnProgress, Progress, RunResult
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.core import JobEstimate, Plan
from funcpipe.errors import FuncPipeError, InvalidValue
from funcpipe.platforms.base import Storage
from funcpipe.runstate.reader import RunReader

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The run that begins, or that is watched or collected from now on.

    It ends after step `steps`, and has begun after step `began_step`. `losses` are those of its steps that were done
    before, which callbacks do not get again: they get step `done + 1` first. `resumed` says whether the run
    was known before, so that what was logged of it is to go on. `estimate` is what the steps that are left are expected
    to take; None if the plan has none. An epoch has `steps_per_epoch` steps.
    """

    run: str
    plan: Plan
    epochs: int
    steps: int
    samples: int
    storage: str
    losses: tuple[float, ...] = ()
    resumed: bool = False
    estimate: JobEstimate | None = None
    max_usd: float | None = None
    began_step: int = 0
    steps_per_epoch: int = 0

    @property
    def settings(self) -> dict[str, int | str]:
        """The run's settings for loggers, under the names that all of them use."""
        return {
            "epochs": self.epochs,
            "steps": self.steps,
            "samples": self.samples,
            "global_batch": self.plan.global_batch,
            "stages": len(self.plan.stages),
            "replicas": self.plan.replicas,
            "platform": self.plan.platform,
            "model": self.plan.model,
        }

    @property
    def done(self) -> int:
        """The last step that was done before."""
        return self.began_step + len(self.losses)

    @property
    def known_losses(self) -> dict[int, float]:
        """The losses of steps that were done before, by step."""
        return dict(enumerate(self.losses, start=self.began_step + 1))


class Callback:
    """A handler of a run's events; each method does nothing unless a subclass defines it.

    A callback that raises an exception is not called again, but for its `on_end` or `on_error`. The run goes on; the
    exception is logged once, with its traceback, and `RunResult.callback_errors` has it in the end. KeyboardInterrupt
    ends the run, or ends watching it.
    """

    def on_start(self, run: RunInfo) -> None:
        """All checks are made; functions are started next, unless they run already."""

    def on_step(self, progress: Progress) -> None:
        """A step has ended. Each is reported once, in order, also those that ended before this client watched."""

    def on_epoch(self, epoch: int, progress: Progress) -> None:
        """The epoch of that number, from 1 on, has ended with the step of `progress`."""

    def on_validation(self, step: int, values: Mapping[str, float]) -> None:
        """The model was validated after so many steps; `values` are its loss and metrics by name."""

    def on_checkpoint(self, step: int, load: Callable[[], SavedModel]) -> None:
        """The run has saved its model after so many steps; `load` reads it, or a newer one if there is one meanwhile.

        Not each checkpoint is reported: the storage is asked once in LOOK_S seconds, and only for a callback with this
        method.
        """

    def on_end(self, result: RunResult) -> None:
        """The run has finished, and its result is loaded into the model."""

    def on_error(self, error: BaseException) -> None:
        """The run has failed, was ended early, or is not watched any more; `error` is raised next."""


class EachStep(Callback):
    """A callback that calls a function with the progress of each step: `callbacks=[EachStep(print)]`."""

    def __init__(self, call: OnProgress) -> None:
        self._call = call

    def on_step(self, progress: Progress) -> None:
        """Call the function."""
        self._call(progress)


LOOK_S = 2.0
"""The seconds between two looks for a new checkpoint."""


class Callbacks:
    """Callbacks called in order, with the exceptions that they raise; call it with the progress of each step."""

    def __init__(self, callbacks: Iterable[Callback], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._callbacks, self._clock = tuple(callbacks), clock
        self._steps_per_epoch = 0
        for number, callback in enumerate(self._callbacks):
            if not isinstance(callback, Callback):
                rule = "must be a Callback, made already; for a function of each step, EachStep(function)"
                raise InvalidValue(f"callbacks[{number}]", callback, rule)
        self._errors: dict[int, Exception] = {}
        self._checkpoints: _Checkpoints | None = None

    def __call__(self, progress: Progress) -> None:
        """A step has ended, or the model was validated after it."""
        if progress.validation is not None:
            self.validated(progress.validation.step, progress.validation.values)
            return
        self._call("on_step", lambda callback: callback.on_step(progress))
        if self._steps_per_epoch and progress.step % self._steps_per_epoch == 0:
            epoch = progress.step // self._steps_per_epoch
            self._call("on_epoch", lambda callback: callback.on_epoch(epoch, progress))
        if self._checkpoints is not None and (step := self._checkpoints.newer()) is not None:
            load = self._checkpoints.load
            self._call("on_checkpoint", lambda callback: callback.on_checkpoint(step, load))

    @contextlib.contextmanager
    def of_run(self, run: RunInfo, storage: Storage | None = None) -> Iterator[None]:
        """The run begins, in `storage`, which is signed; if an exception leaves this context, the run has failed."""
        self._steps_per_epoch = run.steps_per_epoch
        if storage is not None and any(
            type(one).on_checkpoint is not Callback.on_checkpoint for one in self._callbacks
        ):
            self._checkpoints = _Checkpoints(storage, run.run, run.done, self._clock)
        self._call("on_start", lambda callback: callback.on_start(run))
        try:
            yield
        except BaseException as error:
            failure = error
            self._call("on_error", lambda callback: callback.on_error(failure), last=True)
            raise

    def validated(self, step: int, values: Mapping[str, float]) -> None:
        """The model was validated."""
        self._call("on_validation", lambda callback: callback.on_validation(step, values))

    def ended(self, result: RunResult) -> RunResult:
        """The run has finished; returns its result with what callbacks have raised."""
        self._call("on_end", lambda callback: callback.on_end(result), last=True)
        return replace(result, callback_errors=tuple(self._errors.values()))

    def _call(self, method: str, call: Callable[[Callback], None], *, last: bool = False) -> None:
        for number, callback in enumerate(self._callbacks):
            failed = number in self._errors
            if failed and not last:
                continue
            try:
                call(callback)
            except Exception as error:  # noqa: BLE001 - a callback is the user's code, and the run is worth more
                if not failed:
                    self._errors[number] = error
                    _log.error(
                        "%s.%s has failed, and is not called again; the run goes on",
                        *(type(callback).__name__, method),
                        exc_info=error,
                    )


class _Checkpoints:
    """Looks for checkpoints of a run that are newer than step `seen`."""

    def __init__(self, storage: Storage, run: str, seen: int, clock: Callable[[], float]) -> None:
        self._storage, self._run, self._seen, self._clock = storage, run, seen, clock
        self._looked_s = clock()

    def newer(self) -> int | None:
        """Return the step of the newest one, if it has not been seen, and it is time to look."""
        if self._clock() - self._looked_s < LOOK_S:
            return None
        self._looked_s = self._clock()
        try:
            newest = max(RunReader.newest(self._storage, self._run).saved, default=0)
        except FuncPipeError as error:  # another look may be luckier
            _log.info("run %s: cannot look for checkpoints: %s", self._run, error)
            return None
        if newest <= self._seen:
            return None
        self._seen = newest
        return newest

    def load(self) -> SavedModel:
        """The newest one that can be read."""
        return read_saved(self._run, self._storage)


def run_info(prepared: PreparedRun) -> RunInfo:
    """The RunInfo of a run that was prepared."""
    job, running = prepared.job, prepared.running
    known = running or prepared.resumed
    return RunInfo(
        run=prepared.name,
        plan=job.plan,
        epochs=job.epochs,
        steps=job.steps if running is None else running.steps,
        samples=job.samples,
        storage=prepared.storage_url,
        losses=() if known is None else known.losses,
        began_step=prepared.began_step if running is None else running.began_step,
        steps_per_epoch=job.batches.steps_per_epoch,
        resumed=known is not None,
        estimate=prepared.estimate,
        max_usd=prepared.limits.max_usd,
    )
