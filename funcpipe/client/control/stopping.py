"""The end of a run from outside: it is stopped, taken over from another client, or removed with all its objects."""

import logging
import time
from collections.abc import Sequence

from funcpipe.client.control.status import RunStatus, read_status
from funcpipe.core import Halt, Outcome, Plan, RunRecord, WorkerReport, WorkerSpec
from funcpipe.core.run_key import RunKey
from funcpipe.errors import CorruptMessage, InputError, PlatformError, RunKeyMissing, RunUnknown
from funcpipe.platforms.base import OpenPlatform, Platform, ProvisioningPlatform, Storage
from funcpipe.platforms.catalog import open_platform as open_by_url
from funcpipe.platforms.catalog import url_share
from funcpipe.platforms.function_group import stop_functions
from funcpipe.runstate.documents import POLL_S, find_readable_document, readable_documents
from funcpipe.runstate.finished import find_finished
from funcpipe.runstate.functions import list_functions, unmark_generation
from funcpipe.runstate.generations import (
    FoundObjects,
    delete_generation,
    find_objects,
    find_record,
    generations_of,
    list_generations,
    newest_record,
)
from funcpipe.runstate.halt import halt_run, notice_steps
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.lease import is_superseded
from funcpipe.runstate.liveness import read_heartbeats
from funcpipe.runstate.owner import owned, raise_if_taken
from funcpipe.runstate.reader import RunReader
from funcpipe.runstate.signing import KeyFolder, key_of, signed

_log = logging.getLogger(__name__)

_MOST_POLL_S = 2.0  # each check that all workers have ended is several requests
_SETTLE_S = 1.0  # then objects are deleted that functions wrote while they were ended


def stop(
    storage: Storage,
    run: str,
    open_platform: OpenPlatform = open_by_url,
    *,
    wait_s: float = 60.0,
    reason: str = "it was stopped",
) -> RunStatus:
    """End the run after a step that all its workers can still end with, so that it can be resumed.

    Functions that still run after `wait_s` are ended at once. Raises RunUnknown.
    """
    own = signed(storage)
    _end_early(own, run, open_platform, wait_s=wait_s, reason=reason)
    return read_status(RunReader.newest(own, run), open_platform)


def _end_early(storage: Storage, run: str, open_platform: OpenPlatform, *, wait_s: float, reason: str) -> None:
    """Do what `stop` does, on a storage that is signed."""
    record = newest_record(storage, run)
    keys = Keys.of(record)
    if find_finished(storage, keys) is not None:
        return  # nothing of it runs, and nothing is to be written into what is kept
    beats = [beat for beat in read_heartbeats(storage, record) if beat is not None]
    specs = readable_documents(storage, WorkerSpec, storage.list(keys.payloads))
    heartbeat_s = max((spec.faults.heartbeat_s for spec in specs), default=0.0)
    step_s = min((beat.step_s for beat in beats if beat.step_s), default=None)
    done = max((beat.step for beat in beats), default=record.first_step)
    order_end(storage, keys, done=done, notice=notice_of(heartbeat_s, step_s), reason=reason)
    until_s, pause_s = time.monotonic() + wait_s, POLL_S
    while time.monotonic() < until_s and not _all_ended(storage, keys, record):
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _MOST_POLL_S)
    end_functions(storage, keys, open_platform)
    _release(storage, keys, open_platform)


def run_key(storage: Storage, run: str) -> RunKey:
    """The key of the newest generation of `run`. Raises RunUnknown, or RunKeyMissing if it was started elsewhere."""
    generations = list_generations(storage, run) or generations_of(find_objects(storage, Keys(run).run_prefix).own)
    if not generations:
        raise RunUnknown(f"there is no run {run!r} in this storage")
    return key_of(KeyFolder(), generations[-1])


def notice_of(heartbeat_s: float, step_s: float | None) -> int:
    """The steps in advance that an order to end is given; workers repeat one that comes too late."""
    return notice_steps(heartbeat_s, step_s) if step_s else 1


def order_end(storage: Storage, keys: Keys, *, done: int, notice: int, reason: str) -> None:
    """Order a run that has done `done` steps to end `notice` steps later."""
    _log.info("run %s: is to end after step %d", keys.run, done + notice)
    halt_run(storage, keys, Halt(reason=reason, step=done + notice))


def clean(storage: Storage, run: str, open_platform: OpenPlatform = open_by_url, *, take_over: bool = False) -> int:
    """End all functions of the run and delete all its objects; returns how many there were.

    Objects below its name that no run has written stay. Raises RunUnknown if there are no others, or RunTaken if
    another client owns the run, unless with `take_over`, or takes it over meanwhile.
    """
    found = find_objects(storage, Keys(run).run_prefix)
    if not found.own:
        raise RunUnknown(f"there is no run {run!r} in this storage{_left_alone(found)}")
    with raise_if_taken(run), owned(signed(storage), run, take_over=take_over) as owner:
        generations = generations_of(find_objects(owner.storage, Keys(run).run_prefix).own)
        payloads = sum(len(find_objects(owner.storage, keys.payloads).own) for keys in generations)
        for keys in generations:
            end_functions(owner.storage, keys, open_platform, for_good=True)
            _release(owner.storage, keys, open_platform)
        return payloads + owner.delete_run(settle_s=_SETTLE_S)


