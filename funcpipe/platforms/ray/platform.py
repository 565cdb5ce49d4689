"""Functions as tasks of a Ray cluster, which keeps the output of each of its processes in a file on its node."""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from funcpipe.core import Invocation, Plan, PlatformSpec, WatchSpec, WorkerSpec, to_text
from funcpipe.core.cached import cached_property
from funcpipe.core.logs import BEGINS, LogLine, RawLine, merged, prefix
from funcpipe.errors import PlanError, PlatformBusy, PlatformError
from funcpipe.platforms.base import Handle, PlainKeys, Status
from funcpipe.platforms.local.output import log_file
from funcpipe.platforms.process import usable_processors
from funcpipe.platforms.ray import host
from funcpipe.platforms.ray.cluster import RayAddress, Via, check_plan, gpu_request, node_of, size_for
from funcpipe.platforms.ray.connection import NAMESPACE, connect, connected
from funcpipe.platforms.ray.library import NodeAffinitySchedulingStrategy, ray
from funcpipe.platforms.room import Node, Offer, of_nodes, with_gpus

_log = logging.getLogger(__name__)

_HEAD = {"node:__internal_head__": 0.001}
"""The node that a cluster does not outlive."""


class RayPlatform(PlainKeys):
    """The functions of the cluster at `address`, in tasks with the processors and the memory of their size.

    `spec` lists the sizes, those that fit on a node are offered. The process is connected when that is first needed.
    """

    def __init__(self, address: RayAddress, spec: PlatformSpec) -> None:
        self._address = address
        self._base = spec
        self._watched: dict[str, WatchSpec] = {}

    @property
    def url(self) -> str:
        """The URL by which `catalog.open_platform` opens it again, in a function or in another process."""
        return connect(self._address).url

    @cached_property
    def spec(self) -> PlatformSpec:
        """The specification of the cluster as it is now; functions on one machine share its processors."""
        on_one_machine = not self._address.is_shared
        return of_nodes(self._base, self._nodes(), shared_cores=usable_processors() if on_one_machine else None)

    @property
    def offer(self) -> Offer:
        """The specification, with the nodes that functions have room on."""
        return Offer(spec=self.spec, nodes=tuple(self._nodes()))

    def check(self, plan: Plan, *, run_s: float | None = None) -> None:
        """Raise PlatformRefused for a plan whose functions cannot run at once, nor ever will on these nodes."""
        more = "add nodes" if self._address.is_shared else "have Ray offer more: ray://local?cpus=N"
        nodes = self._nodes()
        check_plan(plan, with_gpus(self._base, nodes), nodes, more=more)

    def invoke(self, worker: Invocation) -> Handle:
        """Start a function and return at once; it waits in Ray's queue until there is room."""
        payload = to_text(worker)
        if len(payload.encode()) > self._base.max_payload_bytes:
            raise PlanError(
                f"the invocation payload of worker {worker.worker} has {len(payload.encode())} bytes, more than the "
                f"{self._base.max_payload_bytes} that {self._base.name} takes; use fewer stages or shorter names"
            )
        nodes = self._known_nodes
        size = size_for(with_gpus(self._base, nodes), worker.size, worker.memory_mb)
        asked = size.vcpu, size.memory_bytes, gpu_request(size, nodes)
        name = self._ask("invoke", worker.run, worker.worker, payload, *asked)
        if isinstance(worker, WorkerSpec):
            self._watched[worker.run] = WatchSpec(
                storage=worker.storage, run=worker.run, run_key=worker.run_key, until_ended=True
            )
        return Handle(worker=worker.worker, name=name)

    def status(self, handle: Handle) -> Status:
        """Return the function's state."""
        status: Status = self._ask("status", handle.name)
        return status

    def stop(self, handle: Handle) -> None:
        """End the function if it still runs; return when it has ended."""
        self._ask("stop", handle.name)

    def detach(self) -> None:
        """Have the cluster watch the runs that were started here; raises PlatformRefused where Ray ends with us."""
        self._address.check_detachable()
        for spec in self._watched.values():
            self._ask("watch", spec)

    def logs(self, run: str) -> Iterator[RawLine]:
        """Return the lines of the functions of `run` on the cluster's living nodes."""
        connect(self._address)
        yield from read_logs(run)

    def keep_logs(self) -> None:
        """Keep the logs of the runs that were started here on this machine."""
        for run in self._watched:
            try:
                keep_here(run, read_logs(run))
            except (ray.exceptions.RayError, OSError) as error:
                _log.warning("the logs of run %s are not kept: %s", run, error)

    @cached_property
    def _known_nodes(self) -> list[Node]:
        """The nodes as they are when a function is first started."""
        return self._nodes()

    def _nodes(self) -> list[Node]:
        """Return the living nodes; without their GPUs where a machine's price is that of its processors and memory."""
        connect(self._address)
        nodes = [node_of(node["Resources"]) for node in ray.nodes() if node["Alive"]]
        return nodes if self._address.machine is None else [replace(node, gpus=()) for node in nodes]

    def _ask(self, method: str, *words: object) -> Any:
        connect(self._address)
        try:
            return ray.get(getattr(self._host, method).remote(*words))
        except ray.exceptions.ActorUnavailableError as error:
            raise PlatformBusy(f"the host of functions at {self._address.url} does not answer: {error}") from error
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise PlatformError(f"the host of functions at {self._address.url}: {_reason(error)}") from error

    @cached_property
    def _host(self) -> Any:
        actor = ray.remote(host.FunctionHost).options(
            name=host.NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=3,
            max_concurrency=1000,
            resources=_HEAD,
        )
        return actor.remote(NAMESPACE)


