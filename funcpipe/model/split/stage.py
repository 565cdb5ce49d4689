"""One stage of a model: a module with its own layers and nothing else; the last one also holds modules of its loss.

What a loss holds that is trained with the last stage, or that its calls change, is a module beside the stage's own. Its
names are those of the loss below "<loss>", which no module of a user's has:

    loss.head.weight    ->    <loss>.head.weight
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from funcpipe.model.draws import is_from_torch
from funcpipe.model.graph.modes import set_mode
from funcpipe.model.graph.node_functions import expect_sizes
from funcpipe.model.graph.program import WHOLE, Call, attribute, is_inside, resolve, run, share_contents
from funcpipe.model.graph.reachable import reached_values
from funcpipe.model.graph.values import NOTHING_CARRIED, Carried, Crossing, Statistic, Value, first_few
from funcpipe.model.tensors import Tree, copied, flatten

LOSS = "<loss>"
"""The path at which the last stage holds the modules of its loss; no module of a user's can have it."""


@dataclass(frozen=True)
class LayerProgram:
    """One layer as a stage runs it."""

    name: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class StageProgram:
    """The program of a stage: its layers in order, the values it receives and sends, the leaves of the model's output.

    `placeholders` maps model inputs to their nodes; `symbols` maps the nodes of free sizes, such as the batch size, to
    where they are read: an input or received value, and its dimension. `claims` are dimensions of sent values that are
    free sizes, and that later stages may read there: the value, the dimension, the size's node. `copied` are the inputs
    and received nodes that the stage writes into; `outputs` are Refs and constants, empty unless the stage is the last.
    """

    layers: tuple[LayerProgram, ...]
    placeholders: Mapping[str, str]
    symbols: Mapping[str, tuple[str, int]]
    claims: tuple[tuple[str, int, str], ...]
    copied: frozenset[str]
    received: tuple[Crossing, ...]
    sent: tuple[Crossing, ...]
    values: Mapping[str, Value]
    outputs: tuple[Any, ...]
    output_tree: Tree


