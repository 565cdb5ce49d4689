"""One stage of a model: a module that holds its own layers and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.model.graph.program import Call, resolve, run
from funcpipe.model.graph.tree import Tree, rebuild, take_apart
from funcpipe.model.graph.values import Crossing, Statistic, Value
from funcpipe.model.seeds import layer_seed, reseed


@dataclass(frozen=True)
class Part:
    """One layer as a stage runs it: its calls, and the generators of random numbers that they use."""

    name: str
    calls: tuple[Call, ...]
    draws: frozenset[str]


@dataclass(frozen=True)
class Recipe:
    """What a stage does: layers in order, where its values come from and go to, and what the model's output is made
    of.

    `placeholders` are the node names of the model inputs; `batch` is the node that stands for the batch size, and the
    input or value that has it as its first dimension; `copied` are the nodes, among those and the received, that the
    stage writes into; `outputs` are Refs and constants, empty unless the stage is last.
    """

    parts: tuple[Part, ...]
    placeholders: Mapping[str, str]
    batch: tuple[str, str] | None
    copied: frozenset[str]
    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]
    values: Mapping[str, Value]
    outputs: tuple[Any, ...]
    output_tree: Tree


class StageModule(nn.Module):
    """The layers of one stage, with only their parameters, which keep the names they have in the user's `state_dict`.

    `inputs` are the model inputs it reads; `receives` and `sends` name the values that come from earlier stages and
    that later ones need; of those, gradients travel back for the ones in `differentiable`. `shared` maps each of its
    parameters that other layers use as well to the name that all stages know it by: their gradients must be summed.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        is_last: bool,
        training: Mapping[str, bool],
        statistics: tuple[Statistic, ...],
        shared: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.recipe = recipe
        self.is_last = is_last
        self.inputs: tuple[str, ...] = tuple(recipe.placeholders)
        self.receives: tuple[str, ...] = _names(recipe.received)
        self.sends: tuple[str, ...] = _names(recipe.sent)
        self.differentiable = frozenset(name for name, value in recipe.values.items() if value.differentiable)
        self.statistics = statistics
        self.shared = dict(shared)
        self.training_modes = dict(training)

    def forward(
        self, values: Mapping[str, Tensor], seed: tuple[int, int, int] | None = None
    ) -> tuple[dict[str, Tensor], Any]:
        """Run the stage on one micro-batch: `values` holds its inputs and what it receives, by name.

        `seed` is (seed of the run, step, micro-batch); None leaves torch's random number generator alone. Gives what
        it sends, by name, and the model's output if it is the last stage, else None.
        """
        recipe = self.recipe
        env: dict[str, Any] = {node: values[name] for name, node in recipe.placeholders.items()}
        for crossing in recipe.received:
            env[crossing.node] = self._unpacked(crossing, values)
        if recipe.batch is not None:
            env[recipe.batch[0]] = values[recipe.batch[1]].size(0)
        for node in recipe.copied:
            env[node] = rebuild(env[node], lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
        for part in recipe.parts:
            if part.draws and seed is not None:
                reseed(layer_seed(*seed, part.name), part.draws)
            run(part.calls, env, self)
        sent = {name: tensor for crossing in recipe.sent for name, tensor in _packed(crossing, env[crossing.node])}
        if not self.is_last:
            return sent, None
        return sent, recipe.output_tree.join(iter(resolve(list(recipe.outputs), env)))

    def train(self, mode: bool = True) -> "StageModule":
        """Training mode, in which modules that the user had put in eval mode stay so; or eval mode for all."""
        super().train(mode)
        for name, module in self.named_modules():
            if name:
                module.training = mode and self.training_modes.get(name, True)
        return self

    def _unpacked(self, crossing: Crossing, values: Mapping[str, Tensor]) -> Any:
        leaves = []
        for name, constant in zip(crossing.names, crossing.constants, strict=True):
            if name is None:
                leaves.append(constant)
            elif self.recipe.values[name].scalar:
                leaves.append(values[name].item())
            else:
                leaves.append(restored(values[name], self.recipe.values[name]))
        return crossing.tree.join(iter(leaves))


def restored(tensor: Tensor, value: Value) -> Tensor:
    """`tensor` with its dimensions in the order in memory that `value` had; contiguous where that was overlapping."""
    order = sorted(range(tensor.dim()), key=lambda d: (-value.stride[d], d))
    if order == list(range(tensor.dim())) or 0 in value.stride:
        return tensor
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


def _packed(crossing: Crossing, value: Any) -> list[tuple[str, Tensor]]:
    leaves, _ = take_apart(value)
    pairs = zip(crossing.names, leaves, strict=True)
    return [
        (name, leaf if isinstance(leaf, Tensor) else torch.tensor(leaf)) for name, leaf in pairs if name is not None
    ]


def _names(crossings: tuple[Crossing, ...]) -> tuple[str, ...]:
    return tuple(name for crossing in crossings for name in crossing.names if name is not None)
