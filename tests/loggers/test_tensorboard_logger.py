"""Steps in TensorBoard's own files, read back by TensorBoard."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from funcpipe.loggers import TensorBoardLogger
from tests.loggers import runs

EVENTS = "tensorboard.backend.event_processing.event_accumulator"


@pytest.fixture(autouse=True)
def installed() -> None:
    """Loaded only where it is needed, as it takes long."""
    pytest.importorskip(EVENTS, reason="TensorBoard is not installed")


def curve(folder: Path, tag: str) -> list[tuple[int, Any]]:
    accumulators: Any = importlib.import_module(EVENTS)
    found = accumulators.EventAccumulator(str(folder / runs.RUN), size_guidance={"scalars": 0}).Reload()
    return [(event.step, pytest.approx(event.value)) for event in found.Scalars(tag)]


EXPECTED = list(enumerate(runs.LOSSES, start=1))


def test_the_curves_of_a_resumed_run_go_on(tmp_path: Path) -> None:
    runs.interrupted_and_resumed(TensorBoardLogger(tmp_path), TensorBoardLogger(tmp_path))
    assert curve(tmp_path, "loss") == EXPECTED
    assert curve(tmp_path, "cost_usd") == [(step, 0.01 * step) for step in range(1, 7)]
    assert [step for step, _ in curve(tmp_path, "val_loss")] == [2, 4, 6]


def test_steps_that_were_done_while_nobody_logged_have_their_loss(tmp_path: Path) -> None:
    assert runs.log(TensorBoardLogger(tmp_path), runs.info(known=3, resumed=True), (4, 5, 6)) == ()
    assert curve(tmp_path, "loss") == EXPECTED
    assert [step for step, _ in curve(tmp_path, "cost_usd")] == [4, 5, 6]
