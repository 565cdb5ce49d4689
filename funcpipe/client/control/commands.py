"""The commands for a run that goes on, or was stopped, without the one that started it."""

import contextlib
import shlex
from collections.abc import Iterator
from contextvars import ContextVar

from funcpipe.core.settings import KEEP_DAYS
from funcpipe.errors import RunInterrupted
from funcpipe.platforms.catalog import LOCAL

_verb = ContextVar("verb", default="train")


@contextlib.contextmanager
def resumed_by(verb: str) -> Iterator[None]:
    """Have the commands for runs that end within this context name `verb`, the one that the user called."""
    token = _verb.set(verb)
    try:
        yield
    finally:
        _verb.reset(token)


def commands(run: str, storage: str | None, *, watch: str = "watch it") -> tuple[str, ...]:
    """The commands to watch or resume, show, stop and delete a run whose objects lie in `storage`."""
    where = f"{shlex.quote(run)} --storage {shlex.quote(storage or 'URL')}"
    return (
        f"  {watch + ':':<11} funcpipe {_verb.get()} ... --resume {where}",
        f"  {'status:':<11} funcpipe run status {where}",
        f"  {'stop it:':<11} funcpipe run stop {where}",
        f"  {'delete it:':<11} funcpipe run clean {where}",
    )


def watch_command(run: str, storage: str | None) -> str:
    """The command that shows a run while it goes on."""
    return f"  {'watch it:':<11} funcpipe run watch {shlex.quote(run)} --storage {shlex.quote(storage or 'URL')}"


def after_failure(run: str, storage: str, *, watch: str = "resume it", expires: bool = False) -> tuple[str, ...]:
    """The commands to resume, show and delete a run that has ended, whose objects are still in `storage`.

    In a deployment's own bucket, what is kept `expires`.
    """
    resume, status, _, clean = commands(run, storage, watch=watch)
    logs = f"  {'logs:':<11} funcpipe run logs {shlex.quote(run)} --storage {shlex.quote(storage)}"
    kept = f"  {'it is kept:':<11} {KEEP_DAYS} days, unless the deployment was made with another platform.keep-days"
    return resume, status, logs, clean, *((kept,) if expires else ())


def after_interrupt(interrupt: RunInterrupted) -> tuple[str, ...]:
    """The next commands, in a shell and in Python; none for a run whose objects were deleted."""
    run, storage = interrupt.run, interrupt.storage
    resume, *others = commands(run, storage, watch="collect it" if interrupt.running else "resume it")
    call = "sweep.run(trials, " if _verb.get() == "sweep" else f"pipe.{_verb.get()}(dataset, "
    in_python = f"  in Python:  {call}..., resume={run!r}, storage={storage!r})"
    if interrupt.running:
        return watch_command(run, storage), resume, in_python, *others
    return (resume, in_python, others[-1]) if interrupt.kept else ()


def after_end(run: str, storage: str) -> tuple[str, ...]:
    """The commands to write, continue and delete the model of a finished run that is kept in `storage`."""
    where = f"{shlex.quote(run)} --storage {shlex.quote(storage)}"
    *_, clean = commands(run, storage)
    return (
        f"  {'write it:':<11} funcpipe run export {where} -o model.safetensors",
        f"  {'train on:':<11} funcpipe {_verb.get()} ... --resume {where} --epochs MORE",
        clean,
    )


def before_start(run: str) -> tuple[str, ...]:
    """The commands for a run that could not begin, of which there is nothing to resume."""
    return (f"  {'begin anew:':<11} run {run} had not begun; once this is mended, the same command begins it",)


def after_removal(run: str, platform: str) -> tuple[str, ...]:
    """The command that shows the platform's logs of a run whose objects were deleted."""
    where = "" if platform.startswith(f"{LOCAL}:") else f" --platform {shlex.quote(platform)}"
    return (f"  {'logs:':<11} funcpipe run logs {shlex.quote(run)}{where}",)
