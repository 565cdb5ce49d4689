"""A sweep: trainings of one model with many settings, and the best of them."""

import contextlib
import copy
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import optuna
from torch import nn

from funcpipe.client.control.commands import after_interrupt, resumed_by
from funcpipe.client.follow.export import write_trained
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.client.prepare.session import Session, open_session
from funcpipe.comm.weight_files import opening
from funcpipe.core import DEFAULT_STORES, FaultTolerance, Plan, PlatformSpec, RunLimits, RunSettings, Validation, checks
from funcpipe.core.run_key import RunKey
from funcpipe.core.settings import DEFAULT_FAULTS, DEFAULT_SETTINGS, NO_LIMITS, RunKeywords, settings_with
from funcpipe.core.texts import Described
from funcpipe.core.validation import LOSS, MonitorMode
from funcpipe.errors import InvalidValue, RunInterrupted, RunUnknown
from funcpipe.platforms.base import Platform
from funcpipe.platforms.catalog import LOCAL, is_deployment, is_ray, load_spec, open_deployment, open_storage
from funcpipe.platforms.launch_rate import LaunchRate
from funcpipe.runstate.generations import find_objects, list_generations, reserve_generation
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import Owner, owned
from funcpipe.runstate.reader import RunReader
from funcpipe.runstate.signing import KeyFolder, key_of
from funcpipe.sweep.budget import SweepEstimate, estimate_sweep
from funcpipe.sweep.candidates import Candidate, Candidates, Terms
from funcpipe.sweep.study import ENDED, Direction, JournalKeys, SweepStatus, SweepStudy, TrialStatus
from funcpipe.sweep.trial_run import delete_runs
from funcpipe.sweep.wave import Make, Wave
from funcpipe.training.data_source import Data
from funcpipe.training.state_dict import StateDict

ITEM = "item"
"""The parameter of a sweep over a list: the place in it."""

