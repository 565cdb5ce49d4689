"""Lambda, a GPU, or neither? What a job would take and cost, before anything is rented.

    python lambda_or_gpu.py

A small convolutional network is measured here, and AWS's sizes, speeds and prices say the rest.
"""

from functools import partial
from itertools import pairwise

import torch
from torch import nn

from funcpipe import FuncPipe

SAMPLES, SIDE, GLOBAL_BATCH, MICRO_BATCH = 50_000, 32, 256, 16
JOBS = {"a first look tonight": (1, 8 * 3600), "a first look in a minute": (1, 60), "all of it in an hour": (60, 3600)}


def network() -> nn.Module:
    """A small convolutional network for images of 32 x 32."""
    widths = (3, 32, 64, 128)
    blocks = [
        nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2))
        for before, after in pairwise(widths)
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128 * 16, 10))


def pipe_for(platform: str) -> FuncPipe:
    """The network, measured for a platform."""
    pipe = FuncPipe(network(), loss_fn=nn.functional.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.1))
    images = torch.rand(MICRO_BATCH, 3, SIDE, SIDE)
    pipe.profile(images, micro_batch=MICRO_BATCH, platform=platform, repeats=2)
    return pipe


def main() -> None:
    """Compare this machine with what can be rented, for each job."""
    here, cloud = pipe_for("local"), pipe_for("aws-lambda")
    here.optimize(global_batch=GLOBAL_BATCH, replicas=1)
    for name, (epochs, deadline_s) in JOBS.items():
        own_s = here.estimate(SAMPLES, epochs=epochs).seconds
        table = cloud.provision(
            SAMPLES, global_batch=GLOBAL_BATCH, epochs=epochs, deadline_s=deadline_s, ways=("funcpipe", "one-machine")
        )
        print(f"{name}, {epochs} epochs of {SAMPLES:,} images:")
        ways = {"this machine": (own_s, 0.0)} | {found.text: (found.seconds, found.usd) for found in table.provisions}
        for way, (seconds, usd) in ways.items():
            print(f"  {way}: {seconds / 60:.1f} min, ${usd:.4f}")
        rented = [found.text for found in table.provisions if found.way == table.recommended]
        print(f"  take {'this machine' if own_s <= deadline_s else (rented or ['more time'])[0]}")


if __name__ == "__main__":
    main()