class StageModule(nn.Module):
    """The layers of one stage with their parameters, which keep their names in the user's `state_dict`.

    `inputs` are the model inputs that it reads; `receives` and `sends` name the values from earlier and for later
    stages; gradients are sent back for those in `differentiable`. `shared` maps each parameter that other stages use
    too to its common name: these gradients must be summed. `other_names` maps names that the model has for tensors of
    the stage, but the stage has not, to those that the stage has. `carried` is what a forward leaves for the next one.
    `fixed` names the tensors, each by its first name, that no step is to change: checkpoints do without them.
    """

    def __init__(
        self,
        program: StageProgram,
        *,
        is_last: bool,
        training: Mapping[str, bool],
        statistics: tuple[Statistic, ...],
        shared: Mapping[str, str],
        other_names: Mapping[str, str],
        carried: Carried = NOTHING_CARRIED,
    ) -> None:
        super().__init__()
        self.program = program
        self.is_last = is_last
        self.inputs: tuple[str, ...] = tuple(program.placeholders)
        self.receives: tuple[str, ...] = _names(program.received)
        self.sends: tuple[str, ...] = _names(program.sent)
        self.differentiable = frozenset(name for name, value in program.values.items() if value.differentiable)
        self.statistics = statistics
        self.shared = dict(shared)
        self.other_names = dict(other_names)
        self.carried = carried
        self.training_modes = dict(training)
        self.fixed: frozenset[str] = frozenset()
        self._settled: dict[str, tuple[Tensor, int]] = {}

    def settle(self) -> None:
        """Note what the `fixed` tensors are, so that one that code changes all the same is seen."""
        named = (*self.named_buffers(remove_duplicate=False), *self.named_parameters(remove_duplicate=False))
        self._settled = {name: (tensor, tensor._version) for name, tensor in named if name in self.fixed}

    def is_fixed(self, name: str, tensor: Tensor) -> bool:
        """Return whether `tensor`, by its first name, is one of the `fixed`, and as it was."""
        before, version = self._settled.get(name, (tensor, tensor._version))
        return name in self.fixed and before is tensor and version == tensor._version

    def forward(
        self, values: Mapping[str, Tensor], seed: tuple[int, int, int] | None = None
    ) -> tuple[dict[str, Tensor], Any]:
        """Run the stage on one micro-batch: `values` holds its inputs and what it receives, by name.

        `seed` is (seed of the run, step, micro-batch); None leaves the random number generators alone. Returns what it
        sends, by name, and the model's output if it is the last stage, else None.
        """
        program = self.program
        sizes: dict[str, int] = {}
        env: dict[str, Any] = {node: values[name] for name, node in program.placeholders.items()}
        for crossing in program.received:
            env[crossing.node] = self._unpacked(crossing, values)
        for node, (name, dim) in program.symbols.items():
            env[node] = sizes[node] = values[name].size(dim)
        for node in program.copied:
            env[node] = copied(env[node])
        for layer in program.layers:
            run(layer.calls, env, self, seed)
        sent = {name: tensor for crossing in program.sent for name, tensor in _packed(crossing, env[crossing.node])}
        for name, dim, node in program.claims:
            if sent[name].size(dim) != sizes[node]:
                expect_sizes(sent[name], "", f"{name}, which stages send each other,", None, dim, sizes[node])
        if not self.is_last:
            return sent, None
        return sent, program.output_tree.unflatten(iter(resolve(list(program.outputs), env)))

    @property
    def may_draw_backwards(self) -> bool:
        """Return whether a backward may draw random numbers: under checkpoints, the user's code runs there again."""
        seeded = [call for layer in self.program.layers for call in layer.calls if call.draws is not None]
        modules = [attribute(self, call.target) for call in seeded if call.op == "call_module"]
        return any(not is_from_torch(module) for module in modules)

    def train(self, mode: bool = True) -> "StageModule":
        """Call the own `train()` or `eval()` of the user's modules; then each is in the mode in which it was traced in
        training, or all are in eval mode.
        """
        self.training = mode
        if WHOLE in vars(self):
            vars(self)[WHOLE].train(mode)
        else:
            _set_modes(self, training=mode)
        if mode:
            self.set_traced_modes()
        else:
            for module in self._user_modules().values():
                module.training = False
        return self

    def set_traced_modes(self) -> None:
        """Put each module into the mode in which it was traced."""
        for name, module in self._user_modules().items():
            module.training = self.training_modes.get(name, True)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Those of the stage, and then those that hold what belongs to its loss."""
        memo = set() if memo is None else memo
        yield from super().named_modules(memo, prefix, remove_duplicate)
        if LOSS in vars(self):
            yield from vars(self)[LOSS].named_modules(memo, f"{prefix}.{LOSS}".lstrip("."), remove_duplicate)

    def _user_modules(self) -> dict[str, nn.Module]:
        found = dict(self.named_modules())
        del found[""]
        return {**found, "": self.whole_model()} if WHOLE in vars(self) else found

    def attach_whole(self, model: nn.Module) -> None:
        """Hold a model that runs as a whole; its contents become those of this stage, under their own names."""
        vars(self)[WHOLE] = model
        share_contents(self, model)

    def whole_model(self) -> nn.Module:
        """The user's model, in a stage that runs it as a whole."""
        model: nn.Module = vars(vars(self)[WHOLE])["model"]
        return model

    def _unpacked(self, crossing: Crossing, values: Mapping[str, Tensor]) -> Any:
        leaves = []
        for name, constant in zip(crossing.names, crossing.constants, strict=True):
            if name is None:
                leaves.append(constant)
            elif self.program.values[name].scalar:
                leaves.append(values[name].item())
            else:
                leaves.append(_with_layout(values[name], self.program.values[name]))
        return crossing.tree.unflatten(iter(leaves))


def _set_modes(module: nn.Module, *, training: bool) -> None:
    """Call `train()` or `eval()` of the modules in `module`; what stands for those of which only parts are here is
    passed through.
    """
    for child in module.children():
        if type(child) is nn.Module:
            child.training = training
            _set_modes(child, training=training)
        else:
            set_mode(child, training=training)


def _with_layout(tensor: Tensor, value: Value) -> Tensor:
    """`tensor` with its dimensions ordered in memory as those of `value` were; contiguous if those overlapped."""
    order = sorted(range(tensor.dim()), key=lambda d: (-value.stride[d], d))
    if order == list(range(tensor.dim())) or 0 in value.stride:
        return tensor
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


