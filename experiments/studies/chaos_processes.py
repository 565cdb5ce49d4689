"""Runs of which real processes are killed or stopped at any moment: each must end with the bits of an undisturbed one.

The job is that of `experiments.studies.chaos`, over local functions, and files or the S3 storage that is named.
Functions get SIGKILL, also just as a checkpoint is being written or a worker hands over, or SIGSTOP until others have
taken their place; the client gets SIGKILL, leaves, or meets another one; an object is damaged; the storage cannot be
reached. A run whose client was killed is resumed with other cuts of the model.
"""

import argparse
import contextlib
import functools
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.studies.chaos import show
from experiments.studies.process_faults import LASTS_S, MARK, Striker, is_mountable, mark, own_disk
from funcpipe import FuncPipe
from funcpipe.client.control.status import status
from funcpipe.client.control.stopping import clean
from funcpipe.client.control.verdict import Verdict
from funcpipe.core import FaultTolerance, Plan
from funcpipe.errors import FuncPipeError, RunTaken
from funcpipe.platforms.catalog import open_platform, open_storage
from funcpipe.testing.faults import Fault, damage
from tests.support import chaos
from tests.support.chaos import Ending, good
from tests.support.plans import even_stages
from tests.support.processes import all_functions, all_hosts, children, functions_of, hosts_of, runs

RUN = "chaos"
EPOCHS = 16
ASLEEP_S = 3.0
WITHIN_S, ENDS_WITHIN_S = 180.0, 10.0
WORKERS = chaos.STAGES * chaos.REPLICAS
QUICK = FaultTolerance(heartbeat_s=0.25, lease_s=1.0, checkpoint_steps=4)
SHORT_LIVED = replace(QUICK, lifetime_s=8.0, cold_start_s=1.0)
Trained = tuple[Mapping[str, Tensor], int]
IMPATIENT_S = 6.0
"""The message deadline of runs in which functions sleep for longer than that."""


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    """The cross entropy, after a while."""
    time.sleep(0.05)
    return nn.functional.cross_entropy(output, target)


def slower_loss(output: Tensor, target: Tensor) -> Tensor:
    """The cross entropy, after so long that functions must hand over."""
    time.sleep(0.1)
    return slow_loss(output, target)


def pipe(loss: Callable[[Tensor, Tensor], Tensor] = slow_loss) -> FuncPipe:
    return FuncPipe(chaos.model(), loss_fn=loss, optimizer=functools.partial(torch.optim.Adam, lr=0.01))


def train(
    url: str,
    plan: Plan,
    *,
    resume: bool = False,
    faults: FaultTolerance = QUICK,
    deadline_s: float = chaos.DEADLINE_S / 3,
    loss: Callable[[Tensor, Tensor], Tensor] = slow_loss,
) -> Trained:
    """The parameters after training from this process, and how many functions were restarted."""
    result = pipe(loss).train(
        chaos.data,
        epochs=EPOCHS,
        plan=plan,
        storage=url,
        faults=faults,
        message_deadline_s=deadline_s,
        run=None if resume else RUN,
        resume=RUN if resume else None,
        keep_model=False,
    )
    return result.state_dict(), max(result.bill.functions - plan.workers, 0)


def run(seed: int, fault: Fault, expected: Mapping[str, Tensor], storage_url: str | None) -> Ending:
    """One run, and its ending."""
    draw, began_s = random.Random(seed), time.monotonic()
    error, restarts, tensors = "", 0, None
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if fault in (Fault.OUTAGE, Fault.MIXED) and storage_url is None:
            stack.enter_context(own_disk(folder))
        url = storage_url or folder.as_uri()
        storage = open_storage(url)
        try:
            tensors, restarts = WAYS.get(fault, struck)(url, fault, draw)
        except FuncPipeError as caught:
            error = f"{type(caught).__name__}: {caught}".splitlines()[0]
            if storage.list(""):
                clean(storage, RUN, open_platform)
        same = tensors is not None and all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
        return Ending(
            seed=seed,
            fault=fault,
            outcome="same bits" if same else ("OTHER BITS" if tensors is not None else error.partition(":")[0]),
            seconds=time.monotonic() - began_s,
            restarts=restarts,
            error=error,
            left_objects=len(storage.list("")),
            left_functions=len(_left()),
        )


def _left() -> set[int]:
    """The processes of the run that do not end by themselves: a watchdog ends once it sees that its run has ended."""
    until_s = time.monotonic() + ENDS_WITHIN_S
    while (left := {*all_hosts(mark()), *all_functions(mark())}) and time.monotonic() < until_s:
        time.sleep(0.1)
    return left


def struck(url: str, fault: Fault, draw: random.Random) -> Trained:
    """Something happens to functions, or to the storage."""
    plan, deadline_s, asleep_s = chaos.job().plan, chaos.DEADLINE_S / 3, ASLEEP_S
    if fault is Fault.ZOMBIE:
        deadline_s, asleep_s = IMPATIENT_S, draw.uniform(1, 3) * IMPATIENT_S
    with Striker(fault, draw, url, open_storage(url), asleep_s=asleep_s).striking(WORKERS):
        if fault is Fault.HANDING:
            return train(url, plan, faults=SHORT_LIVED, deadline_s=deadline_s, loss=slower_loss)
        return train(url, plan, deadline_s=deadline_s)


