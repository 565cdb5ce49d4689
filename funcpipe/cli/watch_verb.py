"""The verb watch: a run as a terminal, a file or a program shows it, until it ends or is left."""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from funcpipe import show as render
from funcpipe.cli.keyboard import Left, leaving_with
from funcpipe.core.json_form import to_plain
from funcpipe.core.process import write_out
from funcpipe.core.texts import printable
from funcpipe.platforms.catalog import open_platform, open_storage
from funcpipe.show.terminal import Terminal
from funcpipe.show.watch import Lines, screen

if TYPE_CHECKING:
    from funcpipe.client.control.run_view import RunView
    from funcpipe.client.control.watching import Watcher

_GIVEN_UP_S = 90.0
"""A run that has been dead for so long is not restarted: a watchdog checks once a minute."""

_KEY = "q"


def watch(options: argparse.Namespace) -> int:
    """Show a run until it ends; ends as `status` does, or with 0 if it is left."""
    from funcpipe.client.control.watching import Watcher

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
    watcher: "Watcher", options: argparse.Namespace, console: Console, pause: Callable[[float], None], *, live: bool
) -> "RunView":
    """Poll until the run has ended, or once; returns the last view."""
    if options.json:
        return _each(watcher, options, pause, lambda view: _print(json.dumps(_with_format(view))))
    if options.once:
        return watcher.poll()
    if not live:
        lines = Lines()
        return _each(watcher, options, pause, lambda view: _print(printable("\n".join(lines.of(view)))))
    with Live(console=console, screen=True, auto_refresh=False) as display:
        draw = partial(screen, every_s=options.interval)
        return _each(watcher, options, pause, lambda view: display.update(draw(view, console), refresh=True))


def _each(
    watcher: "Watcher", options: argparse.Namespace, pause: Callable[[float], None], show: Callable[["RunView"], None]
) -> "RunView":
    dead_since_s: float | None = None
    while True:
        view = watcher.poll()
        show(view)
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


def _ended(view: "RunView", options: argparse.Namespace, console: Console) -> None:
    """Print the last view as a page that stays, and the next commands."""
    console.print(screen(view, console, all_rows=True))
    if view.has_ended or view.status.verdict.value == "dead":
        for command in render.commands_after(view.status, options.storage):
            console.print(command, soft_wrap=True)


def _left(options: argparse.Namespace, console: Console) -> None:
    from funcpipe.client.control.commands import commands, watch_command

    console.print(f"run {options.name} is as it was: watching changes nothing", soft_wrap=True)
    for command in (watch_command(options.name, options.storage), *commands(options.name, options.storage)[1:]):
        console.print(command, soft_wrap=True)
