"""The effect of Ctrl-C on a run, and the commands that go on from there.

Only the client knows whether it started a run or watched one that another process had started: it raises
RunInterrupted, which says so. Any other KeyboardInterrupt came before a run began, or after it had ended.
"""

from funcpipe.client.control.commands import after_interrupt
from funcpipe.errors import RunInterrupted


def what_happened(interrupt: KeyboardInterrupt) -> str:
    """The state in which `interrupt` left the run, if there was one, and what the user can do now."""
    left = _of_run(interrupt)
    if left is None:
        return "interrupted"
    return "\n".join([f"interrupted; run {left.run}: {left.state}", *after_interrupt(left)])


def _of_run(interrupt: BaseException | None) -> RunInterrupted | None:
    """The RunInterrupted behind `interrupt`, also where a second Ctrl-C came while this command cleaned up."""
    while interrupt is not None and not isinstance(interrupt, RunInterrupted):
        interrupt = interrupt.__context__
    return interrupt
