"""Functions as tasks of a real Ray on this machine."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from funcpipe.core import ProbeSpec
from funcpipe.core.accelerator import Accelerator
from funcpipe.errors import PlanError, PlatformError, PlatformRefused
from funcpipe.platforms.base import Cause, Platform, State, Status, Storage
from funcpipe.platforms.catalog import load_spec, open_platform, open_storage
from funcpipe.platforms.gpus import known_accelerators
from funcpipe.platforms.ray.cluster import RayAddress
from funcpipe.platforms.ray.library import ray
from funcpipe.testing.platform_contract import PlatformContract, ended
from tests.e2e import small
from tests.platforms.kept_logs import assert_logs_are_kept
from tests.platforms.ray.processes import named, processes_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xdist_group("ray")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def platform(cluster: RayAddress) -> Platform:
    return open_platform(cluster.url)


@pytest.fixture
def storage_url(tmp_path: Path) -> str:
    return (tmp_path / "objects").as_uri()


@pytest.fixture
def storage(storage_url: str) -> Storage:
    return open_storage(storage_url)


class TestTasksOfRay(PlatformContract):
    """By the fixtures above."""


def test_logs_of_runs_are_kept_apart_though_one_process_ran_both(
    platform: Platform, storage: Storage, storage_url: str
) -> None:
    plan = small.plan(1, 1)
    plan = replace(plan, stages=(replace(plan.stages[0], size=platform.spec.sizes[0].name),))
    assert_logs_are_kept(platform, storage, storage_url, plan=plan, wait=lambda: None)


def probe(platform: Platform, storage_url: str, *, run: str, memory_mb: int = 1024) -> ProbeSpec:
    """A function that measures for a minute."""
    return ProbeSpec(
        run=run,
        number=0,
        size=platform.spec.sizes[0].name if memory_mb == 1024 else f"{memory_mb}MB",
        memory_mb=memory_mb,
        storage=storage_url,
        platform=platform.url,
        time_s=60.0,
    )


def test_what_it_offers_is_what_fits_on_its_node(platform: Platform, cluster: RayAddress) -> None:
    assert platform.spec.sizes[0] == load_spec("ray").sizes[0]
    assert all(size.vcpu <= 8 for size in platform.spec.sizes)
    assert platform.url == cluster.url
    platform.check(small.plan(4, 2))
    with pytest.raises(PlatformRefused, match="the plan needs 10 CPUs and 10240 MB at once, the cluster has 8 CPUs"):
        platform.check(small.plan(5, 2))


PRETEND = Accelerator(
    name="Pretend", memory_mb=8000, vcpu_equivalents=40.0, fp32_tflop_s=8.0, memory_gb_s=300.0, host_device_gb_s=10.0
)


def test_functions_with_a_part_of_a_gpu_ask_ray_for_it(
    platform: Platform, storage_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three halves of the one GPU: the third waits in Ray's queue, as `check` says before."""
    assert not any(size.accelerator for size in platform.spec.sizes)
    table = replace(known_accelerators(), accelerators=(PRETEND,), usd_h={"Pretend": 1.0})
    monkeypatch.setattr("funcpipe.platforms.gpus.known_accelerators", lambda: table)
    platform, half = open_platform(platform.url), "1vCPU-4096MB-Pretend-1of2"
    device = platform.spec.size(half).accelerator
    assert device is not None
    assert device.memory_mb == 4000
    plan = small.plan(3, 1)
    plan = replace(plan, stages=tuple(replace(stage, size=half, memory_mb=4096) for stage in plan.stages))
    with pytest.raises(PlatformRefused, match=f"3 of {half}, at once, the cluster has .* GPUs Pretend, on 1 nodes"):
        platform.check(plan)
    platform.check(replace(plan, stages=plan.stages[:2]))
    assert platform.spec.size(half).price_usd_s == 0

    def left() -> tuple[float, float]:
        found = ray.available_resources()
        return found.get("GPU", 0.0), found.get("CPU", 0.0)

    wait_until(lambda: left() == (1, 8))
    handles = []
    try:
        for free in ((0.5, 7), (0, 6), (0, 6)):
            spec = replace(probe(platform, storage_url, run="halves"), size=half, memory_mb=4096)
            handles.append(platform.invoke(spec))
            wait_until(lambda free=free: left() == free)  # type: ignore[misc]
        types = ray.available_resources()["accelerator_type:Pretend"]
        assert types == pytest.approx(1 - 2 * 0.001), "which is what a task takes of its type"
    finally:
        for handle in handles:
            platform.stop(handle)
    wait_until(lambda: left() == (1, 8))


