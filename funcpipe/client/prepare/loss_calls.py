"""The state that calls of a loss leave for the next ones: found by calls on one micro-batch, and on another after it.

As with the forwards of a model, what every call writes anew, such as the parts of the loss for a log, does not count:
it is the same after two calls as after the second alone.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from funcpipe.errors import ModelError
from funcpipe.model.draws import GENERATORS
from funcpipe.model.graph.isolation import Snapshot
from funcpipe.model.graph.program import is_inside
from funcpipe.model.graph.python_state import Slot, differing, reached_state, why_not_plain
from funcpipe.model.graph.reachable import reached_of, reached_values
from funcpipe.model.graph.state_access import watched_attributes
from funcpipe.model.graph.values import NOTHING_CARRIED, Carried
from funcpipe.model.split.stage import LOSS, hold, trained_by
from funcpipe.model.tensors import copied, flatten, tree_map
from funcpipe.training.losses import LossFunction, seed_loss

_COPY = "functions compute the loss with a copy, which is not trained"

_REACH_WAY_OUT = (
    "return from the model's forward, as one more output, what the loss needs of it; put a penalty on weights into the "
    "forward, or use the optimiser's weight_decay; make a method of the model a function of output and target alone"
)


def check_reach(model: nn.Module, loss: LossFunction) -> None:
    """Raise ModelError if `loss` reaches trainable parameters of `model`, or has parameters that cannot be trained."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = reached_of(loss, trainable)
    if found:
        name, path = next(iter(found.items()))
        more = f", and {len(found) - 1} more of its parameters" if len(found) > 1 else ""
        raise ModelError(f"the loss holds {name} of the model as loss.{path}{more}; {_COPY}: {_REACH_WAY_OUT}")
    for path, value in reached_values(loss):
        if isinstance(value, nn.Parameter):
            if is_lazy(value):
                raise ModelError(f"the parameter loss.{path} has no shape yet; call the loss once before training")
        elif isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
            raise ModelError(
                f"loss.{path} requires a gradient, but is no parameter, so that it cannot be trained; "
                "make it an nn.Parameter, or leave out requires_grad"
            )


_CLOSE = 1e-4
"""The share by which two losses of the same output and target may differ, by rounding."""

_WAY_OUT = "keep it in a buffer, or as plain data in an attribute, of a loss that is an nn.Module, or compute it anew"


