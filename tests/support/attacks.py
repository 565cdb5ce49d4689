"""One run under attack: it ends with the bits of an undisturbed one, or with a true message whose advice works.

Its storage is not its own, its client sleeps, its folders cannot be written; which of these, and when, is drawn by
seed. After each run the verbs of clients are called, what a message advises is done, and then nothing may be left of
the run, and nothing of others be touched. For many runs there is `experiments/studies/attacks.py`.
"""

import contextlib
import functools
import logging
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from unittest import mock

import torch

from funcpipe.client.control import stopping as control
from funcpipe.client.follow.results import RunResult
from funcpipe.errors import FuncPipeError, RunUnknown
from funcpipe.runstate import owner
from funcpipe.runstate.renewal import DAY_S
from funcpipe.runstate.signing import FOLDER, RUN_KEY
from funcpipe.worker import checkpoint_manager
from funcpipe.worker.progress import WorkerProgress
from tests.support import attacked_world
from tests.support.advice import Left, World, Wrong, follow, is_refusal, mend, say
from tests.support.attacked_world import REQUESTS, TORN
from tests.support.hostile_storage import Hostility

_log = logging.getLogger(__name__)

SHORT_DEADLINE_S = 4.0
"""The message deadline of runs whose messages vanish, or cannot be written."""

SILENT_S = 1.0
"""After so long, and five heartbeats, an owner that says nothing counts as dead here."""


class Attack(Enum):
    """What a run has to stand."""

    BELOW = "others' objects below the name"
    LATER = "others' objects come meanwhile"
    AGE = "objects vanish by age"
    RENEWED = "a short age, days pass"
    LATE = "reads lag"
    LISTS = "reads and listings lag"
    TORN = "torn puts"
    CONDITIONS = "conditions of puts ignored"
    ASLEEP = "a client sleeps, another acts"
    STOPPED = "another client stops the run"
    KEYS = "no home, so no folder for keys"
    KEYS_LOST = "keys vanish meanwhile"
    LOGS = "no folder for logs"
    FOLDER = "no folder for objects"
    DISK = "storage read-only from some moment"


SAME, ADVISED, REFUSED, WRONG = "same bits", "true message, its advice works", "refused rightly", "WRONG"
OUTCOMES = (SAME, ADVISED, REFUSED, WRONG)
"""With the same bits at once; by the advice of an error; by that of a refusal before the run began; or as none may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a run ended: `outcome` is one of OUTCOMES, and `did` what was done after its first error or by others."""

    seed: int
    attacks: tuple[Attack, ...]
    outcome: str
    seconds: float
    processor_s: float
    errors: tuple[str, ...] = ()
    did: tuple[str, ...] = ()
    wrong: str = ""


def drawn(seed: int) -> tuple[Attack, ...]:
    """The attacks of a run: the first in turn, and up to three more by chance."""
    draw, every = random.Random(-1 - seed), list(Attack)
    first = every[seed % len(every)]
    more = draw.sample([one for one in every if one is not first], draw.choice((0, 0, 1, 1, 2, 3)))
    return (first, *more)


def run(seed: int, attacks: tuple[Attack, ...]) -> Ending:
    """Train under `attacks`, do what is advised, and look what is left."""
    draw, began_s, used_s = random.Random(seed), time.monotonic(), time.process_time()
    replicas = draw.choice((1, 1, 2))
    expected = undisturbed(replicas)
    with _world(draw, replicas, attacks) as world:
        outcome, wrong = attacked(world, attacks, expected)
        world.platform.stop_all()
    return Ending(
        seed=seed,
        attacks=attacks,
        outcome=outcome,
        seconds=time.monotonic() - began_s,
        processor_s=time.process_time() - used_s,
        errors=tuple(world.errors),
        did=tuple(world.did),
        wrong=wrong,
    )


def attacked(world: World, attacks: tuple[Attack, ...], expected: Left) -> tuple[str, str]:
    """Let the run of `world` stand `attacks`; how it ended, and what was wrong with that."""
    try:
        outcome = _ended(world, attacks, expected)
        _check_rest(world)
    except Wrong as error:
        return WRONG, str(error)
    except Exception as error:  # noqa: BLE001 - no error but those of funcpipe may end a run: this one is shown
        _log.exception("a run ends by an error that nobody expects")
        return WRONG, f"{type(error).__name__}: {error}"
    return outcome, ""


@functools.cache
def undisturbed(replicas: int) -> RunResult:
    """What the job leaves where nothing goes wrong."""
    with _world(random.Random(0), replicas, ()) as world:
        result = world.begin()
        world.platform.stop_all()
    return result


