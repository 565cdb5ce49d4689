"""How a program writes its log: one handler for all loggers below `funcpipe`. Libraries log; programs configure."""

import logging
import os
import sys

from funcpipe.errors import InvalidValue

LEVELS = "FUNCPIPE_LOG"
"""The environment variable with the level."""

_NAMES = ("debug", "info", "warning", "error", "critical")


def configure(levels: str | None = None) -> None:
    """Write what is logged at this level or above to standard error.

    `levels` defaults to the environment's, or else to `warning`; raises InvalidValue for one that there is not.
    """
    level = levels or os.environ.get(LEVELS) or "warning"
    if level.lower() not in _NAMES:
        raise InvalidValue("log level", level, f"must be one of {', '.join(_NAMES)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("funcpipe")
    logger.setLevel(level.upper())
    logger.handlers[:] = [handler]
