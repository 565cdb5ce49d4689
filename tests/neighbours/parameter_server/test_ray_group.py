"""Whole runs on Ray: actors in processes, on nodes that come and go."""

import functools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from funcpipe.cli import main
from funcpipe.core import write
from funcpipe.core.provision import CostItem, Provision, Rented
from funcpipe.neighbours.parameter_server.loops import History, LoopConfig, train_synchronously
from funcpipe.neighbours.parameter_server.training import stored_job
from funcpipe.neighbours.parameter_server.worker_group import ServerWorker, WorkerGroup
from funcpipe.platforms.catalog import load_market, open_storage
from funcpipe.platforms.ray.cluster import RayAddress, Via
from tests.neighbours.parameter_server.conftest import RUN, adam_job
from tests.neighbours.parameter_server.test_loops import plain
from tests.ray_here import environment_of_ray, signals_as_before

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore"),  # of Ray: sockets and files that it leaves to the collector
]

MACHINE, SERVER = "m5.large", load_market("aws").server
NODE = {"object_store_memory": 100 << 20}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head node for the server, a node for two workers, and one that is taken back; with Ray connected to them."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # short, as sockets lie in it
    with environment_of_ray(tmp_path_factory.mktemp("ray")) as environment:
        environment.setenv("RAY_TMPDIR", str(folder))  # or the cluster's address goes to where no Ray may have been yet
        (folder / "ray").mkdir()
        from ray.cluster_utils import Cluster

        from funcpipe.platforms.ray.connection import connected

        head = {"num_cpus": 0, "resources": {SERVER: 1}, "include_dashboard": False, "temp_dir": str(folder), **NODE}
        made = Cluster()
        try:
            with signals_as_before():
                made.add_node(**head)
                made.add_node(num_cpus=2, resources={MACHINE: 2}, **NODE)
            with connected(RayAddress(via=Via.GCS, endpoint=made.address)):
                yield made
        finally:
            made.shutdown()
            shutil.rmtree(folder)


def stays(name: str, **settings: Any) -> ServerWorker:
    return ServerWorker(name=name, resources={MACHINE: 1}, **settings)


def site_in(folder: Path) -> Any:
    from funcpipe.neighbours.parameter_server.ray_group import RaySite

    url = folder.as_uri()
    return RaySite(
        job=stored_job(adam_job(), open_storage(url), RUN),
        open_storage=functools.partial(open_storage, url),
        run=RUN,
        server_resources={SERVER: 0.1},
    )


@pytest.mark.long
def test_a_node_is_taken_back_and_the_server_dies_and_the_result_is_that_of_one_process(
    cluster: Any, tmp_path: Path
) -> None:
    """The node's worker had no notice: it is found gone, and what it was given is dealt out again."""
    import ray

    from funcpipe.neighbours.parameter_server.ray_group import RayWorkerGroup

    job, history = adam_job(), History()
    with signals_as_before():
        spot = cluster.add_node(num_cpus=1, resources={"spot": 1}, **NODE)
    done_at: list[float] = []

    with RayWorkerGroup(
        site_in(tmp_path), [stays("fast", speed=2.0), stays("slow"), ServerWorker(name="spot", resources={"spot": 1})]
    ) as group:

        def watch(_: WorkerGroup, done: float) -> None:
            if done > 0 and not done_at:
                done_at.append(done)
                cluster.remove_node(spot, allow_graceful=False)
            if done >= 0.5 and len(done_at) == 1:
                done_at.append(done)
                ray.kill(group._server)

        train_synchronously(
            group, LoopConfig(batches=job.batches, epochs=job.epochs, save_every=2, watch=watch), history
        )
        found = group.state_dict()
    assert history.computed_by[0] == {"fast": 4, "slow": 2, "spot": 2}
    assert history.computed_by[-1].keys() == {"fast", "slow"}
    assert [line.partition(":")[0] for line in history.lost] == ["spot"]
    assert history.server_restarts == 1
    assert len(history.losses) == job.steps
    for name, tensor in plain(adam_job()).items():
        assert torch.equal(found[name], tensor) or "running" in name, name


def words(cluster: Any, tmp_path: Path, *, workers: int) -> list[str]:
    """What trains on the machines of a provision, which are nodes of a cluster."""
    way = Provision(
        way="spotdnn",
        rented=(
            Rented(name=MACHINE, count=workers, spot=True),
            Rented(name=SERVER, count=1, role="parameter server"),
        ),
        seconds=60.0,
        iterations=10.0,
        cost=(CostItem(name="all", usd=1.0),),
        binds="deadline",
        why="it is a test",
    )
    write(way, tmp_path / "way.json")
    train = ["train", "funcpipe.examples.spirals:model", "--data", "funcpipe.examples.spirals:train_data"]
    train += [
        "--set",
        "plan.global-batch=64",
        "--set",
        "model.micro-batch=16",
        "--set",
        "training.updates=asp",
        "--set",
        "training.checkpoint=20",
        "--json",
    ]
    where = ["--storage", (tmp_path / "objects").as_uri(), "--platform", f"ray://{cluster.address}?via=gcs"]
    return [*train, *where, "--plan", str(tmp_path / "way.json"), "-o", str(tmp_path / "trained.safetensors")]


def test_a_provision_trains_a_model_and_asynchronous_workers_apply_each_sample_once(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from funcpipe.examples.spirals import train_data

    assert main(words(cluster, tmp_path, workers=2)) == 0
    found = json.loads(capsys.readouterr().out)
    pushes = found["pushes"]
    assert found["losses"] == []
    assert sum(push["samples"] for push in pushes) == len(train_data())
    assert {push["worker"] for push in pushes} == {f"{MACHINE}-0", f"{MACHINE}-1"}
    assert all(0 <= push["staleness"] < len(pushes) for push in pushes)
    assert found["cost_usd"] > 0
    assert (tmp_path / "trained.safetensors").exists()


def test_a_cluster_that_lacks_machines_is_refused(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(cluster, tmp_path, workers=3)) == 2
    told = capsys.readouterr().err
    assert f"the server and 3 workers need 3 of the resource {MACHINE}, and all nodes of Ray offer 2" in told
