"""Steps in a CSV file: each once, in order, however often a run is resumed or watched."""

import csv
from pathlib import Path

from funcpipe.loggers import CSVLogger
from tests.loggers import runs


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def logged(path: Path) -> list[tuple[str, int, float]]:
    return [(row["run"], int(row["step"]), float(row["loss"])) for row in rows(path)]


EXPECTED = [(runs.RUN, step, loss) for step, loss in enumerate(runs.LOSSES, start=1)]


def test_a_resumed_run_goes_on_and_steps_that_are_trained_again_are_there_once(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "steps.csv"
    runs.interrupted_and_resumed(CSVLogger(path), CSVLogger(path))
    assert logged(path) == EXPECTED
    assert [row["val_loss"] for row in rows(path)] == ["", "0.25", "", "0.125", "", repr(1 / 12)]
    assert {row["samples_per_s"] for row in rows(path)} == {"8.0"}
    assert [float(row["learning_rate"]) for row in rows(path)] == [0.5**step for step in range(1, 7)]


def test_steps_that_were_done_while_nobody_logged_have_their_loss(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    assert runs.log(CSVLogger(path), runs.info(known=3, resumed=True), (4, 5, 6)) == ()
    assert logged(path) == EXPECTED
    assert [row["cost_usd"] for row in rows(path)] == ["", "", "", "0.04", "0.05", "0.06"]


def test_a_file_holds_several_runs_and_a_new_one_of_the_same_name_replaces_the_old(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    runs.log(CSVLogger(path), runs.info(run="other"), (1,))
    runs.log(CSVLogger(path), runs.info(), (1, 2, 3))
    runs.log(CSVLogger(path), runs.info(), (1, 2))
    assert logged(path) == [("other", 1, 1.0), *EXPECTED[:2]]
