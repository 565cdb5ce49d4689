"""How a command starts: what it says without torch, what it never loads, and that functions are forked from it."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from funcpipe.core import write
from funcpipe.platforms.catalog import open_storage
from funcpipe.platforms.process import environment
from funcpipe.runstate.generations import reserve_generation, write_record
from funcpipe.runstate.signing import signed
from tests.e2e import small
from tests.run_documents import RECORD
from tests.support.processes import runs

JOB = """
import atexit, json, os, sys, warnings
from pathlib import Path
from tests.e2e.small import data, model

FOLDER = Path(__file__).parent

def loaded():
    return sorted(sys.modules)

atexit.register(lambda: (FOLDER / "client").write_text(json.dumps(loaded())))

def parents(pid):
    while pid > 1:
        yield pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

class Samples:
    def __init__(self):
        self.samples = data()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if Path("/proc/self/comm").read_text().strip() == "funcpipe-func":
            _, host, server, client, *_ = parents(os.getpid())
            found = {
                "modules": loaded(),
                "variables": dict(os.environ),
                "warning": warnings.formatwarning("text", UserWarning, "file.py", 1, "code"),
                "descriptors": len(os.listdir(f"/proc/{server}/fd")),
                "commands": [Path(f"/proc/{pid}/cmdline").read_text() for pid in (server, client)],
                "server": server,
            }
            (FOLDER / "function").write_text(json.dumps(found))
        return self.samples[index]
"""

TRAIN = ["train", "job:model", "--plan", "plan.json", "--data", "job:Samples", "-q"]
TRAIN += ["--loss", "torch.nn.functional:cross_entropy"]

NOT_NEEDED = ("torch._dynamo.eval_frame", "sympy.core", "networkx", "pyomo", "boto3", "matplotlib", "ray")
PLANNING = (
    "funcpipe.partitioner.search",
    "funcpipe.neighbours.provisioning",
    "funcpipe.analysis.predict",
    "funcpipe.profiler.profile",
)
OF_CLIENTS = ("funcpipe.client.prepare.job", "funcpipe.api", "funcpipe.partitioner.cost", "rich")


def found_in(modules: Sequence[str], packages: Sequence[str]) -> list[str]:
    return [name for name in modules if any(name == top or name.startswith(f"{top}.") for top in packages)]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_functions_are_forked_from_the_command_which_loads_no_more_than_it_needs(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "platform.py").write_text("raise AssertionError('taken for the one of Python, which torch imports')")
    write(small.plan(1, 1), tmp_path / "plan.json")
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "funcpipe", *TRAIN]
    subprocess.run(command, cwd=tmp_path, env=variables, check=True, capture_output=True)
    client: list[str] = json.loads((tmp_path / "client").read_text())
    assert found_in(client, (*NOT_NEEDED, *PLANNING)) == []
    function: dict[str, Any] = json.loads((tmp_path / "function").read_text())
    assert function["commands"][0] == function["commands"][1], "the server is a fork of the client"
    assert function["descriptors"] < 12, "and has kept none of what the client has opened"
    assert function["warning"] == "file.py:1: UserWarning: text\n  code\n"
    assert found_in(function["modules"], (*NOT_NEEDED, *OF_CLIENTS)) == []
    assert function["variables"].get("LD_PRELOAD") == environment().get("LD_PRELOAD")
    assert not runs(function["server"])


REFUSED = """
import sys
from funcpipe.cli import main
code = main(sys.argv[1:])
print(code, *sys.modules)
"""


def test_what_needs_no_torch_is_said_without_it(tmp_path: Path) -> None:
    """A name that is taken, for one."""
    (tmp_path / "job.py").write_text(JOB)
    write(small.plan(1, 1), tmp_path / "plan.json")
    url = (tmp_path / "runs").as_uri()
    storage = signed(open_storage(url))
    keys = reserve_generation(storage, RECORD.run)
    write_record(storage, keys, replace(RECORD, nonce=keys.nonce))
    words = [*TRAIN, "--storage", url, "--run", RECORD.run]
    done = subprocess.run([sys.executable, "-c", REFUSED, *words], cwd=tmp_path, capture_output=True, text=True)
    code, *modules = done.stdout.split()
    assert (code, done.stderr) == (
        "2",
        "funcpipe: run is the name of a run in this storage; resume it, or clean it first, got 'run-1'\n",
    )
    assert found_in(modules, ("torch", "numpy", "rich", "asyncio", "job")) == []
