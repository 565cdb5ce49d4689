"""Logs of functions: Ray keeps the output of each of its processes in a file on its node."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from funcpipe.core.logs import BEGINS, LogLine, RawLine, merged, prefix
from funcpipe.platforms.local.log_files import log_file
from funcpipe.platforms.ray.library import NodeAffinitySchedulingStrategy, ray

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
