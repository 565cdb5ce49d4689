"""This process's connection to Ray: a process has one, to one cluster."""

import contextlib
import importlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from funcpipe.core.process import handlers_kept
from funcpipe.errors import PlatformError
from funcpipe.platforms.process import usable_processors
from funcpipe.platforms.ray.cluster import RayAddress, Via
from funcpipe.platforms.ray.library import ray

_log = logging.getLogger(__name__)

NAMESPACE = "funcpipe"
_USAGE_STATS = "RAY_USAGE_STATS_ENABLED"
_OBJECT_STORE_BYTES = 80 << 20  # Ray takes 75 MiB at least; of functions only payloads lie in it
_REACH_S = 5.0
_LONGEST_PARENT = 20  # of the folder in which Ray makes sockets, whose paths may have 107 bytes


@contextlib.contextmanager
def connected(address: RayAddress, *, object_store_bytes: int = _OBJECT_STORE_BYTES) -> Iterator[RayAddress]:
    """Be connected to the cluster at `address` within this context; the address by which others find that cluster.

    A process that is connected already stays so. Ray that is started here ends with the context, and so do all tasks;
    it has `object_store_bytes` of shared memory.
    """
    if ray.is_initialized():
        yield connect(address)
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_private_folder()) if address.via is Via.LOCAL else None
        try:
            yield connect(address, folder=folder, object_store_bytes=object_store_bytes)
        finally:
            ray.shutdown()


def connect(
    address: RayAddress, *, folder: str | None = None, object_store_bytes: int = _OBJECT_STORE_BYTES
) -> RayAddress:
    """Connect this process to the cluster at `address`, if it is not connected; raises PlatformError.

    Ray that is started here keeps its files in `folder`. A process that is connected elsewhere is refused; a task is
    part of the cluster that it runs on, whose address may differ from there.
    """
    if not ray.is_initialized():
        _init(address, folder, object_store_bytes)
    elif address.via in (Via.GCS, Via.HERE) and not _is_task() and _gcs_address() != address.endpoint:
        raise PlatformError(
            f"this process is connected to the Ray cluster at {_gcs_address()}, not to {address.url}; call "
            "ray.shutdown() before"
        )
    return address if address.via is Via.CLIENT else address.connected_at(_gcs_address())


def _init(address: RayAddress, folder: str | None, object_store_bytes: int) -> None:
    os.environ.setdefault(_USAGE_STATS, "0")
    options: dict[str, Any] = {"address": address.ray_address}
    if address.via is Via.LOCAL:
        options = {
            "num_cpus": address.cpus or usable_processors(),
            "object_store_memory": object_store_bytes,
            "include_dashboard": False,
            "_temp_dir": folder,
        }
    elif address.endpoint:
        _reach(address)
    _log_what_nodes_report()
    try:
        with handlers_kept():
            ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise PlatformError(f"no connection to Ray at {address.url}: {_first_line(error)}; {_help(address)}") from error


def _log_what_nodes_report() -> None:
    """Have Ray log what its nodes report to this process: it prints that to stdout, which is for results."""

    def log(data: Mapping[str, Any], *words: object, **options: object) -> None:
        for line in data["lines"]:
            _log.info("Ray: %s", line)

    worker = importlib.import_module("ray._private.worker")  # there is no public way, as of Ray 2.60
    if hasattr(worker, "print_to_stdstream"):
        vars(worker)["print_to_stdstream"] = log


def _reach(address: RayAddress) -> None:
    """Raise PlatformError at once where no server listens: Ray would try again for minutes."""
    host, _, port = address.endpoint.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise PlatformError(f"no connection to Ray at {address.url}: {error}; {_help(address)}") from error


def _help(address: RayAddress) -> str:
    match address.via:
        case Via.AUTO:
            return "this machine is in no cluster: run `ray start --head` or `ray start --address HOST:6379` on it"
        case Via.CLIENT:
            return "Ray Client listens on the head node, at port 10001 by default, if grpcio is installed"
        case Via.HERE:
            return "the client that started this Ray has ended, and Ray and all functions with it"
        case _:
            return "see docs/ray.md"


def _is_task() -> bool:
    return ray.get_runtime_context().get_task_id() is not None


def _gcs_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _private_folder() -> Iterator[str]:
    """Make a private folder, with a path short enough for the sockets in it."""
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="funcpipe-", dir=parent if len(parent) <= _LONGEST_PARENT else "/tmp")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
