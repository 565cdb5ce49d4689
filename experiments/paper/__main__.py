"""Run the paper's evaluation and write its page, index.html. Scripts that only plan run first, two at a time."""

import argparse
import platform
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from experiments.paper import (
    bandwidth,
    beyond,
    executed,
    front,
    hand_over,
    prediction,
    scaling,
    search,
    synchronisation,
    systems,
)
from experiments.paper.common import Answer, Script, Settings, answer, read_arguments, save, tell
from experiments.paper.index import page
from funcpipe.platforms.process import usable_processors

SCRIPTS = {
    module.SCRIPT.name: module.SCRIPT
    for module in (
        executed,
        systems,
        front,
        synchronisation,
        search,
        prediction,
        scaling,
        bandwidth,
        hand_over,
        beyond,
    )
}
"""In the order of the page."""

ONLY_PLAN = (systems, bandwidth, beyond, front, search, scaling)
"""The modules that execute nothing, the longest first."""


def main(words: Sequence[str] | None = None) -> None:
    """Be the command."""
    parser = argparse.ArgumentParser(prog="python -m experiments.paper", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), metavar="NAME")
    folder, settings, chosen = _read(parser, words)
    began_s = time.monotonic()
    found: dict[str, Answer] = {}
    for done in _answers([script for name, script in SCRIPTS.items() if name in chosen], settings):
        save(done, folder)
        tell(done)
        found[done.name] = done
    ordered = [found[name] for name in SCRIPTS if name in found]
    machine = f"{usable_processors()} processors ({platform.machine()}, {platform.system()})"
    (folder / "index.html").write_text(page(ordered, time.monotonic() - began_s, machine), encoding="utf-8")
    print(f"{(time.monotonic() - began_s) / 60:.1f} minutes; written: {folder / 'index.html'}")


def _read(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> tuple[Path, Settings, Sequence[str]]:
    folder, settings = read_arguments(parser, words)
    return folder, settings, parser.parse_args(words).only


def _answers(scripts: Sequence[Script], settings: Settings) -> Iterator[Answer]:
    planned = [module.SCRIPT for module in ONLY_PLAN if module.SCRIPT in scripts]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(answer, script, settings) for script in planned]):
            yield future.result()
    yield from (answer(script, settings) for script in scripts if script not in planned)


if __name__ == "__main__":
    main()
