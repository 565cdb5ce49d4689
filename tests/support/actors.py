"""Programs whose requests to a storage are answered one by one, whenever somebody else decides.

A program has no thread of its own. To learn what it asks next it is run from its beginning, with the answers that it
has had so far; the first request without an answer is what it asks next:

    answers so far                      what `Actors.next` finds
    -                                   put leases/s0.r0/00000001
    put -> done                         get leases/s0.r0/00000002
    put -> done, get -> KeyMissing      get leases/s0.r0/00000001

Most often nobody comes between two requests of an actor. So each run goes on as if nobody did, and what it asks then is
remembered for the case that this comes true.
"""

import contextlib
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

from funcpipe.errors import FuncPipeError, KeyExists, KeyMissing
from funcpipe.platforms.base import OPEN, Gate

MAX_ALONE = 200
"""How many requests a program makes in one run beyond those that were answered."""


class Unanswered(BaseException):
    """Ends a program where it waits for an answer. Not an Exception, so that no program handles it."""


class Unrepeatable(BaseException):
    """A program depends on more than the answers that it gets."""


class Request(NamedTuple):
    """What a program asks for: `kind` is a method of a storage, clock, sleep, start or kill."""

    kind: str
    key: str = ""
    data: bytes = b""
    if_absent: bool = False
    span: slice = slice(None)
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.key}".rstrip()


Value = None | bytes | tuple[str, ...] | float
Answer = Value | type[FuncPipeError]


class Answered(NamedTuple):
    """A request, its answer, or the kind of error that it raises, and the time of the answer."""

    request: Request
    answer: Answer
    now_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """What a program has returned, or the exception that it has raised."""

    result: object


class Actor:
    """One run of a program: all that the program may learn from or change."""

    def __init__(self, name: str, answers: list[Answered], objects: dict[str, bytes], now_s: float) -> None:
        """It begins at `now_s`; `objects` is what the storage holds after `answers`."""
        self.name = name
        self.storage = AskingStorage(self.ask)
        self.alone: list[Answered] = []
        self._objects = objects
        self.pending: Request | None = None
        self.started: dict[str, Program] = {}
        self.tokens = 0
        self.now_s = now_s
        self._answers = iter(answers)

    def clock(self) -> float:
        """The time, which may have passed since the last answer."""
        return float(self.ask(Request("clock")))  # type: ignore[arg-type]

    def start(self, name: str, program: "Program") -> None:
        """Start another actor."""
        self.started[name] = program
        self.ask(Request("start", name))

    def kill(self, name: str) -> None:
        """End another actor at once."""
        self.ask(Request("kill", name))

    def ask(self, request: Request) -> Value:
        """The answer to `request`."""
        if self.pending is not None:
            raise Unanswered
        found = next(self._answers, None)
        if found is None:
            found = self._answer_alone(request)
        elif (found.request.kind, found.request.key) != (request.kind, request.key):
            raise Unrepeatable(f"{self.name} does not do the same again: {request} instead of {found.request}")
        self.now_s = found.now_s
        if isinstance(found.answer, type):
            raise found.answer(request.key)
        return found.answer

    def _answer_alone(self, request: Request) -> Answered:
        """The answer if nobody else does anything. Other actors may change what starting and killing does."""
        if request.kind in ("start", "kill", "clock") or len(self.alone) == MAX_ALONE:
            self.pending = request
            raise Unanswered
        self._objects, answer = done(self._objects, request)
        found = Answered(request, answer, now_after(request, self._objects, self.now_s))
        self.alone.append(found)
        return found


Program = Callable[[Actor], object]


