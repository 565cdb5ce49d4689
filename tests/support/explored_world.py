"""What checks see of an exploration: the newest step, what the storage holds, and what each actor has done."""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.support.actors import Answer, Answered, AskingStorage, Ended, History, Request, Value, done


@dataclass(frozen=True, slots=True)
class Step:
    """What an actor did, how that failed if it did, and what was under the key before and after."""

    actor: str
    what: str
    key: str = ""
    error: str = ""
    before: bytes | None = None
    after: bytes | None = None

    def __str__(self) -> str:
        words = [self.actor and f"{self.actor}:", self.what, self.key, self.error and f"-> {self.error}"]
        return " ".join(word for word in words if word)


class World:
    """What checks see: the newest step, and what the storage holds after and before it.

    Requests to `storage` are no steps, and change nothing.
    """

    def __init__(
        self,
        before: Mapping[str, bytes],
        objects: Mapping[str, bytes],
        actors: tuple[History, ...],
        dead: frozenset[str],
        step: Step,
    ) -> None:
        self.before = before
        self.objects = objects
        self.step = step
        self.dead = dead
        self._actors = actors

    @property
    def is_over(self) -> bool:
        """Whether all actors have ended or died."""
        return all(isinstance(actor.next, Ended) or actor.name in self.dead for actor in self._actors)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the actors."""
        return tuple(actor.name for actor in self._actors)

    @property
    def results(self) -> dict[str, object]:
        """What the actors have returned, or raised, that have ended."""
        return {actor.name: actor.next.result for actor in self._actors if isinstance(actor.next, Ended)}

    def did(self, name: str) -> tuple[tuple[Request, Answer], ...]:
        """What the actor `name` has asked and been answered, in this order."""
        return tuple((answered.request, answered.answer) for answered in self.history(name))

    def history(self, name: str) -> tuple[Answered, ...]:
        """What the actor `name` has asked, what it was answered, and when."""
        return next((tuple(actor.answers()) for actor in self._actors if actor.name == name), ())

    @property
    def storage(self) -> AskingStorage:
        """A storage with what there is now."""
        return self.reader(self.objects)

    @staticmethod
    def reader(objects: Mapping[str, bytes]) -> AskingStorage:
        """A storage that holds `objects`, and whatever it is asked to do."""

        def answer(request: Request) -> Value:
            found = done(dict(objects), request)[1]
            if isinstance(found, type):
                raise found(request.key)
            return found

        return AskingStorage(answer)
