"""A stage's optimiser: made as plain PyTorch makes that of the whole model, and its state as tensors and JSON.

In every stage the factory is given all trainable parameters of the model, in the model's order, under their full names.
Those of other stages are stand-ins without memory, which leave the optimiser once it is made. So a factory may group
parameters by name, by shape or by position, and may leave some out: every stage has the same groups with the same
settings, some of them empty, and a scheduler with a value for each group fits in every stage.

    whole model      group 0: a.weight b.weight     group 1: a.bias b.bias
    stage of `b`     group 0: b.weight              group 1: b.bias

A saved group holds its number, the names of those parameters that the stage has, and its settings; so a stage finds the
settings of all its groups, however the model is cut, those too of groups that are empty there.

Checkpoints hold tensors in safetensors files and everything else as JSON, so nothing read from storage is unpickled.
`split_tensors({"step": 3, "exp_avg": t}, "optimizer/w", tensors)` gives

    {"dict": {"step": 3, "exp_avg": {"tensor": "optimizer/w/exp_avg"}}}

and puts `t` into `tensors` under "optimizer/w/exp_avg"; `join_tensors` is the inverse.
"""

import inspect
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from funcpipe.core.texts import error_text
from funcpipe.errors import FuncPipeError, InputError, ModelError, PlanError
from funcpipe.model.split.stage import trained_by
from funcpipe.training.losses import LossFunction

OptimizerFactory = Callable[..., Optimizer]
"""Makes the optimiser of the parameters that it is given; if its argument is called `named_parameters`, of pairs of
their full names and the parameters.
"""

NAMED = "named_parameters"
"""A factory whose argument has this name is given pairs of name and parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShape:
    """A trainable parameter of the model, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def stand_in(self) -> nn.Parameter:
        """Return a parameter of this shape that takes the memory of one element."""
        return nn.Parameter(torch.zeros((), dtype=self.dtype).expand(self.shape))


def trainable_shapes(model: nn.Module, loss: LossFunction | None = None) -> tuple[ParameterShape, ...]:
    """Return the trainable parameters of `model`, in its order, and then those of `loss`; tied ones once, under their
    first name.

    Lazy ones, which have no shape yet, are left out. Raises ModelError for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model must be an nn.Module that is made already, got {model!r}")
    named = [*model.named_parameters(), *({} if loss is None else trained_by(loss)).items()]
    return tuple(
        ParameterShape(name=name, shape=tuple(parameter.shape), dtype=parameter.dtype)
        for name, parameter in named
        if parameter.requires_grad and not is_lazy(parameter)
    )


def takes_names(factory: Callable[..., Any]) -> bool:
    """Return True if an optimiser factory asks for the parameters' names."""
    try:
        return NAMED in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # builtins may have no signature
        return False


