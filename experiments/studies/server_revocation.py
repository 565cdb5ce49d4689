"""A spot machine is taken back: notice, the survivors go on, others join, the run ends before its deadline.

Nodes are raylets of this machine (`ray.cluster_utils.Cluster`). The two minutes of a notice, and the start of a
machine, are shortened as the job is.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray.cluster_utils import Cluster

from experiments.studies.server_cases import (
    FAST_S,
    MICRO_BATCH,
    SLOW_S,
    job,
    site,
    spot_system,
    spot_type,
    worker,
)
from funcpipe.client.server_replan import Replanner, SpotPlan
from funcpipe.core.job_spec import JobSpec
from funcpipe.parameter_server.loops import Course, History, train_asynchronously
from funcpipe.parameter_server.ray_crew import RayCrew
from funcpipe.parameter_server.values import ServerWorker
from funcpipe.platforms.ray.address import RayAddress, Via
from funcpipe.platforms.ray.connection import connected
from funcpipe.provision.goal import Goal
from funcpipe.provision.spotdnn import SpotType, predict

SMALL = spot_type("small", SLOW_S, usd_h=0.1, quota=3)
LARGE = spot_type("large", FAST_S, usd_h=0.3, quota=3)
MEMORY = {"object_store_memory": 100 << 20}
HEAD = {"num_cpus": 1, "resources": {"server": 1}, "include_dashboard": False, **MEMORY}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pushes", type=int, default=180)
    parser.add_argument(
        "--notice", type=float, default=10.0, help="seconds between a notice and the end of its machine"
    )
    parser.add_argument("--start", type=float, default=15.0, help="seconds that a machine is expected to need")
    parser.add_argument(
        "--slack", type=float, default=1.25, help="the deadline, in predicted times of three small ones"
    )
    options = parser.parse_args()
    made = job(options.pushes * MICRO_BATCH, MICRO_BATCH)
    spec = JobSpec(samples=made.samples, global_batch=MICRO_BATCH, epochs=1)
    system = spot_system()
    undisturbed_s = predict((3, 0), (SMALL, LARGE), system, Goal(job=spec)).seconds
    deadline_s = options.slack * undisturbed_s
    goal = Goal(job=replace(spec, deadline_s=deadline_s), deadline_s=deadline_s)
    print(f"three small machines: {undisturbed_s:.1f} s predicted; deadline {deadline_s:.1f} s")
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    nodes = {name: cluster.add_node(num_cpus=1, resources={name: 1}, **MEMORY) for name in ("s0", "s1", "s2")}
    plan = SpotPlan(goal=goal, types=(SMALL, LARGE), system=system, overhead_s=options.start)
    try:
        with connected(RayAddress(via=Via.GCS, endpoint=cluster.address)):
            revoked(made, plan, cluster, nodes, options)
    finally:
        cluster.shutdown()


def revoked(made: Any, plan: SpotPlan, cluster: Cluster, nodes: dict[str, Any], options: argparse.Namespace) -> None:
    """One run, told line by line."""
    history, notices = History(), list[str]()
    began_s = 0.0

    def tell(text: str) -> None:
        print(f"{time.monotonic() - began_s:6.1f} s  {len(history.pushes):4} pushes  {text}", flush=True)

    def end_machine() -> None:
        tell("the machine of s2 is gone")
        cluster.remove_node(nodes["s2"], allow_graceful=False)

    def rent(workers: Sequence[ServerWorker]) -> None:
        tell(f"re-planned: rents {', '.join(one.name for one in workers)}")
        for one in workers:
            cluster.add_node(num_cpus=1, resources={one.name: 1}, wait=False, **MEMORY)

    def like(kind: SpotType, name: str) -> ServerWorker:
        return worker(name, kind.compute_s / kind.batch, machine=kind.name, spot=True, resources={name: 1})

    timer = threading.Timer(options.notice, end_machine)
    with (
        tempfile.TemporaryDirectory() as folder,
        RayCrew(site(made, folder, {"server": 0.1}), [like(SMALL, n) for n in nodes]) as crew,
    ):
        began_s = time.monotonic()
        replanner, present = Replanner(plan, lambda: notices, rent, like=like), set(nodes)

        def watch(seen: Any, done: float) -> None:
            if done >= 0.3 and not notices:
                notices.append("s2")
                tell("notice for s2")
                timer.start()
            for name in {one.name for one in crew.workers} - present:
                present.add(name)
                tell(f"{name} works")
            replanner(crew, done)

        train_asynchronously(crew, Course(batches=made.batches, epochs=1, watch=watch), history)
        took_s = time.monotonic() - began_s
        tell("done")
    timer.join()
    samples = {name: sum(p.samples for p in history.pushes if p.worker == name) for name in sorted(present)}
    print(f"samples by worker {samples}, in all {sum(samples.values())} of {made.samples}; lost {history.lost}")
    print(f"loss {history.pushes[0].loss:.3f} -> {history.pushes[-1].loss:.3f}")
    verdict = "met" if took_s <= plan.goal.deadline_s else "MISSED"
    print(f"took {took_s:.1f} s, deadline {plan.goal.deadline_s:.1f} s: {verdict}")


if __name__ == "__main__":
    main()
