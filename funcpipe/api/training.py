"""A module to be trained over functions, and the verbs that run it: train, start, verify."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from torch import nn

from funcpipe.api.evaluating import Evaluating
from funcpipe.client.follow.callbacks import Callback, Callbacks, run_info
from funcpipe.client.follow.export import load_into
from funcpipe.client.follow.launch import launch, launch_detached
from funcpipe.client.follow.results import RunResult, write_back
from funcpipe.client.prepare import arguments
from funcpipe.client.prepare.job import Job, Learned, Learner, SampleOrder
from funcpipe.client.prepare.precheck import with_last
from funcpipe.client.prepare.prepared_run import Confirm, PreparedRun, prepare_training
from funcpipe.client.prepare.session import Session, open_session
from funcpipe.core import (
    FaultTolerance,
    Plan,
    PlatformSpec,
    RunLimits,
    RunSettings,
    Validation,
    checks,
)
from funcpipe.core.market import Market
from funcpipe.core.process import ending_interrupts
from funcpipe.core.provision import Provision
from funcpipe.core.settings import DEFAULT_FAULTS, DEFAULT_SETTINGS, NO_LIMITS, RunKeywords, settings_with
from funcpipe.errors import InvalidValue, ModelError
from funcpipe.loggers import with_bar
from funcpipe.model.split.stage import below_loss
from funcpipe.model.tensors import named_tensors, saved_state
from funcpipe.neighbours.history.filing import file_run
from funcpipe.neighbours.parameter_server.worker_group import Updates
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import LOCAL
from funcpipe.training.data_source import Data
from funcpipe.training.verify import TOLERANCE, Verification, verify_run
from funcpipe.worker.deferred_compiler import CompilerDeferred

if TYPE_CHECKING:
    from funcpipe.neighbours.parameter_server.loops import Watch
    from funcpipe.neighbours.parameter_server.on_functions import ServerFunctions
    from funcpipe.neighbours.parameter_server.on_machines import ServerCluster
    from funcpipe.neighbours.parameter_server.training import ServerResult, ServerRun


class Training(Evaluating):
    """A module that is trained by a plan; `FuncPipe` says what it is made of."""

    _learned: Learned | None = None

    @arguments.strict
    def train(
        self,
        dataset: Data,
        *,
        epochs: int = 1,
        platform: str = LOCAL,
        like: str | PlatformSpec | None = None,
        plan: Plan | None = None,
        seed: int = 0,
        shuffle: bool = True,
        validation: Validation | Data | None = None,
        faults: FaultTolerance = DEFAULT_FAULTS,
        limits: RunLimits = NO_LIMITS,
        settings: RunSettings = DEFAULT_SETTINGS,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        confirm: Confirm | None = None,
        **keywords: Unpack[RunKeywords],
    ) -> RunResult:
        """Train the module over functions, as one process would, and load the result into it.

        Called again, it goes on: `epochs` more, with its optimiser, order of data and seeds where they were (`reset`).
        The module changes only if the run succeeds.

        Args:
            dataset: Holds tuples of the module's inputs and, last, the target, or dictionaries of its arguments; or it
                is a factory of such a dataset, which is called inside the functions, or the URL of one in object
                storage, such as `s3://bucket/prefix` (see `funcpipe.data`).
            epochs: How often training goes over the dataset.
            platform: "local", functions as processes of this machine; what `funcpipe deploy` made, by URL,
                `aws-lambda://NAME?region=…`, `aliyun-fc://…`; or Ray, `ray://local`, `ray://auto` or `ray://HOST:PORT`.
            like: The platform whose memory, processors, links and lifetime local functions have; by default no limits.
            plan: The plan, by default the last one of `optimize`.
            seed: Decides the order of samples, and the random numbers that the model draws.
            shuffle: Mix the samples of each epoch.
            validation: Data on which the module is validated after every epoch, or a `Validation`.
            faults: How the run copes with failures.
            limits: What it may cost, and how long it may take.
            settings: What it is called and where its objects lie. Each setting may be given by keyword: `run`, which is
                the name, `storage`, `resume` and the others of `RunSettings`. A run that is resumed goes on by whatever
                plan; if its functions still run, it is watched, as it was started.
            callbacks: Get the events of the run: see `Callback` and `funcpipe.loggers`.
            progress: Draw a bar on a terminal or in a notebook.
            confirm: Gets the job's estimate before anything starts, and may raise.

        Raises:
            InputError: PlanError, DataError, ModelError, PlatformRefused, RunTaken or RunUnknown: before a function
                starts.
            RunError: WorkerFailed, RunHalted or DeadlineExceeded: afterwards.
            RunInterrupted: Ctrl-C or SIGTERM ended the run, after a step that is saved where it can be resumed, or
                ended watching.
        """
        settings, order = settings_with(settings, keywords), SampleOrder(epochs=epochs, seed=seed, shuffle=shuffle)
        events = Callbacks(with_bar(callbacks, progress))
        with open_session(platform, like, settings) as session:
            prepared = self._prepare(
                session, dataset, plan, order, validation, faults=faults, limits=limits, settings=settings
            )
            prepared.ask(confirm)
            with events.of_run(run_info(prepared), prepared.storage):
                result = launch(prepared, events)
                file_run(prepared, result)
                if self._weights is not None:
                    result.loss.write_to(self._recipe.loss)
                    return events.ended(result)
                loss, epochs = self._recipe.loss, prepared.epochs_after(len(result.losses))
                self._learned = write_back(result, self.model, loss, epochs)
                if self._made is not None and result.learned is not None:
                    self._made.restore(result.learned)
                learned = None if self._learned is None else self._learned.state
                return events.ended(replace(result.with_all_of(saved_state(self.model), loss), learned=learned))

    @arguments.strict
    @ending_interrupts()
    def train_with_server(
        self,
        dataset: Data,
        *,
        way: "Provision | ServerCluster | ServerFunctions",
        global_batch: int,
        micro_batch: int,
        epochs: int = 1,
        updates: Updates | str = Updates.BSP,
        market: Market | str = "aws",
        platform: str | None = None,
        like: str | PlatformSpec | None = None,
        save_every: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        watch: "Watch | None" = None,
        limits: RunLimits = NO_LIMITS,
        settings: RunSettings = DEFAULT_SETTINGS,
        **keywords: Unpack[RunKeywords],
    ) -> "ServerResult":
        """Train the module around a parameter server, on Ray or on functions, and load the result into it.

        The module changes only if the run succeeds. Arguments that are not listed are those of `train`.

        Args:
            dataset: As in `train`.
            way: What `provision` has found, with a parameter server; or a cluster or functions by hand.
            global_batch: The samples of an update.
            micro_batch: The samples that are dealt out to a worker at once.
            updates: "bsp" makes those of one process, however many workers there are and however fast; "asp" makes one
                with each push of a worker.
            market: The prices of machines.
            platform: For machines, a Ray cluster that has them, `ray://auto` or `ray://HOST:PORT`; by default all of
                them are processes of this machine. For functions, "local" or a deployment's URL; the server is in this
                process then, and `limits` hold for this call.
            like: The platform whose limits local functions have.
            save_every: With a `storage`, save the server after every so many updates; a run of the same name goes on
                there.
            watch: Gets the share of the run done, and may let workers leave and join, as a `Replanner` does.

        Raises:
            InputError: PlanError, DataError or ModelError: before anything starts.
            RunError: WorkerFailed: no worker is left; RunHalted: at a limit.
        """
        from funcpipe.neighbours.history.filing import file_server_run
        from funcpipe.neighbours.parameter_server.loops import nothing_changes
        from funcpipe.neighbours.parameter_server.on_machines import check_given, cluster_of, server_job_of
        from funcpipe.neighbours.parameter_server.training import ServerRun
        from funcpipe.platforms.catalog import load_market

        settings, order = settings_with(settings, keywords), SampleOrder(epochs=epochs, seed=seed, shuffle=shuffle)
        prices = load_market(market) if isinstance(market, str) else market
        predicted = way if isinstance(way, Provision) else None
        cluster = cluster_of(way, prices, platform=platform, like=like) if isinstance(way, Provision) else way
        check_given(cluster, like=like if predicted is None else None, limits=limits)
        run = ServerRun(
            global_batch=global_batch,
            micro_batch=micro_batch,
            updates=checks.choice("updates", updates, Updates),
            save_every=save_every,
            watch=watch or nothing_changes,
        )
        job = server_job_of(self._new_learner(), dataset, order, settings, run)
        result, is_rented = _trained_around(cluster, job, run, settings, prices, limits=limits, way=predicted)
        self.model.load_state_dict(result.state_dict())
        self._learned = None
        if predicted is not None:
            file_server_run(predicted, result, job, ran_on=prices.name if is_rented else LOCAL)
        return result

    def reset(self) -> None:
        """Forget the optimiser and the epochs of earlier calls of `train`; the module's weights stay as they are."""
        self._learned = None
        if self._made is not None:
            self._made.reset()

    @arguments.strict
    def load(self, run: str, *, storage: str | Storage, step: int | None = None) -> int:
        """Load a checkpoint of a run into the module and return its step; `train` then begins with a new optimiser.

        Args:
            run: The run's name.
            storage: The URL of the storage that it is in, or the open storage.
            step: The step, by default the last one that `funcpipe.export` can read.
        """
        model = self._held("load")
        self.reset()
        return load_into(model, self._recipe.loss, run, storage=storage, step=step)

    @arguments.strict
    def start(
        self,
        dataset: Data,
        *,
        epochs: int = 1,
        platform: str = LOCAL,
        like: str | PlatformSpec | None = None,
        plan: Plan | None = None,
        seed: int = 0,
        shuffle: bool = True,
        validation: Validation | Data | None = None,
        faults: FaultTolerance = DEFAULT_FAULTS,
        limits: RunLimits = NO_LIMITS,
        settings: RunSettings = DEFAULT_SETTINGS,
        confirm: Confirm | None = None,
        **keywords: Unpack[RunKeywords],
    ) -> str:
        """Start what `train` does, leave the run to itself once its functions have started, and return its name.

        On the local platform it needs a `storage`. `train` with `resume` watches the run, and collects what it leaves.
        The arguments are those of `train`.
        """
        settings, order = settings_with(settings, keywords), SampleOrder(epochs=epochs, seed=seed, shuffle=shuffle)
        with open_session(platform, like, settings, silent=True, detached=True) as session:
            if not session.lasts:
                raise InvalidValue("storage", settings.storage, "must be given for a run that is left to itself")
            prepared = self._prepare(
                session, dataset, plan, order, validation, faults=faults, limits=limits, settings=settings
            )
            prepared.ask(confirm)
            return launch_detached(prepared)

    @arguments.strict
    def verify(
        self,
        dataset: Data,
        *,
        steps: int = 3,
        plan: Plan | None = None,
        seed: int = 0,
        tolerance: float = TOLERANCE,
        message_deadline_s: float = DEFAULT_SETTINGS.message_deadline_s,
    ) -> Verification:
        """Train for some steps over local functions and in one process, and compare; the module stays as it is.

        The one process trains on whole global batches, as a script does; where the model draws random numbers, or its
        samples depend on each other as under BatchNorm, it accumulates micro-batches. The result says which was equal.
        It raises what `train` raises.

        Args:
            dataset: As in `train`.
            steps: The number of steps.
            plan: The plan, by default the last one of `optimize`.
            seed: As in `train`.
            tolerance: The largest difference that counts as equal, relative to the change by training.
            message_deadline_s: As in `RunSettings`.
        """
        checks.positive("tolerance", tolerance)
        self._held("verify")
        settings, order = RunSettings(message_deadline_s=message_deadline_s), SampleOrder(seed=seed, steps=steps)
        with open_session(LOCAL, None, settings) as session:
            prepared = self._prepare(session, dataset, plan, order, settings=settings)
            job = prepared.job
            result = launch(prepared)
            found = {**named_tensors(self.model), **result.tensors, **below_loss(result.loss.tensors)}
        return verify_run(found, job.plain_training(self.model), steps=job.steps, tolerance=tolerance)

    def _begun(self) -> Learned | None:
        """What was learned before, with what an optimiser keeps that was given made already."""
        made, learned = self._made, self._learned
        if made is None or (learned is None and not made.has_begun):
            return learned
        state = made.state_in(None if learned is None else learned.state, self.model)
        return Learned(state=state, epochs=0 if learned is None else learned.epochs)

    def _new_learner(self) -> Learner:
        """The module with its way of learning, which must have no optimiser that has begun."""
        if self._made is not None and self._made.has_begun:
            raise InvalidValue("optimizer", type(self._made.optimizer), "must be new for training around a server")
        return replace(self._learner(None), model=self._held("train_with_server"))

    @property
    def learner(self) -> Learner:
        """The module with its way of learning, for a run that begins anew."""
        return self._learner(None)

    def _held(self, verb: str) -> nn.Module:
        """The module. Raises ModelError if its weights are not here, which `verb` needs."""
        if self._weights is not None:
            raise ModelError(
                f"{verb} needs the module's weights in this process, which weights= leaves where they lie; give the "
                "module itself, FuncPipe(module, …)"
            )
        return self.model

    def _learner(self, learned: Learned | None) -> Learner:
        """The module with its way of learning, and what it has learned."""
        return Learner(
            model=self.model,
            recipe=self._recipe,
            blocks=self._blocks,
            learned=learned,
            logged_notes=self._logged_notes,
            weights=self._weights,
        )

    @CompilerDeferred()
    def _prepare(
        self,
        session: Session,
        dataset: Data,
        plan: Plan | None,
        order: SampleOrder,
        validation: Validation | Data | None = None,
        *,
        faults: FaultTolerance = DEFAULT_FAULTS,
        limits: RunLimits = NO_LIMITS,
        settings: RunSettings,
    ) -> PreparedRun:
        arguments.check_run(faults, limits)
        settings = with_last(session.storage, settings)
        anew = order.steps or settings.resume or settings.take_over
        learned = None if anew else self._begun()
        return prepare_training(
            self._learner(learned),
            dataset,
            self._planned(plan),
            order,
            session,
            validation,
            faults=faults,
            limits=limits,
            settings=settings,
            spec=self._spec,
        )


def _trained_around(
    cluster: "ServerCluster | ServerFunctions",
    job: Job,
    run: "ServerRun",
    settings: RunSettings,
    prices: Market,
    *,
    limits: RunLimits,
    way: Provision | None,
) -> tuple["ServerResult", bool]:
    """Train around a parameter server on machines or functions; also return True if these are rented."""
    from funcpipe.neighbours.parameter_server.on_functions import ServerFunctions, train_on_functions
    from funcpipe.neighbours.parameter_server.on_machines import train_on_cluster

    if isinstance(cluster, ServerFunctions):
        result = train_on_functions(job, cluster, run, settings, prices, limits=limits, way=way)
        return result, cluster.platform != LOCAL
    return train_on_cluster(job, cluster, run, settings, prices), cluster.address.is_shared
