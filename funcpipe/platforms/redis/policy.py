"""A check that a server keeps the objects that it is given."""

import logging

from redis import Redis
from redis.exceptions import NoPermissionError

from funcpipe.errors import PlatformRefused

_log = logging.getLogger(__name__)


def require_no_eviction(client: Redis, where: str) -> None:
    """Raise PlatformRefused if the server, once its memory is full, may evict keys that have no time to live.

    A run's objects have none, so `volatile-…` policies keep them. INFO reports the policy, also on managed services,
    which forbid CONFIG.
    """
    try:
        info = client.info("memory")
    except NoPermissionError:
        _log.warning(
            "%s: this user may not call INFO, so it is not known whether the server evicts objects that a run still "
            "needs; allow INFO, or make sure that maxmemory-policy is noeviction",
            where,
        )
        return
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy.startswith("allkeys"):
        raise PlatformRefused(
            f"{where}: the server's maxmemory-policy is {policy}, so it may evict objects that a run waits for; set it "
            "to noeviction (CONFIG SET maxmemory-policy noeviction, or the parameter group of a managed service), or "
            "use another server"
        )
