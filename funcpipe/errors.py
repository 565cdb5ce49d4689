"""Every exception that funcpipe raises on purpose, as one tree.

::

    FuncPipeError
    ├── InputError              the caller can fix it; the command line exits with code 2
    │   ├── InvalidValue        a field holds a value outside its range
    │   ├── FormatError         a file or object is not the JSON document that it should be
    │   ├── ModelError          a module cannot be turned into layers, or its layers cannot be split
    │   ├── PlanError           a plan does not fit the model, the data or the platform
    │   ├── DataError           a dataset cannot feed the run
    │   ├── RunTaken            another client owns the run: says who, since when, and what to do
    │   ├── PlatformRefused     the platform rejects the request: a permission, a quota, a region, a size
    │   ├── Infeasible          no plan satisfies the limits: says which limit binds and what would help
    │   └── SolverUnavailable   the chosen solver is not installed or not licensed
    └── RunError                something went wrong while functions ran; the command line exits with code 1
        ├── WorkerFailed        a function raised an exception, was killed or ran out of memory
        │   └── NotFinite       losses, gradients or parameters became NaN or infinite: says where first, and what to do
        ├── TaskFailed          a task of a worker raised an exception, which is the cause of this one
        ├── DeadlineExceeded    something did not arrive or end in time: says what, and how long it was awaited
        ├── PlatformError       the platform failed to start, watch or stop functions, or to deploy
        │   └── PlatformBusy    it failed for now: too many requests or functions at once, an error of its own
        ├── Cancelled           stopped because another part of the run failed first
        ├── Superseded          a newer attempt has replaced this one
        ├── RunHalted           the run was stopped early, by a command or at a limit; it can be resumed
        ├── RunUnknown          no such run, or too little of it is left to continue
        ├── RunKeyMissing       the run was started elsewhere, and its key is not here: says how to bring it
        ├── StorageError        the object storage failed
        │   ├── KeyMissing      there is no object with this key
        │   ├── KeyExists       there is an object with this key already
        │   └── StorageBusy     the request failed for now: too many requests, a server error, a lost connection
        ├── CorruptMessage      an object does not hold the bytes that were written
        ├── Disagreement        training by the plan differs from training in one process
        └── ReplicasDiffer      replicas of a stage have come to hold different parameters

    KeyboardInterrupt
    └── RunInterrupted          Ctrl-C or SIGTERM during a run: says whether it goes on, and which step is saved
"""


class FuncPipeError(Exception):
    """The root of the tree, for `except`; only its subclasses are raised.

    `exit_code` is what the command line exits with.
    """

    exit_code = 1


class InputError(FuncPipeError):
    """The caller passed something that cannot be used."""

    exit_code = 2


