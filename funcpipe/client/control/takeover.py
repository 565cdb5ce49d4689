"""The end of functions that no client supervises any more, and of a run that another client takes over."""

import logging

from funcpipe.client.control.stopping import end_early, end_functions
from funcpipe.errors import RunUnknown
from funcpipe.platforms.base import OpenPlatform, Storage
from funcpipe.runstate.generations import delete_generation, list_generations
from funcpipe.runstate.keys import Keys
from funcpipe.runstate.owner import owned, raise_if_taken
from funcpipe.runstate.run_objects import find_objects, generations_of

_log = logging.getLogger(__name__)


def take_over(storage: Storage, run: str, open_platform: OpenPlatform, *, wait_s: float = 60.0) -> None:
    """End the work of any other client on `run`: its workers save a step and end, those left after `wait_s` at once.

    The other client finds that it does not own the run any more, and leaves it alone. Raises RunTaken if a third client
    takes the run over meanwhile.
    """
    with raise_if_taken(run), owned(storage, run, take_over=True) as owner:
        try:
            end_early(owner.storage, run, open_platform, wait_s=wait_s, reason="another client takes it over")
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
