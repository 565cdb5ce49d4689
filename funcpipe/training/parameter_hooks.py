"""Hooks of parameters (`Tensor.register_hook`), run in functions on gradients of the whole global batch.

In a user's script on whole batches a hook of a parameter runs once a step, on the sum over all uses of the parameter.
In a stage that sum is there once micro-batches are added, and replicas and other stages that hold the parameter have
given theirs; so autograd itself runs no hook here. The result of a hook takes the gradient's place before the norm of
the model's gradient is measured.

    backward(m) … → sums over replicas → sums over stages → hooks → norm → clipping → optimiser

Every stage that holds a tied parameter, and every replica, runs its hooks on the same sum with the same seed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from funcpipe.model.draws import GENERATORS, SHARED_GENERATORS, layer_seed, reseed

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
