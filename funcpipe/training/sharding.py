"""An optimiser divided over the replicas of a stage: each replica updates its own split of the parameters, and keeps
the optimiser's state for that split only.

This is ZeRO stage 1 (Rajbhandari et al., SC 2020) on top of a scatter-reduce through storage. A replica that has summed
its piece of the gradients updates the parameters in that piece at once and sends them on in place of the sums. With two
replicas and one round, of a flat vector of 8 elements:

    replica 0 sums [0, 4), updates parameters [0, 4), writes them; reads the updated [4, 8)
    replica 1 sums [4, 8), updates parameters [4, 8), writes them; reads the updated [0, 4)

It works for optimisers that update each element independently of all others, which `optimizer_parts` tries out.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.training.gradients import Layout, is_absent


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
        """Return a copy of these elements of `values`, which has the parameter's shape."""
        return values.reshape(-1)[self.start : self.stop].clone().view(self.shape)


class ShardedOptimizer:
    """The optimiser of one replica's split, which is one range of the flat vector in each round of synchronisation.

    `groups` holds all parameters of each parameter group, including those that other replicas update.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        rounds: Sequence[tuple[int, int]],
        *,
        clip_grad_value: float | None = None,
    ) -> None:
        """Takes over `optimizer`, which was made for whole parameters; `rounds` holds this replica's [start, stop)."""
        self.optimizer = optimizer
        self._clip_grad_value = clip_grad_value
        self.groups: list[list[nn.Parameter]] = [group["params"] for group in optimizer.param_groups]
        self._rounds = [tuple(_segments(layout, start, stop)) for start, stop in rounds]
        self.segments = tuple(segment for in_round in self._rounds for _, segment in in_round)
        self._replace_parameters()

    def update(self, number: int, values: Tensor) -> None:
        """Replace this replica's summed gradients of round `number`, `values`, by updated parameters.

        The model's own parameters do not change yet: a backward may still be using them.
        """
        have_gradient = [segment.load(values[place]) for place, segment in self._rounds[number]]
        if self._clip_grad_value is not None:
            nn.utils.clip_grad_value_([segment.proxy for _, segment in self._rounds[number]], self._clip_grad_value)
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
    """Yield the segments in [start, stop) of the flat vector, each with its place relative to `start`."""
    for number in layout.parameters_in(start, stop):
        place = layout.slice_of(number)
        first, last = max(start, place.start), min(stop, place.stop)
        segment = Segment(layout.parameters[number], first - place.start, last - place.start)
        yield slice(first - start, last - start), segment


def has_cut_state(sharded: ShardedOptimizer) -> bool:
    """Return True if the optimiser's state of a segment has its shape, or is one value for all of the parameter."""
    return all(
        value.shape in (torch.Size([]), segment.shape) if isinstance(value, Tensor) else not _is_nested(value)
        for segment in sharded.segments
        for value in sharded.optimizer.state[segment.proxy].values()
    )


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)