def _packed(crossing: Crossing, value: Any) -> list[tuple[str, Tensor]]:
    leaves, _ = flatten(value)
    pairs = zip(crossing.names, leaves, strict=True)
    return [
        (name, leaf if isinstance(leaf, Tensor) else torch.tensor(leaf)) for name, leaf in pairs if name is not None
    ]


def _names(crossings: tuple[Crossing, ...]) -> tuple[str, ...]:
    return tuple(name for crossing in crossings for name in crossing.names if name is not None)


_T = TypeVar("_T")

_BELOW = f"{LOSS}."


def trained_by(loss: Callable[..., Any]) -> dict[str, nn.Parameter]:
    """The trainable parameters that `loss` reaches, by name: those of a module in its order, each once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, value in reached_values(loss):
        if isinstance(value, nn.Module):
            for name, parameter in value.named_parameters(prefix=path):
                found.setdefault(id(parameter), (name, parameter))
        elif isinstance(value, nn.Parameter):
            found.setdefault(id(value), (path, value))
    return {_BELOW + name: parameter for name, parameter in found.values() if parameter.requires_grad}


def hold(loss: Callable[..., Any], blocks: Collection[str] = ()) -> nn.Module:
    """A module with the very parameters that `loss` trains, and its modules at the paths `blocks` as they are."""
    if LOSS in blocks:
        assert isinstance(loss, nn.Module), "only modules are blocks"
        return loss
    holder, values = nn.Module(), dict(reached_values(loss)) if blocks else {}
    for block in blocks:
        _owner(holder, block)._modules[block.rpartition(".")[2]] = values[block.removeprefix(_BELOW)]
    for name, parameter in trained_by(loss).items():
        if not any(is_inside(name, block) for block in blocks):
            _owner(holder, name)._parameters[name.rpartition(".")[2]] = parameter
    return holder


def attach_loss(stage: StageModule, loss: Callable[..., Any], carried: Carried) -> None:
    """Let the last `stage` have what `loss` trains, and what its calls leave for the next ones as `carried` says."""
    if not carried.names and not trained_by(loss):
        return
    holder, own = hold(loss, carried.blocks), stage.carried
    vars(stage)[LOSS] = holder
    stage.training_modes |= {name: module.training for name, module in holder.named_modules(prefix=LOSS)}
    stage.carried = Carried(
        blocks=(*own.blocks, *carried.blocks),
        attributes=(*own.attributes, *carried.attributes),
        buffers=(*own.buffers, *carried.buffers),
    )


def modules_of(loss: Callable[..., Any] | None) -> list[nn.Module]:
    """The modules that `loss` reaches, those inside others too."""
    return [value for _, value in reached_values(loss) if isinstance(value, nn.Module)]


@contextlib.contextmanager
def in_eval_mode(loss: Callable[..., Any] | None) -> Iterator[None]:
    """Put the modules that `loss` reaches into eval mode for a while."""
    modules = modules_of(loss)
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def kept_names(carried: Carried) -> str:
    """The state that calls of a loss leave for the next ones, for a message."""
    return first_few(list(of_loss(dict.fromkeys(carried.names))))


def block_names(names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names`, of blocks of the last stage, that are the loss's."""
    return tuple(name for name in names if is_inside(name, LOSS))


def of_model(named: Mapping[str, _T]) -> dict[str, _T]:
    """Those of `named` that are the model's own."""
    return {name: value for name, value in named.items() if not is_inside(name, LOSS)}


def of_loss(named: Mapping[str, _T]) -> dict[str, _T]:
    """Those of `named` that are the loss's, under the names that the loss has for them."""
    return {name.removeprefix(LOSS).removeprefix("."): v for name, v in named.items() if is_inside(name, LOSS)}


def below_loss(named: Mapping[str, _T]) -> dict[str, _T]:
    """Those that the loss has `named`, under the names that a stage has for them."""
    return {f"{_BELOW}{name}".rstrip("."): value for name, value in named.items()}


def _owner(holder: nn.Module, name: str) -> nn.Module:
    """The module in `holder` that is to have the entry `name`; those on the way are made."""
    for part in name.removeprefix(_BELOW).split(".")[:-1]:
        holder = holder._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    return holder
