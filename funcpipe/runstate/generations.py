"""The generations of a run. Starting a run makes generation 0; each time it is resumed, a new generation follows.

A generation is first reserved under its number and the fingerprint of its key, then prepared, and counts from the
moment that its record is written. Only the client that owns the run does so.

Only objects that a run can have written are ever deleted: a name may be that of a folder which holds other people's
objects as well. Whatever deletes a run asks here first, and whatever begins one refuses such a name.
"""

import contextlib
import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from funcpipe.core import LeaseDocument, RunRecord, WorkerSpec
from funcpipe.core.run_key import RunKey
from funcpipe.core.settings import KEEP_DAYS, WHY_GONE
from funcpipe.errors import (
    CorruptMessage,
    InvalidValue,
    KeyExists,
    KeyMissing,
    PlatformRefused,
    RunKeyMissing,
    RunUnknown,
    StorageError,
)
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import exists, get_document, get_listed_document, put_document, side_by_side
from funcpipe.runstate.functions import unmark_run
from funcpipe.runstate.keys import Keys, generation_of
from funcpipe.runstate.signing import KeyFolder, key_of

_log = logging.getLogger(__name__)

_PARTS = {
    "GENERATION": r"\d{4}(?:-[0-9a-f]{1,16})?",
    "NUMBER": r"\d{4,10}",
    "INDEX": r"\d+",
    "SPREAD": "[0-9a-f]{3}",
    "STAGE": r"s\d+",
    "TOKEN": r"[0-9a-f]+",
    "NAME": r"[A-Za-z0-9][A-Za-z0-9._-]*",
    "DATA": r"(?:evaluation\.)?(?:dataset\.bundle|dataset\.tensors|shard-\d{6,})",
    "DIGEST": r"[0-9a-f]{64}",
    "FILE": r"\d{8}\.[A-Za-z0-9._-]+\.(?:json|safetensors)",
}
"""The expression that replaces a word in capitals."""