def _left_alone(found: FoundObjects) -> str:
    """The message about objects where nothing is deleted."""
    if not found.others:
        return ""
    lie = " lies" if len(found.others) == 1 else ", lie"
    return f"; {found.others_text}{lie} there that no run has written, and nothing is deleted"


def end_functions(storage: Storage, keys: Keys, open_platform: OpenPlatform, *, for_good: bool = False) -> None:
    """End the functions of a generation, even of one that has no record, and let no watchdog restart them.

    Those of a platform that is gone have ended with it. With `for_good`, the generation is to be deleted: its payloads
    go first, so that late starts of functions are noticed (`start_for_worker`). Those of a generation whose key
    is not known here cannot be found: they end by themselves, once its objects are gone.
    """
    unmark_generation(storage, keys.prefix)
    payloads = find_objects(storage, keys.payloads).own
    try:
        url = _platform_of(storage, keys, payloads)
    except RunKeyMissing as error:
        if not for_good:
            raise
        storage.delete_many(payloads)
        _log.warning("run %s: functions of generation %d are left to end: %s", keys.run, keys.generation, error)
        return
    if for_good:
        storage.delete_many(payloads)
    functions = [] if url is None else list_functions(storage, keys)
    if url is None or not functions:
        return
    _log.info("run %s: ends %d functions", keys.run, len(functions))
    try:
        stop_functions(open_platform(url), [function.handle for function in functions])
    except PlatformError as error:
        _log.info("run %s: its functions have ended with their platform: %s", keys.run, error)


def release(platform: Platform, plan: Plan, run: str) -> None:
    """Keep the functions of `run` ready no longer, if `platform` does. If that fails, it does so later by itself."""
    if not isinstance(platform, ProvisioningPlatform) or url_share(platform.url) is None:
        return
    try:
        platform.release(plan, run)
    except (InputError, PlatformError) as error:
        _log.warning("run %s: its functions are kept ready until the time that was planned: %s", run, error)


def _release(storage: Storage, keys: Keys, open_platform: OpenPlatform) -> None:
    """Keep the functions of a generation ready no longer, if its record says that they are."""
    try:
        record = _readable_record(storage, keys)
    except RunKeyMissing:
        return
    if record is not None and url_share(record.platform) is not None:
        release(open_platform(record.platform), record.plan, keys.run)


def _platform_of(storage: Storage, keys: Keys, payloads: Sequence[str]) -> str | None:
    """The platform of a generation, by its record or else by a payload, if either can be read."""
    record = _readable_record(storage, keys)
    if record is not None:
        return record.platform
    return next((spec.platform for spec in readable_documents(storage, WorkerSpec, payloads)), None)


def _readable_record(storage: Storage, keys: Keys) -> RunRecord | None:
    try:
        return find_record(storage, keys)
    except CorruptMessage:
        return None  # which was logged


def _all_ended(storage: Storage, keys: Keys, record: RunRecord) -> bool:
    """Return True if every worker has ended for good, or its last attempt failed and no other follows."""
    for beat in read_heartbeats(storage, record):
        report = None if beat is None else _report(storage, keys, beat.worker, beat.attempt)
        if report is None or report.outcome is Outcome.HANDED_OVER:
            return False
    return True


def _report(storage: Storage, keys: Keys, worker: str, attempt: int) -> WorkerReport | None:
    """The report of an attempt; None if there is none, or if it says how the worker ended although it goes on."""
    report = find_readable_document(storage, WorkerReport, keys.worker_report(worker, attempt))
    if report is None or (report.is_final and is_superseded(storage, keys, worker, attempt)):
        return None
    return report


def take_over(storage: Storage, run: str, open_platform: OpenPlatform, *, wait_s: float = 60.0) -> None:
    """End the work of any other client on `run`: its workers save a step and end, those left after `wait_s` at once.

    The other client finds that it does not own the run any more, and leaves it alone. Raises RunTaken if a third client
    takes the run over meanwhile.
    """
    with raise_if_taken(run), owned(storage, run, take_over=True) as owner:
        try:
            _end_early(owner.storage, run, open_platform, wait_s=wait_s, reason="another client takes it over")
        except RunUnknown:
            _log.info("run %s: has not begun yet, so that nothing of it can be saved", run)
        for keys in generations_of(find_objects(owner.storage, Keys(run).run_prefix).own):
            end_functions(owner.storage, keys, open_platform)


def end_leftovers(storage: Storage, run: str, open_platform: OpenPlatform, *, keep: Keys | None) -> None:
    """End and delete what clients that died have left of all generations but `keep`, which is to be resumed."""
    for keys in list_generations(storage, run):
        if keys != keep:
            _log.warning("run %s: deletes what is left of generation %d", run, keys.generation)
            end_generation(storage, keys, open_platform)


def end_generation(storage: Storage, keys: Keys, open_platform: OpenPlatform) -> None:
    """End the functions of a generation, also those just being started, and delete it."""
    end_functions(storage, keys, open_platform, for_good=True)
    delete_generation(storage, keys)
