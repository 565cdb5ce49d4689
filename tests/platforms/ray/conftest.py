"""One Ray for all tests of this folder: it takes seconds to start."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from funcpipe.platforms.ray.address import RayAddress, Via
from tests.e2e import small

CPUS = 8


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayAddress]:
    """A Ray of eight CPUs, as a cluster that others have started: clients come and go. Nothing of it is left."""
    from funcpipe.platforms.ray.connection import connected

    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # short, as sockets lie in it
    with pytest.MonkeyPatch.context() as patch:
        token = tmp_path_factory.mktemp("ray") / "token"  # or Ray would put one into the home folder
        token.write_text(secrets.token_hex(32))
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv(small.GATES, str(tmp_path_factory.mktemp("gates")))
        patch.setattr(tempfile, "tempdir", str(folder))
        with connected(RayAddress(via=Via.LOCAL, cpus=CPUS)) as found:
            patch.setattr(tempfile, "tempdir", None)
            yield RayAddress(via=Via.GCS, endpoint=found.endpoint)
    folder.rmdir()  # it is empty
    assert ray_processes_of(os.getpid()) == []


@pytest.fixture
def gates(cluster: RayAddress) -> Iterator[Path]:
    """The folder of gates, which functions know since Ray was started; none is open."""
    folder = Path(os.environ[small.GATES])
    yield folder
    for gate in folder.iterdir():
        gate.unlink()


def ray_processes_of(client: int) -> list[int]:
    """The processes of the Ray that `client` has started."""
    from funcpipe.testing.processes import children

    return [pid for pid in children(client) if "/ray/" in Path(f"/proc/{pid}/cmdline").read_text()]