def call_factory(factory: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return the optimiser that `factory` makes of parameters, of which it gets the names if it asks for them."""
    if takes_names(factory):
        return factory(**{NAMED: list(named)})
    return factory([parameter for _, parameter in named])


def stage_optimizer(
    factory: OptimizerFactory, own: Mapping[str, nn.Parameter], whole: Sequence[ParameterShape]
) -> Optimizer:
    """Return the optimiser of a stage's `own` parameters, which is made as that of the `whole` model.

    `own` has each parameter under its name in `whole`, or under a name of its own if that does not hold it.
    """
    named = [(shape.name, own[shape.name] if shape.name in own else shape.stand_in()) for shape in whole]
    known = {shape.name for shape in whole}
    named += [(name, parameter) for name, parameter in own.items() if name not in known]
    optimizer = call_factory(factory, named)
    _leave_only(optimizer, {id(parameter) for parameter in own.values()})
    return optimizer


def _leave_only(optimizer: Optimizer, kept: set[int]) -> None:
    """Remove the stand-ins from `optimizer`: parameters whose ids are not `kept`."""
    for group in optimizer.param_groups:
        mine = [id(parameter) in kept for parameter in group["params"]]
        for field in ("params", "param_names"):
            if field in group:
                group[field] = list(compress(group[field], mine))
    for parameter in [key for key in optimizer.state if isinstance(key, nn.Parameter) and id(key) not in kept]:
        del optimizer.state[parameter]


_ELEMENTS = 100_000  # of a model that is tried as it is; of a larger one the dimensions are cut

_SMALL = 8  # the size of a dimension that is cut


def small_parameters(shapes: Sequence[ParameterShape]) -> list[tuple[str, nn.Parameter]]:
    """Parameters of these names, with a few elements each in a large model."""
    return [(one.name, nn.Parameter(torch.zeros(one.shape, dtype=one.dtype))) for one in small_shapes(shapes)]


def small_shapes(shapes: Sequence[ParameterShape]) -> tuple[ParameterShape, ...]:
    """Return the same parameters, in a large model with a few elements each."""
    if _is_small(shapes):
        return tuple(shapes)
    return tuple(replace(shape, shape=tuple(min(size, _SMALL) for size in shape.shape)) for shape in shapes)


def _is_small(shapes: Sequence[ParameterShape]) -> bool:
    return sum(math.prod(shape.shape) for shape in shapes) <= _ELEMENTS


def made_optimizer(factory: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    """Return `factory`'s optimiser of these parameters. Raises InputError if it is not an optimiser of them."""
    given = "pairs of name and parameter" if takes_names(factory) else "parameters"
    try:
        made: Any = call_factory(factory, named)
    except FuncPipeError:  # there is no factory
        raise
    except Exception as error:  # whatever a user's factory raises
        raise InputError(
            f"the optimiser cannot be made: {error_text(error)}; optimizer= is called with a list of the "
            f"model's {len(named)} trainable {given}"
        ) from error
    if isinstance(made, list | tuple) and sum(isinstance(one, Optimizer) for one in made) > 1:
        raise InputError(
            f"the optimiser factory returns {len(made)} optimisers, and a step over functions is that of one; if they "
            "step together, make them groups of one optimiser; if in turn, train their parts in turn: see Several "
            "optimisers in docs/training.md"
        )
    if not isinstance(made, Optimizer):
        raise InputError(
            f"the optimiser factory returns a {type(made).__name__}; it must return a torch.optim.Optimizer of the "
            "parameters that it is given"
        )
    known = {id(parameter) for _, parameter in named}
    strange = [p for group in made.param_groups for p in group["params"] if id(p) not in known]
    if strange:
        raise InputError(
            f"the optimiser, {kind_of(made)}, holds {len(strange)} parameters that its factory was not given, the "
            f"first of shape {list(strange[0].shape)}: functions train their own copies, so let the factory use its "
            "argument, such as optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
        )
    if not any(group["params"] for group in made.param_groups):
        raise InputError(f"the optimiser, {kind_of(made)}, holds none of the model's {len(named)} trainable parameters")
    return made


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if all elements are the same numbers, or NaN in both."""
    return torch.equal(one, other) or bool(torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all())


def kind_of(optimizer: Optimizer) -> str:
    """Return the name of `optimizer` in messages."""
    return type(optimizer).__name__


OPTIMIZER = "optimizer/"
"""The prefix of the names of the optimiser's tensors."""

_NOT_SETTINGS = frozenset({"params", "param_names"})


def capture_optimizer(optimizer: Optimizer, name_of: Mapping[int, str], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The state of `optimizer` as JSON; its tensors go into `tensors`. `name_of` has each parameter's name by its id.

    Raises ModelError if it is not plain data.
    """
    strange = [type(key).__name__ for key in optimizer.state if id(key) not in name_of]
    if strange:
        raise ModelError(
            f"the optimiser keeps state for a {strange[0]} that is none of its parameters, which a checkpoint cannot "
            "hold; keep it for each parameter, or in the settings of the groups"
        )
    state = {
        name_of[id(p)]: split_tensors(kept, f"{OPTIMIZER}{name_of[id(p)]}", tensors)
        for p, kept in optimizer.state.items()
    }
    names = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return {"state": state, "groups": capture_groups(optimizer, names, tensors)}


def restore_optimizer(
    saved: Mapping[str, Any], optimizer: Optimizer, name_of: Mapping[int, str], tensors: Mapping[str, Tensor]
) -> None:
    """Go back to what `capture_optimizer` returned."""
    names = [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    restore_groups(saved["groups"], optimizer, names, tensors)
    for group in optimizer.param_groups:
        for p in group["params"]:
            if name_of[id(p)] in saved["state"]:
                optimizer.state[p] = join_tensors(saved["state"][name_of[id(p)]], tensors)


def capture_groups(
    optimizer: Optimizer, names: Sequence[Sequence[str]], tensors: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """Return the parameter groups as JSON; `names` lists each group's parameters by name."""
    return [
        {
            "number": number,
            "parameters": list(own),
            "settings": split_tensors(group_settings(group), f"{OPTIMIZER}group/{number}", tensors),
        }
        for number, (group, own) in enumerate(zip(optimizer.param_groups, names, strict=True))
    ]


def restore_groups(
    saved: Sequence[Mapping[str, Any]],
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    tensors: Mapping[str, Tensor],
) -> None:
    """Give the groups of `optimizer` their saved settings; `names` lists each group's parameters by name.

    Raises PlanError if the optimiser groups its parameters otherwise now.
    """
    settings_of = {name: group["settings"] for group in saved for name in group["parameters"]}
    for number, (group, own) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        trees = [settings_of[name] for name in own]
        found = [group_settings(join_tensors(tree, tensors)) for tree in trees]
        if any(other != found[0] for other in found):
            raise PlanError(
                "parameters that had different optimiser settings are now in one group; keep the optimiser as it was"
            )
        empty = [one["settings"] for one in saved if one.get("number") == number]
        if not own and empty:
            found = [group_settings(join_tensors(empty[0], tensors))]
        if found:
            group.update(found[0])


def select_optimizer(saved: Mapping[str, Any], source: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of a whole model's optimiser for a stage; `source` maps the stage's names to those in `saved`."""
    groups = saved["groups"]
    known = {name for group in groups for name in group["parameters"]}
    stored_as = {name: stored for name, stored in source.items() if stored in known}
    kept = []
    for group in groups:
        held = set(group["parameters"])
        if own := [name for name, stored in stored_as.items() if stored in held]:
            kept.append({**group, "parameters": own})
    numbers = {group.get("number") for group in kept}
    for group in groups:
        if group.get("number") not in numbers:
            numbers.add(group.get("number"))
            kept.append({**group, "parameters": []})
    return {"state": {n: saved["state"][s] for n, s in stored_as.items() if s in saved["state"]}, "groups": kept}


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group, without its parameters."""
    return {name: value for name, value in group.items() if name not in _NOT_SETTINGS}


def split_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` as JSON data; its tensors go into `tensors`, under `name` and their place in `value`.

    Raises ModelError for anything that is neither a tensor nor plain data.
    """
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) in (dict, OrderedDict, defaultdict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: split_tensors(item, f"{name}/{key}", tensors) for key, item in value.items()}}
    if type(value) in (list, tuple):
        items = [split_tensors(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]
        return {type(value).__name__: items}
    if type(value) in (dict, Counter) and all(isinstance(key, int | float | str) for key in value):
        pairs = [[key, split_tensors(item, f"{name}/{i}", tensors)] for i, (key, item) in enumerate(value.items())]
        return {"pairs" if type(value) is dict else "counter": pairs}
    owner = name.partition("/")[0].replace("optimizer", "optimiser")
    raise ModelError(
        f"the {owner} keeps a {type(value).__name__} ({name}), which a checkpoint cannot hold: only tensors, numbers, "
        "strings, lists, tuples, counters and dictionaries of these can be saved; keep it elsewhere, or leave it out "
        "of the state"
    )


def join_tensors(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the inverse of `split_tensors`; tensors are copied."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    match kind:
        case "tensor":
            return tensors[content].clone()
        case "dict":
            return {key: join_tensors(item, tensors) for key, item in content.items()}
        case "list":
            return [join_tensors(item, tensors) for item in content]
        case "tuple":
            return tuple(join_tensors(item, tensors) for item in content)
        case "pairs":
            return {key: join_tensors(item, tensors) for key, item in content}
        case "counter":
            return Counter({key: join_tensors(item, tensors) for key, item in content})
        case _:
            raise TypeError(f"unknown kind {kind!r}")


def tensor_names_in(tree: Any) -> Iterator[str]:
    """Yield the names of the tensors that `tree` refers to."""
    if isinstance(tree, dict):
        if _is_reference(tree):
            yield tree["tensor"]
        else:
            yield from tensor_names_in(list(tree.values()))
    elif isinstance(tree, list):
        for item in tree:
            yield from tensor_names_in(item)


def rename_tensors(tree: Any, names: Mapping[str, str]) -> Any:
    """Return `tree` referring to its tensors by new names: `names` maps old to new, what it lacks keeps its name."""
    if isinstance(tree, list):
        return [rename_tensors(item, names) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _is_reference(tree):
        return {"tensor": names.get(tree["tensor"], tree["tensor"])}
    return {key: rename_tensors(item, names) for key, item in tree.items()}


def _is_reference(tree: Mapping[str, Any]) -> bool:
    return tree.keys() == {"tensor"} and isinstance(tree["tensor"], str)
