"""What starts of functions take, part by part, by how ready their environments were; and pauses of hand-overs.

    cold       a new process for each function, as in a new environment of a cloud
    reused     one process for all of them, as in an environment that a cloud keeps
    imported   forked from the host of local functions, which has torch and our modules
    template   forked from a process with the stage's code and tensors

The functions of the first two train for a few steps, one run each; memory is that of the one process after each of
them. Those of the last two are successors in one run, whose functions live for 20 steps at most, of which a trace has
the events. The network is the digits' of `experiments/models`. Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

import torch
from rich.console import Console
from torch.utils.data import TensorDataset

from experiments.models import digits
from funcpipe import FuncPipe
from funcpipe.client.follow.launch import upload
from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.job import Job
from funcpipe.client.prepare.prepared_run import prepare
from funcpipe.client.prepare.session import open_session
from funcpipe.core import FaultTolerance, Plan, RunSettings, Trace, WorkerReport, to_text
from funcpipe.core.start import Readiness
from funcpipe.model.graph import trace
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.platforms.process import environment
from funcpipe.runstate.documents import get_document
from funcpipe.runstate.generations import reserve_generation
from funcpipe.runstate.signing import KeyFolder, signed
from funcpipe.show.starts import starts
from funcpipe.show.terminal import print_table
from funcpipe.training.recipe import Recipe

MICRO_BATCH, GLOBAL_BATCH, STEPS = 8, 64, 6

ENVIRONMENT = """
import json, sys, time
from pathlib import Path
from funcpipe.platforms import entry
here = entry.Environment(entry.process_age_s())
for file in sys.argv[2:]:
    payload = json.loads(Path(file).read_text())
    invoked_at_s = float(sys.argv[1]) if file == sys.argv[2] else time.time()
    entry.main(json.dumps({**payload, "invoked_at_s": invoked_at_s}), here.invoked())
    entry.free_memory()
    print(Path("/proc/self/statm").read_text().split()[1])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="cold starts")
    parser.add_argument("--runs", type=int, default=20, help="functions of one process")
    parser.add_argument("--steps", type=int, default=400, help="of the run that hands over")
    parser.add_argument(
        "--lifetime",
        type=float,
        default=2.0,
        help="seconds for which its functions live: at most 20 steps, of which a trace has the events",
    )
    parser.add_argument("--json", type=Path, help="write all reports and pauses into this file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        os.environ |= {"FUNCPIPE_HISTORY": f"{name}/history.jsonl", "FUNCPIPE_LOG_DIR": f"{name}/logs"}
        torch.manual_seed(0)
        pipe = FuncPipe(digits.model(), loss_fn=digits.loss, optimizer=digits.optimizer)
        pipe.profile(digits.sample(), platform="local", micro_batch=MICRO_BATCH)
        plan = pipe.optimize(global_batch=GLOBAL_BATCH, replicas=[1])
        cold = [in_one_process(Path(name), plan, [f"cold-{i}"])[0][0] for i in range(options.repeats)]
        reused, pages = in_one_process(Path(name), plan, [f"reused-{i}" for i in range(options.runs)])
        faults = FaultTolerance(lifetime_s=options.lifetime)
        result = pipe.train(samples(options.steps), plan=plan, faults=faults, progress=False)
    reports = [*cold, *reused[1:], *result.workers]
    table = starts(reports)
    assert table is not None
    print_table(Console(width=160), table)
    print_savings(reports)
    print(f"memory after {len(pages)} functions of one process / after the first: {pages[-1] / pages[0]:.3f}")
    print_pauses(result)
    if options.json is not None:
        pauses = hand_over_pauses(result.trace)
        told = {"reports": [json.loads(to_text(report)) for report in reports], "pauses": pauses, "pages": pages}
        options.json.write_text(json.dumps(told, indent=1))


def print_savings(reports: Sequence[WorkerReport]) -> None:
    """Print the decision table: what a start of each readiness saves beside a cold one."""
    known = [report.start for report in reports if report.start is not None and report.first_step is not None]
    took = {
        one: median(start.seconds for start in known if start.readiness is one)
        for one in Readiness
        if any(start.readiness is one for start in known)
    }
    for one, seconds in took.items():
        print(f"{one.value:10} {seconds:7.3f} s, saves {took[Readiness.COLD] - seconds:7.3f} s of a cold start")


def print_pauses(result: RunResult) -> None:
    """Print the distribution of the pauses of hand-overs, and the first steps of functions beside the usual ones."""
    pauses = hand_over_pauses(result.trace)
    if len(pauses) > 1:
        deciles = ", ".join(f"{1000 * cut:.0f}" for cut in quantiles(pauses, n=10))
        print(f"{len(pauses)} hand-overs pause for {1000 * median(pauses):.0f} ms in the median; deciles {deciles} ms")
    steps_s = [end_s - begin_s for begin_s, end_s in result.trace.windows().values()]
    successors = [report.start for report in result.workers if report.attempt and report.start is not None]
    first = [start.first_step_s for start in successors if start.first_step_s is not None]
    if first:
        usual_s = median(steps_s)
        print(
            f"first steps of successors take {median(first) / usual_s:.2f} of the median step, {1000 * usual_s:.1f} ms"
        )


def hand_over_pauses(trace: Trace) -> list[float]:
    """Seconds between the last step of a function and the first of its successor, beyond those between two steps."""
    begun, ended, attempt = dict[int, float](), dict[int, float](), dict[int, int]()
    for event in trace.events:
        begun[event.step] = min(begun.get(event.step, event.start_s), event.start_s)
        ended[event.step] = max(ended.get(event.step, event.end_s), event.end_s)
        attempt[event.step] = event.attempt
    gaps = [
        (begun[after] - ended[before], attempt[after] - attempt[before])
        for before, after in pairwise(sorted(ended))
        if after == before + 1
    ]
    usual_s = median([gap_s for gap_s, handed in gaps if not handed] or [0.0])
    return [gap_s - usual_s for gap_s, handed in gaps if handed]


def in_one_process(folder: Path, plan: Plan, runs: Sequence[str]) -> tuple[list[WorkerReport], list[int]]:
    """The reports of functions of one process, one for each of `runs`, and its pages after each of them."""
    url, payloads, keys = (folder / "objects").as_uri(), [], []
    with open_session("local", None, RunSettings(storage=url)) as session:
        for run in runs:
            keys.append(reserve_generation(session.storage, run))
            (spec,) = upload(prepare(job(plan), session), keys[-1])
            payloads.append(folder / run)
            payloads[-1].write_text(to_text(spec))
    words = [sys.executable, "-c", ENVIRONMENT, str(time.time()), *map(str, payloads)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=environment())
    storage = signed(open_storage(url))
    reports = [get_document(storage, WorkerReport, own.worker_report("s0.r0", 0)) for own in keys]
    KeyFolder().forget(keys)
    return reports, [int(line) for line in done.stdout.split()]


def job(plan: Plan) -> Job:
    torch.manual_seed(0)
    return Job(
        graph=trace(digits.model(), digits.sample()),
        plan=plan,
        recipe=Recipe(loss=digits.loss, optimizer=digits.optimizer),
        dataset=partial(samples, STEPS),
        samples=STEPS * GLOBAL_BATCH,
        epochs=1,
        seed=0,
        shuffle=False,
        message_deadline_s=60.0,
        prices=load_spec("local"),
    )


def samples(steps: int) -> TensorDataset:
    count, generator = steps * GLOBAL_BATCH, torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(count, 1, 8, 8, generator=generator), torch.arange(count) % 10)


if __name__ == "__main__":
    main()
