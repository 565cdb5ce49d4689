"""A pytest plugin: the process that starts others rewrites the asserts of tests for all of them.

Pytest keeps what it makes of a module beside it, and has that at hand in the next run. In a new clone all processes of
pytest-xdist begin at once, and each would make the same of the same modules.
"""

import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Before the other processes are started."""
    config = session.config
    starts_others = config.pluginmanager.hasplugin("dsession")
    if starts_others and not sys.dont_write_bytecode and config.getoption("assertmode") == "rewrite":
        here = config.invocation_params.dir
        rewrite_all(config, modules_of(here / word.partition("::")[0] for word in config.args))


def modules_of(chosen: Iterable[Path]) -> list[Path]:
    """The modules of tests in these files and folders, as far as they are there."""
    found = (found for path in chosen for found in (path.rglob("*.py") if path.is_dir() else [path]))
    return [path for path in found if path.is_file() and re.match(r"test_|conftest\.py$", path.name)]


def rewrite_all(config: pytest.Config, modules: Iterable[Path]) -> None:
    """Keep what pytest makes of these modules, unless it is kept already; whoever runs a broken one says so."""
    for module in modules:
        kept = rewrite.get_cache_dir(module) / (module.stem + rewrite.PYC_TAIL)
        if not kept.exists() or kept.stat().st_mtime < module.stat().st_mtime:
            with suppress(SyntaxError, ValueError, OSError):
                source, code = rewrite._rewrite_test(module, config)
                kept.parent.mkdir(parents=True, exist_ok=True)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, kept)
