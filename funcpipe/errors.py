"""Every exception that funcpipe raises on purpose, as one tree.

::

    FuncPipeError
    ├── InputError              the caller can put it right; the command line ends with exit code 2
    │   ├── InvalidValue        a value outside its range: says which field and what it held
    │   ├── FormatError         a JSON document of ours that cannot be read: says which file and field
    │   ├── ModelError          a module that cannot be turned into layers, or whose layers cannot be split
    │   ├── PlanError           a plan that does not fit the model, the data or the platform
    │   ├── DataError           a dataset that cannot feed the run
    │   ├── PlatformRefused     the platform will not do it for this account: says what would make it
    │   ├── Infeasible          no plan fits: says which limit binds and what would help
    │   └── SolverUnavailable   the solver that was asked for is not installed or not licensed
    └── RunError                something went wrong while functions ran; exit code 1
        ├── WorkerFailed        a function raised, was killed or ran out of memory
        ├── TaskFailed          a task of a worker raised; its cause is the original error
        ├── DeadlineExceeded    something awaited did not come in time: says what and for how long
        ├── PlatformError       the platform failed: to start functions, watch or stop them, set up what they need
        ├── Cancelled           given up because another part of the run failed
        ├── Superseded          another function has become the worker that this one was
        ├── RunHalted           the run was ended early, by order or at a limit; it can be resumed
        ├── RunUnknown          there is nothing of a run of that name, or not enough to go on with it
        ├── StorageError        the object storage failed
        │   ├── KeyMissing      there is no object of that name
        │   ├── KeyExists       the object was to be new and is not
        │   └── StorageBusy     it failed for now: too many requests, an error within, a lost connection
        ├── CorruptMessage      bytes from storage that are not what was written
        └── Disagreement        a plan does not train a model as one process does

    KeyboardInterrupt
    └── WatchInterrupted        this client was interrupted while it watched a run, and the run goes on
"""


class FuncPipeError(Exception):
    """The root of the tree; never raised itself."""

    exit_code = 1


class InputError(FuncPipeError):
    """What the caller gave cannot be used."""

    exit_code = 2


class InvalidValue(InputError):
    """A field holds a value outside its range."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} {rule}, got {value!r}")
        self.field = field
        self.value = value
        self.rule = rule


class FormatError(InputError):
    """A JSON document cannot be read as the value it should hold."""


class ModelError(InputError):
    """A module cannot be turned into a graph of layers."""


class PlanError(InputError):
    """A plan does not fit the model, the data or the platform."""


class DataError(InputError):
    """A dataset cannot feed the run."""


class PlatformRefused(InputError):
    """The platform will not do it for this account: a permission, a quota, a region, a size."""


class Infeasible(InputError):
    """No plan satisfies the limits."""


class SolverUnavailable(InputError):
    """The solver is not installed, or its licence does not admit the problem."""


class RunError(FuncPipeError):
    """Something went wrong while functions ran."""


class WorkerFailed(RunError):
    """A function raised, was killed, or ended without finishing its work."""


class TaskFailed(RunError):
    """A task of a worker raised; `__cause__` is what it raised."""

    def __init__(self, task: str, error: BaseException) -> None:
        super().__init__(f"{task}: {type(error).__name__}: {error}")
        self.task = task


class PlatformError(RunError):
    """The platform failed: to start functions, to know them, to set up what they need."""


class Cancelled(RunError):
    """Given up because another part of the run failed; never the first error of a run."""


class Superseded(RunError):
    """Another function has become the worker that this one was."""


class RunHalted(RunError):
    """The run was ended early, by order or at a limit; it can be resumed."""


class RunUnknown(RunError):
    """There is nothing of a run of that name, or not enough to go on with it."""


class DeadlineExceeded(RunError):
    """Something awaited did not come in time."""


class StorageError(RunError):
    """The object storage failed."""


class KeyMissing(StorageError):
    """There is no object of that name."""

    def __init__(self, key: str) -> None:
        super().__init__(f"there is no object {key!r}")
        self.key = key


class KeyExists(StorageError):
    """An object of that name exists already and must not be replaced."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the object {key!r} exists already")
        self.key = key


class StorageBusy(StorageError):
    """The request failed for now and may be made again; whether it had an effect is not known."""


class CorruptMessage(RunError):
    """Bytes from storage are not a whole message of ours."""


class Disagreement(RunError):
    """A plan does not train a model as one process does."""


class WatchInterrupted(KeyboardInterrupt):
    """This client was interrupted while it watched a run that it had not started; the run goes on.

    `run` is its name, `storage` the URL of the storage that it lies in.
    """

    def __init__(self, run: str, storage: str) -> None:
        super().__init__(
            f"run {run} goes on; --resume {run} watches it again, `funcpipe stop {run} --storage {storage}` ends it so "
            f"that it can be resumed, `funcpipe clean {run} --storage {storage}` ends and deletes it"
        )
        self.run = run
        self.storage = storage