OF_RUN = (
    *("generations/GENERATION", "generations/GENERATION.json"),
    *("owner/leases/NUMBER.TOKEN", "owner/heartbeats/NUMBER.TOKEN"),
    *("base/DIGEST.json", "base/DIGEST.safetensors"),
    *("server/checkpoints/NUMBER.json", "server/checkpoints/NUMBER.safetensors", "server/data/DATA"),
    *("SPREAD/gGENERATION/messages/NAME/NUMBER/NAME", "SPREAD/gGENERATION/messages/NAME/NUMBER.NUMBER/NAME"),
)
OF_GENERATION = (
    *("run.json", "finished.json", "halts/NUMBER", "halts/NUMBER.verdict"),
    *("stage/STAGE.bundle", "stage/STAGE.tensors", "data/DATA", "payloads/NAME", "journal/NUMBER"),
    *("messages/NAME/NUMBER/NAME", "messages/NAME/NUMBER.NUMBER/NAME"),
    *("checkpoints/run.json", "checkpoints/STAGE/FILE", "best/STAGE/FILE"),
    *("steps/NUMBER.NAME", "losses/NAME/NUMBER.NUMBER", "progress/NAME/NUMBER.NUMBER.NUMBER"),
    *("validations/NUMBER", "scores/NUMBER/NAME/NUMBER", "outputs/NUMBER.NAME"),
    *("leases/NAME/NUMBER", "heartbeats/NAME/NUMBER", "hand-overs/NAME/NUMBER", "restarts/NAME/NUMBER"),
    *(
        "renewals/NUMBER",
        "functions/NAME/NUMBER.TOKEN",
        "functions/together",
        "reports/NAME/NUMBER",
        "traces/NAME/NUMBER",
    ),
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


def objects_of(storage: Storage, keys: Keys) -> tuple[str, ...]:
    """Return the objects of one generation, its reservation and the record beside that aside."""
    own = find_objects(storage, keys.run_prefix).own
    return tuple(key for key in own if generation_of(key) == keys and not key.startswith(keys.reservations))


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


_PROBES = {"messages": "put-probe", "sums": "put-split.probe"}
"""For each kind of messages a name of one, by which it lies where its kind does."""


_READS = 3
"""A single read may miss an object for another reason, such as a fault on its way."""


def reserve_generation(
    storage: Storage,
    run: str,
    *,
    after: Keys | None = None,
    apart: Collection[str] = (),
    run_key: RunKey | None = None,
) -> Keys:
    """Return the keys of a new generation of `run`, later than `after`. Its RunKey is kept on this machine first: a new
    one, or `run_key` if the run is a part of something whose key that is.

    Everything depends on conditional puts, and on reads that find what was written, so the storage is tried, and those
    that keep the kinds `apart` of messages. Raises PlatformRefused for one that replaces what it must keep, or reads it
    late.
    """
    before = [*list_generations(storage, run), *([] if after is None else [after])]
    number = max((keys.generation for keys in before), default=-1) + 1
    run_key = run_key or RunKey.new()
    keys = Keys(run, number, run_key.fingerprint)
    KeyFolder().keep(keys, run_key)
    probes = [keys.message("s0.r0", 0, _PROBES[kind]) for kind in apart]
    try:
        put_document(storage, keys.reservation, LeaseDocument(holder="client"), if_absent=True)
        for probe in probes:
            put_document(storage, probe, LeaseDocument(holder="client"), if_absent=True)
        for key in (keys.reservation, *probes):
            _refuse_if_late(storage, key)
            _refuse_if_replaced(storage, key)
    except BaseException:
        KeyFolder().forget([keys])
        raise
    finally:
        storage.delete_many(probes)
    _log.info("generation %d of run %s begins", number, run)
    return keys


def reserve_first(storage: Storage, run: str, run_key: RunKey) -> Keys:
    """Return the keys of the first generation of `run`, a part of something whose key is `run_key`, in a storage that
    was tried. Raises KeyExists if the run is known.
    """
    keys = Keys(run, nonce=run_key.fingerprint)
    with contextlib.suppress(FileExistsError):  # which a client that died has left
        KeyFolder().keep(keys, run_key)
    put_document(storage, keys.reservation, LeaseDocument(holder="client"), if_absent=True)
    return keys


def _refuse_if_late(storage: Storage, key: str) -> None:
    """Delete the object `key`, which was just written, and raise PlatformRefused, if reads do not find it."""
    if any(exists(storage, key) for _ in range(_READS)):
        return
    storage.delete(key)
    raise PlatformRefused(
        f"reads of the storage lag behind writes, so functions would take each other for dead: {key} is not found just "
        "after it was written; take a storage whose reads find what was written before"
    )


def _refuse_if_replaced(storage: Storage, key: str) -> None:
    """Delete the object `key`, and raise PlatformRefused, if a conditional put replaces it."""
    try:
        put_document(storage, key, LeaseDocument(holder="another"), if_absent=True)
    except KeyExists:
        return
    storage.delete(key)
    raise PlatformRefused(
        f"the storage replaces objects that a conditional put must keep, so two functions could hold one lease: it did "
        f"so with {key}; take a server that heeds If-None-Match or, on OSS, a bucket that has never had versioning"
    )


def list_generations(storage: Storage, run: str) -> tuple[Keys, ...]:
    """Return the reserved generations of `run`, in ascending order."""
    return generations_of(find_objects(storage, Keys(run).reservations).own)


def write_record(storage: Storage, keys: Keys, record: RunRecord) -> None:
    """Write the record of a generation, three times in case some are lost: from now on it counts."""
    for key in keys.records:
        put_document(storage, key, record)


def touch_saved_record(storage: Storage, keys: Keys) -> None:
    """Make the record beside the checkpoints as young as the newest of them; one that is lost is written again."""
    try:
        storage.touch(keys.saved_record)
    except KeyMissing:
        record = find_record(storage, keys)
        if record is not None:
            put_document(storage, keys.saved_record, record)


def find_record(storage: Storage, keys: Keys) -> RunRecord | None:
    """The record of a generation; None if it does not count. Raises CorruptMessage if no copy of it can be read."""
    damage: CorruptMessage | None = None
    for key in keys.records:
        try:
            return get_document(storage, RunRecord, key)
        except KeyMissing:
            continue
        except CorruptMessage as error:
            _log.warning("run %s: the record of generation %d is damaged: %s", keys.run, keys.generation, error)
            damage = error
    if damage is not None:
        raise damage
    return None


def newest_record(storage: Storage, run: str) -> RunRecord:
    """Return the record of the newest generation of `run` that counts. Raises RunUnknown, or CorruptMessage.

    Of a generation that was deleted, a late client may have put a record and nothing else, which does not count.
    """
    listed = storage.list(Keys(run).reservations)
    for keys in reversed(generations_of(listed)):
        record = find_record(storage, keys)
        if record is not None and (keys.reservation in listed or storage.list(keys.payloads)):
            return record
        _log.debug("generation %d of run %s has no record: its client died before it began", keys.generation, run)
    own = find_objects(storage, Keys(run).run_prefix).own
    for keys in reversed(generations_of(own)):
        saved = any(key.startswith(keys.checkpoints) for key in own if key != keys.saved_record)
        record = find_record(storage, keys) if saved and keys.reservation not in listed else None
        if record is not None:
            _log.warning("run %s: its reservation is lost; it is found by its checkpoints", run)
            return record
    raise RunUnknown(f"there is no run {run!r} in this storage; {_why_unknown(run, own)}")


def _why_unknown(run: str, own: Sequence[str]) -> str:
    """Return advice for a user who asks for a run of which there is no record."""
    left = [key for key in own if not key.startswith(Keys(run).owner.prefix)]
    if not left:
        kept = f"one that was stopped is kept for {KEEP_DAYS} days, or what platform.keep-days of deploy says"
        return f"its name is what `train` printed; in a deployment's own bucket, {kept}"
    count = "an object" if len(left) == 1 else f"{len(left)} objects"
    why = f"its client ended before it began, {WHY_GONE}"
    return f"{count} of one, such as {left[0]}, without a record: {why}; funcpipe run clean {run} deletes what is left"


def refuse_if_gone(storage: Storage, run: str, why: str) -> None:
    """Raise RunUnknown, which begins with `why`, if too little of `run` is left to resume it: says what to do instead.

    A record that cannot be read counts as left.
    """
    try:
        newest_record(storage, run)
    except (CorruptMessage, RunKeyMissing, StorageError):
        return
    except RunUnknown:
        if any(not key.startswith(Keys(run).owner.prefix) for key in find_objects(storage, Keys(run).run_prefix).own):
            rest = (
                f"what is left of it cannot be resumed: funcpipe run clean {run} deletes what is left, then train again"
            )
        else:
            rest = "nothing is left of it to resume: train without --resume begins it anew"
        raise RunUnknown(f"{why}; {rest}") from None


def write_payload(storage: Storage, keys: Keys, spec: WorkerSpec) -> None:
    """Write the payload of a worker's first attempt, without the run's key."""
    put_document(storage, keys.payload(spec.worker), replace(spec, run_key=""))


def load_payload(storage: Storage, keys: Keys, worker: str, run_key: RunKey) -> WorkerSpec:
    """The payload of the first attempt of `worker`, as it can be invoked again. Raises KeyMissing, CorruptMessage."""
    return replace(get_document(storage, WorkerSpec, keys.payload(worker)), run_key=run_key.text)


def load_worker_specs(storage: Storage, keys: Keys) -> tuple[WorkerSpec, ...]:
    """The payloads of the first attempts of a generation's workers, as they can be invoked again from this machine."""
    found, run_key = storage.list(keys.payloads), key_of(KeyFolder(), keys)
    specs = side_by_side(lambda key: get_listed_document(storage, WorkerSpec, key), found)
    return tuple(replace(spec, run_key=run_key.text) for spec in specs)


def delete_generation(storage: Storage, keys: Keys) -> None:
    """Delete all objects of one generation; workers that still run lose their leases and end."""
    _delete(storage, keys.records)  # first: what is half deleted must not be resumed
    _delete(storage, objects_of(storage, keys))
    storage.delete(keys.reservation)
    KeyFolder().forget([keys])


def delete_objects(storage: Storage, run: str) -> FoundObjects:
    """Delete all objects of the run, but for what says who owns it; returns which were found, and which others stay.

    First goes what has watchdogs restart its workers.
    """
    unmark_run(storage, run)
    owner, found = Keys(run).owner.prefix, find_objects(storage, Keys(run).run_prefix)
    own = tuple(key for key in found.own if not key.startswith(owner))
    generations = generations_of(own)
    _delete(storage, [key for keys in generations for key in keys.records])
    _delete(storage, own)
    KeyFolder().forget(generations)
    return FoundObjects(own, found.others)


def _delete(storage: Storage, keys: Iterable[str]) -> None:
    found = tuple(keys)
    storage.delete_many(found)
    _log.info("deleted %d objects%s", len(found), f" from {found[0]} on" if found else "")
