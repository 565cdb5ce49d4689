"""One Ray for all tests of this folder: it takes seconds to start, and a process has one at a time."""

import json
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from funcpipe.platforms.ray.cluster import RayAddress, Via
from tests.e2e import small
from tests.ray_here import environment_of_ray

CPUS, MEMORY_BYTES = 8, 16 * 2**30
RESOURCES = {"memory": MEMORY_BYTES, "GPU": 1, "accelerator_type:Pretend": 1}
"""What the node has besides: a GPU that is not there, of a type that is not known, so that nothing plans for it."""

_FOLDER = Path(__file__).parent
_ray = ExitStack()
_address: list[RayAddress] = []


@contextmanager
def _begun(folder: Path) -> Iterator[RayAddress]:
    from funcpipe.platforms.ray.connection import connected

    sockets = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # short
    with environment_of_ray(folder) as patch:
        gates = folder / "gates"
        gates.mkdir()
        patch.setenv(small.GATES, str(gates))
        patch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps(RESOURCES))  # whatever else runs here
        patch.setattr(tempfile, "tempdir", str(sockets))
        with connected(RayAddress(via=Via.LOCAL, cpus=CPUS)) as found:
            patch.setattr(tempfile, "tempdir", None)
            yield RayAddress(via=Via.GCS, endpoint=found.endpoint)
    sockets.rmdir()  # it is empty


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None]:
    """After the last test of this folder Ray ends: others may begin their own."""
    yield
    if nextitem is None or not nextitem.path.is_relative_to(_FOLDER):
        _address.clear()
        _ray.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> RayAddress:
    """A Ray of eight CPUs, as a cluster that others have started: clients come and go. Nothing of it is left."""
    if not _address:
        _address.append(_ray.enter_context(_begun(tmp_path_factory.mktemp("ray"))))
    return _address[0]


@pytest.fixture
def gates(cluster: RayAddress) -> Iterator[Path]:
    """The folder of gates, which functions know since Ray was started; none is open."""
    folder = Path(os.environ[small.GATES])
    yield folder
    for gate in folder.iterdir():
        gate.unlink()
