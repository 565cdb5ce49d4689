"""A SkyPilot task file for the machines of a provision: a Ray cluster of them, and a command on its head node.

Machines of one type are one task. Several types are a job group, in which each type is a task and the nodes of all
find each other by name (docs.skypilot.co/en/latest/examples/job-groups.html, 2026-11, there called experimental).
SkyPilot has a Ray of its own, on port 6380, which `ray stop` would end too (docs.skypilot.co/en/latest/examples/
training/ray.html, 2026-11); so what is started here is ended by the processes it was started with.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from funcpipe.core.distribution import DISTRIBUTION
from funcpipe.core.market import Market
from funcpipe.core.provision import Provision, Rented
from funcpipe.errors import InvalidValue, PlatformRefused

CLOUDS = ("aws",)
"""The markets whose machines SkyPilot 0.14 can rent; it has no Alibaba Cloud."""

PORT = 6379
_HEAD = "head"
_GROUP = "SKYPILOT_JOBGROUP_NAME"
_ENVIRONMENT = "~/funcpipe-env"

_START_HEAD = """\
ray start --head --port "$FUNCPIPE_RAY_PORT" --include-dashboard=false --disable-usage-stats --block &
ray_head=$!
trap 'kill "$ray_head"; wait "$ray_head" || true' EXIT
until python -c "$count_nodes"; do
  kill -0 "$ray_head"
  sleep 2
done
"""
_JOIN = """\
until python -c "$reach_head"; do
  sleep 2
done
ray start --address "$RAY_ADDRESS" --disable-usage-stats --block || true
"""
_REACH_HEAD = 'import os, socket; socket.create_connection(os.environ["RAY_ADDRESS"].rsplit(":", 1), 5)'


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyJob:
    """The job to run on the machines: `command` on the head node, with `requirements` of the model for pip.

    `package` is what pip installs as funcpipe; `name` is the task's.
    """

    command: str
    name: str = "funcpipe"
    package: str = f"{DISTRIBUTION}[ray,aws]"
    requirements: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.command.strip():
            raise InvalidValue("run", self.command, "must be what runs on the head node, such as funcpipe train …")
        if not self.name or not all(char.isascii() and (char.isalnum() or char in "-_") for char in self.name):
            raise InvalidValue("name", self.name, "must have letters, digits, - and _ only")


def sky_text(provision: Provision, market: Market, job: SkyJob) -> str:
    """Return the task file, YAML. Raises PlatformRefused for what SkyPilot cannot rent."""
    return "---\n".join("".join(_lines(document)) for document in sky_documents(provision, market, job))


def sky_documents(provision: Provision, market: Market, job: SkyJob) -> list[dict[str, Any]]:
    """The documents of the task file: one task, or the header of a job group and a task for each type of machine."""
    kinds = _kinds(provision, market)
    nodes = sum(kinds.values())
    if len(kinds) == 1:
        (kind,) = kinds
        return [_task(job, job.name, kind.to_sky(market), nodes, nodes, head='$(echo "$SKYPILOT_NODE_IPS" | head -n1)')]
    head = f"{_HEAD}-0.${_GROUP}"
    tasks = []
    for number, (kind, count) in enumerate(kinds.items()):
        name = _HEAD if not number else f"workers-{number}"
        tasks.append(_task(job, name, kind.to_sky(market), count, nodes, head=head, has_head=not number))
    return [{"name": job.name, "execution": "parallel", "primary_tasks": [_HEAD]}, *tasks]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    machine: str
    spot: bool

    def to_sky(self, market: Market) -> dict[str, Any]:
        return {
            "cloud": market.name,
            "region": market.region,
            "instance_type": self.machine,
            "use_spot": self.spot,
        }


def _kinds(provision: Provision, market: Market) -> dict[_Kind, int]:
    """Return the number of machines of each type; on-demand machines first, as the head node is among them."""
    if market.name not in CLOUDS:
        raise PlatformRefused(
            f"SkyPilot cannot rent the machines of the market {market.name}; it can those of {', '.join(CLOUDS)}"
        )
    known = {machine.name for machine in market.machines}
    found: dict[_Kind, int] = {}
    for rented in sorted(provision.rented, key=_leaves_first):
        if rented.name not in known:
            raise PlatformRefused(
                f"the way {provision.way} rents {rented.count} x {rented.name}, which is no machine of the market "
                f"{market.name}: deploy functions with `funcpipe deploy aws` or `aliyun`, or choose another plan.way"
            )
        kind = _Kind(machine=rented.name, spot=rented.spot)
        found[kind] = found.get(kind, 0) + rented.count
    return found


def _leaves_first(rented: Rented) -> tuple[bool, bool]:
    return rented.spot, rented.role == "worker"


def _task(
    job: SkyJob, name: str, resources: Mapping[str, Any], count: int, nodes: int, *, head: str, has_head: bool = True
) -> dict[str, Any]:
    return {
        "name": name,
        "resources": dict(resources),
        "num_nodes": count,
        "workdir": ".",
        "envs": {"FUNCPIPE_RAY_PORT": str(PORT), "RAY_USAGE_STATS_ENABLED": "0"},
        "setup": _setup(job),
        "run": _run(job, head, nodes, has_head=has_head),
    }


def _setup(job: SkyJob) -> str:
    packages = " ".join(map(shlex.quote, (job.package, *job.requirements)))
    return f"python3 -m venv {_ENVIRONMENT}\n{_ENVIRONMENT}/bin/pip install {packages}\n"


def _run(job: SkyJob, head: str, nodes: int, *, has_head: bool) -> str:
    """The head node starts Ray, waits for all nodes and runs the command; the others are nodes until it ends Ray."""
    count = (
        'import ray, sys; ray.init(log_to_driver=False, logging_level="ERROR"); '
        f'sys.exit(sum(node["Alive"] for node in ray.nodes()) < {nodes})'
    )
    begin = f'. {_ENVIRONMENT}/bin/activate\nexport RAY_ADDRESS="{head}:$FUNCPIPE_RAY_PORT"\n'
    join = f"reach_head='{_REACH_HEAD}'\n{_JOIN}"
    as_head = f"set -e\ncount_nodes='{count}'\n{_START_HEAD}{job.command.strip()}\n"
    if not has_head:
        return f"{begin}{join}"
    return f'{begin}if [ "$SKYPILOT_NODE_RANK" != 0 ]; then\n{_indented(join)}  exit 0\nfi\n{as_head}'


def _indented(text: str) -> str:
    return "".join(f"  {line}" for line in text.splitlines(keepends=True))


def _lines(document: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """YAML of texts, numbers, lists and mappings: what is on one line as JSON, texts of several lines as blocks."""
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:\n"
            yield from _lines(value, indent + "  ")
        elif isinstance(value, str) and "\n" in value:
            yield f"{indent}{key}: |\n"
            yield from (f"{indent}  {line}\n" if line else "\n" for line in value.splitlines())
        else:
            yield f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}\n"
