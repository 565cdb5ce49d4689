"""Train, press Ctrl-C in the middle, go on another day, export the model, and use it without funcpipe.

    python resume_and_export.py [URL]

URL, such as s3://bucket/runs, is where the run keeps what it has learned; without one it is a temporary folder.
"""

import signal
import sys
import tempfile
import uuid
from functools import partial

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import TensorDataset

import funcpipe
from funcpipe import EachStep, FaultTolerance, FuncPipe, Plan, Progress, RunInterrupted

SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 256, 64, 32
MANY_EPOCHS, MORE_EPOCHS, STOPPED_AT = 1000, 16, 5


def network() -> nn.Module:
    """A small network with dropout, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def points() -> TensorDataset:
    """Points of the plane; the class of each says whether it lies in the unit circle."""
    x = 3 * torch.rand(SAMPLES, 2, generator=torch.Generator().manual_seed(1)) - 1.5
    return TensorDataset(x, (x.norm(dim=1) < 1).long())


def new_pipe() -> FuncPipe:
    """As a new process makes it: it knows nothing of earlier runs."""
    return FuncPipe(network(), loss_fn=nn.functional.cross_entropy, optimizer=partial(torch.optim.AdamW, lr=0.02))


def stop(progress: Progress) -> None:
    """Do what Ctrl-C does; SIGTERM, as containers and Slurm send it, does the same."""
    if progress.step == STOPPED_AT:
        signal.raise_signal(signal.SIGINT)


def train_in_parts(plan: Plan, run: str, storage: str) -> int:
    """Train until interrupted, which saves a step; to the end of that epoch; and some more epochs. Return how many."""
    how = {"plan": plan, "storage": storage, "faults": FaultTolerance(heartbeat_s=0.1)}
    saved_step = 0
    try:
        new_pipe().train(points(), epochs=MANY_EPOCHS, run=run, callbacks=[EachStep(stop)], **how)
    except RunInterrupted as interrupted:
        print(interrupted, *interrupted.__notes__, sep="\n")
        saved_step = interrupted.saved_step or 0
    begun = saved_step * GLOBAL_BATCH // SAMPLES + 1
    for epochs in (begun, begun + MORE_EPOCHS):
        new_pipe().train(points(), epochs=epochs, resume=run, **how)
    return begun + MORE_EPOCHS


def main() -> None:
    """Compare both ways bit by bit, and predict with the exported file."""
    pipe = new_pipe()
    pipe.profile(points()[:MICRO_BATCH][0], micro_batch=MICRO_BATCH, platform="local", repeats=2)
    plan = pipe.optimize(global_batch=GLOBAL_BATCH, time_value=3.84)
    with tempfile.TemporaryDirectory() as folder:
        storage, run = sys.argv[1] if len(sys.argv) > 1 else f"file://{folder}", f"circle-{uuid.uuid4().hex[:8]}"
        epochs = train_in_parts(plan, run, storage)
        save_file(funcpipe.export(run, storage=storage), "model.safetensors")
        funcpipe.clean(funcpipe.open_storage(storage), run)

    model = network().eval()
    model.load_state_dict(load_file("model.safetensors"))
    at_once = pipe.train(points(), epochs=epochs).state_dict()
    same = all(torch.equal(tensor, at_once[name]) for name, tensor in model.state_dict().items())
    print(f"{epochs} epochs in three parts: {'the same bits as' if same else 'other bits than'} in one")
    x, inside = points().tensors
    right = (model(x).argmax(1) == inside).float().mean().item()
    print(f"model.safetensors: {right:.0%} of the points are right")


if __name__ == "__main__":
    main()
