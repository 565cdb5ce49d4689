"""A run as loggers are told of it: begun, interrupted after some steps, and resumed from a checkpoint before them."""

from collections.abc import Sequence

from funcpipe.client.follow.callbacks import Callback, Callbacks, RunInfo
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.core import Bill, Plan, ScheduleKind, Source, Sync, Trace, Wire
from tests.support.plans import even_stages

LOSSES = tuple(1.0 / step for step in range(1, 7))
RUN = "digits"
PLAN = Plan(
    global_batch=8,
    micro_batch=2,
    replicas=2,
    schedule=ScheduleKind.GPIPE,
    sync=Sync.PIPELINED,
    wire=Wire.FP32,
    platform="local",
    stages=even_stages(["a", "b"], 2),
)


def info(*, known: int = 0, resumed: bool = False, run: str = RUN) -> RunInfo:
    """The run, of which `known` steps were done before."""
    return RunInfo(
        run=run,
        plan=PLAN,
        epochs=2,
        steps=len(LOSSES),
        samples=24,
        storage="memory://",
        losses=LOSSES[:known],
        resumed=resumed,
    )


def progress(step: int) -> Progress:
    return Progress(
        step=step,
        steps=len(LOSSES),
        loss=LOSSES[step - 1],
        samples_per_s=8.0,
        cost_usd=0.01 * step,
        elapsed_s=step,
        learning_rate=0.5**step,
    )


def result() -> RunResult:
    bill = Bill(platform="local", functions=1, function_seconds=1.0, puts=1, gets=1, compute_usd=0.05, request_usd=0.01)
    trace = Trace(run=RUN, source=Source.EXECUTED, events=())
    return RunResult(run=RUN, losses=LOSSES, tensors={}, trace=trace, bill=bill, workers=())


def log(callback: Callback, told: RunInfo, steps: Sequence[int], *, ends: bool = True) -> tuple[Exception, ...]:
    """Tell `callback` of `steps`, after which the run has finished or is interrupted; returns what it has raised."""
    callbacks = Callbacks([callback])
    ended = result()
    try:
        with callbacks.of_run(told):
            for step in steps:
                callbacks(progress(step))
                if step % 2 == 0:
                    callbacks.validated(step, {"val_loss": LOSSES[step - 1] / 2})
            if not ends:
                raise KeyboardInterrupt
            ended = callbacks.ended(ended)
    except KeyboardInterrupt:
        pass
    return ended.callback_errors


def interrupted_and_resumed(first: Callback, second: Callback) -> None:
    """Four steps; then the last two again, from the checkpoint after the second, and the rest."""
    assert log(first, info(), (1, 2, 3, 4), ends=False) == ()
    assert log(second, info(known=2, resumed=True), (3, 4, 5, 6)) == ()
