import logging
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)  # as in functions: more threads than free processors make torch many times slower


@pytest.fixture(scope="session", autouse=True)
def nothing_of_the_user_s(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logs of functions and keys of runs do not go where those of the user lie; no history is read or kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUNCPIPE_LOG_DIR", str(tmp_path_factory.mktemp("logs")))
        patch.setenv("FUNCPIPE_KEY_DIR", str(tmp_path_factory.mktemp("keys")))
        patch.setenv("FUNCPIPE_HISTORY", "")
        yield


@pytest.fixture(autouse=True)
def logger_as_before() -> Iterator[None]:
    """What a command sets of the package's logger is not set in the next test."""
    root = logging.getLogger("funcpipe")
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    root.setLevel(before[1])
