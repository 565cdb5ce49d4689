"""A character-level transformer that learns the English of CPython's own documentation topics."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # any other character is read as "?"
BLOCK = 64


class Attention(nn.Module):
    """Causal self-attention: a character looks at itself and at those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined


class Block(nn.Module):
    """Attention, then a small network for each position; both normalise first and add to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.dropout1 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.contract = nn.Linear(4 * width, width)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout1(self.attention(self.norm1(x)))
        inner: Tensor = self.dropout2(self.contract(self.gelu(self.expand(self.norm2(x)))))
        return x + inner


class CharacterTransformer(nn.Module):
    """Characters and their positions to the logits of the characters that follow them."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Parameter(0.02 * torch.randn(BLOCK, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, len(ALPHABET))

    def forward(self, characters: Tensor) -> Tensor:
        x = self.dropout(self.characters(characters) + self.positions)
        logits: Tensor = self.logits(self.norm(self.blocks(x)))
        return logits


def model() -> nn.Module:
    """Return the transformer with fresh weights, drawn from torch's global generator."""
    return CharacterTransformer()


def sample() -> tuple[Tensor, ...]:
    """Return the inputs of one micro-batch of 16 blocks."""
    return (torch.randint(len(ALPHABET), (16, BLOCK), generator=torch.Generator().manual_seed(0)),)


def loss(logits: Tensor, following: Tensor) -> Tensor:
    """Return the mean cross entropy (nats per character) over all positions of all blocks."""
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=3e-3)


def train_data() -> TensorDataset:
    """Return the blocks of the first nine tenths of the text, each with the characters one place on."""
    text = _text()
    return _blocks(text[: len(text) * 9 // 10])


def test_data() -> TensorDataset:
    """Return the blocks of the last tenth of the text."""
    text = _text()
    return _blocks(text[len(text) * 9 // 10 :])


def _text() -> Tensor:
    from pydoc_data.topics import topics

    place = {character: number for number, character in enumerate(ALPHABET)}
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor([place.get(character, place["?"]) for character in text])


def _blocks(text: Tensor) -> TensorDataset:
    blocks = (len(text) - 1) // BLOCK
    return TensorDataset(text[: blocks * BLOCK].view(-1, BLOCK), text[1 : blocks * BLOCK + 1].view(-1, BLOCK))