def test_a_killed_function_and_one_that_is_stopped_while_it_waits(platform: Platform, storage_url: str) -> None:
    """The second asks for more processors than are free, so it is in Ray's queue."""
    handle = platform.invoke(probe(platform, storage_url, run="killed"))
    large = [platform.invoke(probe(platform, storage_url, run="waits", memory_mb=16384)) for _ in range(2)]
    try:
        wait_until(lambda: processes_of("killed"))
        assert platform.status(handle) == Status(state=State.RUNNING)
        (process,) = processes_of("killed")
        process.send_signal(signal.SIGKILL)
        assert ended(platform, handle) == Status(state=State.FAILED, reason="its process died", cause=Cause.CRASHED)
    finally:
        for other in large:
            platform.stop(other)
    assert [platform.status(other) for other in large] == [Status(state=State.FAILED, reason="stopped")] * 2
    wait_until(lambda: not processes_of("waits"))


def test_a_function_with_too_little_memory_ends_and_that_is_said(platform: Platform, storage_url: str) -> None:
    """Torch alone takes more than 64 MB."""
    status = ended(platform, platform.invoke(probe(platform, storage_url, run="tight", memory_mb=64)))
    assert (status.state, status.cause) == (State.FAILED, Cause.OUT_OF_MEMORY)
    assert status.reason.startswith("out of memory: ")
    assert status.reason.endswith(" MB of 64 MB")
    assert (status.peak_bytes or 0) > 64 << 20


OTHER_CLIENT = """
import sys
from funcpipe.platforms.base import Handle
from funcpipe.platforms.catalog import open_platform
platform = open_platform(sys.argv[1])
handle = Handle(worker="probe0", name=sys.argv[2])
print(platform.status(handle).state.value)
platform.stop(handle)
print(platform.status(handle).reason)
"""


def test_another_process_finds_and_stops_functions_by_their_handles(platform: Platform, storage_url: str) -> None:
    handle = platform.invoke(probe(platform, storage_url, run="shared"))
    words = [sys.executable, "-c", OTHER_CLIENT, platform.url, handle.name]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["running", "stopped"]
    assert platform.status(handle) == Status(state=State.FAILED, reason="stopped")


def test_functions_die_with_their_host_and_ray_starts_it_again(platform: Platform, storage_url: str) -> None:
    handle = platform.invoke(probe(platform, storage_url, run="orphan"))
    wait_until(lambda: processes_of("orphan"))
    (host,) = named("ray::FunctionHost")
    host.send_signal(signal.SIGKILL)
    status = ended(platform, handle)
    assert status.reason == "the host of functions that started it has ended"
    assert status.cause is Cause.CRASHED
    wait_until(lambda: not processes_of("orphan"))
    again = platform.invoke(probe(platform, storage_url, run="again"))
    assert platform.status(again).state is State.RUNNING
    platform.stop(again)


def test_a_payload_that_is_too_large_is_refused(platform: Platform, storage_url: str) -> None:
    large = probe(platform, "file:///" + "x" * (16 << 20), run="large")
    with pytest.raises(PlanError, match="the invocation payload of worker probe0 has 16777"):
        platform.invoke(large)


def test_what_nodes_report_is_logged_and_does_not_disturb_what_is_printed(
    cluster: RayAddress, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when a node is lost."""
    from ray._private.utils import publish_error_to_driver
    from ray._private.worker import global_worker

    def is_told() -> bool:
        publish_error_to_driver("test", "a node is lost", gcs_client=global_worker.gcs_client)
        return "Ray: a node is lost" in caplog.text

    with caplog.at_level("INFO", "funcpipe"):
        wait_until(is_told)
    assert capsys.readouterr().out == ""


def test_a_process_has_one_cluster(cluster: RayAddress) -> None:
    other = open_platform("ray://127.0.0.1:1?via=gcs")
    with pytest.raises(PlatformError, match=r"this process is connected to the Ray cluster at .*, not to ray://127"):
        _ = other.url


NOBODY = """
import sys
from funcpipe.errors import PlatformError
from funcpipe.platforms.catalog import open_platform
for url in sys.argv[1:]:
    try:
        open_platform(url).url
    except PlatformError as error:
        print(error)
"""


def test_a_cluster_that_is_not_there_is_told_at_once() -> None:
    urls = ["ray://127.0.0.1:1?via=gcs", "ray://127.0.0.1:1", "ray://127.0.0.1:1?via=here"]
    words = [sys.executable, "-c", NOBODY, *urls]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    gcs, client, here = done.stdout.splitlines()
    assert "no connection to Ray at ray://127.0.0.1:1?via=gcs: " in gcs
    assert "Ray Client listens on the head node, at port 10001" in client
    assert "the client that started this Ray has ended" in here
