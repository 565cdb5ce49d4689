"""What one death costs the other functions: the dead one replays alone what it had done since its stage was saved.

On the simulator, for a model of the paper on Lambda: a replayed step takes what the worker is busy, for its messages
lie there; after a global rollback all functions do whole iterations again. For real: local functions, one of which is
killed just before its stage is saved.
"""

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.studies import handover
from funcpipe import FuncPipe
from funcpipe.client.callbacks import EachStep
from funcpipe.client.results import Progress, RunResult
from funcpipe.core import FaultTolerance, ModelProfile, TrainingSpec, read
from funcpipe.partitioner.optimize import optimize
from funcpipe.platforms.catalog import load_spec
from funcpipe.report.predict import step_shape, task_cost
from funcpipe.scheduler.graph import build_graph
from funcpipe.scheduler.simulator.simulate import simulate
from funcpipe.testing.processes import functions_of

PROFILE = Path(__file__).parents[1] / "profiles" / "amoebanet-d18.json"
EVERY = 10
"""Steps between two checkpoints."""

KILLED_AFTER = 3 * EVERY - 1
EPOCHS = 4


def simulated() -> list[dict[str, Any]]:
    """For each stage: a step that is replayed alone, an iteration, and what a death costs by either."""
    profile, spec = read(ModelProfile, PROFILE), load_spec("aws-lambda")
    plan = optimize(profile, spec, TrainingSpec(global_batch=64, replicas=(2,), time_value=30.72))
    graph, cost = build_graph(step_shape(plan, profile)), task_cost(plan, profile, spec)
    iteration_s = simulate(graph, cost).end_s
    rows = []
    for stage in range(len(plan.stages)):
        alone_s = simulate(graph.of_worker(stage, 0), cost).end_s
        lost = (EVERY - 1) / 2  # steps, on average
        replay_s, rollback_s = spec.cold_start_s + lost * alone_s, spec.cold_start_s + lost * iteration_s
        rows.append(
            {
                "stage": stage,
                "replayed step s": alone_s,
                "iteration s": iteration_s,
                "death by replay s": replay_s,
                "death by rollback s": rollback_s,
                "function seconds by replay": replay_s * plan.workers,
                "replay / rollback": replay_s / rollback_s,
            }
        )
    return rows


def train(on_progress: Callable[[Progress], None] = lambda progress: None) -> RunResult:
    pipe = FuncPipe(handover.model(), loss_fn=handover.slow_loss, optimizer=handover.optimizer)
    faults = FaultTolerance(heartbeat_s=1.0, lease_s=3.0, checkpoint_steps=EVERY)
    return pipe.train(
        handover.data,
        epochs=EPOCHS,
        plan=handover.plan(),
        faults=faults,
        message_deadline_s=60,
        callbacks=[EachStep(on_progress)],
    )


def measured(worker: str, undisturbed: RunResult) -> dict[str, Any]:
    """Kill `worker` late, and see how much longer the run takes than one in which nobody dies."""
    number = ("s0.r0", "s0.r1", "s1.r0", "s1.r1").index(worker)
    killed_s: list[float] = []

    def kill(progress: Progress) -> None:
        if progress.step == KILLED_AFTER and not killed_s:
            os.kill(functions_of(os.getpid())[number], signal.SIGKILL)
            killed_s.append(time.time())

    found = train(kill)
    (again,) = [report for report in found.workers if report.attempt == 1]
    events = [e for e in found.trace.events if f"s{e.stage}.r{e.replica}" == worker and e.attempt == 1]
    replayed = [e for e in events if e.step < KILLED_AFTER]
    replay_s = max((e.end_s for e in replayed), default=0.0) - min((e.start_s for e in replayed), default=0.0)
    step_s = handover.seconds(undisturbed) / len(undisturbed.losses)
    return {
        "killed": worker,
        "same bits": all(torch.equal(t, found.state_dict()[n]) for n, t in undisturbed.state_dict().items()),
        "run s": handover.seconds(found),
        "undisturbed s": handover.seconds(undisturbed),
        "lost s": handover.seconds(found) - handover.seconds(undisturbed),
        "restart s": again.started_at_s - killed_s[0],
        "replay s": replay_s,
        "rollback would replay s": (EVERY - 1) * step_s,
    }


def show(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0])
    print("  ".join(f"{name:>24}" for name in names))
    for row in rows:
        print("  ".join(f"{v:>24.3f}" if isinstance(v, float) else f"{v!s:>24}" for v in row.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    rows = simulated()
    show(rows)
    undisturbed = train()
    found = [measured(worker, undisturbed) for worker in ("s0.r0", "s1.r1")]
    show(found)
    if options.output:
        options.output.write_text(json.dumps({"simulated": rows, "measured": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
