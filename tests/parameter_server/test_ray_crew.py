"""Whole runs on Ray: actors in processes, on nodes that come and go."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from funcpipe.client.server_job import stored_job
from funcpipe.parameter_server.crew import Crew
from funcpipe.parameter_server.loops import Course, History, train_asynchronously, train_synchronously
from funcpipe.parameter_server.values import ServerWorker
from funcpipe.platforms.catalog import open_storage
from tests.parameter_server.conftest import RUN, adam_job
from tests.parameter_server.test_loops import plain

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore"),  # of Ray: sockets and files that it leaves to the collector
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head node for the server, and a node for each of two workers; with Ray connected to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        import ray
        from ray.cluster_utils import Cluster

        node = {"include_dashboard": False, "object_store_memory": 100 << 20}
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"server": 1}, **node})
        try:
            made.add_node(num_cpus=2, resources={"stays": 4}, object_store_memory=100 << 20)
            ray.init(address=made.address, log_to_driver=False, configure_logging=False)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def stays(name: str, **settings: Any) -> ServerWorker:
    return ServerWorker(name=name, resources={"stays": 1}, **settings)


def site_in(folder: Path) -> Any:
    from funcpipe.parameter_server.ray_crew import RaySite

    url = folder.as_uri()
    return RaySite(
        job=stored_job(adam_job(), open_storage(url), RUN),
        open_storage=functools.partial(open_storage, url),
        run=RUN,
        server_resources={"server": 0.1},
    )


def assert_equals_one_process(found: dict[str, torch.Tensor]) -> None:
    for name, tensor in plain(adam_job()).items():
        assert torch.equal(found[name], tensor) or "running" in name, name


def test_two_synchronous_workers_equal_one_process(cluster: Any, tmp_path: Path) -> None:
    from funcpipe.parameter_server.ray_crew import RayCrew

    job, history = adam_job(), History()
    with RayCrew(site_in(tmp_path), [stays("fast", speed=3.0), stays("slow")]) as crew:
        train_synchronously(crew, Course(batches=job.batches, epochs=job.epochs), history)
        assert_equals_one_process(crew.state_dict())
    assert history.computed_by[0] == {"fast": 6, "slow": 2}


def test_asynchronous_workers_apply_each_sample_once(cluster: Any, tmp_path: Path) -> None:
    from funcpipe.parameter_server.ray_crew import RayCrew

    job, history = adam_job(), History()
    with RayCrew(site_in(tmp_path), [stays("a"), stays("b", push=2)]) as crew:
        train_asynchronously(crew, Course(batches=job.batches, epochs=job.epochs, save_every=3), history)
        version, below, beyond = crew.progress()
    assert sum(push.samples for push in history.pushes) == job.epochs * job.samples
    assert version == len(history.pushes)
    assert (below, beyond) == (job.steps * 4, [])
    assert all(0 <= push.staleness <= version for push in history.pushes)


def test_a_node_is_taken_back_and_the_survivor_goes_on(cluster: Any, tmp_path: Path) -> None:
    """Its worker had no notice: it is found gone, and what it was given is dealt out again."""
    from funcpipe.parameter_server.ray_crew import RayCrew

    job, history = adam_job(), History()
    spot = cluster.add_node(num_cpus=1, resources={"spot": 1}, object_store_memory=100 << 20)
    removed: list[float] = []

    def watch(crew: Crew, done: float) -> None:
        if done > 0 and not removed:
            removed.append(done)
            cluster.remove_node(spot, allow_graceful=False)

    workers = [stays("survivor"), ServerWorker(name="spot", resources={"spot": 1})]
    with RayCrew(site_in(tmp_path), workers) as crew:
        train_synchronously(crew, Course(batches=job.batches, epochs=job.epochs, watch=watch), history)
        assert_equals_one_process(crew.state_dict())
    assert [line.partition(":")[0] for line in history.lost] == ["spot"]
    assert history.computed_by[-1].keys() == {"survivor"}


def test_a_server_that_dies_goes_on_from_storage(cluster: Any, tmp_path: Path) -> None:
    import ray

    from funcpipe.parameter_server.ray_crew import RayCrew

    job, history = adam_job(), History()
    killed: list[float] = []

    with RayCrew(site_in(tmp_path), [stays("only")]) as crew:

        def watch(_: Crew, done: float) -> None:
            if done >= 0.5 and not killed:
                killed.append(done)
                ray.kill(crew._server)

        train_synchronously(crew, Course(batches=job.batches, epochs=job.epochs, save_every=2, watch=watch), history)
        assert_equals_one_process(crew.state_dict())
    assert history.server_restarts == 1
    assert len(history.losses) == job.steps
