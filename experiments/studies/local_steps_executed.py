"""Steps of replicas that meet after every step, and after eight, executed: how much faster they are, and as predicted?

Two stages of four replicas train a character transformer of 2.7 million parameters on local functions with the links,
latency and processors of AWS Lambda's, of 400 MB each, which two processors hold. It is profiled in such functions
first. A step's time is the mean from the end of one meeting to that of another, by the traces of the functions.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import Subset

from experiments.models import characters
from experiments.paper.common import LOCAL
from experiments.paper.executed import small_spec
from funcpipe import FuncPipe
from funcpipe.client.prepare.session import open_site
from funcpipe.core import Pins, PlatformSpec, Trace
from funcpipe.platforms.catalog import load_spec

MEMORY_MB, REPLICAS = 400, 4
BATCH, MICRO_BATCH = 16, 4
BLOCKS = tuple(f"blocks.{number}" for number in range(6))
STEPS = {1: 8, 8: 24}
"""The steps that are trained where replicas meet after so many."""


def pipe() -> FuncPipe:
    """The same weights each time."""
    torch.manual_seed(1)
    model = characters.CharacterTransformer(layers=6, width=192, heads=6, dropout=0.0)
    return FuncPipe(model, loss_fn=characters.loss, optimizer=partial(torch.optim.SGD, lr=0.1), blocks=BLOCKS)


def functions() -> PlatformSpec:
    """Functions of one size."""
    small = small_spec(load_spec("aws-lambda"))
    part = MEMORY_MB / small.sizes[0].memory_mb
    size = replace(
        small.sizes[0],
        name=f"{MEMORY_MB}MB",
        memory_mb=MEMORY_MB,
        vcpu=part * small.sizes[0].vcpu,
        upload_bytes_s=part * small.sizes[0].upload_bytes_s,
        download_bytes_s=part * small.sizes[0].download_bytes_s,
        price_usd_s=part * small.sizes[0].price_usd_s,
    )
    return replace(small, sizes=(size,), max_functions=2 * REPLICAS)


def seconds_of_a_step(trace: Trace, sync_every: int) -> float:
    """The mean of the steps between the first meeting that was traced and the last one."""
    ends: dict[int, float] = {}
    for event in trace.events:
        ends[event.step] = max(ends.get(event.step, 0.0), event.end_s)
    met = [step for step in sorted(ends) if (step + 1) % sync_every == 0]
    return (ends[met[-1]] - ends[met[0]]) / (met[-1] - met[0])


def rows() -> Iterator[dict[str, Any]]:
    measured, (inputs, targets) = pipe(), characters.train_data()[:MICRO_BATCH]
    with open_site(LOCAL, like=functions()) as site:
        spec = site.platform.spec
        profile = measured.profile(
            (inputs,), sample_target=targets, micro_batch=MICRO_BATCH, repeats=STEPS[1] // 2, on=site
        )
    halves = Pins(cuts=(profile.layers[len(profile.layers) // 2].name,))
    for sync_every, steps in STEPS.items():
        plan = measured.optimize(
            global_batch=BATCH,
            replicas=REPLICAS,
            sync="pipelined",
            time_value=30.72,
            sync_every=sync_every,
            pins=halves,
            profile=profile,
            spec=spec,
        )
        data = Subset(characters.train_data(), range(steps * BATCH))
        result = pipe().train(data, plan=plan, shuffle=False, platform=LOCAL, like=spec, prices=spec, progress=False)
        assert plan.estimate is not None
        assert result.trace is not None
        yield {
            "sync_every": sync_every,
            "plan": f"{len(plan.stages)} x {plan.replicas}",
            "predicted_s": plan.estimate.iteration_s,
            "observed_s": seconds_of_a_step(result.trace, sync_every),
            "losses": [result.losses[0], result.losses[-1]],
        }


def main() -> None:
    found = []
    for row in rows():
        found.append(row)
        print(json.dumps(row), flush=True)
    every, rarely = (row["observed_s"] for row in found)
    off = ", ".join(f"{row['observed_s'] / row['predicted_s'] - 1:+.1%}" for row in found)
    print(f"{every / rarely:.2f} times as fast; observed beside predicted: {off}")


if __name__ == "__main__":
    main()