@contextlib.contextmanager
def ray_functions(address: RayAddress, spec: PlatformSpec) -> Iterator[RayPlatform]:
    """The functions of the cluster at `address`, with `spec`'s sizes; Ray is started and ended where it says so.

    A cluster's functions run on afterwards. What those of a Ray that ends have logged is kept on this machine.
    """
    with connected(address) as found:
        platform = RayPlatform(found, spec)
        try:
            yield platform
        finally:
            if address.via is Via.LOCAL:
                platform.keep_logs()


def _reason(error: BaseException) -> str:
    """Return the line that says most: that of the error on the node, if there was one."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


_OWN_OUTPUT = "/proc/self/fd/2"  # of Linux, as Ray's clusters are
_MARKS = (":job_id:", ":task_name:", ":actor_name:")
"""The prefixes of lines that Ray writes for itself between those of tasks."""


def read_logs(run: str) -> Iterator[RawLine]:
    """Yield the lines of all processes of the cluster that functions of `run` have begun in, on nodes that live."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    found = [_on(node).remote(run) for node in nodes]
    for node, lines in zip(nodes, ray.get(found), strict=True):
        yield from (RawLine(function=f"{node}/{function}", text=text) for function, text in lines)


def _on(node: str) -> Any:
    place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray.remote(read_node).options(num_cpus=0, scheduling_strategy=place)


def read_node(run: str) -> list[tuple[str, str]]:
    """Return the functions of `run` on this node, each with its lines, from a task of Ray."""
    return read_folder(Path(os.readlink(_OWN_OUTPUT)).parent, run)


def read_folder(folder: Path, run: str) -> list[tuple[str, str]]:
    """Return the same from the folder in which Ray keeps logs."""
    begins = f" run={run} "
    found = []
    for path in sorted(folder.glob("worker-*.err")):
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            lines = list(_of_functions(path.stem, (line.rstrip("\n") for line in file)))
        wanted = {function for function, text in lines if BEGINS in text and begins in text}
        found += [line for line in lines if line[0] in wanted]
    return found


def _of_functions(stream: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the lines of one process, each with the function that it is of: a process may be several, one by one."""
    number = 0
    for line in lines:
        number += BEGINS in line
        if number and not line.startswith(_MARKS):
            yield f"{stream}/{number}", line


def keep_here(run: str, lines: Iterable[RawLine]) -> None:
    """Keep the lines of a run where those of local functions lie, as the cluster that has them ends."""
    files: dict[str, list[LogLine]] = {}
    for line in merged(run, lines):
        files.setdefault(f"{line.worker}.a{line.attempt}", []).append(line)
    for name, found in files.items():
        with log_file(run, name).open("a", encoding="utf-8") as file:
            file.writelines(f"{_begin(line)} {line.text}\n" for line in found)


def _begin(line: LogLine) -> str:
    return prefix(line.time_s, line.level, run=line.run, worker=line.worker, attempt=line.attempt, step=line.step)