_LONGEST_NAME = 45
"""So that the names of its trials and of its code are names of runs."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SweepResult(Described):
    """The result of a sweep: how each trial has ended, Optuna's study of them, and models by the number of the trial.

    The study is a copy in memory, as Optuna's own functions take it. The models are those of the validation with the
    best value: that of the best trial, and of a sweep over a list those of all trials that have finished.
    """

    status: SweepStatus
    study: optuna.Study
    models: dict[int, nn.Module] = field(default_factory=dict, repr=False)

    @property
    def best(self) -> TrialStatus:
        """The trial with the best value. Raises RunUnknown if none has finished."""
        best = self.status.best
        if best is None:
            raise RunUnknown(f"no trial of sweep {self.status.run} has finished: {self.status.line()}")
        return best

    @property
    def model(self) -> nn.Module:
        """The trained model of the best trial."""
        return self.models[self.best.number]

    @property
    def is_complete(self) -> bool:
        """True if all trials that were wanted have ended; otherwise `resume` goes on."""
        ended = sum(trial.state in ENDED for trial in self.status.trials)
        return ended >= self.status.wanted


class Sweep:
    """Many trainings side by side, and the best of them.

    `make` takes a trial of Optuna, asks it for values (`trial.suggest_float("lr", 1e-4, 1.0, log=True)`), and returns a
    FuncPipe, or a Candidate with data or epochs of its own. With `items`, one trial is trained for each of them, and
    `make` takes the item: folds, or customers. `data`, `validation`, `epochs`, `seed` and `shuffle` are those of
    `FuncPipe.train`; a trial's value is its best `metric` of all validations, val_loss or the name of a metric, and the
    best trial's is the least or, with the `direction` "maximize", the largest. `sampler` and `pruner` are Optuna's; by
    default trials are drawn by its TPESampler, and none is pruned.

    Trials are trained by `plan`, or by the cheapest for batches of `global_batch`, in micro-batches of `micro_batch`,
    by default the whole batch. Trials that differ in numbers only are traced, tried and planned once. Raises
    InvalidValue for what cannot be.
    """

    def __init__(
        self,
        make: Make | Callable[[Any], Any],
        *,
        data: Data | None = None,
        validation: Validation | Data | None = None,
        metric: str = LOSS,
        direction: Direction = "minimize",
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        plan: Plan | None = None,
        sampler: optuna.samplers.BaseSampler | None = None,
        pruner: optuna.pruners.BasePruner | None = None,
        items: Sequence[Any] | None = None,
    ) -> None:
        if not callable(make):
            raise InvalidValue("make", make, "must be a function that returns a FuncPipe or a Candidate")
        if direction not in ("minimize", "maximize"):
            raise InvalidValue("direction", direction, "must be minimize or maximize")
        if plan is None and global_batch is None:
            raise InvalidValue("global_batch", None, "must be given, unless there is a plan")
        if items is not None:
            checks.filled("items", tuple(items))
        self._make, self._items = make, None if items is None else tuple(items)
        self._data, self._validation, self._metric, self._direction = data, validation, metric, direction
        self._epochs, self._seed, self._shuffle, self._plan = epochs, seed, shuffle, plan
        whole = plan.global_batch if plan is not None else global_batch or 1
        self._global_batch, self._micro_batch = whole, micro_batch or whole
        self._sampler = sampler or optuna.samplers.TPESampler(seed=seed)
        self._pruner = pruner

    def run(
        self,
        trials: int | None = None,
        *,
        platform: str = LOCAL,
        like: str | PlatformSpec | None = None,
        max_functions: int | None = None,
        limits: RunLimits = NO_LIMITS,
        faults: FaultTolerance = DEFAULT_FAULTS,
        settings: RunSettings = DEFAULT_SETTINGS,
        confirm: Callable[[SweepEstimate], None] | None = None,
        show: Callable[[SweepStatus], None] | None = None,
        **keywords: Unpack[RunKeywords],
    ) -> SweepResult:
        """Train so many trials; of a sweep that goes on (`resume`), those before count.

        As many run at once as `max_functions` admit, by default all that the platform has, on one machine its
        processors. `limits` are for the whole sweep: no trial starts that is not expected to end within them, and at a
        limit all are stopped, to go on when the sweep is resumed. `settings` and the keywords are those of
        `FuncPipe.train`: `run` names the sweep, whose trials are runs called NAME-t0000. `confirm` gets what is
        expected before anything starts, and may raise; `show` gets the status a few times a second.

        Raises InputError before anything starts, for what cannot be trained; the error of the third trial that fails
        before any has finished; RunInterrupted when Ctrl-C or SIGTERM ends it, after trials have saved a step.
        """
        settings = settings_with(settings, keywords)
        wanted = len(self._items) if self._items is not None else trials
        if wanted is None or (self._items is not None and trials not in (None, wanted)):
            raise InvalidValue("trials", trials, "must be given, unless there are items")
        checks.whole("trials", wanted, 1)
        checks.at_least("max_functions", 1 if max_functions is None else max_functions, 1)
        if settings.provisioned:
            raise InvalidValue("provisioned", True, "must be left out of a sweep, whose functions come and go")
        with open_session(platform, like, settings, silent=True) as session:
            opened = _once(session)
            terms = self._terms(platform, opened, faults, settings)
            with self._owned(opened, settings) as (owner, keys):
                sweep = _Opened(self, opened, owner, keys, terms)
                return sweep.run(wanted, max_functions, limits, confirm, show)

    def _terms(self, platform: str, session: Session, faults: FaultTolerance, settings: RunSettings) -> Terms:
        if session.like is not None:
            spec = session.like
        elif is_deployment(platform):
            spec = open_deployment(platform).of_deployed_sizes().spec
        else:
            spec = session.functions().spec if is_ray(platform) else load_spec(platform)
        return Terms(
            metric=self._metric,
            mode=MonitorMode.MIN if self._direction == "minimize" else MonitorMode.MAX,
            data=self._data,
            validation=self._validation,
            epochs=self._epochs,
            seed=self._seed,
            shuffle=self._shuffle,
            global_batch=self._global_batch,
            micro_batch=self._micro_batch,
            plan=self._plan,
            spec=spec,
            faults=replace(faults, keep=faults.keep or session.lasts),
            settings=replace(settings, name=None, resume=None, take_over=False),
        )

    @contextlib.contextmanager
    def _owned(self, session: Session, settings: RunSettings) -> Iterator[tuple[Owner, Keys]]:
        """Own the sweep, a new one or the one that goes on; nothing is left of a new one that does not begin."""
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        name = settings.resume or settings.name or f"sweep-{stamp}"
        if len(name) > _LONGEST_NAME:
            raise InvalidValue("run", name, f"must have at most {_LONGEST_NAME} characters")
        with owned(session.storage, name, take_over=settings.take_over) as owner:
            known = list_generations(owner.storage, name)
            if settings.resume is None and known:
                raise InvalidValue("run", name, "is in use in this storage; resume the sweep, or clean it first")
            theirs = [] if known else [key for key in session.storage.list(f"{name}-t") if _of_trial(name, key)]
            if theirs:
                rule = f"names its trials {name}-t0000 and so on, but {theirs[0]} is there already; choose another name"
                raise InvalidValue("run", name, rule)
            if settings.resume is not None and not known:
                raise RunUnknown(f"there is no sweep {name!r} in this storage")
            keys = known[-1] if known else reserve_generation(owner.storage, name)
            try:
                yield owner, keys
            except BaseException:
                if not known and not find_objects(owner.storage, f"{keys.prefix}journal/").own:
                    owner.delete_run()
                raise

    def _made(self, trial: optuna.Trial) -> Any:
        """Return what the user's factory makes of a trial."""
        if self._items is None:
            return self._make(trial)
        return self._make(self._items[trial.suggest_int(ITEM, 0, len(self._items) - 1)])

    @property
    def _item_trials(self) -> list[dict[str, int]]:
        """The trials of a sweep over a list; of any other none."""
        return [{ITEM: number} for number in range(len(self._items or ()))]

    @property
    def _parts(self) -> dict[str, Any]:
        """The parts of Optuna's study."""
        return {"direction": self._direction, "sampler": copy.deepcopy(self._sampler), "pruner": self._pruner}


