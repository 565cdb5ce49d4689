"""Train a small convolutional network on scikit-learn's handwritten digits, with what an ordinary script has.

    pip install 'funcpipe-torch[examples]'
    python digits.py

Groups of parameters, a cosine schedule, a moving average, validation, early stopping, and a log: steps.csv.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from funcpipe import EMA, FuncPipe, Validation
from funcpipe.loggers import CSVLogger

EPOCHS, GLOBAL_BATCH, MICRO_BATCH = 6, 64, 16


def network() -> nn.Module:
    """A small convolutional network."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(512, 10)),
    )


def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW that decays matrices and convolutions, but no biases and norms, and has a rate of its own for the head."""
    named = list(named_parameters)
    head = [p for name, p in named if name.startswith("9.")]
    decayed = [p for name, p in named if not name.startswith("9.") and p.ndim > 1]
    plain = [p for name, p in named if not name.startswith("9.") and p.ndim < 2]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}, {"params": head, "lr": 1e-3}]
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.05)


def main() -> None:
    """Train until the accuracy on held-out images no longer grows, and evaluate the averaged weights."""
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    known, held_out = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    labels = torch.tensor(labels)
    train_data, held_out_data = (TensorDataset(images[rows], labels[rows]) for rows in (known, held_out))

    steps = EPOCHS * -(-len(train_data) // GLOBAL_BATCH)
    pipe = FuncPipe(
        network(),
        loss_fn=nn.functional.cross_entropy,
        optimizer=optimizer,
        scheduler=lambda optimizer: CosineAnnealingLR(optimizer, T_max=steps),
        scheduler_interval="step",
        average=EMA(decay=0.95),
    )
    pipe.profile(images[:MICRO_BATCH], micro_batch=MICRO_BATCH, platform="local", repeats=2)
    pipe.optimize(global_batch=GLOBAL_BATCH, time_value=3.84)
    accuracy = MulticlassAccuracy(10, average="micro")
    validation = Validation(
        data=held_out_data, metrics={"accuracy": accuracy}, monitor="accuracy", mode="max", patience=3
    )
    loader = DataLoader(train_data, shuffle=True)  # how large micro-batches are, the plan says
    result = pipe.train(loader, epochs=EPOCHS, validation=validation, callbacks=[CSVLogger("steps.csv")])

    pipe.model.load_state_dict(result.averaged_state_dict())
    found = pipe.evaluate(held_out_data, metrics={"accuracy": accuracy})
    best = max(report.values["accuracy"] for report in result.validations)
    print(f"{len(result.losses)} steps: validation accuracy {best:.3f}, of the average {found.metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
