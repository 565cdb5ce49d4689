"""The encoder of BERT-Large (Devlin et al., 2019) on 64 words, finding the first and the last word of an answer.

Of its 302,328,834 parameters 302,260,224 are the 24 blocks (12,594,176 each), 66,560 the embedding of 64 positions
with its normalisation, 2,050 the two scores of each word. Words come in as vectors, since the table of word embeddings
is not counted. Unlike the original it has no token types and no pooler, and normalisations with a scale but no shift.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Every word looks at every word."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined


class Block(nn.Module):
    """Attention, then a small network for each word; each is added to what came in and the sum is normalised."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.dropout1 = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.expand = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.contract = nn.Linear(4 * width, width)
        self.dropout2 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout1(self.attention(x)))
        joined: Tensor = self.norm2(x + self.dropout2(self.contract(self.gelu(self.expand(x)))))
        return joined


class Positions(nn.Module):
    """Add to each word's vector that of its place."""

    def __init__(self, sequence: int, width: int, dropout: float) -> None:
        super().__init__()
        self.places = nn.Parameter(0.02 * torch.randn(sequence, width))
        self.norm = nn.LayerNorm(width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, words: Tensor) -> Tensor:
        placed: Tensor = self.dropout(self.norm(words + self.places))
        return placed


class BertEncoder(nn.Module):
    """Word vectors (batch, sequence, width) to scores (batch, sequence, 2)."""

    def __init__(
        self, layers: int = 24, width: int = 1024, heads: int = 16, sequence: int = 64, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.positions = Positions(sequence, width, dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.scores = nn.Linear(width, 2)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.blocks(self.positions(words)))
        return scores


def model() -> nn.Module:
    return BertEncoder()


def sample() -> tuple[Tensor, ...]:
    return (torch.randn(4, 64, 1024, generator=torch.Generator().manual_seed(0)),)


def target() -> Tensor:
    return torch.randint(64, (4, 2), generator=torch.Generator().manual_seed(1))


def loss(scores: Tensor, span: Tensor) -> Tensor:
    """Return the mean cross entropy of the first and the last word; `span` holds their places (batch, 2)."""
    return F.cross_entropy(scores, span)
