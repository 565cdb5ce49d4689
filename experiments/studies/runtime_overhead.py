"""Is the runtime the bottleneck? Iterations beside what the simulator predicts, and beside a plain PyTorch loop.

Each ratio comes from one run of this script; the start of six functions is timed too.
"""

import time
from statistics import median

import torch

from experiments.cuts import even_cuts
from experiments.models import digits
from funcpipe import FuncPipe
from funcpipe.analysis.compare import compare
from funcpipe.core import ModelProfile, Pins, Plan

MICRO_BATCH, GLOBAL_BATCH, EPOCHS = 8, 64, 3


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    pipe = FuncPipe(digits.model(), loss_fn=digits.loss, optimizer=digits.optimizer)
    profile = pipe.profile(
        digits.sample(), platform="local", micro_batch=MICRO_BATCH, sample_target=torch.arange(MICRO_BATCH)
    )
    figures = {"start of six functions s": start(pipe, plan(pipe, profile, 3, 2))}
    for stages, replicas in ((2, 2), (2, 1), (1, 2)):
        chosen = plan(pipe, profile, stages, replicas)
        result = pipe.train(digits.train_data, epochs=EPOCHS, plan=chosen)
        comparison = compare(pipe.simulate(chosen), result.trace)
        figures[f"{stages} x {replicas} predicted s"] = comparison.predicted_iteration_s
        figures[f"{stages} x {replicas} observed s"] = comparison.observed_iteration_s
        figures[f"{stages} x {replicas} observed / predicted"] = comparison.ratio or float("nan")
    plain_s = plain_iteration(pipe)
    single_s = single_iteration(pipe, plan(pipe, profile, 1, 1))
    figures |= {"plain loop s": plain_s, "1 x 1 s": single_s, "1 x 1 / plain loop": single_s / plain_s}
    for name, value in figures.items():
        print(f"{name:32} {value:9.4f}")


def plan(pipe: FuncPipe, profile: ModelProfile, stages: int, replicas: int) -> Plan:
    pins = Pins(cuts=even_cuts(profile, stages), replicas=(replicas,))
    return pipe.optimize(global_batch=GLOBAL_BATCH, pins=pins)


def start(pipe: FuncPipe, chosen: Plan) -> float:
    """Seconds from the first function's first task to the last one's."""
    result = pipe.train(digits.train_data, plan=chosen)
    starts = [report.started_at_s for report in result.workers]
    return max(starts) - min(starts)


def single_iteration(pipe: FuncPipe, chosen: Plan) -> float:
    result = pipe.train(digits.train_data, epochs=EPOCHS, plan=chosen)
    return compare(pipe.simulate(chosen), result.trace).observed_iteration_s


def plain_iteration(pipe: FuncPipe) -> float:
    """The same micro-batches in plain PyTorch, one thread."""
    data, model = digits.train_data(), pipe.model.train()
    optimizer = digits.optimizer(model.parameters())
    times = []
    for _ in range(EPOCHS):
        for first in range(0, len(data) - GLOBAL_BATCH, GLOBAL_BATCH):
            began_s = time.perf_counter()
            optimizer.zero_grad()
            for start_index in range(first, first + GLOBAL_BATCH, MICRO_BATCH):
                inputs, targets = data[list(range(start_index, start_index + MICRO_BATCH))]
                loss = digits.loss(model(inputs), targets) * (MICRO_BATCH / GLOBAL_BATCH)
                torch.autograd.backward(loss)
            optimizer.step()
            times.append(time.perf_counter() - began_s)
    return median(times)


if __name__ == "__main__":
    main()
