"""Every example runs as its first lines say, in a folder of its own, and shows what it promises."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SAID = {
    "finetune_hugging_face.py": r"steps: loss 5\.\d\d -> [34]\.\d\d for each token",
    "lora.py": r"trained 8960 of 191936 numbers: loss 5\.\d\d -> 3\.\d\d",
}

pytestmark = pytest.mark.slow


def ran(command: list[str | Path], folder: Path) -> str:
    """What a command prints in `folder`; it must end well."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JUPYTER_PLATFORM_DIRS": "1"}
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_each_is_here() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == SAID.keys()


@pytest.mark.parametrize("name", SAID)
def test_it_runs(name: str, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / name, tmp_path)
    assert re.search(SAID[name], ran([sys.executable, name], tmp_path))


def test_the_notebook_runs(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "first_steps.ipynb", tmp_path)
    run = [sys.executable, "-c", "from nbclient.cli import main; main()"]
    ran([*run, "--output", "done", "first_steps.ipynb"], tmp_path)
    cells = json.loads((tmp_path / "done.ipynb").read_text())["cells"]
    last = "".join(cells[-1]["outputs"][-1]["data"]["text/plain"])
    assert re.search(r"mean squared error 0\.\d+, \$0\.00", last)
