"""pytest-xdist keeps the tests of a group in one process, as it has to: two Rays at once do not fit on a machine."""

import os
import subprocess
import sys
from pathlib import Path

MODULE = """
import os
from pathlib import Path

import pytest

@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("number", range(4))
def test_its_process_is_noted(number):
    Path(f"{os.environ['PYTEST_XDIST_WORKER']}.worker").touch()
"""


def test_one_process_runs_all_tests_of_a_group(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / f"test_{name}.py").write_text(MODULE)
    words = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", "--dist", "loadgroup", "--rootdir", "."]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = alone | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout
    assert len(list(tmp_path.glob("*.worker"))) == 1, "two processes shared the tests of one group"