class AskingStorage:
    """A storage that passes each request to `ask`."""

    watches = True

    def __init__(self, ask: Callable[[Request], Value]) -> None:
        self._ask = ask

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool = False, gate: Gate = OPEN) -> None:
        """Write an object; with `if_absent`, raise KeyExists rather than replace one."""
        self._ask(Request("put", key, bytes(data), if_absent=if_absent))

    def get(self, key: str, *, start: int = 0, stop: int | None = None, gate: Gate = OPEN) -> bytes:
        """The bytes [start, stop) of an object; raises KeyMissing."""
        answer = self._ask(Request("get", key, span=slice(start, stop)))
        assert isinstance(answer, bytes)
        return answer

    def delete(self, key: str) -> None:
        """Remove an object; a missing key is not an error."""
        self._ask(Request("delete", key))

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects, one after another: a request for many is not atomic."""
        for key in keys:
            self.delete(key)

    def list(self, prefix: str) -> tuple[str, ...]:
        """The keys that begin with `prefix`, sorted."""
        answer = self._ask(Request("list", prefix))
        assert isinstance(answer, tuple)
        return answer

    def etags(self, prefix: str) -> Mapping[str, str]:
        """The keys that begin with `prefix`, with hashes of their objects, read one after another."""
        return {key: hashlib.sha256(self.get(key)).hexdigest() for key in self.list(prefix)}

    def touch(self, key: str) -> None:
        """Nothing, as no object has an age here; raises KeyMissing."""
        self.get(key)

    def wait(self, key: str, timeout_s: float, cancel: threading.Event) -> None:
        """Pause until the object is there, or `timeout_s` are over, in which the others may do nothing."""
        self._ask(Request("wait", key, seconds=timeout_s))


def done(objects: dict[str, bytes], request: Request) -> tuple[dict[str, bytes], Answer]:
    """`objects` after `request` to a storage that holds them, and the answer."""
    match request.kind:
        case "put" if request.if_absent and request.key in objects:
            return objects, KeyExists
        case "put":
            return objects | {request.key: request.data}, None
        case "delete":
            return {key: data for key, data in objects.items() if key != request.key}, None
        case "get":
            return objects, objects[request.key][request.span] if request.key in objects else KeyMissing
        case "list":
            return objects, tuple(sorted(key for key in objects if key.startswith(request.key)))
    return objects, None


class History:
    """What an actor has asked and been answered: the history before, the newest answer, and what it does next."""

    def __init__(
        self,
        name: str,
        began_s: float,
        next: "Request | Ended",
        before: "History | None" = None,
        answered: Answered | None = None,
    ) -> None:
        self.name = name
        self.began_s = began_s
        self.next = next
        self.before = before
        self.answered = answered
        self.longer: dict[tuple[Answer, float], History] = {}

    def answers(self) -> list[Answered]:
        """All answers, the first one first."""
        found, history = [], self
        while history.before is not None and history.answered is not None:
            found.append(history.answered)
            history = history.before
        return found[::-1]


def now_after(request: Request, objects: Mapping[str, bytes], now_s: float) -> float:
    """The time after `request`: a wait for what never comes, and sleep, take as long as they may."""
    waits = request.kind == "sleep" or (request.kind == "wait" and request.key not in objects)
    return now_s + request.seconds if waits else now_s


class Actors:
    """The programs of a scenario. No program is run twice for the same answers: histories are remembered."""

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self._programs = dict(programs)
        self._first: dict[tuple[str, float], History] = {}
        self._running: Actor | None = None

    def begin(self, name: str, objects: dict[str, bytes], now_s: float) -> History:
        """The history of an actor that has asked nothing yet, with a storage that holds `objects`."""
        if (name, now_s) not in self._first:
            self._first[name, now_s] = self._run(name, None, [], objects, now_s)
        return self._first[name, now_s]

    def answer(self, history: History, answer: Answer, objects: dict[str, bytes], now_s: float) -> History:
        """The history in which the pending request is answered at `now_s`, after which the storage holds `objects`."""
        longer = history.longer.get((answer, now_s))
        if longer is None:
            assert isinstance(history.next, Request), "an actor that has ended asks nothing"
            answered = Answered(history.next, answer, now_s)
            longer = self._run(history.name, history, [*history.answers(), answered], objects, history.began_s)
            history.longer[answer, now_s] = longer
        return longer

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """Meanwhile programs get the world's time and the same random numbers in each run; nothing is logged."""
        tokens, now, today, sleep = secrets.token_hex, time.monotonic, time.time, time.sleep

        def token_hex(nbytes: int | None = None) -> str:
            if self._running is None:
                return tokens(nbytes)
            self._running.tokens += 1
            text = f"{self._running.name} {self._running.tokens}"
            return hashlib.sha256(text.encode()).hexdigest()[: 2 * (nbytes or 16)]

        def monotonic() -> float:
            return now() if self._running is None else self._running.now_s

        def time_of_day() -> float:
            return today() if self._running is None else self._running.now_s

        def pause(seconds: float) -> None:
            sleep(seconds) if self._running is None else self._running.ask(Request("sleep", seconds=seconds))

        with (
            mock.patch.object(secrets, "token_hex", token_hex),
            mock.patch.object(time, "monotonic", monotonic),
            mock.patch.object(time, "time", time_of_day),
            mock.patch.object(time, "sleep", pause),
            mock.patch("funcpipe.comm.signature.os", mock.Mock(urandom=bytes)),
        ):
            logs = logging.root.manager.disable
            logging.disable(logging.CRITICAL)
            try:
                yield
            finally:
                logging.disable(logs)

    def _run(
        self, name: str, before: History | None, answers: list[Answered], objects: dict[str, bytes], began_s: float
    ) -> History:
        """The history with `answers`, and those that follow from it while no other actor does anything."""
        actor = self._running = Actor(name, answers, objects, began_s)
        last: Request | Ended
        try:
            last = Ended(self._programs[name](actor))
        except Unanswered:
            self._programs.update(actor.started)
            assert actor.pending is not None
            last = actor.pending
        except Exception as error:  # noqa: BLE001 - whatever it is, the explorer tells it
            last = Ended(error)
        finally:
            self._running = None
        if isinstance(last, Ended) and actor.pending is not None:
            raise Unrepeatable(f"{name} has swallowed the end of its run, at {actor.pending}")
        asked = [*(answered.request for answered in actor.alone), last]
        first = history = History(name, began_s, asked[0], before, answers[-1] if answers else None)
        for answered, following in zip(actor.alone, asked[1:], strict=True):
            longer = History(name, began_s, following, history, answered)
            history.longer[answered.answer, answered.now_s] = longer
            history = longer
        return first