class LossCalls:
    """The calls of a loss that are made to try it. `call` computes it, in the precision of the run."""

    def __init__(self, loss: LossFunction, call: LossFunction, *, seed: int) -> None:
        self._loss = loss
        self._call = call
        self._seed = seed
        self._start = reached_state(loss)
        self._snapshot = Snapshot(loss)
        self._parameters = [(p, p.detach().clone()) for p in trained_by(loss).values()]

    def check_untouched(self, by: str) -> None:
        """Raise ModelError if what the loss reaches has changed `by` something else than its calls."""
        changed = differing(self._start, reached_state(self._loss))
        if changed:
            raise ModelError(
                f"{by} changes {_named(changed)}, which the loss may read; functions compute the loss in a process of "
                "its own, where that stays as it was: return it from the model's forward, as one more output"
            )

    def carried(self, output: Any, target: Any, value: Any = None) -> Carried:
        """The state that calls leave for the next ones; with a `value`, the caller made the first, which returned it.

        Raises ModelError for what cannot be kept with a stage.
        """
        changed = differing(self._start, reached_state(self._loss))
        again = self._called(output, target)
        once = self._called(output, target) if value is None else _numbers(value)
        if not changed and _equal(again, once):
            return NOTHING_CARRIED
        self.restore()
        other = tree_map(output, _other_rows)
        alone = self._called(other, target)
        state = reached_state(self._loss)
        self.restore()
        self._called(output, target)
        after = self._called(other, target)
        slots = differing(state, reached_state(self._loss))
        if not slots and not _equal(alone, after):
            slots = changed
        slots = self._read_first(slots, other, target)
        if not slots and not (_equal(alone, after) and _equal(again, once)):
            raise ModelError(
                "the loss of the same output and target is another one when it is called again, by something that is "
                f"kept between its calls where it cannot be found, such as a random number generator; {_WAY_OUT}"
            )
        return self._kept(slots)

    def restore(self) -> None:
        """Bring the loss back to where it was."""
        self._snapshot.restore()
        with torch.no_grad():
            for parameter, value in self._parameters:
                if not torch.equal(parameter, value):
                    parameter.copy_(value)

    def _called(self, output: Any, target: Any) -> list[float]:
        seed_loss(self._seed, 0, 0)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first call has warned
            return _numbers(self._call(*copied((output, target))))

    def _read_first(self, slots: Sequence[Slot], output: Any, target: Any) -> list[Slot]:
        """`slots` without the attributes that a call writes before it reads them: what it makes of others."""
        modules = self._modules()
        own = [slot for slot in slots if slot.path in modules]
        with watched_attributes(hold(self._loss, _blocks(own)), own) as found:
            self._called(output, target)
        return [slot for slot in slots if not found.get(slot) or found[slot][0].is_read]

    def _kept(self, slots: Sequence[Slot]) -> Carried:
        """The `slots` as what the last stage keeps."""
        modules, now = self._modules(), reached_state(self._loss)
        buffers, attributes = list[str](), list[str]()
        for slot in slots:
            module, name = modules.get(slot.path), _below(str(slot))
            if module is not None and slot.attribute in module._parameters:
                raise ModelError(
                    f"each call of the loss changes its parameter {_named([slot])}, besides the optimiser; compute "
                    "with a changed copy instead, such as F.normalize(weight)"
                )
            if module is None or "." in slot.attribute:
                raise ModelError(f"each call of the loss changes {_named([slot])} for the next one; {_WAY_OUT}")
            if slot.attribute in module._buffers:
                buffers.append(name)
            elif reason := why_not_plain(now[slot]):
                raise ModelError(
                    f"each call of the loss leaves {reason} in {_named([slot])} for the next one, which cannot be kept "
                    f"with a stage; {_WAY_OUT}"
                )
            else:
                attributes.append(name)
        return Carried(blocks=_blocks(slots), attributes=tuple(attributes), buffers=tuple(buffers))

    def _modules(self) -> dict[str, nn.Module]:
        return {path: value for path, value in reached_values(self._loss) if isinstance(value, nn.Module)}


@contextmanager
def trying(loss: LossFunction, call: LossFunction, *, seed: int) -> Iterator[LossCalls]:
    """Calls of `loss` within this context, after which it, and the random number generators, are as before."""
    calls = LossCalls(loss, call, seed=seed)
    states = {name: read() for name, (read, _) in GENERATORS.items()}
    try:
        yield calls
    finally:
        calls.restore()
        for name, (_, write) in GENERATORS.items():
            write(states[name])


def _below(path: str) -> str:
    return f"{LOSS}.{path}".rstrip(".")


def _blocks(slots: Sequence[Slot]) -> tuple[str, ...]:
    paths = dict.fromkeys(_below(slot.path) for slot in slots)
    return tuple(path for path in paths if not any(_is_below(path, other) for other in paths))


def _is_below(path: str, other: str) -> bool:
    return path != other and is_inside(path, other)


def _named(slots: Sequence[Slot]) -> str:
    more = f" and {len(slots) - 1} more" if len(slots) > 1 else ""
    return f"loss.{slots[0]}{more}"


def _numbers(value: Any) -> list[float]:
    return [leaf.detach().double().sum().item() for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and bool(
        torch.allclose(torch.tensor(one), torch.tensor(other), rtol=_CLOSE, atol=1e-12, equal_nan=True)
    )


def _other_rows(value: Any) -> Any:
    """The rows of a tensor in another order, for other samples of the kind."""
    return value.detach().flip(0) if isinstance(value, Tensor) and value.dim() else value
