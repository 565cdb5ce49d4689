"""A real run with many functions: processes of this machine, which train a tiny model and end.

Prints seconds to start and for a step, the most memory of all processes, the client's share of a processor, requests,
and whether the parameters have the bits of plain PyTorch in one process. Linux only.

    nice -n 10 python -m experiments.studies.many_functions
"""

import argparse
import contextlib
import copy
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from funcpipe.client.follow.launch import launch
from funcpipe.client.follow.results import Progress, RunResult
from funcpipe.client.prepare import session
from funcpipe.client.prepare.job import Learner, SampleOrder
from funcpipe.client.prepare.prepared_run import prepare_training
from funcpipe.core import FaultTolerance, Plan, RunLimits, RunSettings
from funcpipe.platforms.base import Platform
from funcpipe.platforms.catalog import load_spec, open_storage
from funcpipe.training.recipe import Recipe
from tests.e2e.plans import even_plan, momentum, sample_numbers
from tests.e2e.reference import largest_difference, order_of, train
from tests.support.processes import children
from tests.support.run_keys import remembered_keys

RUN, WIDTH = "many", 8
SAMPLED_EVERY_S = 2.0


def make(layers: int) -> nn.Module:
    """Return so many small layers, always the same."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))


def samples(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return so many samples."""
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(WIDTH, generator=generator), torch.randn(WIDTH, generator=generator)) for _ in range(count)]


class Seen:
    """What the client sees: the moments at which steps ended, and the memory of all its processes, now and then."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self.memory_mb, self.processes, self.processor_s = 0.0, 0, 0.0
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Seen":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def __call__(self, progress: Progress) -> None:
        self.steps_s.append(time.monotonic())

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLED_EVERY_S):
            found = [os.getpid(), *descendants(os.getpid())]
            self.memory_mb = max(self.memory_mb, sum(map(pss_mb, found)))
            self.processes = max(self.processes, len(found))
            self.processor_s = time.thread_time()


def descendants(parent: int) -> Iterator[int]:
    """Yield the processes that `parent` has started, and those that these have."""
    for child in children(parent):
        yield child
        yield from descendants(child)


def pss_mb(pid: int) -> float:
    """Return the memory of a process, with its part of what it shares; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def measure(stages: int, replicas: int, steps: int) -> None:
    """Train for so many steps on so many functions, and print what that takes."""
    model, dataset = make(stages), samples(steps * replicas)
    sample = (torch.zeros(1, WIDTH),)
    plan = even_plan(model, sample, stages=stages, replicas=replicas, micro_batch=1, micro_batches=1)
    learner = Learner(model=copy.deepcopy(model), recipe=Recipe(loss=nn.functional.mse_loss, optimizer=momentum))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, FUNCPIPE_LOG_DIR=f"{folder}/logs"))
        stack.enter_context(remembered_keys())
        seen, url = stack.enter_context(Seen()), Path(folder).as_uri()
        spec = replace(load_spec("local"), max_functions=plan.workers)
        stack.enter_context(mock.patch.object(session, "load_spec", return_value=spec))
        platform = stack.enter_context(session.open_local())
        prepared = prepare_training(
            *(
                learner,
                dataset,
                plan,
                SampleOrder(),
                session.session_on(session.Site(platform, open_storage(url), url)),
            ),
            spec=spec,
            faults=FaultTolerance(),
            limits=RunLimits(),
            settings=RunSettings(name=RUN),
        )
        began_s, at_s, processor_s = time.monotonic(), time.time(), time.process_time() - seen.processor_s
        result = launch(prepared, seen)
        taken_s, processor_s = time.monotonic() - began_s, time.process_time() - seen.processor_s - processor_s
        asked, warnings = prepared.meter.counts, warnings_of(platform)
    ends_s, starts_s = seen.steps_s, [report.started_at_s - at_s for report in result.workers]
    each_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
    print(f"{plan.workers} functions, {stages} stages x {replicas} replicas, {len(result.losses)} steps:")
    print(
        f"  functions began within {max(starts_s):.1f} s, the first step ended after {ends_s[0] - began_s:.1f} s;",
        end=" ",
    )
    print(f"then {each_s:.2f} s a step")
    print(f"  the run ended {began_s + taken_s - ends_s[-1]:.1f} s after its last step")
    print(f"  {taken_s:.1f} s in all; at most {seen.processes} processes with {seen.memory_mb:.0f} MB (sum of PSS)")
    print(f"  client: {processor_s:.1f} processor seconds, {processor_s / taken_s:.1%} of a core;", end=" ")
    print(f"{asked.puts} puts, {asked.lists} lists, {asked.gets} gets")
    print(f"  bill: {result.bill.functions} functions, {result.bill.requests_text}")
    print(f"  warnings in logs: {dict(warnings.most_common(5))}")
    compare(model, dataset, plan, result)


def warnings_of(platform: Platform) -> Counter[str]:
    """Return the warnings in the logs of functions and client, without numbers, and how often each came."""
    texts = (line.text for line in platform.logs(RUN))
    said = (text.partition("WARNING")[2].partition(": ")[2] for text in texts if "WARNING" in text)
    return Counter(re.sub(r"\S*/\S*|[0-9.]+", "#", text)[:100] for text in said)


def compare(model: nn.Module, dataset: Sequence[tuple[Tensor, Tensor]], plan: Plan, result: RunResult) -> None:
    """Print how far the run's parameters and losses are from those of one process."""
    losses = train(
        model,
        dataset,
        loss_fn=nn.functional.mse_loss,
        optimizer=momentum,
        steps=sample_numbers(plan, len(dataset), epochs=1),
        replicas=plan.replicas,
        order=order_of(plan.sync, plan.replicas),
    )
    trained = result.state_dict()
    equal = all(torch.equal(trained[name], tensor) for name, tensor in model.state_dict().items())
    furthest = max(abs(a - b) / b for a, b in zip(result.losses, losses, strict=True))
    print(f"  parameters {'have the bits of' if equal else 'DIFFER from those of'} one process:", end=" ")
    print(f"largest difference {largest_difference(trained, model.state_dict()):.1e}, of losses {furthest:.1e}")


def main(given: Sequence[str] | None = None) -> None:
    """Measure a run of so many stages and replicas."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=25)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    measure(options.stages, options.replicas, options.steps)


if __name__ == "__main__":
    main()
