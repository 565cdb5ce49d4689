"""Train low-rank adapters (LoRA, Hu et al. 2021) of a frozen Transformer: only they travel between replicas.

python lora.py
"""

from functools import partial
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from funcpipe import FuncPipe

BLOCK, WIDTH, MICRO_BATCH, GLOBAL_BATCH = 32, 64, 8, 32


class LoRA(nn.Module):
    """A frozen linear layer plus a trainable product of two matrices of rank `rank`, which begins as zero."""

    def __init__(self, layer: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        self.scale = alpha / rank
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output and the adapter's."""
        return self.layer(x) + self.scale * self.up(self.down(x))


class Language(nn.Module):
    """Bytes to the logits of the bytes that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        layer = partial(nn.TransformerEncoderLayer, WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(BLOCK))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, shape (batch, BLOCK, 256)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        return self.head(x)


def loss(logits: Tensor, following: Tensor) -> Tensor:
    """The mean cross entropy of all positions."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def main() -> None:
    """Freeze all but the adapters, train them, and say how little was trained."""
    torch.manual_seed(0)
    model = Language().requires_grad_(False)
    for block in model.blocks:
        block.linear1, block.linear2 = LoRA(block.linear1), LoRA(block.linear2)
    model.head = LoRA(model.head)

    text = torch.tensor(list("\n".join(topics.values()).encode()[: 256 * BLOCK + 1]))
    data = TensorDataset(text[:-1].view(-1, BLOCK), text[1:].view(-1, BLOCK))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    pipe = FuncPipe(model, loss_fn=loss, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    pipe.profile(data[:MICRO_BATCH][0], micro_batch=MICRO_BATCH, platform="local", repeats=2)
    pipe.optimize(global_batch=GLOBAL_BATCH, time_value=3.84)
    result = pipe.train(data, epochs=2)

    trained = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad), sum(p.numel() for p in model.parameters())
    assert all(".down." in name or ".up." in name for name in trained)
    print(f"trained {numbers[0]} of {numbers[1]} numbers: loss {result.losses[0]:.2f} -> {result.losses[-1]:.2f}")


if __name__ == "__main__":
    main()
