"""One Ray for all tests of a module: it takes seconds to start, and a process has one at a time."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from funcpipe.platforms.ray.address import RayAddress, Via
from tests.e2e import small
from tests.ray_here import environment_of_ray

CPUS = 8


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayAddress]:
    """A Ray of eight CPUs, as a cluster that others have started: clients come and go. Nothing of it is left."""
    from funcpipe.platforms.ray.connection import connected

    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # short, as sockets lie in it
    with environment_of_ray(tmp_path_factory.mktemp("ray")) as patch:
        patch.setenv(small.GATES, str(tmp_path_factory.mktemp("gates")))
        patch.setattr(tempfile, "tempdir", str(folder))
        with connected(RayAddress(via=Via.LOCAL, cpus=CPUS)) as found:
            patch.setattr(tempfile, "tempdir", None)
            yield RayAddress(via=Via.GCS, endpoint=found.endpoint)
    folder.rmdir()  # it is empty


@pytest.fixture
def gates(cluster: RayAddress) -> Iterator[Path]:
    """The folder of gates, which functions know since Ray was started; none is open."""
    folder = Path(os.environ[small.GATES])
    yield folder
    for gate in folder.iterdir():
        gate.unlink()
