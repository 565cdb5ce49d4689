"""The job of runs whose functions are threads of the tests' process, traced once."""

import dataclasses
import functools

from funcpipe.client.prepare.job import Job
from funcpipe.core import FaultTolerance
from tests.support import chaos
from tests.support.plans import even_stages

RUN = "run-1"
STEADY = FaultTolerance(heartbeat_s=0.2, lease_s=30.0, checkpoint_steps=2)
"""Nobody counts as lost on a machine that is busy."""


@functools.cache
def job() -> Job:
    return chaos.job()


@functools.cache
def smaller_job(*, stages: int = 2, replicas: int = 2) -> Job:
    """The same work by fewer functions."""
    layers = even_stages([layer.name for layer in job().graph.layers], stages)
    return dataclasses.replace(job(), plan=dataclasses.replace(job().plan, replicas=replicas, stages=layers))