def _of_trial(sweep: str, key: str) -> bool:
    """Return True if the object `key` lies where those of a trial do."""
    return re.match(rf"{sweep}-t\d{{4,}}/", key) is not None


def _once(session: Session) -> Session:
    """Return the session with one platform for all runs, opened when it is first wanted."""
    platforms = list[Platform]()

    def functions() -> Platform:
        if not platforms:
            platforms.append(session.functions())
        return platforms[0]

    return replace(session, functions=functions)


class _Opened:
    """A sweep with its storage, owned by this client."""

    def __init__(self, sweep: Sweep, session: Session, owner: Owner, keys: Keys, terms: Terms) -> None:
        self._sweep, self._session, self._owner, self._keys, self._terms = sweep, session, owner, keys, terms
        self._study = SweepStudy(owner.parts, JournalKeys.of(keys), **sweep._parts)
        self._before_usd = self._study.client_usd
        run_key: RunKey = key_of(KeyFolder(), keys)
        self._candidates = Candidates(session, owner.parts, terms, sweep=keys.run, run_key=run_key)

    def run(
        self,
        wanted: int,
        max_functions: int | None,
        limits: RunLimits,
        confirm: Callable[[SweepEstimate], None] | None,
        show: Callable[[SweepStatus], None] | None,
    ) -> SweepResult:
        """Do what `Sweep.run` says."""
        if self._sweep._item_trials and not self._study.trials():
            self._study.enqueue(self._sweep._item_trials)
        wave = Wave(
            make=self._sweep._made,
            study=self._study,
            candidates=self._candidates,
            owner=self._owner,
            sweep=self._keys,
            metric=self._terms.metric,
            wanted=wanted,
            limits=limits,
            client_usd=self._client_usd,
            keeps_all=bool(self._sweep._item_trials),
            show=show,
        )
        try:
            first = wave.first()
            if first is not None:
                spec = first.platform.spec
                functions = min(max_functions or spec.shared_cores or spec.max_functions, spec.max_functions)
                estimate = self._estimate(first, wanted - wave.ended, functions)
                _check_affordable(estimate, limits)
                if confirm is not None and estimate is not None:
                    confirm(estimate)
                wave.run(functions, LaunchRate(spec))
        except KeyboardInterrupt as error:
            url, lasts = self._session.storage_url, self._session.lasts
            end = RunInterrupted(self._keys.run, running=False, kept=lasts, storage=url)
            with resumed_by("sweep"):
                end.add_note("\n".join(after_interrupt(end)))
            raise end from error
        return self._result(wave.status())

    def _client_usd(self) -> float:
        """Return the dollars of all that clients of the sweep have asked of its storage."""
        prices = self._terms.settings.prices or self._terms.spec
        return self._before_usd + prices.client_usd(self._session.meter.by_kind, DEFAULT_STORES)

    def _estimate(self, first: PreparedRun, trials: int, functions: int) -> SweepEstimate | None:
        if first.estimate is None or first.job.evaluation is None:
            return None
        workers = first.job.plan.workers
        return estimate_sweep(
            first.estimate,
            trials=trials,
            at_once=max(functions // workers, 1),
            spec=first.platform.spec,
            functions=workers,
            first_share=min(first.job.evaluation.every / first.job.steps, 1.0) if self._study.prunes else None,
        )

    def _result(self, status: SweepStatus) -> SweepResult:
        """Read the models that are kept; what trials have shared goes once all of them have ended."""
        storage = self._owner.parts
        finished = [trial for trial in status.trials if trial.state == "finished"]
        kept = finished if self._sweep._item_trials else [trial for trial in [status.best] if trial is not None]
        models = {trial.number: self._model(trial) for trial in kept}
        if all(trial.state in ENDED for trial in status.trials):
            delete_runs(storage, self._keys, "-code-")
        return SweepResult(status=status, study=self._study.copy(), models=models)

    def _model(self, trial: TrialStatus) -> nn.Module:
        """Return the model of a trial, made anew, as it was at its best validation."""
        frozen = next(one for one in self._study.trials() if one.number == trial.number)
        made = self._sweep._made(self._study.again(frozen))
        model = made.pipe.model if isinstance(made, Candidate) else made.model
        reader = RunReader.newest(self._owner.parts, trial.run)
        best = reader.best_models((*reader.record.validations, *reader.validations))
        learned = reader.model(max(reader.saved))
        base = StateDict(reader.base.state_readers(opening(self._owner.parts, open_storage)))
        tensors = base.replaced(learned.state_dict()).replaced(next((one.state_dict() for one in best.values()), {}))
        write_trained(model, tensors, learned.attributes(), learned)
        return model


def _check_affordable(estimate: SweepEstimate | None, limits: RunLimits) -> None:
    """Raise InvalidValue if not even one trial is expected to end within `limits`, unless they allow that."""
    if estimate is None or limits.allow_partial:
        return
    if limits.max_usd is not None and estimate.trial_usd > limits.max_usd:
        rule = f"must be at least {estimate.trial_usd:.2g}, which one trial is expected to cost"
        raise InvalidValue("max_usd", limits.max_usd, rule)
    if limits.deadline_s is not None and estimate.trial_s > limits.deadline_s:
        rule = f"must be at least {estimate.trial_s:.2g}, which one trial is expected to take"
        raise InvalidValue("deadline_s", limits.deadline_s, rule)
