"""boto3's descriptions of AWS's services, which each client reads anew: that is most of what it takes to make one."""

import functools


@functools.cache
def read_once() -> None:
    """From now on this process reads each description once, whatever sessions and clients are made."""
    from botocore import loaders, session

    session.create_loader = functools.cache(loaders.create_loader)
