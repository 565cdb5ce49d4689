import gc
import logging
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.run_keys import RUN_KEY

settings.register_profile("funcpipe", deadline=None)  # no test is about time
settings.register_profile("quick", settings.get_profile("funcpipe"), max_examples=20)  # what `make check` asks for
settings.register_profile("long", settings.get_profile("funcpipe"), max_examples=1000)  # and `make test-long`
settings.load_profile("funcpipe")
gc.disable()  # while tests are collected

pytest_plugins = tuple(f"tests.support.{name}" for name in ("durations", "rewriting", "shares", "browser"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """As in functions: more threads than free processors make torch many times slower."""
    if not session.config.pluginmanager.hasplugin("dsession"):  # which starts other processes, and runs no tests itself
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def logs_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logs of local functions and keys of runs do not go where those of the user lie; no history is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUNCPIPE_LOG_DIR", str(tmp_path_factory.mktemp("logs")))
        patch.setenv("FUNCPIPE_KEY_DIR", str(tmp_path_factory.mktemp("keys")))
        patch.setenv("FUNCPIPE_HISTORY", "")
        patch.setenv("FUNCPIPE_RUN_KEY", RUN_KEY.text)
        yield


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt this process, also where its shell started it in the background, which ignores that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def logger_as_before() -> Iterator[None]:
    """What a test sets of the package's logger, as the command line does, is not set in the next one."""
    root = logging.getLogger("funcpipe")
    before = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.propagate = before[0], before[2]
    if root.level != before[1]:
        root.setLevel(before[1])  # which makes every logger forget whether it is enabled


def pytest_collection_finish() -> None:
    """What is loaded stays: the collector looks at what tests make only, and less often than every 700 objects."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000)
