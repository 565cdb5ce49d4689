"""`funcpipe run logs` of runs, from files of this machine."""

from pathlib import Path

import pytest

from funcpipe.cli import main
from funcpipe.core.logs import prefix
from funcpipe.platforms.local.output import FOLDER, log_file


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "logs"))
    for name, time_s, level in (("s0.r0", 2, "INFO"), ("s0.r1", 1, "WARNING"), ("s0.r1", 3, "PRINT")):
        begin = prefix(time_s, level, run="run-1", worker=name, attempt=0)
        with log_file("run-1", f"{name}.a0").open("a") as file:
            file.write(f"{begin} line {time_s}\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["line 1", "line 2", "line 3"]),
        (["--worker", "s0.r1"], ["line 1", "line 3"]),
        (["--level", "warning"], ["line 1"]),
        (["--platform", "local"], ["line 1", "line 2", "line 3"]),
    ],
)
def test_lines_are_merged_and_chosen(words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "run-1", *words]) == 0
    assert [line[-6:] for line in capsys.readouterr().out.splitlines()] == expected


@pytest.mark.parametrize("words", [[], ["--platform", "local"], ["--storage", "{}"]])
def test_a_run_that_nobody_knows_is_told(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = (tmp_path / "objects").as_uri()
    assert main(["logs", "run-2", *(word.format(storage) for word in words)]) == 2
    assert "run-2" in capsys.readouterr().err


def test_what_cannot_be_asked_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "run-1", "--level", "loud"]) == 2
    assert main(["logs", "run-1", "--platform", "mars://x"]) == 2
    assert "platform must be local, ray://…, or a deployment" in capsys.readouterr().err
