"""Every example runs as its first lines say, in a folder of its own, and shows what it promises."""

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import in_long_run
from tests.s3_servers import any_server

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SAID = {
    "augmented_images.py": r"69 steps: loss 2\.\d\d -> 0\.\d\d\naccuracy on 360 images that were held out: 0\.[89]\d",
    "classify_hugging_face.py": r"accuracy after each epoch: 0\.\d\d.*, (0\.[6-9]\d|1\.00)\nthe best after \d+ of",
    "data_in_s3.py": r"16 steps: loss 1\.\d\d -> [01]\.\d\d\ns0\.r0 read [\d,]+ bytes, 5\d% of the data",
    "digits.py": r"steps: validation accuracy 0\.9\d\d, of the average 0\.9\d\d",
    "lambda_or_gpu.py": r"all of it in an hour, 60 epochs .*:\n  this machine: .* min, \$0\.0000\n(.*\n)+  take .+",
    "lora.py": r"trained 8960 of 191936 numbers: loss 5\.\d\d -> 3\.\d\d",
    "lora_from_files.py": r"loss 5\.\d\d -> 5\.\d\d",
    "finetune_hugging_face.py": r"steps: loss 5\.\d\d -> [34]\.\d\d for each token",
    "resume_and_export.py": r"interrupted while training .*: it was stopped, and step \d+ of 4000 is saved\n(.*\n){3}"
    r"\d+ epochs in three parts: the same bits as in one\n",
}
LONG = ("augmented_images.py", "digits.py", "finetune_hugging_face.py", "lora.py", "lora_from_files.py")
NEEDED = {"data_in_s3.py": "bucket", "lora_from_files.py": "shards"}
"""The fixtures whose values examples are given."""
BUCKET = "funcpipe-data"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket, which the environment says how to reach, as boto3 reads it."""
    with any_server() as server:
        server.use(monkeypatch)
        server.make_bucket(BUCKET)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield BUCKET


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """A small Llama of random numbers, in several files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes)).save_pretrained(
        tmp_path / "llama", max_shard_size="50KB"
    )
    return str(tmp_path / "llama")


def ran(command: list[str | Path], folder: Path) -> str:
    """What a command prints in `folder`; it must end well."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JUPYTER_PLATFORM_DIRS": "1"}
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_each_is_here() -> None:
    """`learning_rates.py` is run by `test_wheel.py`, by a Python that has the wheel installed."""
    assert {file.name for file in EXAMPLES.glob("*.py")} == {*SAID, "learning_rates.py"}


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("name", [*(name for name in SAID if name not in LONG), *in_long_run(LONG)])
def test_it_runs(
    name: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As the main program of this process, which has loaded torch already; one example runs as `python …`."""
    shutil.copy(EXAMPLES / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = [request.getfixturevalue(NEEDED[name])] if name in NEEDED else []
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as in a process of its own
        runpy.run_path(name, run_name="__main__")
    assert re.search(SAID[name], capsys.readouterr().out)


def test_a_model_in_shards_is_fine_tuned_by_thirty_lines_of_code() -> None:
    text = (EXAMPLES / "lora_from_files.py").read_text()
    code = ast.unparse(ast.parse(re.sub(r'""".*?"""', "", text, flags=re.DOTALL)))
    assert len([line for line in code.splitlines() if line]) <= 30


def test_the_notebook_runs(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "first_steps.ipynb", tmp_path)
    run = [sys.executable, "-c", "from nbclient.cli import main; main()"]
    ran([*run, "--output", "done", "first_steps.ipynb"], tmp_path)
    cells = json.loads((tmp_path / "done.ipynb").read_text())["cells"]
    shown = [cell["outputs"][-1]["data"] for cell in cells if cell["cell_type"] == "code" and cell["outputs"]]
    drawn = ["".join(data["text/html"]) for data in shown if "text/html" in data]
    titles = (
        "Profile of Sequential on local",
        "Plan of Sequential on local",
        "Trace (simulated): prediction of Sequential",
        "Result of run ",
    )
    for title, html in zip(titles, drawn, strict=True):
        assert f"<strong>{title}" in html
    assert "<rect" in drawn[2]
    assert "<polyline" in drawn[3]
    last = "".join(shown[-1]["text/plain"])
    assert re.search(r"mean squared error 0\.\d+, \$0\.00", last)
