"""The cost of a start: processor seconds from the command, or the call, to a function's first task, and to the end.

Those to the first task are divided: the client, the server that forks hosts (where there is one), the host, the
function. A perceptron with one hidden layer trains for three steps in one local function. Linux only.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from funcpipe.core import Plan, ScheduleKind, Sync, Wire, write
from funcpipe.platforms.local.function import FUNCTION
from tests.support.plans import even_stages

STUDY, NOTES = "START_UP_STUDY", "START_UP_NOTES"
PROCESSES = ("function", "host", "server", "client")
STEPS, MICRO_BATCH, GLOBAL_BATCH = 3, 8, 32

JOB = """
import torch
from torch.utils.data import Dataset
from experiments.studies.start_up import note_first_task

def make():
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))

class Samples(Dataset):
    def __len__(self):
        return {samples}

    def __getitem__(self, index):
        note_first_task()
        return torch.full((16,), index / {samples}), index % 4
"""

SCRIPT = """
import functools, time
import torch
from funcpipe import FuncPipe, Plan, read
from job import Samples, make
from experiments.studies.start_up import note_call

pipe = FuncPipe(make(), loss_fn=torch.nn.functional.cross_entropy, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
for call in range(2):
    note_call()
    pipe.train(Samples(), plan=read(Plan, "plan.json"), progress=False)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    os.environ |= {STUDY: str(os.getpid()), "PYTHONPATH": str(Path(__file__).parents[2])}
    train = ["-m", "funcpipe", "train", "job:make", "--plan", "plan.json", "--data", "job:Samples", "-q"]
    loss = ["--loss", "torch.nn.functional:cross_entropy"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"FUNCPIPE_HISTORY": f"{name}/history.jsonl", "FUNCPIPE_LOG_DIR": f"{name}/logs"}
        prepare(folder)
        storage = ["--storage", (folder / "storage").as_uri(), "--run", "taken"]
        started(folder, [*train, *loss, *storage])  # which also writes what Python compiles
        commands = [started(folder, [*train, *loss]) for _ in range(options.repeats)]
        refusals = [started(folder, [*train, *loss, *storage], refused=True) for _ in range(options.repeats)]
        scripts = [started(folder, ["-c", SCRIPT]) for _ in range(options.repeats)]
    print(f"{'processor seconds of':34}" + "".join(f"{kind:>10}" for kind in (*PROCESSES, "all", "wall s")))
    row("funcpipe train, to the first task", [first for first, *_ in commands])
    row("funcpipe train, to the end", [rest[-1] for rest in commands])
    row("a name that is taken", [rest[-1] for rest in refusals])
    row("a script, to its first task", [notes[1] for notes in scripts])
    row("  from its first train() on", [less(notes[1], notes[0]) for notes in scripts])
    row("  from its second train() on", [less(notes[3], notes[2]) for notes in scripts])


def prepare(folder: Path) -> None:
    """Write the job and its plan, of one stage."""
    (folder / "job.py").write_text(JOB.format(samples=STEPS * GLOBAL_BATCH))
    plan = Plan(
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        replicas=1,
        schedule=ScheduleKind.ONE_F_ONE_B,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        platform="local",
        stages=even_stages(["0", "1", "2"], 1),
    )
    write(plan, folder / "plan.json")


def started(folder: Path, words: list[str], *, refused: bool = False) -> list[dict[str, float]]:
    """Processor seconds of each process at each note of a command, and at its end; and wall seconds."""
    notes = folder / "notes"
    notes.unlink(missing_ok=True)
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, NOTES: str(notes)}, capture_output=True, text=True
    )
    if done.returncode != (2 if refused else 0):
        raise SystemExit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    found = [{**used, "wall s": used["wall s"] - began_s} for used in found]
    return [*found, {"all": used_s, "wall s": time.time() - began_s}]


def row(title: str, found: list[dict[str, float]]) -> None:
    shown = [median(used.get(kind, 0.0) for used in found) for kind in (*PROCESSES, "all", "wall s")]
    print(f"{title:34}" + "".join(f"{seconds:10.2f}" for seconds in shown))


def less(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {kind: after.get(kind, 0.0) - before.get(kind, 0.0) for kind in after}


def note_first_task() -> None:
    """Note what this function, and each process that it comes from, has used before its first sample."""
    if _noted or Path("/proc/self/comm").read_text().strip() != FUNCTION:
        return
    _noted.append(True)
    pids = [os.getpid()]
    while parent(pids[-1]) != int(os.environ[STUDY]):
        pids.append(parent(pids[-1]))
    kinds = ("function", "host", *(("server", "client") if len(pids) == 4 else ("client",)))
    _note({kind: used_s(pid) for kind, pid in zip(kinds, pids, strict=True)})


def note_call() -> None:
    """Note what this client, and the server of forks if it has one, have used before it calls `train`."""
    children = [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]
    _note({"client": used_s(os.getpid()), "server": sum(map(used_s, children))})


_noted = list[bool]()


def _note(used: dict[str, float]) -> None:
    with open(os.environ[NOTES], "a") as file:
        print(json.dumps({**used, "all": sum(used.values()), "wall s": time.time()}), file=file)


def parent(pid: int) -> int:
    return int(_fields(pid)[1])


def used_s(pid: int) -> float:
    """Processor seconds of a process and of those that it has waited for."""
    return sum(int(ticks) for ticks in _fields(pid)[11:15]) / os.sysconf("SC_CLK_TCK")


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


if __name__ == "__main__":
    main()
