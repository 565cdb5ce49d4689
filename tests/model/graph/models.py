"""Small models with what makes real ones hard."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels, momentum=0.3)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Any:
        out = self.drop(self.relu(self.bn1(self.conv1(x))))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class ResidualNet(nn.Module):
    """A residual CNN with BatchNorm, dropout, modules used twice, operations in place."""

    def __init__(self, channels: int = 6, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(channels) for _ in range(blocks)])
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        x = F.dropout(x.mean((2, 3)), 0.1, self.training)
        return self.head(torch.flatten(x, 1))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Any:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class CausalTransformer(nn.Module):
    """Functional attention with dropout, learned generator_states, an output layer tied to the embedding."""

    def __init__(self, words: int = 23, width: int = 16, depth: int = 3, length: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.generator_states = nn.Parameter(torch.randn(length, width) * 0.1)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(width),
                    "attention": Attention(width, 4),
                    "norm2": nn.LayerNorm(width),
                    "mlp": nn.Sequential(
                        nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
                    ),
                }
            )
            for _ in range(depth)
        )
        self.output = nn.Linear(width, words, bias=False)
        self.output.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.words(tokens) + self.generator_states[: tokens.shape[1]]
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = x + block["attention"](block["norm1"](x))
            x = x + block["mlp"](block["norm2"](x))
        return self.output(x)


class Encoder(nn.Module):
    """torch.nn's own encoder layers, which are traced whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.head((x + y).mean(1))
