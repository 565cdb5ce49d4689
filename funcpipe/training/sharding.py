"""An optimiser divided over the replicas of a stage: each updates its own split, and keeps the state of that alone.

ZeRO's first stage (Rajbhandari et al., SC 2020), for gradients that are summed through storage: what a replica has
added up it replaces by the updated parameters, which travel in the place of the sums. That needs an optimiser which
updates every element by itself.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.core import Routes
from funcpipe.errors import PlanError
from funcpipe.training.gradients import Layout, is_absent

_Factory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_TRIED_SHAPE, _TRIED_CUT = (31, 33), 500
_TRIED_SIZES = (1.0, 1e4, 1e-4, 0.0, 1.0)


class Segment:
    """The elements [start, stop) of a parameter, flattened, which its replica updates; `own` stands for them in the
    optimiser, and holds nothing between two updates.
    """

    def __init__(self, parameter: nn.Parameter, start: int, stop: int) -> None:
        self.parameter = parameter
        self.start = start
        self.stop = stop
        whole = stop - start == parameter.numel()
        self.shape = parameter.shape if whole else torch.Size([stop - start])
        self.own = nn.Parameter(torch.empty(0, dtype=parameter.dtype))

    def begin(self, summed: Tensor) -> bool:
        """Get ready for an update with the gradient `summed`; whether there is one."""
        self.own.data = self.part_of(self.parameter.detach())
        if is_absent(summed):
            return False
        self.own.grad = summed.to(self.parameter.dtype).view(self.shape)
        return True

    def end(self, updated: Tensor) -> None:
        """Write the updated elements into `updated`."""
        updated.copy_(self.own.detach().reshape(-1))
        self.own.grad = None
        self.own.data = torch.empty(0, dtype=self.parameter.dtype)

    def part_of(self, values: Tensor) -> Tensor:
        """These elements of `values`, which has the parameter's shape: a copy."""
        return values.reshape(-1)[self.start : self.stop].clone().view(self.shape)


class ShardedOptimizer:
    """The optimiser of one replica's own split, which consists of a range of the flat vector in each round.

    `groups` holds the parameters of its groups, also those that other replicas update.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, layout: Layout, rounds: Sequence[tuple[int, int]]) -> None:
        """Takes over `optimizer`, which was made for the whole parameters; `rounds` holds the ranges."""
        self.optimizer = optimizer
        self.groups: list[list[nn.Parameter]] = [group["params"] for group in optimizer.param_groups]
        self._rounds = [tuple(_segments(layout, start, stop)) for start, stop in rounds]
        self.segments = tuple(segment for placed in self._rounds for _, segment in placed)
        self._take_over()

    def update(self, number: int, values: Tensor) -> None:
        """Replace the summed gradients of round `number` in `values`, this replica's piece, by updated parameters.

        The parameters themselves stay as they are: a backward may still be at work with them.
        """
        present = [segment.begin(values[place]) for place, segment in self._rounds[number]]
        if any(present):
            self.optimizer.step()
        for place, segment in self._rounds[number]:
            segment.end(values[place])

    def _take_over(self) -> None:
        """Have the optimiser update the segments in place of the parameters."""
        of_parameter: dict[int, list[Segment]] = defaultdict(list)
        for segment in self.segments:
            of_parameter[id(segment.parameter)].append(segment)
        for group, parameters in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["params"] = [segment.own for p in parameters for segment in of_parameter[id(p)]]
        begun = dict(self.optimizer.state)
        self.optimizer.state.clear()
        for parameter, state in begun.items():
            for segment in of_parameter[id(parameter)]:
                self.optimizer.state[segment.own] = {name: cut_state(value, segment) for name, value in state.items()}


def cut_state(value: Any, segment: Segment) -> Any:
    """What an optimiser keeps of a parameter, cut to a segment of it if it is a tensor of the parameter's shape."""
    if not isinstance(value, Tensor):
        return value
    return segment.part_of(value) if value.shape == segment.parameter.shape else value.clone()


def _segments(layout: Layout, start: int, stop: int) -> Iterator[tuple[slice, Segment]]:
    """The segments that lie in [start, stop) of the vector, and where in that range."""
    for number in layout.within(start, stop):
        place = layout.place(number)
        first, last = max(start, place.start), min(stop, place.stop)
        segment = Segment(layout.parameters[number], first - place.start, last - place.start)
        yield slice(first - start, last - start), segment


def check_sharding(factory: _Factory, routes: Routes) -> None:
    """Raise PlanError unless the optimiser that `factory` makes can be divided over the replicas of each stage."""
    if routes.ties:
        first, *others = routes.ties[0].stages
        raise PlanError(
            f"the optimiser cannot be divided over replicas where stages share parameters, as {first} and "
            f"{', '.join(map(str, others))} share {routes.ties[0].parameters[0]}; keep its layers together "
            "(--together), or plan without shard_optimizer"
        )
    _check_element_wise(factory)


def _check_element_wise(factory: _Factory) -> None:
    """Raise PlanError unless the optimiser, tried on a parameter as a whole and cut in two, gives the same bits."""
    try:
        with torch.random.fork_rng(devices=[]):
            same = _same_in_parts(factory)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise PlanError(_refusal(f"it fails on a part of a parameter ({type(error).__name__}: {error})")) from error
    if not same:
        raise PlanError(_refusal("a parameter cut in two is not updated as the whole is"))


def _refusal(fact: str) -> str:
    return (
        f"the state of this optimiser cannot be divided over replicas: {fact}; choose one that updates every element "
        "by itself (SGD, Adam, AdamW, …, not fused), or a plan without shard_optimizer"
    )


def _same_in_parts(factory: _Factory) -> bool:
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(_TRIED_SHAPE))
    parted = nn.Parameter(whole.detach().clone())
    expected = factory([whole])
    layout = Layout([parted], [])
    ranges = ((_TRIED_CUT, layout.elements), (0, _TRIED_CUT))
    found = ShardedOptimizer(factory([parted]), layout, ranges)
    for size in _TRIED_SIZES:
        gradient = size * torch.randn(_TRIED_SHAPE)
        whole.grad = gradient.clone()
        expected.step()
        flat = gradient.reshape(-1).clone()
        for number, (start, stop) in enumerate(ranges):
            found.update(number, flat[start:stop])
        with torch.no_grad():
            parted.copy_(flat.view(_TRIED_SHAPE))
        if not torch.equal(whole, parted):
            return False
    return all(
        value.shape in (torch.Size([]), segment.shape) if isinstance(value, Tensor) else not _is_nested(value)
        for segment in found.segments
        for value in found.optimizer.state[segment.own].values()
    )


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)
