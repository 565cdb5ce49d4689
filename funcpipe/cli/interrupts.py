"""What Ctrl-C did to a run, and the commands that go on from there.

Only the client knows whether it started a run or watched one that another process had started: it raises
RunInterrupted, which says so. Any other KeyboardInterrupt came before a run began, or after it had ended.
"""

from funcpipe.client.commands import commands
from funcpipe.errors import RunInterrupted


def what_happened(interrupt: KeyboardInterrupt) -> str:
    """The state in which `interrupt` left the run, if there was one, and what the user can do now."""
    if not isinstance(interrupt, RunInterrupted):
        return "interrupted"
    run = interrupt.run
    if interrupt.running:
        return "\n".join([f"interrupted; run {run} goes on without this command", *commands(run, interrupt.storage)])
    if interrupt.kept:
        resume, *_, clean = commands(run, interrupt.storage, watch="resume it")
        return "\n".join([f"interrupted; run {run} was stopped, and what it saved is kept", resume, clean])
    return f"interrupted; run {run} was stopped and its objects were deleted"
