from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("funcpipe", deadline=None)  # no test is about time
settings.register_profile("quick", settings.get_profile("funcpipe"), max_examples=20)  # what `make check` asks for
settings.load_profile("funcpipe")
torch.set_num_threads(1)  # as in functions: more threads than free processors make torch many times slower

_TESTS = Path(__file__).parent
_ALONE = (
    "chaos/",
    "cloud/",
    "e2e/test_failure.py",
    "e2e/test_like.py",
    "e2e/test_measure.py",
    "e2e/test_recovery.py",
    "platforms/entry/",
    "worker/test_hand_over.py",
    "client/test_control.py",
    "platforms/aliyun/",
    "platforms/aws/test_functions.py",
    "platforms/aws/test_hand_over.py",
    "platforms/aws/test_measure.py",
    "cli/",
)


@pytest.fixture(scope="session", autouse=True)
def logs_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logs of local functions do not go where those of the user lie."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUNCPIPE_LOG_DIR", str(tmp_path_factory.mktemp("logs")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests that start functions run alone: beside others their leases and lives would be too short."""
    for item in items:
        if item.get_closest_marker("slow") and str(item.path.relative_to(_TESTS)).startswith(_ALONE):
            item.add_marker("alone")
