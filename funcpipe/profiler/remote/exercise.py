"""Train tiny networks, to see how much memory torch itself needs in a function."""

import torch
from torch import nn


def exercise() -> None:
    """Train small networks of common layers, which loads the pages of torch's libraries that training needs."""
    vision = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 8)
    )
    words = nn.Sequential(
        nn.Embedding(9, 16), nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
    )
    loss = nn.functional.cross_entropy(vision(torch.rand(4, 3, 8, 8)), torch.arange(4))
    (loss + words(torch.ones(2, 8).long()).sum()).backward()
    optimizers = (torch.optim.SGD(vision.parameters(), lr=0.1), torch.optim.AdamW(words.parameters(), lr=0.1))
    for optimizer in optimizers:
        optimizer.step()
