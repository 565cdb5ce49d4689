"""Runs under attack in real processes, over local functions and files: as `experiments.studies.attacks`, with commands.

Clients are processes that call `FuncPipe.train`, and `funcpipe run status|stop|clean`; a client sleeps by SIGSTOP,
files are deleted by their age, cut, made by others, or on a disk that is read-only; folders cannot be made.
"""

import argparse
import contextlib
import json
import os
import random
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from experiments.studies.attacked_processes import Result, World
from experiments.studies.attacks import show, tell
from experiments.studies.chaos_processes import QUICK, pipe
from experiments.studies.process_faults import MARK, is_mountable, own_disk
from funcpipe.errors import FuncPipeError
from tests.support import chaos
from tests.support.attacked_world import STAGES
from tests.support.attacks import WRONG, Attack, Ending, attacked
from tests.support.plans import even_stages

EPOCHS = 4
SHORT_DEADLINE_S = 8.0
ATTACKS = tuple(attack for attack in Attack if attack.name not in ("RENEWED", "LATE", "LISTS", "CONDITIONS"))
"""What files can be put to."""


def client(options: argparse.Namespace) -> int:
    """Train as `options` say, as a program of a user's does that prints what the command line would."""
    job = chaos.job()
    plan = replace(job.plan, replicas=1, stages=even_stages([layer.name for layer in job.graph.layers], STAGES))
    resumes = options.client == "resume"
    try:
        result = pipe().train(
            chaos.data,
            epochs=EPOCHS,
            plan=plan,
            storage=options.url,
            faults=QUICK,
            message_deadline_s=options.message_deadline,
            run=None if resumes else options.run,
            resume=options.run if resumes else None,
            take_over=options.take_over,
            from_start=options.from_start,
            keep_model=options.keep_model,
            progress=False,
        )
    except FuncPipeError as error:
        print("\n".join([f"funcpipe: {error}", *getattr(error, "__notes__", ())]))
        return error.exit_code
    torch.save({"tensors": result.state_dict(), "losses": result.losses}, options.result)
    return 0


def run(seed: int, attacks: tuple[Attack, ...], expected: Result) -> Ending:
    """One run, and its ending."""
    draw, began_s = random.Random(seed), time.monotonic()
    with _world(draw, attacks) as world:
        outcome, wrong = attacked(world, attacks, expected)
    return Ending(
        seed=seed,
        attacks=attacks,
        outcome=outcome,
        seconds=time.monotonic() - began_s,
        processor_s=0.0,
        errors=tuple(world.errors),
        did=tuple(world.did),
        wrong=wrong,
    )


@contextlib.contextmanager
def _world(draw: random.Random, attacks: tuple[Attack, ...]) -> Iterator[World]:
    with tempfile.TemporaryDirectory() as outside, contextlib.ExitStack() as stack:
        world = World(draw, Path(outside), keeps_model=draw.random() < 0.5)
        if Attack.DISK in attacks:
            stack.enter_context(own_disk(world.objects))
        if {Attack.DISK, Attack.AGE} & set(attacks):
            world.deadline_s = SHORT_DEADLINE_S
        try:
            yield world
        finally:
            world.heal()


def drawn(seed: int, possible: tuple[Attack, ...]) -> tuple[Attack, ...]:
    """The attacks of a run: the first in turn, and up to two more by chance."""
    draw, first = random.Random(-1 - seed), possible[seed % len(possible)]
    return (first, *draw.sample([one for one in possible if one is not first], draw.choice((0, 0, 1, 2))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--attack", choices=[attack.name.lower() for attack in ATTACKS], help="only this one, alone")
    parser.add_argument("--output", type=Path, help="write every ending as JSON")
    parser.add_argument("--client", choices=["begin", "resume"], help=argparse.SUPPRESS)
    for name in ("--url", "--run", "--result"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--take-over", "--from-start", "--keep-model"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--message-deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.client:
        raise SystemExit(client(options))
    os.environ.setdefault(MARK, secrets.token_hex(8))
    possible = tuple(attack for attack in ATTACKS if attack is not Attack.DISK or is_mountable())
    with _world(random.Random(0), ()) as world:
        expected = world.begin()
    endings = []
    for seed in range(options.first_seed, options.first_seed + options.runs):
        attacks = (Attack[options.attack.upper()],) if options.attack else drawn(seed, possible)
        endings.append(run(seed, attacks, expected))
        tell(endings[-1])
    show(endings)
    if options.output:
        rows = [[e.seed, [a.name for a in e.attacks], e.outcome, e.seconds, e.errors, e.did, e.wrong] for e in endings]
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    if any(ending.outcome == WRONG for ending in endings):
        raise SystemExit("a run ended as none may")


if __name__ == "__main__":
    main()
