"""A logger of runs to Weights & Biases."""

import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from funcpipe.client.follow.callbacks import Callback, RunInfo
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.core.distribution import needed_from
from funcpipe.loggers.values import step_values


class WandbLogger(Callback):
    """A logger to `project`, with the files of W&B in `directory`; `mode="offline"` keeps them there for `wandb sync`.

    `DIRECTORY/funcpipe-RUN.json` says which run of W&B is the run's, and which steps it has: one that is resumed or
    watched again from this folder goes on there (`resume="allow"`); elsewhere give its `id`. W&B cannot take values
    back: steps that are trained again, with the same result, are logged once. Raises InputError if W&B is missing.
    """

    def __init__(
        self, project: str, *, directory: str | os.PathLike[str] = ".", mode: str | None = None, id: str | None = None
    ) -> None:
        with needed_from("wandb"):
            import wandb
        self._wandb: Any = wandb
        self._project = project
        self._directory = Path(directory)
        self._mode = mode
        self._id = id
        self._run: Any = None
        self._note = Path()
        self._step = self._known = 0

    def on_start(self, run: RunInfo) -> None:
        """Go on with the run in W&B, or make it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._note = self._directory / f"funcpipe-{re.sub(r'[^A-Za-z0-9_.-]', '-', run.run)}.json"
        known = json.loads(self._note.read_text()) if run.resumed and self._note.exists() else {}
        name = re.sub(r"[^A-Za-z0-9_-]", "-", run.run)[:80]
        self._id = self._id or known.get("id") or f"{name}-{secrets.token_hex(3)}"
        self._step = known.get("step", 0)
        self._run = self._wandb.init(
            project=self._project,
            id=self._id,
            name=run.run,
            resume="allow",
            dir=str(self._directory),
            mode=self._mode,
            config=run.settings,
        )
        self._step = max(self._step, (self._run.step or 1) - 1)  # W&B says which step comes next
        self._known = self._step
        for step, loss in run.known_losses.items():
            self._log(step, {"loss": loss})

    def on_step(self, progress: Progress) -> None:
        """Log the numbers of a step that is not known yet."""
        self._log(progress.step, step_values(progress))

    def on_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Log what was validated, with the step that it was validated after."""
        if step > self._known:
            self._run.log(dict(values), step=step)

    def on_end(self, result: RunResult) -> None:
        """Send what is left, with the bill."""
        self._run.summary["bill_usd"] = result.bill.cost_usd
        self._finish(0)

    def on_error(self, error: BaseException) -> None:
        """Send what is left."""
        self._finish(1)

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._step:
            self._step = step
            self._run.log(dict(values), step=step)

    def _finish(self, code: int) -> None:
        if self._run is not None:
            self._note.write_text(json.dumps({"id": self._id, "step": self._step}))
            self._run.finish(exit_code=code)