class InvalidValue(InputError):
    """A field holds a value outside its range: `field` is its name, `rule` what the value must be."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} {rule}, got {value!r}")
        self.field = field
        self.value = value
        self.rule = rule


class FormatError(InputError):
    """A file or object is not the JSON document that it should be; the message names it and the field."""


class ModelError(InputError):
    """A module cannot be turned into layers, or its layers cannot be split."""


class PlanError(InputError):
    """A plan does not fit the model, the data or the platform."""


class DataError(InputError):
    """A dataset cannot feed the run."""


class PlatformRefused(InputError):
    """The platform rejects the request for this account: a permission, a quota, a region, a size."""


class RunTaken(InputError):
    """Another client, `owner`, owns the run; it `watches` if functions train the run without it."""

    def __init__(self, run: str, owner: str, *, watches: bool = False) -> None:
        does = "is watching" if watches else "is training"
        super().__init__(
            f"{owner}, {does} run {run}: choose another name, see how it fares (funcpipe run status {run}), or end "
            "what that client does and go on from what is saved: --take-over (in Python: take_over=True)"
        )
        self.run = run
        self.owner = owner
        self.watches = watches


class Infeasible(InputError):
    """No plan satisfies the limits; the message names the limit that binds and what would help."""


class SolverUnavailable(InputError):
    """The solver is not installed, or its licence does not cover a problem of this size."""


class RunError(FuncPipeError):
    """Something went wrong while functions ran."""


class WorkerFailed(RunError):
    """A function raised an exception, was killed, or ended without finishing its work."""


class NotFinite(WorkerFailed):
    """Losses, gradients or parameters became NaN or infinite; the message names step, stage and the way out.

    Gradients flow backwards, so the stage that is named may not be the one in which it began.
    """


class TaskFailed(RunError):
    """The task called `task` raised an exception, which is the `__cause__` of this one."""

    def __init__(self, task: str, error: BaseException) -> None:
        super().__init__(f"{task}: {type(error).__name__}: {error}")
        self.task = task


class PlatformError(RunError):
    """The platform failed to start, watch or stop functions, or to set up what they need."""


class PlatformBusy(PlatformError):
    """The platform failed for now, and may be asked again; what it was asked to do may or may not have been done."""


class Cancelled(RunError):
    """Stopped because another part of the run failed; never the first error of a run."""


class Superseded(RunError):
    """A newer attempt has replaced this one as the worker, or its lease is `missing`, perhaps without a newer one."""

    def __init__(self, cause: str, *, missing: bool = False) -> None:
        super().__init__(cause)
        self.missing = missing


class RunHalted(RunError):
    """The run was stopped early, by a command or at a limit; it can be resumed."""


class RunUnknown(RunError):
    """There is no run of this name in the storage, or too little of it is left to continue."""

    exit_code = 2


class RunKeyMissing(RunError):
    """The run was started elsewhere, and its key is not on this machine."""

    def __init__(self, run: str) -> None:
        super().__init__(
            f"the key of run {run} is not on this machine, so nothing that it says can be trusted; where it was "
            f"started, `funcpipe run status {run} --key` prints it: set FUNCPIPE_RUN_KEY to that here; "
            f"`funcpipe run clean {run}` deletes the run without it"
        )
        self.run = run


class DeadlineExceeded(RunError):
    """Something did not arrive or end in time."""


class StorageError(RunError):
    """The object storage failed."""


class KeyMissing(StorageError):
    """There is no object with the key `key`."""

    def __init__(self, key: str) -> None:
        super().__init__(f"there is no object {key!r}")
        self.key = key


class KeyExists(StorageError):
    """There is an object with the key `key` already, and it must not be replaced."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the object {key!r} already exists")
        self.key = key


class StorageBusy(StorageError):
    """The request failed for now and may be repeated; it may or may not have taken effect."""


class CorruptMessage(RunError):
    """An object does not hold the bytes that were written."""


class Disagreement(RunError):
    """Training by the plan differs from training in one process."""


class ReplicasDiffer(RunError):
    """Replicas of a stage have come to hold different parameters; the message names them and the processors of both."""


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C, or a signal to end, during the run called `run`, whose objects are in `storage`, a URL.

    With `running` the run goes on, because this process was only watching it. Otherwise its functions were stopped, and
    `kept` says whether what it had saved is still there to be resumed: `saved_step` of `steps`, None if that is not
    known.
    """

    def __init__(
        self,
        run: str,
        *,
        running: bool,
        kept: bool,
        storage: str,
        saved_step: int | None = None,
        steps: int = 0,
    ) -> None:
        self.run = run
        self.running = running
        self.kept = kept
        self.storage = storage
        self.saved_step = saved_step
        self.steps = steps
        super().__init__(f"interrupted while training {run}: {self.state}")

    @property
    def state(self) -> str:
        """The state of the run."""
        if self.running:
            return "it goes on"
        if not self.kept:
            return "it was stopped and its objects were deleted"
        if self.saved_step is None:
            return "it was stopped, and what it saved is kept"
        if self.saved_step == 0:
            return "it was stopped before a step was saved"
        return f"it was stopped, and step {self.saved_step} of {self.steps} is saved"
