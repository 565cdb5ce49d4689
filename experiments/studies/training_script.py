"""A whole training script, disturbed: the same bits as undisturbed, and the numbers of one process.

The script has what ordinary ones have: a DataLoader over shards in object storage, AdamW with named groups of
parameters, a schedule by step, clipping, an average of the weights, validation with a metric and the best model kept,
loggers, evaluation and prediction. It trains over 2 stages and 2 replicas, in double precision.

Undisturbed it is one call. Disturbed, functions live so shortly that each hands over again and again, one is killed,
the client is interrupted and resumes the run, and when that has finished it is trained for more epochs. One process is
plain PyTorch (`experiments.studies.training_recipe`). The data lies on the S3 server that the
environment names (`make s3-server`), or else in a folder.
"""

import argparse
import csv
import json
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

import funcpipe
from experiments.studies.data_reads import uploaded
from experiments.studies.training_recipe import (
    CLIP_NORM,
    DECAY,
    EPOCHS,
    GLOBAL_BATCH,
    HELD_OUT,
    MICRO_BATCH,
    SAMPLES,
    STEPS,
    Found,
    accuracy,
    loader,
    model,
    one_process,
    optimizer,
    slow_loss,
)
from funcpipe import EMA, FuncPipe, RunInterrupted, Validation
from funcpipe.client.callbacks import EachStep
from funcpipe.client.results import Progress, RunResult
from funcpipe.core import FaultTolerance, OptimizerKind, Outcome, Plan, ScheduleKind, Sync, Wire
from funcpipe.loggers import CSVLogger, TensorBoardLogger
from funcpipe.model.graph import trace
from funcpipe.testing.plans import even_stages
from funcpipe.testing.processes import functions_of
from funcpipe.testing.shard_files import WIDTH, write_mds

INTERRUPTED_AFTER, KILLED_AFTER = 13, 17


def plan() -> Plan:
    names = [layer.name for layer in trace(model(), (torch.zeros(MICRO_BATCH, WIDTH).double(),)).layers]
    return Plan(
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        replicas=2,
        schedule=ScheduleKind.ONE_F_ONE_B,
        sync=Sync.PIPELINED,
        wire=Wire.FP32,
        optimizer=OptimizerKind.ADAM,
        platform="local",
        averaged=True,
        stages=even_stages(names, 2),
    )


class Script:
    """The script, whose files lie in `folder` and whose data at two URLs."""

    def __init__(self, folder: Path, training_url: str, held_out_url: str) -> None:
        self._folder = folder
        self._training, self._held_out = partial(loader, training_url, shuffle=True), partial(loader, held_out_url)
        self._pipe = FuncPipe(
            model(),
            loss_fn=slow_loss,
            optimizer=optimizer,
            scheduler=partial(CosineAnnealingLR, T_max=STEPS, eta_min=1e-3),
            scheduler_interval="step",
            clip_grad_norm=CLIP_NORM,
            average=EMA(decay=DECAY),
        )
        self._outcomes: Counter[str] = Counter()

    def undisturbed(self) -> Found:
        """One call."""
        return self._found(self._train(FaultTolerance(heartbeat_s=1.0), epochs=EPOCHS, run="undisturbed"))

    def disturbed(self, lifetime_s: float) -> Found:
        """An interruption and a kill in the first two epochs, then two more, in functions that hand over."""
        faults = FaultTolerance(heartbeat_s=0.5, lease_s=1.5, lifetime_s=lifetime_s, cold_start_s=0.3)
        with suppress(RunInterrupted):
            self._train(faults, epochs=2, run="disturbed", callbacks=[EachStep(_interrupt)])
        self._count(self._train(faults, epochs=2, resume="disturbed", callbacks=[EachStep(self._kill)]))
        return self._found(self._train(faults, epochs=EPOCHS, resume="disturbed"))

    def _kill(self, progress: Progress) -> None:
        """Kill a function after one step; it leaves no report."""
        if progress.step == KILLED_AFTER:
            os.kill(functions_of(os.getpid())[-1], signal.SIGKILL)
            self._outcomes["killed"] += 1

    def _train(self, faults: FaultTolerance, *, callbacks: list[EachStep] | None = None, **keywords: Any) -> RunResult:
        self._pipe.reset()
        return self._pipe.train(
            self._training,
            plan=plan(),
            validation=Validation(
                data=partial(self._held_out, shuffle=False), metrics={"accuracy": accuracy}, patience=EPOCHS
            ),
            faults=faults,
            storage=f"file://{self._folder}/storage",
            message_deadline_s=60,
            callbacks=[
                CSVLogger(self._folder / "runs.csv"),
                TensorBoardLogger(self._folder / "tensorboard"),
                *(callbacks or []),
            ],
            **keywords,
        )

    def _count(self, result: RunResult) -> None:
        self._outcomes += Counter(report.outcome.value for report in result.workers)

    def _found(self, result: RunResult) -> Found:
        """Everything that the run has left, read in every way that there is."""
        self._count(result)
        found = Found(outcomes=self._outcomes)
        found.add("losses", {"of all steps": torch.tensor(result.losses, dtype=torch.float64)})
        found.add("parameters", result.state_dict())
        found.add("average", result.averaged_state_dict())
        found.add("best model", result.best_state_dict())
        found.add("validations", {str(v.step): torch.tensor([*v.values.values()]).double() for v in result.validations})
        held_out = partial(self._held_out, shuffle=False)
        measured = self._pipe.evaluate(held_out, metrics={"accuracy": accuracy}, plan=plan())
        found.add(
            "evaluation", {"loss, accuracy": torch.tensor([measured.loss, measured.metrics["accuracy"]]).double()}
        )
        found.add("predictions", self._pipe.predict(held_out, plan=plan()))
        exported = funcpipe.export(result.run, storage=f"file://{self._folder}/storage")
        found.add("exported model", exported)
        found.add("curves in the CSV", {"loss": self._logged(result.run)})
        found.add("curves in TensorBoard", {"loss": self._drawn(result.run)})
        return found

    def _logged(self, run: str) -> Tensor:
        with (self._folder / "runs.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["run"] == run]
        assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1)), "each step has one line"
        return torch.tensor([float(row["loss"]) for row in rows], dtype=torch.float64)

    def _drawn(self, run: str) -> Tensor:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # slow to import

        events = EventAccumulator(str(self._folder / "tensorboard" / run), size_guidance={"scalars": 0}).Reload()
        by_step = {event.step: event.value for event in events.Scalars("loss")}
        assert sorted(by_step) == list(range(1, STEPS + 1)), "each step is on the curve"
        return torch.tensor([by_step[step] for step in sorted(by_step)], dtype=torch.float32)