def struck_twice(url: str, fault: Fault, draw: random.Random) -> Trained:
    """Two of these happen to one run."""
    one, other = draw.sample((Fault.KILL, Fault.SLEEP, Fault.SAVING, Fault.OUTAGE), 2)
    seeds = random.Random(draw.random()), random.Random(draw.random())
    with (
        Striker(one, seeds[0], url, open_storage(url), asleep_s=ASLEEP_S).striking(WORKERS),
        Striker(other, seeds[1], url, open_storage(url), asleep_s=ASLEEP_S).striking(WORKERS),
    ):
        return train(url, chaos.job().plan)


def client_killed(url: str, fault: Fault, draw: random.Random) -> Trained:
    """The client is killed at any moment, its functions end with it, and an object may be damaged; then the run goes
    on under other cuts.
    """
    client = start_client(url)
    until_s = time.monotonic() + chaos.DEADLINE_S
    while len(functions_of(client.pid)) < WORKERS and time.monotonic() < until_s:
        time.sleep(0.05)
    time.sleep(draw.uniform(0, LASTS_S))
    family = [*hosts_of(client.pid), *functions_of(client.pid), *children(client.pid)]
    client.kill()
    client.wait()
    while any(runs(process) for process in family):
        if time.monotonic() > until_s:
            raise SystemExit(f"processes outlive their client: {[p for p in family if runs(p)]}")
        time.sleep(0.05)
    if fault is Fault.DAMAGED:
        damage(open_storage(url), RUN, draw)
    return train(url, other_cuts(chaos.job().plan), resume=True)


def client_gone(url: str, fault: Fault, draw: random.Random) -> Trained:
    """The run is left to itself, a function is killed, and another client collects the result."""
    pipe().start(
        chaos.data,
        epochs=EPOCHS,
        plan=chaos.job().plan,
        storage=url,
        faults=QUICK,
        message_deadline_s=chaos.DEADLINE_S / 3,
        run=RUN,
    )
    with Striker(Fault.KILL, draw, url, open_storage(url), asleep_s=ASLEEP_S).striking(WORKERS):
        until_s = time.monotonic() + chaos.DEADLINE_S
        while time.monotonic() < until_s and status(open_storage(url), RUN).verdict in (
            Verdict.RUNNING,
            Verdict.WAITING,
        ):
            time.sleep(0.2)
    return train(url, chaos.job().plan, resume=True)


def two_clients(url: str, fault: Fault, draw: random.Random) -> Trained:
    """Another client starts a run of the same name meanwhile; whichever is refused, the other's result counts."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        other = start_client(url, result)
        time.sleep(draw.uniform(0, 2 * LASTS_S))
        try:
            return train(url, chaos.job().plan)
        except RunTaken:
            if other.wait(chaos.DEADLINE_S):
                raise
            trained: Trained = torch.load(result)
            return trained
        finally:
            other.wait(chaos.DEADLINE_S)


WAYS: dict[Fault, Callable[[str, Fault, random.Random], Trained]] = {
    Fault.CLIENT: client_killed,
    Fault.DAMAGED: client_killed,
    Fault.ORPHAN: client_gone,
    Fault.CLIENTS: two_clients,
    Fault.MIXED: struck_twice,
}
FAULTS = (Fault.KILL, Fault.SLEEP, Fault.ZOMBIE, Fault.SAVING, Fault.HANDING, Fault.OUTAGE, *WAYS)


def start_client(url: str, result: Path | None = None) -> subprocess.Popen[bytes]:
    """A process that trains, and writes the parameters to `result`; it is quiet about being refused."""
    words = [sys.executable, "-m", "experiments.studies.chaos_processes", "--client", url]
    words += [] if result is None else ["--result", str(result)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def other_cuts(plan: Plan) -> Plan:
    """The same replicas and micro-batches, and one stage less: the same sums in the same order."""
    names = [layer.name for layer in chaos.job().graph.layers]
    return replace(plan, stages=even_stages(names, chaos.STAGES - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--fault", choices=[fault.name.lower() for fault in FAULTS], help="only this one")
    parser.add_argument("--storage", metavar="URL", help="an empty S3 storage instead of files")
    parser.add_argument("--client", metavar="URL", help="only train, with this storage")
    parser.add_argument("--result", type=Path, help="where a client writes the parameters")
    options = parser.parse_args()
    if MARK not in os.environ:  # from its beginning, as its processes may be forked from this one
        words = [sys.executable, "-m", "experiments.studies.chaos_processes", *sys.argv[1:]]
        os.execve(sys.executable, words, {**os.environ, MARK: secrets.token_hex(8)})
    torch.set_num_threads(1)
    if options.client:
        trained = train(options.client, chaos.job().plan)
        if options.result:
            torch.save(trained, options.result)
        return
    chosen = [fault for fault in FAULTS if options.fault in (None, fault.name.lower())]
    if options.storage is None and not is_mountable():
        chosen = [fault for fault in chosen if fault not in (Fault.OUTAGE, Fault.MIXED)]
        print("without the right to mount a disk, no disk fails here: outages are left out", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        expected, _ = train(Path(folder).as_uri(), chaos.job().plan)
    endings = []
    for seed in range(options.first_seed, options.first_seed + options.runs):
        endings.append(run(seed, chosen[seed % len(chosen)], expected, options.storage))
        last = endings[-1]
        print(f"{seed:4} {last.fault.value:34} {last.outcome} {last.seconds:5.1f} s {last.error}", flush=True)
    show(endings)
    if not all(good(ending, WITHIN_S) for ending in endings):
        raise SystemExit("a run hung, ended with other bits, or left something behind")


if __name__ == "__main__":
    main()
