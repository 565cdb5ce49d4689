"""The job of runs whose functions are threads of the tests' process, traced once."""

import functools

from funcpipe.client.job import Job
from funcpipe.core import FaultTolerance
from funcpipe.testing import chaos

RUN = "run-1"
STEADY = FaultTolerance(heartbeat_s=0.05, lease_s=30.0, checkpoint_steps=2)
"""Nobody counts as lost on a machine that is busy."""


@functools.cache
def job() -> Job:
    return chaos.job()