def _interrupt(progress: Progress) -> None:
    """Interrupt the client after one step."""
    if progress.step == INTERRUPTED_AFTER:
        raise KeyboardInterrupt


def rows(disturbed: Found, undisturbed: Found, plain: Found) -> Iterator[dict[str, Any]]:
    """For each kind of tensors: whether the bits are the same, and how far they are from one process."""
    for kind in undisturbed.kinds():
        first, second, third = (found.of(kind) for found in (disturbed, undisturbed, plain))
        assert first.keys() == second.keys() == third.keys(), kind
        yield {
            "what": kind,
            "tensors": len(first),
            "numbers": sum(tensor.numel() for tensor in first.values()),
            "same bits": all(torch.equal(tensor, second[name]) for name, tensor in first.items()),
            "from one process": max(
                ((tensor - third[name]).abs().max() / third[name].abs().max().clamp(min=1e-12)).item()
                for name, tensor in first.items()
            ),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lifetime", type=float, default=3.5, metavar="S", help="how long functions live")
    parser.add_argument("--output", type=Path, help="write the table as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        urls = []
        for name, samples in (("training", SAMPLES), ("held out", HELD_OUT)):
            written = Path(folder, name)
            written.mkdir()
            write_mds(written, samples, 10)
            urls.append(uploaded(written))
        undisturbed = Script(Path(folder), *urls).undisturbed()
        disturbed = Script(Path(folder), *urls).disturbed(options.lifetime)
        table = list(rows(disturbed, undisturbed, one_process(*urls)))
    print(f"{'what':24}{'tensors':>8}{'numbers':>9}{'same bits':>11}{'from one process':>18}")
    for row in table:
        name, tensors, numbers, same, distance = row.values()
        print(f"{name:24}{tensors:>8}{numbers:>9}{same!s:>11}{distance:>18.1e}")
    print("functions, undisturbed:", dict(undisturbed.outcomes), "disturbed:", dict(disturbed.outcomes))
    if options.output:
        options.output.write_text(json.dumps(table, indent=1) + "\n")
    handed = disturbed.outcomes[Outcome.HANDED_OVER.value]
    if (
        handed < 3
        or not disturbed.outcomes["killed"]
        or not all(row["same bits"] and row["from one process"] < 1e-6 for row in table)
    ):
        raise SystemExit("the bits differ, or too few functions have handed over")


if __name__ == "__main__":
    main()
