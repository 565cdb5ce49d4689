"""An optimiser divided over the replicas of a stage: each replica updates its own split of the parameters, and keeps
the optimiser's state for that split only.

This is ZeRO stage 1 (Rajbhandari et al., SC 2020) on top of a scatter-reduce through storage. A replica that has summed
its piece of the gradients updates the parameters in that piece at once and sends them on in place of the sums. With two
replicas and one round, of a flat vector of 8 elements:

    replica 0 sums [0, 4), updates parameters [0, 4), writes them; reads the updated [4, 8)
    replica 1 sums [4, 8), updates parameters [4, 8), writes them; reads the updated [0, 4)

It works for optimisers that update each element independently of all others, which `check_sharding` tries out.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.core import Routes
from funcpipe.errors import PlanError
from funcpipe.training.gradients import Layout, is_absent
from funcpipe.training.optimizers import call_factory
from funcpipe.training.recipe import OptimizerFactory

_TRIAL_SHAPE, _TRIAL_CUT = (31, 33), 500
_TRIAL_GRADIENTS = (1.0, 1e4, 1e-4, 0.0, 1.0)
"""What `check_sharding` tries an optimiser on: a matrix cut behind that element, gradients of these magnitudes."""


class Segment:
    """The elements [start, stop) of a flattened parameter, which one replica updates.

    `proxy` is the parameter that the optimiser sees for them; it is empty between two updates.
    """

    def __init__(self, parameter: nn.Parameter, start: int, stop: int) -> None:
        self.parameter = parameter
        self.start = start
        self.stop = stop
        whole = stop - start == parameter.numel()
        self.shape = parameter.shape if whole else torch.Size([stop - start])
        self.proxy = nn.Parameter(torch.empty(0, dtype=parameter.dtype))

    def load(self, summed: Tensor) -> bool:
        """Give the proxy the current values and the gradient `summed`; False if no replica has a gradient."""
        self.proxy.data = self.cut(self.parameter.detach())
        if is_absent(summed):
            return False
        self.proxy.grad = summed.to(self.parameter.dtype).view(self.shape)
        return True

    def unload(self, updated: Tensor) -> None:
        """Write the proxy's updated values into `updated`, and empty it."""
        updated.copy_(self.proxy.detach().reshape(-1))
        self.proxy.grad = None
        self.proxy.data = torch.empty(0, dtype=self.parameter.dtype)

    def cut(self, values: Tensor) -> Tensor:
        """A copy of these elements of `values`, which has the parameter's shape."""
        return values.reshape(-1)[self.start : self.stop].clone().view(self.shape)


class ShardedOptimizer:
    """The optimiser of one replica's split, which is one range of the flat vector in each round of synchronisation.

    `groups` holds all parameters of each parameter group, including those that other replicas update.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layout: Layout, rounds: Sequence[tuple[int, int]]) -> None:
        """Takes over `optimizer`, which was made for whole parameters; `rounds` holds this replica's [start, stop)."""
        self.optimizer = optimizer
        self.groups: list[list[nn.Parameter]] = [group["params"] for group in optimizer.param_groups]
        self._rounds = [tuple(_segments(layout, start, stop)) for start, stop in rounds]
        self.segments = tuple(segment for in_round in self._rounds for _, segment in in_round)
        self._replace_parameters()

    def update(self, number: int, values: Tensor) -> None:
        """Replace this replica's summed gradients of round `number`, `values`, by updated parameters.

        The model's own parameters do not change yet: a backward may still be using them.
        """
        have_gradient = [segment.load(values[place]) for place, segment in self._rounds[number]]
        if any(have_gradient):
            self.optimizer.step()
        for place, segment in self._rounds[number]:
            segment.unload(values[place])

    def _replace_parameters(self) -> None:
        """Have the optimiser update the segments' proxies in place of the parameters."""
        of_parameter: dict[int, list[Segment]] = defaultdict(list)
        for segment in self.segments:
            of_parameter[id(segment.parameter)].append(segment)
        for group, parameters in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["params"] = [segment.proxy for p in parameters for segment in of_parameter[id(p)]]
        initial = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for parameter, state in initial.items():
            for segment in of_parameter[id(parameter)]:
                self.optimizer.state[segment.proxy] = {name: cut_state(value, segment) for name, value in state.items()}


