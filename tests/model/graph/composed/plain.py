"""Parts that compute with tensors alone, in every way that models do: what they do is the same for all inputs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.model.graph.composed.base import WIDTH, WORDS, Inputs, Part, parts_in


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, sparse=True)

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return x + self.table(inputs.words)


class SparseProduct(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        places = torch.arange(WIDTH)
        matrix = torch.sparse_coo_tensor(torch.stack([places, places.flip(0)]), torch.ones(WIDTH), (WIDTH, WIDTH))
        y = self.inner(x)
        return torch.sparse.mm(matrix, y.reshape(-1, WIDTH).t()).t().reshape(x.shape)


class Filled(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        whole = torch.empty_like(x)
        for i in range(2):
            whole[..., i::2] = self.inner(x + i)[..., i::2]
        return whole


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.cfloat))

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * self.turn).reshape(x.shape)


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.GELU())

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.layers(x)


class BatchNorm(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2)


class LayerNorm(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.norm(x + self.inner(x))


class InPlace(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        y = self.inner(x)
        y[:, 0] += 1.0
        y.mul_(0.5).add_(x)
        return F.relu(y, inplace=True)


class Twice(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return torch.tanh(self.inner(torch.tanh(self.inner(x))))


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Tanh()})
        self.scales = nn.ParameterList(torch.ones(WIDTH) * i for i in (1, 2))

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        for way, scale in zip(self.ways.values(), self.scales, strict=True):
            x = way(x) * scale
        return x


class Checkpointed(Dropout):
    reentrant = False

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class Autocast(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.inner(x)
        return y.float()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return 3 * gradient * torch.sigmoid(x)


class OwnFunction(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.inner(_Doubled.apply(x))  # type: ignore[no-untyped-call]


class WithoutGradients(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        with torch.no_grad():
            shift = self.inner(x).mean(1, keepdim=True)
        return self.inner(x) - shift + x.detach()


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        y = self.inner(x) * scale
        return {"first": y, "others": (y * 2, None, [y.sum(-1, keepdim=True)])}


class ManyOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two = _Two()

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        made = self.two(x, scale=0.5)
        return made["first"] + made["others"][0] * made["others"][2][0]


class ConstantBuffer(Part):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(64, WIDTH), persistent=False)

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.inner(x) + self.table[: x.shape[1]]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(64, WIDTH)

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return x + self.places(torch.arange(x.size(1)))


class Frozen(Part):
    def __init__(self) -> None:
        super().__init__()
        self.inner.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.inner(x) * self.scale


class Double(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return (self.inner(x).double() * torch.pi).sin().to(x.dtype)


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return torch.einsum("bld,de->ble", x, self.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return x + self.attention(x, x, x, need_weights=False)[0]


class ScaledProduct(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        y = self.inner(x)
        return F.scaled_dot_product_attention(y, x, x, attn_mask=inputs.mask[:, None, :] | True)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.layer(x)[0]


class LongMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        y, (_, state) = self.layer(x)
        return y + state[-1][:, None]


class Sorted(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        order = torch.argsort(x.sum(-1), 1)
        return self.inner(x.gather(1, order[..., None].expand_as(x)))


class Loop(Part):
    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return torch.stack([self.inner(step) for step in x.unbind(1)], 1)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, inputs: Inputs) -> Any:
        return self.layer(x)


PARTS = parts_in(globals())
