"""Callbacks: the events of a run for a user's program, a progress bar or a logger.

They are called in the client's process, one after another, between the client's polls of the run; functions do not wait
for them.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from funcpipe.client.follow.results import OnProgress, Progress, RunResult
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.core import JobEstimate, Plan
from funcpipe.errors import InvalidValue

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The run that begins, or that is watched or collected from now on.

    It ends after step `steps`, and has begun after step `began_step`. `losses` are those of its steps that were done
    before, which callbacks do not get again: they get step `done + 1` first. `resumed` says whether the run
    was known before, so that what was logged of it is to go on. `estimate` is what the steps that are left are expected
    to take; None if the plan has none.
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

    def on_validation(self, step: int, values: Mapping[str, float]) -> None:
        """The model was validated after so many steps; `values` are its loss and metrics by name."""

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


class Callbacks:
    """Callbacks called in order, with the exceptions that they raise; call it with the progress of each step."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        for number, callback in enumerate(self._callbacks):
            if not isinstance(callback, Callback):
                rule = "must be a Callback, made already; for a function of each step, EachStep(function)"
                raise InvalidValue(f"callbacks[{number}]", callback, rule)
        self._errors: dict[int, Exception] = {}

    def __call__(self, progress: Progress) -> None:
        """A step has ended, or the model was validated after it."""
        if progress.validation is not None:
            self.validated(progress.validation.step, progress.validation.values)
            return
        self._call("on_step", lambda callback: callback.on_step(progress))

    @contextlib.contextmanager
    def of_run(self, run: RunInfo) -> Iterator[None]:
        """The run begins; if an exception leaves this context, the run has failed."""
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
        resumed=known is not None,
        estimate=prepared.estimate,
        max_usd=prepared.limits.max_usd,
    )
