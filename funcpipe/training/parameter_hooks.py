"""Hooks of parameters (`Tensor.register_hook`), run in functions on gradients of the whole global batch.

In a user's script on whole batches a hook of a parameter runs once a step, on the sum over all uses of the parameter.
In a stage that sum is there once micro-batches are added, and replicas and other stages that hold the parameter have
given theirs; so autograd itself runs no hook here. The result of a hook takes the gradient's place before the norm of
the model's gradient is measured.

    backward(m) … → sums over replicas → sums over stages → hooks → norm → clipping → optimiser

Every stage that holds a tied parameter, and every replica, runs its hooks on the same sum with the same seed.

A hook is sent to the functions by value. There it sees gradients alone, once a step, and begins anew whenever a
function is replaced. So it must need nothing of the model, change nothing, and return the same for the same gradient.
The trial before a run calls a copy, as functions get one, on the gradient of the first micro-batch, and refuses hooks
that functions cannot repeat.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from funcpipe.core.texts import error_text
from funcpipe.errors import ModelError
from funcpipe.model.draws import GENERATORS, SHARED_GENERATORS, layer_seed, reseed
from funcpipe.model.graph.python_state import differing, reached_state
from funcpipe.model.graph.reachable import reached_values
from funcpipe.model.split.bundle import dump_value, load_value

Hook = Callable[[Tensor], Tensor | None]
"""Takes a gradient, and returns what is to take its place; None leaves it as it is."""

NamedHooks = Mapping[str, tuple[Hook, ...]]
"""The hooks of parameters by name, in the order in which they run."""

NO_HOOKS: NamedHooks = MappingProxyType({})


def hooks_of(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, tuple[Hook, ...]]:
    """Return the hooks of those parameters that have some and require a gradient."""
    return {
        name: tuple(parameter._backward_hooks.values())
        for name, parameter in parameters
        if parameter._backward_hooks and parameter.requires_grad
    }


def hooked(hooks: Sequence[Hook], gradient: Tensor, *, seed: int) -> Tensor:
    """Return a copy of `gradient` after `hooks`, one after the other, which draw random numbers from `seed` on.

    Raises TypeError for a result of another kind, as torch raises RuntimeError.
    """
    found = gradient.detach().clone()
    with torch.no_grad(), SHARED_GENERATORS.computing():
        reseed(seed, GENERATORS)
        for hook in hooks:
            result = hook(found)
            if result is not None:
                _check_result(result, found)
                found = result
    return torch.empty_like(gradient).copy_(found)  # a hook may return what it keeps, or a tensor with strides of 0


def _check_result(result: object, gradient: Tensor) -> None:
    if not isinstance(result, Tensor):
        raise TypeError(f"it returns a {type(result).__name__}, which must be a tensor or None")
    one, other = ((tensor.dtype, tuple(tensor.shape)) for tensor in (result, gradient))
    if one != other:
        raise TypeError(
            f"it returns {_form(*one)}, which must have the dtype and shape of the gradient, {_form(*other)}"
        )


def _form(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def hook_seed(seed: int, step: int, name: str) -> int:
    """Return the seed of the random numbers that the hooks of the parameter `name` draw in `step`, in any stage."""
    return layer_seed(seed, step, 0, f"hooks of {name}")


class ParameterHooks:
    """Runs the hooks of one replica of a stage, once a step for each parameter."""

    def __init__(self, hooks: NamedHooks, parameters: Mapping[str, nn.Parameter], *, seed: int) -> None:
        """`parameters` are those of the stage, by their names in the model, and `hooks` those of some of them."""
        self._hooks = hooks
        self._names = {id(parameters[name]): name for name in hooks}
        self._parameters = [parameters[name] for name in hooks]
        self._seed = seed
        self._found: dict[str, Tensor | None] = {}

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def begin_step(self, step: int) -> None:
        """Start a step: no hook has run yet."""
        self._step = step
        self._found = {}

    def gradient(self, parameter: nn.Parameter, summed: Tensor | None, *, loss_factor: float) -> Tensor | None:
        """Return the `summed` gradient of `parameter`, which is that of the loss times `loss_factor`, after its hooks.

        Hooks see the gradient of the loss. If it has overflowed, which leaves the step out, they do not run.
        """
        name = self._names.get(id(parameter))
        if name is None or summed is None:
            return summed
        if name not in self._found:
            self._found[name] = self._run(name, summed, loss_factor)
        return self._found[name]

    def replace_gradients(self, *, loss_factor: float) -> None:
        """Give the parameters, which hold their sums, what the hooks make of these."""
        for parameter in self._parameters:
            parameter.grad = self.gradient(parameter, parameter.grad, loss_factor=loss_factor)

    def _run(self, name: str, summed: Tensor, loss_factor: float) -> Tensor:
        seed = hook_seed(self._seed, self._step, name)
        if loss_factor == 1.0:
            return hooked(self._hooks[name], summed, seed=seed)
        if not bool(torch.isfinite(summed).all()):
            return summed
        return hooked(self._hooks[name], summed / loss_factor, seed=seed) * loss_factor


_SCALE = 2.0**16  # as of a loss in fp16


def check_hooks(model: nn.Module, used: Collection[nn.Parameter]) -> None:
    """Raise ModelError if a hook of a parameter of `model` that is `used` reaches the model, or waits for `.grad`."""
    known = {id(parameter) for parameter in used}
    named = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in known}
    _refuse_accumulated(named)
    hooks = hooks_of(named.items())
    if not hooks:
        return
    parts = _parts_of(model)
    for name, own in hooks.items():
        for hook in own:
            _refuse_reach(name, hook, named[name], parts)


def listed(names: Collection[str]) -> str:
    """Return the first of `names`, and how many more there are."""
    first = ", ".join(list(names)[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"


def _refuse_accumulated(named: Mapping[str, nn.Parameter]) -> None:
    names = [name for name, p in named.items() if p._post_accumulate_grad_hooks and p.requires_grad]
    if names:
        raise ModelError(
            f"register_post_accumulate_grad_hook was called on {listed(names)}: over functions, a gradient is "
            "complete only once those of all micro-batches and replicas are added. Leave steps to the optimiser that "
            "FuncPipe is given, and clipping to clip_grad_norm; to change a gradient, return the new one from a hook "
            "of register_hook"
        )


def _parts_of(model: nn.Module) -> dict[int, str]:
    """Return the modules, parameters and buffers of `model` in words, by identity."""
    found = {id(buffer): f"the buffer {name}" for name, buffer in model.named_buffers()}
    found |= {id(parameter): f"the parameter {name}" for name, parameter in model.named_parameters()}
    modules = {id(m): f"the module {path} ({type(m).__name__})" for path, m in model.named_modules()}
    return found | modules | {id(model): f"the model itself ({type(model).__name__})"}


def _refuse_reach(name: str, hook: Hook, parameter: nn.Parameter, parts: Mapping[int, str]) -> None:
    for path, value in reached_values(hook):
        if isinstance(value, RemovableHandle):
            raise ModelError(
                f"the hook of {name} reaches a handle that removes hooks, by {path}: functions run hooks in every "
                "step; let it return None where the gradient is to stay as it is"
            )
        what = None if value is parameter else parts.get(id(value))
        if what is not None:
            raise ModelError(
                f"the hook of {name} reaches {what}, by {path}, which is missing or out of date in functions: of the "
                "model it may read its own parameter alone. Give it what else it needs by value: a variable or a "
                "default of an argument with a copy, as of tensor.detach().clone(), made before register_hook"
            )


def try_hooks(model: nn.Module, hooks: NamedHooks, *, seed: int, scales_loss: bool) -> None:
    """Give the parameters of `model` what copies of their `hooks` make of their gradients.

    Raises ModelError for hooks that cannot be sent, fail, change what they reach, or depend on more than a gradient;
    where the loss `scales`, for those that do not scale with it.
    """
    if not hooks:
        return
    parameters = dict(model.named_parameters())
    tried = set[Any]()
    for name, own in _copies(hooks).items():
        gradient = parameters[name].grad
        if gradient is None:
            continue
        code = tuple(hook.__code__ if isinstance(hook, FunctionType) else id(hook) for hook in own)
        once = _called_without_change(name, own, gradient, hook_seed(seed, 0, name))
        if code not in tried:  # as one hook is often registered on many parameters
            _check_repeats(name, own, once, gradient, hook_seed(seed, 0, name), scales_loss=scales_loss)
        tried.add(code)
        parameters[name].grad = once


def _copies(hooks: NamedHooks) -> NamedHooks:
    try:
        bundle, tensors = dump_value(dict(hooks))
        copies: NamedHooks = load_value(bundle, {name: tensor.clone() for name, tensor in tensors.items()})
    except Exception as error:
        raise ModelError(
            f"the hooks of {listed(hooks)} cannot be sent to functions: {error_text(error)}; make that "
            "object inside the hook, or let it hold tensors and numbers alone"
        ) from error
    return copies


def _called_without_change(name: str, hooks: tuple[Hook, ...], gradient: Tensor, seed: int) -> Tensor:
    """Return the result of the hooks. Raises ModelError if they change what they reach."""
    before = [reached_state(hook) for hook in hooks]
    held = [(path, p, p.detach().clone()) for path, p in _parameters(hooks)]
    result = _called(name, hooks, gradient, seed)
    changed = [path for path, parameter, values in held if not torch.equal(parameter, values)]
    for hook, state in zip(hooks, before, strict=True):
        changed += map(str, differing(state, reached_state(hook)))
        if changed:
            raise ModelError(
                f"the hook of {name} changes what it reaches, {changed[0]}, but every function has a copy of its own, "
                "which begins anew when the function is replaced, and of which nothing comes back: let what it returns "
                "follow from the gradient alone, or remove it for training over functions"
            )
    return result


def _check_repeats(
    name: str, hooks: tuple[Hook, ...], once: Tensor, gradient: Tensor, seed: int, *, scales_loss: bool
) -> None:
    """Raise ModelError unless the hooks return `once` for the same gradient, whatever `.grad` and the scale are."""
    if not _are_close(_called(name, hooks, gradient, seed), once):
        raise ModelError(
            f"the hook of {name} returns something else for the same gradient and seeds, but replicas must agree: draw "
            "random numbers from the global generators of torch, numpy or random, and use nothing else that changes"
        )
    _check_grad_unread(name, hooks, gradient, seed, once)
    if scales_loss and not _are_close(_called(name, hooks, gradient * _SCALE, seed) / _SCALE, once):
        raise ModelError(
            f"the hook of {name} does something else to a gradient that is {_SCALE:.0f} times as large, as those of a "
            "scaled loss are (precision='fp16'), or those of a sum before its weight is known (reduction): let what it "
            "returns grow with the gradient, or train with precision='bf16' or 'fp32' and a loss that is a mean over "
            "samples"
        )


def _check_grad_unread(name: str, hooks: tuple[Hook, ...], gradient: Tensor, seed: int, result: Tensor) -> None:
    """Raise ModelError if the hook reads the `.grad` of its parameter, which in a script is not there yet."""
    own = [parameter for _, parameter in _parameters(hooks)]
    if not own:
        return
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    same = _are_close(_called(name, hooks, gradient, seed), result)
    for parameter in own:
        parameter.grad = None
    if not same:
        raise ModelError(
            f"the hook of {name} reads .grad of its parameter, which holds something else over functions, where "
            "micro-batches add to it; use the gradient that the hook is given, which is that of the whole global batch"
        )


def _parameters(hooks: tuple[Hook, ...]) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that hooks reach, each with its path."""
    return [(path, value) for hook in hooks for path, value in reached_values(hook) if isinstance(value, nn.Parameter)]


def _called(name: str, hooks: tuple[Hook, ...], gradient: Tensor, seed: int) -> Tensor:
    try:
        return hooked(hooks, gradient, seed=seed)
    except Exception as error:
        raise ModelError(
            f"the hook of {name} fails on the gradient of the first micro-batch, {list(gradient.shape)}: "
            f"{error_text(error)}"
        ) from error


def _are_close(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or torch.allclose(one, other, rtol=1e-4, atol=0.0, equal_nan=True)
