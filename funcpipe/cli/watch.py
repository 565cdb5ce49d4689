"""The verb watch: a run as a terminal, a file or a program shows it, until it ends or is left."""

import contextlib
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from funcpipe import show
from funcpipe.cli.options import option, positive
from funcpipe.cli.run import RUN, STORAGE
from funcpipe.cli.verbs import Options, verb
from funcpipe.core.json_form import to_plain
from funcpipe.core.process import write_out
from funcpipe.core.texts import printable
from funcpipe.platforms.catalog import open_platform, open_storage

if TYPE_CHECKING:
    from rich.console import Console

    from funcpipe.client.control.watching import RunView, Watcher

_GIVEN_UP_S = 90.0
"""A run that has been dead for so long is not restarted: a watchdog checks once a minute."""

_KEY = "q"


class Left(Exception):
    """The user has pressed the key that leaves the command."""


@verb(
    "funcpipe run watch RUN --storage file:///tmp/runs",
    RUN,
    STORAGE,
    option("--interval SECONDS", "pause between two polls of the run", positive, 5.0),
    option("--once", "poll once, and end with the exit code of `status`"),
    about="Show a run while it goes on: workers, losses, dollars, warnings. It only reads, so it can be left (q or "
    "Ctrl-C) and started again at any time, from any machine that has the run's key. When the run has ended, it "
    "says how, and ends with the exit code of `funcpipe run status`. Where there is no terminal, it prints lines.\n\n"
    "A poll takes about 12 requests to the storage, 8 to 10 of them lists, and one more for each worker, up to 16, and "
    "each replica, up to 8; the first reads more. At the prices of S3, some $0.04 an hour with the default interval.",
)
def watch(options: Options) -> int:
    """Show a run until it ends; ends as `status` does, or with 0 if it is left."""
    from funcpipe.client.control.watching import Watcher
    from funcpipe.show.terminal import Terminal

    console = Terminal()
    live = console.is_terminal and not options.json and not options.once
    with leaving_with(_KEY, when=live) as pause:
        watcher = Watcher(open_storage(options.storage), options.name, open_platform, clock=time.time, pause=pause)
        try:
            view = _follow(watcher, options, console, pause, live=live)
        except (Left, KeyboardInterrupt):
            if not options.json:
                _left(options, console)
            return 0
    if not options.json:
        _ended(view, options, console)
    return view.status.verdict.exit_code


def _follow(
    watcher: "Watcher", options: Options, console: "Console", pause: Callable[[float], None], *, live: bool
) -> "RunView":
    """Poll until the run has ended, or once; returns the last view."""
    from rich.live import Live

    from funcpipe.show.watch import PollLog, screen

    if options.json:
        return _each(watcher, options, pause, lambda view: _print(json.dumps(_with_format(view))))
    if options.once:
        return watcher.poll()
    if not live:
        lines = PollLog()
        return _each(watcher, options, pause, lambda view: _print(printable("\n".join(lines.of(view)))))
    with Live(console=console, screen=True, auto_refresh=False) as display:
        draw = partial(screen, every_s=options.interval)
        return _each(watcher, options, pause, lambda view: display.update(draw(view, console), refresh=True))


def _each(
    watcher: "Watcher", options: Options, pause: Callable[[float], None], draw: Callable[["RunView"], None]
) -> "RunView":
    dead_since_s: float | None = None
    while True:
        view = watcher.poll()
        draw(view)
        dead = view.status.verdict.value == "dead"
        dead_since_s = (dead_since_s or view.looked_at_s) if dead else None
        given_up = dead_since_s is not None and view.looked_at_s - dead_since_s >= _GIVEN_UP_S
        if options.once or view.has_ended or given_up:
            return view
        pause(options.interval)


def _print(text: str) -> None:
    if not write_out(text):
        raise Left


def _with_format(view: "RunView") -> dict[str, object]:
    return {"format": view.FORMAT, **to_plain(view)}


def _ended(view: "RunView", options: Options, console: "Console") -> None:
    """Print the last view as a page that stays, and the next commands."""
    from funcpipe.show.watch import screen

    console.print(screen(view, console, all_rows=True))
    if view.has_ended or view.status.verdict.value == "dead":
        for command in show.commands_after(view.status, options.storage):
            console.print(command, soft_wrap=True)


def _left(options: Options, console: "Console") -> None:
    from funcpipe.client.control.commands import commands, watch_command

    console.print(f"run {options.name} is as it was: watching changes nothing", soft_wrap=True)
    for command in (watch_command(options.name, options.storage), *commands(options.name, options.storage)[1:]):
        console.print(command, soft_wrap=True)


@contextlib.contextmanager
def leaving_with(key: str, *, when: bool = True) -> Iterator[Callable[[float], None]]:
    """A pause of so many seconds that raises Left as soon as `key` is pressed; without a terminal, only a pause."""
    if not when or not sys.stdin.isatty():
        yield time.sleep
        return
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin, termios.TCSANOW)  # what was typed already counts
    try:
        yield lambda seconds: _pause(seconds, key)
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _pause(seconds: float, key: str) -> None:
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        stdin = sys.stdin.fileno()
        if select.select([stdin], [], [], left_s)[0]:
            pressed = os.read(stdin, 64)
            if not pressed or key.encode() in pressed:  # nothing: the terminal is gone
                raise Left
