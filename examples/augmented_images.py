"""Train an image model with augmentation in processes of a DataLoader, as with plain PyTorch.

    pip install 'funcpipe-torch[examples]'
    python augmented_images.py

Each process gets the dataset and nothing of the model. Samples draw their random numbers from (seed, epoch, number of
the sample), so that the result does not depend on who loads them.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from funcpipe import FuncPipe

EPOCHS, BATCH = 3, 64


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Handwritten digits, every fifth of them held out; those that are trained on are moved and made noisy."""

    def __init__(self, *, held_out: bool) -> None:
        pixels, labels = load_digits(return_X_y=True)
        rows = [row for row in range(len(labels)) if (row % 5 == 0) == held_out]
        self.images = torch.tensor(pixels[rows], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.labels = torch.tensor(labels[rows])
        self.moves = not held_out

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.moves:
            across, down = torch.randint(-1, 2, (2,)).tolist()
            image = image.roll((across, down), (1, 2)) + 0.05 * torch.randn_like(image)
        return image, self.labels[index]


def network() -> nn.Module:
    """A small convolutional network."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)),
    )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of images that are recognised."""
    return (output.argmax(1) == target).float().mean()


def main() -> None:
    """Train, and evaluate on what was held out."""
    torch.manual_seed(0)
    model = network()
    pipe = FuncPipe(
        model, loss_fn=nn.functional.cross_entropy, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3)
    )
    loader = DataLoader(Digits(held_out=False), batch_size=BATCH, shuffle=True, num_workers=1)
    result = pipe.fit(loader, epochs=EPOCHS)  # under BatchNorm, functions take whole batches
    held_out = Digits(held_out=True)
    found = pipe.evaluate(held_out, metrics={"accuracy": accuracy})
    print(f"{len(result.losses)} steps: loss {result.losses[0]:.2f} -> {result.losses[-1]:.2f}")
    print(f"accuracy on {found.samples} images that were held out: {found.metrics['accuracy']:.2f}")


if __name__ == "__main__":
    main()
