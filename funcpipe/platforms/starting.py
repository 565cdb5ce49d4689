"""Starting functions on a platform that is busy for now."""

import itertools
import logging
import time
from collections.abc import Callable

from funcpipe.core import Invocation
from funcpipe.core.backoff import Backoff
from funcpipe.errors import PlatformBusy
from funcpipe.platforms.base import Handle, Platform

_log = logging.getLogger(__name__)

START_WITHIN_S = 300.0
"""A function that a busy platform has not started by then is given up."""

_PAUSES = Backoff(first_s=2.0, most_s=20.0)


def invoke_with_retry(
    platform: Platform,
    worker: Invocation,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Handle:
    """Start a function as a client does, which can wait: after a pause again while the platform is busy.

    Raises PlatformBusy after START_WITHIN_S, and whatever else `Platform.invoke` raises at once.
    """
    until_s = clock() + START_WITHIN_S
    for tries in itertools.count(1):
        try:
            return platform.invoke(worker)
        except PlatformBusy as error:
            left_s = until_s - clock()
            if left_s <= 0:
                raise
            _log.warning(
                "worker %s cannot be started for now; tried again, for %.0f s more: %s", worker.worker, left_s, error
            )
            sleep(max(_PAUSES.pause_s(tries), 0.1))
    raise AssertionError("the count never ends")
