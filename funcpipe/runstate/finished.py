"""The part of a finished run that is kept: its model, as its last checkpoint, and its cost and time.

    run-1/generations/0000-3fa9c2d1          run-1/g0000-3fa9c2d1/finished.json
    run-1/generations/0000-3fa9c2d1.json     run-1/g0000-3fa9c2d1/checkpoints/s0/00000042.s0.r0.a00000000.json
    run-1/g0000-3fa9c2d1/run.json            run-1/g0000-3fa9c2d1/traces/s0.r0/00000000
    run-1/g0000-3fa9c2d1/checkpoints/run.json

Once `finished.json` is there, all else is deleted: messages, code, payloads, leases, heartbeats, reports, earlier
checkpoints.
"""

import logging
from collections.abc import Sequence

from funcpipe.core import FinishedRun, Manifest, RunRecord
from funcpipe.platforms.base import Storage
from funcpipe.runstate.checkpoint_index import read_index
from funcpipe.runstate.documents import find_document, get_listed_document, put_document
from funcpipe.runstate.functions import unmark_run
from funcpipe.runstate.generations import objects_of
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.reports import ValidationKeys

_log = logging.getLogger(__name__)


def find_finished(storage: Storage, keys: Keys) -> FinishedRun | None:
    """Return the kept part of a generation that finished and was collected, or None. Raises CorruptMessage."""
    return find_document(storage, FinishedRun, keys.finished)


def ended_step(record: RunRecord, losses: Sequence[float]) -> int:
    """Return the steps after which a run with these losses finished: its last one, or earlier after a validation."""
    return record.began_step + len(losses)


def last_checkpoint(storage: Storage, record: RunRecord, step: int) -> tuple[tuple[str, ...], int]:
    """Return the keys of all parts of the checkpoint after the run's last `step`, and how many bytes its files have."""
    keys, found, size = Keys.of(record), list[str](), 0
    index = read_index(storage, keys, first_step=record.first_step)
    for stage in range(len(record.plan.stages)):
        for name in index.manifests(stage, step):
            key = keys.checkpoint(stage, name)
            files = get_listed_document(storage, Manifest, key).files
            found += [key, *(keys.checkpoint(stage, file.name) for file in files)]
            size += sum(file.bytes for file in files)
    return tuple(found), size


def keep_only_model(storage: Storage, record: RunRecord, finished: FinishedRun, checkpoint: tuple[str, ...]) -> None:
    """Delete all of a finished run's generation but what is kept, of which the `checkpoint` is one part.

    A client that dies on the way leaves a run that counts as finished, with objects that are never read.
    """
    keys = Keys.of(record)
    put_document(storage, keys.finished, finished)
    unmark_run(storage, keys.run)
    kept = {*keys.records, keys.finished, *checkpoint}
    own = ValidationKeys.of(record)
    folders = (keys.traces, own.reports, own.best.checkpoints)
    others = [key for key in objects_of(storage, keys) if key not in kept and not key.startswith(folders)]
    payloads = [key for key in others if key.startswith(keys.payloads)]
    storage.delete_many(payloads)  # first, so that who starts a function too late knows
    storage.delete_many([key for key in others if not key.startswith(keys.payloads)])
    _log.info("run %s: has finished; %d objects are deleted, its model is kept", keys.run, len(others))
