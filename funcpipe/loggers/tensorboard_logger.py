"""A logger of runs for TensorBoard."""

import importlib
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from funcpipe.client.follow.callbacks import Callback, RunInfo
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.core.distribution import needed_from
from funcpipe.loggers.values import step_values

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(Callback):
    """A logger into the folder DIRECTORY/RUN, so that TensorBoard on `directory` shows all runs that are logged there.

    When a run is resumed, its curves go on: steps that are trained again replace what was logged of them
    (`purge_step`), and steps that were done without a logger are added with their loss. Raises InputError if
    TensorBoard is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        with needed_from("tensorboard"):
            importlib.import_module("tensorboard")
            from torch.utils import tensorboard
        self._tensorboard = tensorboard
        self._directory = os.fspath(directory)
        self._writer: SummaryWriter | None = None

    def on_start(self, run: RunInfo) -> None:
        """Open the folder; what was logged of steps that are to come is hidden."""
        folder = os.path.join(self._directory, run.run)
        known = _logged_steps(folder) if run.resumed else set[int]()
        self._writer = self._tensorboard.SummaryWriter(folder, purge_step=run.done + 1)
        for step, loss in run.known_losses.items():
            if step not in known:
                self._writer.add_scalar("loss", loss, step)

    def on_step(self, progress: Progress) -> None:
        """Add the numbers of a step."""
        self._add(progress.step, step_values(progress))

    def on_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Add what was validated."""
        self._add(step, values)

    def on_end(self, result: RunResult) -> None:
        """Write what is left."""
        self._close()

    def on_error(self, error: BaseException) -> None:
        """Write what is left."""
        self._close()

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        assert self._writer is not None
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _logged_steps(folder: str) -> set[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not os.path.isdir(folder):
        return set()
    log = logging.getLogger("tensorboard")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of steps that were hidden on purpose
    try:
        events = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
    finally:
        log.setLevel(level)
    return {event.step for event in events.Scalars("loss")} if "loss" in events.Tags()["scalars"] else set()