def cut_state(value: Any, segment: Segment) -> Any:
    """One value of a parameter's optimiser state for a segment of it: cut if it has the parameter's shape."""
    if not isinstance(value, Tensor):
        return value
    return segment.cut(value) if value.shape == segment.parameter.shape else value.clone()


def _segments(layout: Layout, start: int, stop: int) -> Iterator[tuple[slice, Segment]]:
    """The segments in [start, stop) of the flat vector, each with its place relative to `start`."""
    for number in layout.parameters_in(start, stop):
        place = layout.slice_of(number)
        first, last = max(start, place.start), min(stop, place.stop)
        segment = Segment(layout.parameters[number], first - place.start, last - place.start)
        yield slice(first - start, last - start), segment


def check_sharding(factory: OptimizerFactory, routes: Routes, parameters: Mapping[str, Tensor] = {}) -> None:
    """Raise PlanError unless the optimiser made by `factory` can be divided over the replicas of each stage."""
    for name, parameter in parameters.items():
        if parameter.is_complex() and parameter.requires_grad:
            raise PlanError(
                f"the optimiser cannot be divided over replicas where parameters are complex, as {name} is; plan "
                "without shard_optimizer, or keep its real and imaginary parts in a parameter (torch.view_as_complex)"
            )
    if routes.ties:
        first, *others = routes.ties[0].stages
        raise PlanError(
            f"the optimiser cannot be divided over replicas where stages share parameters, as {first} and "
            f"{', '.join(map(str, others))} share {routes.ties[0].parameters[0]}; keep its layers together "
            "(--together), or plan without shard_optimizer"
        )
    _check_element_wise(factory, next((name for name, p in parameters.items() if p.requires_grad), "weight"))


def _check_element_wise(factory: OptimizerFactory, name: str) -> None:
    """Raise PlanError unless a parameter updated whole and the same one updated in two parts have the same bits."""
    try:
        with torch.random.fork_rng(devices=[]):
            same = _same_in_parts(factory, name)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise PlanError(_refusal(f"it fails on a part of a parameter ({type(error).__name__}: {error})")) from error
    if not same:
        raise PlanError(_refusal("a parameter cut in two is not updated as the whole is"))


def _refusal(fact: str) -> str:
    return (
        f"the state of this optimiser cannot be divided over replicas: {fact}; choose one that updates every element "
        "by itself (SGD, Adam, AdamW, …, not fused), or a plan without shard_optimizer"
    )


def _same_in_parts(factory: OptimizerFactory, name: str) -> bool:
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(_TRIAL_SHAPE))
    parted = nn.Parameter(whole.detach().clone())
    expected = call_factory(factory, [(name, whole)])
    layout = Layout([parted], [])
    ranges = ((_TRIAL_CUT, layout.elements), (0, _TRIAL_CUT))
    found = ShardedOptimizer(call_factory(factory, [(name, parted)]), layout, ranges)
    for size in _TRIAL_GRADIENTS:
        gradient = size * torch.randn(_TRIAL_SHAPE)
        whole.grad = gradient.clone()
        expected.step()
        flat = gradient.reshape(-1).clone()
        for number, (start, stop) in enumerate(ranges):
            found.update(number, flat[start:stop])
        with torch.no_grad():
            parted.copy_(flat.view(_TRIAL_SHAPE))
        if not torch.equal(whole, parted):
            return False
    return all(
        value.shape in (torch.Size([]), segment.shape) if isinstance(value, Tensor) else not _is_nested(value)
        for segment in found.segments
        for value in found.optimizer.state[segment.proxy].values()
    )


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)