def _hostility(attacks: tuple[Attack, ...], draw: random.Random) -> Hostility:
    found = Hostility(ignores_conditions=Attack.CONDITIONS in attacks)
    if Attack.AGE in attacks:
        found = replace(found, keep_days=1, requests_a_day=draw.randrange(REQUESTS // 20, REQUESTS // 2))
    if Attack.RENEWED in attacks:
        found = replace(found, keep_days=draw.randrange(2, 5), requests_a_day=draw.randrange(40, 200))
    if Attack.LATE in attacks or Attack.LISTS in attacks:
        share = draw.choice((1.0, 0.1, 0.02))
        found = replace(found, late_s=draw.uniform(0.005, 0.1), late_share=share, lists_late=Attack.LISTS in attacks)
    if Attack.TORN in attacks:
        found = replace(found, torn=(draw.choice(TORN), draw.choice((1, 1, 2, 3, 5))))
    if Attack.DISK in attacks:
        found = replace(found, unwritable_from=draw.randrange(1, REQUESTS))
    return found


@contextlib.contextmanager
def _world(draw: random.Random, replicas: int, attacks: tuple[Attack, ...]) -> Iterator[attacked_world.World]:
    """A world for a run, with folders of its own and clocks that go faster."""
    with tempfile.TemporaryDirectory() as outside, contextlib.ExitStack() as stack:
        folder = Path(outside)
        for name in ("keys", "logs", "tmp"):
            (folder / name).mkdir()
        (folder / "file").touch()
        logs = folder / ("file" if Attack.LOGS in attacks else "") / "logs"
        told = {FOLDER: str(folder / "keys"), "FUNCPIPE_LOG_DIR": str(logs), "FUNCPIPE_HISTORY": ""}
        stack.enter_context(mock.patch.dict(os.environ, told))
        os.environ.pop(RUN_KEY, None)
        if Attack.KEYS in attacks:
            os.environ["HOME"] = os.environ["XDG_STATE_HOME"] = str(folder / "file")
            del os.environ[FOLDER]
        world = attacked_world.World(draw, replicas, _hostility(attacks, draw), folder, keeps_model=draw.random() < 0.5)
        world.has_folder = Attack.FOLDER not in attacks
        if {Attack.DISK, Attack.AGE, Attack.RENEWED} & set(attacks):
            world.deadline_s = SHORT_DEADLINE_S
        stack.enter_context(mock.patch.object(tempfile, "tempdir", str(folder / "tmp")))
        stack.enter_context(mock.patch.object(owner, "_SILENT_S", SILENT_S))
        stack.enter_context(mock.patch.object(control, "_SETTLE_S", 0.05))
        if Attack.RENEWED in attacks:
            by_days = property(lambda self: world.storage.day * DAY_S)
            stack.enter_context(mock.patch.object(WorkerProgress, "run_s", by_days))
            stack.enter_context(mock.patch.object(checkpoint_manager, "_RECORD_S", 0.0))
        yield world


def _ended(world: World, attacks: tuple[Attack, ...], expected: Left) -> str:
    """How the run ends, with all that is done after it."""
    world.let_happen([attack.name for attack in attacks])
    outcome, refused = SAME, ""
    while True:
        try:
            result = world.slept(functools.partial(say, world)) if Attack.ASLEEP in attacks else world.begin()
            break
        except FuncPipeError as error:
            say(world, error)
            if is_refusal(error) and not _has_begun(world) and refused != str(error):
                refused, outcome = str(error), REFUSED
                mend(world, error)
                continue
            _call_verbs(world)
            if world.draw.random() < 0.5:
                world.heal()
            outcome, result = ADVISED, follow(world, error)
            break
    world.heal()
    check_bits(result, expected)
    _look_after(world, expected)
    return outcome


def _has_begun(world: World) -> bool:
    return any(key.startswith(f"{world.name}/g") for key in world.own())


def check_bits(found: Left, expected: Left) -> None:
    """Raise Wrong unless the results are the same, but for losses that nobody knows any more."""
    tensors, wanted = found.state_dict(), expected.state_dict()
    if tensors.keys() != wanted.keys() or not all(torch.equal(tensors[name], wanted[name]) for name in wanted):
        raise Wrong("other bits")
    if len(found.losses) != len(expected.losses):
        raise Wrong(f"{len(found.losses)} losses of {len(expected.losses)}")
    if any(loss == loss and loss != told for loss, told in zip(found.losses, expected.losses, strict=True)):
        raise Wrong("other losses")


def _call_verbs(world: World) -> None:
    """Call some verbs on what is left; each answers, or says truly why not."""
    for verb in world.draw.sample(("status", "stop"), world.draw.choice((0, 1, 2))):
        world.did.append(verb)
        try:
            getattr(world, verb)()
        except FuncPipeError as error:
            say(world, error)


def _look_after(world: World, expected: Left) -> None:
    """Call verbs on a run that has ended well, and collect what is kept once more."""
    _call_verbs(world)
    if world.keeps_model and world.draw.random() < 0.5:
        world.did.append("collect")
        try:
            check_bits(world.resume(), expected)
        except FuncPipeError as error:
            say(world, error)
            if "lost keys" not in world.happened:
                check_bits(follow(world, error), expected)


def _check_rest(world: World) -> None:
    """Clean what is kept; then nothing may be left, and nothing of others be touched."""
    own = world.own()
    if own and not world.keeps_model and not world.errors:
        raise Wrong(f"{len(own)} objects are left, such as {min(own)}")
    for world.name in sorted({key.partition("/")[0] for key in own}):
        try:
            world.clean()
        except RunUnknown as error:
            raise Wrong(f"cannot be cleaned: {error}; {min(own)} is left") from error
    if left := world.own():
        raise Wrong(f"{len(left)} objects are left, such as {min(left)}")
    world.check_left()
