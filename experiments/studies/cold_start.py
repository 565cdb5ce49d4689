"""From nothing to a worker's first task, in a process of its own: what takes how long. The data is in memory.

Each figure is the median of several processes, in seconds of wall and of processor time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from funcpipe.platforms.process import environment
from funcpipe.training.recipe import Recipe

STEPS = ("interpreter", "torch", "funcpipe", "storage", "bundle, optimiser", "first task", "first step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--function", metavar="PAYLOAD", help="be the function, and print when what was done")
    options = parser.parse_args()
    if options.function:
        print(json.dumps(function(Path(options.function).read_text())))
        return
    rows = []
    for _ in range(options.repeats):  # of runs, as a worker's lease is taken once
        with tempfile.TemporaryDirectory() as folder:
            payload = Path(folder, "payload.json")
            payload.write_text(prepare(Path(folder).as_uri()))
            rows.append(start(payload))
    print(f"{'':18} {'wall s':>8} {'cpu s':>8}")
    for i, name in enumerate(STEPS):
        print(f"{name:18} " + " ".join(f"{median(row[kind][i] for row in rows):8.3f}" for kind in (0, 1)))
    upto = STEPS.index("first task") + 1
    total = [median(sum(row[kind][:upto]) for row in rows) for kind in (0, 1)]
    print(f"{'to the first task':18} {total[0]:8.3f} {total[1]:8.3f}")


def start(payload: Path) -> tuple[list[float], list[float]]:
    """Wall and processor seconds of each step of one process."""
    words = [sys.executable, "-m", "experiments.studies.cold_start", "--function", str(payload)]
    began_s = time.time()
    done = subprocess.run(
        words, stdout=subprocess.PIPE, text=True, check=True, env={**environment(), "OMP_NUM_THREADS": "1"}
    )
    moments = [(began_s, 0.0), *json.loads(done.stdout)]
    walls, cpus = ([row[kind] for row in moments] for kind in (0, 1))
    return [b - a for a, b in pairwise(walls)], [b - a for a, b in pairwise(cpus)]


def function(payload: str) -> list[tuple[float, float]]:
    """Do what `funcpipe.worker.invocation.main` does; the moment after each step, in wall and processor time."""
    moments = [(time.time(), time.process_time())]

    def note() -> None:
        moments.append((time.time(), time.process_time()))

    import torch

    note()

    from funcpipe.core import WorkerSpec, from_text
    from funcpipe.core.run_key import RunKey
    from funcpipe.platforms import process as allocator
    from funcpipe.runstate.signing import OneKey, SignedStorage
    from funcpipe.worker import deferred_compiler
    from funcpipe.worker.setup import load_worker

    note()
    from funcpipe.platforms.catalog import open_platform, open_storage

    spec = from_text(WorkerSpec, payload, source=payload)
    allocator.configure()
    deferred_compiler.defer_compiler()
    torch.set_num_threads(1)
    storage = SignedStorage(open_storage(spec.storage), OneKey(RunKey(spec.run_key)))
    note()
    worker = load_worker(spec, storage, open_platform)
    note()
    forward = worker.computation.forward
    seen: list[bool] = []

    def noted(*args: object) -> object:
        result = forward(*args)  # type: ignore[arg-type]
        if not seen:
            seen.append(True)
            note()
        return result

    worker.computation.forward = noted  # type: ignore[method-assign, assignment]
    worker.run()
    note()
    return moments


def prepare(url: str) -> str:
    """Put what a worker needs into the storage at `url`; its payload, for one step of a residual network."""
    import torch
    from torch.utils.data import TensorDataset

    from experiments.models import digits
    from funcpipe.api import FuncPipe
    from funcpipe.client.follow.launch import upload
    from funcpipe.client.prepare.job import Job
    from funcpipe.client.prepare.prepared_run import prepare as prepared
    from funcpipe.client.prepare.session import open_session
    from funcpipe.core import RunSettings, to_text
    from funcpipe.model.graph import trace
    from funcpipe.platforms.catalog import load_spec
    from funcpipe.runstate.generations import reserve_generation
    from funcpipe.runstate.signing import KeyFolder

    torch.manual_seed(0)
    model = digits.model()
    pipe = FuncPipe(model, loss_fn=digits.loss, optimizer=digits.optimizer)
    pipe.profile(digits.sample(), platform="local", micro_batch=8)
    plan = pipe.optimize(global_batch=8, replicas=[1])
    job = Job(
        graph=trace(model, digits.sample()),
        plan=plan,
        recipe=Recipe(loss=digits.loss, optimizer=digits.optimizer),
        dataset=partial(TensorDataset, torch.rand(8, 1, 8, 8), torch.arange(8)),
        samples=8,
        epochs=1,
        seed=0,
        shuffle=False,
        message_deadline_s=60.0,
        prices=load_spec("local"),
    )
    with open_session("local", None, RunSettings(storage=url)) as session:
        keys = reserve_generation(session.storage, "run-cold")
        (spec,) = upload(prepared(job, session), keys)
    KeyFolder().forget([keys])
    return to_text(spec)


if __name__ == "__main__":
    main()
