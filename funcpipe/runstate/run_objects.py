"""The objects that a run can have written: of those below a run's name, only these are ever deleted.

A name may be that of a folder which holds other people's objects as well. So whatever deletes a run asks here first,
and whatever begins one refuses a name below which other objects lie.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from funcpipe.errors import InvalidValue
from funcpipe.platforms.base import Storage
from funcpipe.runstate.keys import Keys, generation_of

_PARTS = {
    "GENERATION": r"\d{4}(?:-[0-9a-f]{1,16})?",
    "NUMBER": r"\d{4,10}",
    "INDEX": r"\d+",
    "STAGE": r"s\d+",
    "TOKEN": r"[0-9a-f]+",
    "NAME": r"[A-Za-z0-9][A-Za-z0-9._-]*",
    "DATA": r"(?:evaluation\.)?(?:dataset\.bundle|dataset\.tensors|shard-\d{6,})",
    "FILE": r"\d{8}\.[A-Za-z0-9._-]+\.(?:json|safetensors)",
}
"""The expression that replaces a word in capitals."""

OF_RUN = (
    *("generations/GENERATION", "generations/GENERATION.json"),
    *("owner/leases/NUMBER.TOKEN", "owner/heartbeats/NUMBER.TOKEN"),
    *("server/checkpoints/NUMBER.json", "server/checkpoints/NUMBER.safetensors", "server/data/DATA"),
)
OF_GENERATION = (
    *("run.json", "finished.json", "halts/NUMBER", "halts/NUMBER.verdict"),
    *("stage/STAGE.bundle", "stage/STAGE.tensors", "data/DATA", "payloads/NAME"),
    *("messages/NAME/NUMBER/NAME", "messages/NAME/NUMBER.NUMBER/NAME"),
    *("checkpoints/run.json", "checkpoints/STAGE/FILE", "best/STAGE/FILE"),
    *("steps/NUMBER.NAME", "losses/NAME/NUMBER.NUMBER", "progress/NAME/NUMBER.NUMBER"),
    *("validations/NUMBER", "scores/NUMBER/NAME/NUMBER", "outputs/NUMBER.NAME"),
    *("leases/NAME/NUMBER", "heartbeats/NAME/NUMBER", "hand-overs/NAME/NUMBER", "restarts/NAME/NUMBER"),
    *("renewals/NUMBER", "functions/NAME/NUMBER.TOKEN", "reports/NAME/NUMBER", "traces/NAME/NUMBER"),
    *("server/data/DATA", "server/work/NAME/NUMBER/NUMBER", "server/pushes/NAME/NUMBER/NUMBER"),
    "server/parameters/NUMBER",
)
"""The keys below a run, and below one of its generations, as patterns (docs/architecture.md says what each is)."""

_OF_MEASUREMENT = (
    *("INDEX", "layers/INDEX.bundle", "layers/INDEX.tensors", "times/NAME/INDEX"),
    *("probes/INDEX/machine", "probes/INDEX/failure", "probes/INDEX/trial"),
)


def _any_of(places: Sequence[str]) -> str:
    words = "|".join(_PARTS)
    return "|".join(re.sub(words, lambda word: _PARTS[word[0]], place.replace(".", r"\.")) for place in places)


_WRITTEN = re.compile(
    rf"[a-z0-9][a-z0-9-]*/(?:{_any_of(OF_RUN)}|g{_PARTS['GENERATION']}/(?:{_any_of(OF_GENERATION)}))"
    rf"|(?:profile|measure)-[0-9a-f]{{12,16}}/(?:{_any_of(_OF_MEASUREMENT)})",
    re.ASCII,
)


def is_written(key: str) -> bool:
    """Return True if the object `key` can be one that a run has written.

    >>> is_written("digits/generations/0000-3fa9c2d1"), is_written("datasets/2024/images.bin")
    (True, False)
    """
    return _WRITTEN.fullmatch(key) is not None


@dataclass(frozen=True, slots=True)
class FoundObjects:
    """The objects below a run's name: its `own`, and those of `others`."""

    own: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def others_text(self) -> str:
        """The objects of others in words: how many, and one of them."""
        count = len(self.others)
        return f"the object {self.others[0]}" if count == 1 else f"{count} objects, such as {self.others[0]}"


def generations_of(objects: Iterable[str]) -> tuple[Keys, ...]:
    """Return the generations of a run that any of its `objects` belongs to, in ascending order."""
    found = {generation_of(key) for key in objects} - {None}
    return tuple(sorted((keys for keys in found if keys is not None), key=lambda keys: (keys.generation, keys.nonce)))


def find_objects(storage: Storage, prefix: str) -> FoundObjects:
    """Return the objects below `prefix`, the name of a run or a part of it."""
    found = storage.list(prefix)
    own = tuple(key for key in found if is_written(key))
    return FoundObjects(own, tuple(key for key in found if not is_written(key)))


def refuse_foreign_objects(storage: Storage, run: str) -> None:
    """Raise InvalidValue for the name of a new run below which others have objects."""
    found = find_objects(storage, Keys(run).run_prefix)
    if found.others:
        raise InvalidValue(
            "run",
            run,
            f"must be a name of its own: {found.others_text}, that no run has written, would lie among the run's; "
            "choose another name, or another folder as storage",
        )
