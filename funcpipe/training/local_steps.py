"""Local steps: a replica trains alone for a round, then meets the others of its stage (DiLoCo).

All replicas begin a round with the same parameters theta. Each updates its own with its own gradients only. Where they
meet, they sum theta minus their own parameters as they would sum gradients, in the order of ranks, and go on from

    delta   = the sum, divided by the number of replicas
    v       = momentum v + delta
    theta  <- theta - lr (delta + momentum v)        without a momentum: theta - lr delta

with the outer learning rate `lr`. `plain_rounds` is the same algorithm in one process. A stage does so once, or in
fragments (`fragments`).

With `sync_delay` = k, replicas measure theta minus their own parameters after the last step of a round, and take the
outer step k steps later. What each has trained meanwhile stays: where theta_r was its parameters as measured, it goes
on with its own + (theta - theta_r), so with theta moved by what it has trained since. That is delayed averaging (DaSGD,
Zhou et al., 2020), where Streaming DiLoCo (2025) would mix both or drop what was trained. The next round has begun with
the measuring. Where all rounds end, the outer step is taken at once, and a meeting without delay follows.

In the middle of a round, a stage's state has theta under the names of the model's tensors, as it is the model that all
replicas share; this replica's parameters are under "own/NAME", and what its forwards have added to running statistics
is under "added/NAME"; both as they were measured are under "measured/NAME" until the outer step is taken. The outer
momentum is under "outer/NAME". Of a divided outer step, each replica saves its part of that, and of "theta/NAME".
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from funcpipe.comm.piece_ranges import piece_ranges
from funcpipe.comm.sum_pattern import Pattern
from funcpipe.core import END, Plan, ends_round, shift_of
from funcpipe.training.gradients import FlatVector, Layout, in_form_of
from funcpipe.training.norms import as_real
from funcpipe.training.state import ADDED, MEASURED, MODEL, OUTER, OWN, THETA, StageState, mismatch_is_corrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class LateMeeting:
    """A meeting on `fragment`, as replicas were after the step `measured`; the outer step follows the step `taken`."""

    fragment: int
    measured: int
    taken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Meetings:
    """When the replicas of `plan` meet, in a run of `steps` that is validated after every `validate_every` of them."""

    plan: Plan
    steps: int
    validate_every: int | None = None

    def is_after(self, step: int) -> bool:
        """Return True if replicas meet after `step`, and go on from there at once."""
        return bool(self.fragments_after(step))

    def fragments_after(self, step: int) -> tuple[int, ...]:
        """Return the numbers of the fragments on which replicas meet after `step`, to go on from there at once."""
        return () if self.plan.sync_delay and not self._all_end(step) else self._due(step)

    def measured_after(self, step: int) -> int | None:
        """Return the fragment that is measured after `step` for a meeting beside the next steps, if any."""
        late = self.plan.sync_delay > 0 and not self._all_end(step)
        return next(iter(self._due(step)), None) if late else None

    def late(self, step: int) -> LateMeeting | None:
        """Return the meeting that goes on beside `step`, if any."""
        delay, first = self.plan.sync_delay, step - step % self.validate_every if self.validate_every else 0
        for measured in range(step - 1, max(step - delay, first) - 1, -1):
            fragment = self.measured_after(measured)
            if fragment is not None:
                stop = self.steps if self.validate_every is None else min(first + self.validate_every, self.steps)
                return LateMeeting(fragment=fragment, measured=measured, taken=min(measured + delay, stop - 1))
        return None

    def _all_end(self, step: int) -> bool:
        """Return True if the rounds of all fragments end after `step`."""
        return ends_round(step, sync_every=END, steps=self.steps, validate_every=self.validate_every)

    def _due(self, step: int) -> tuple[int, ...]:
        """Return the fragments whose rounds end after `step`."""
        every, count = self.plan.sync_every, self.plan.sync_fragments

        def ends(fragment: int) -> bool:
            shift = shift_of(fragment, sync_every=every, fragments=count)
            return ends_round(step, sync_every=every, steps=self.steps, validate_every=self.validate_every, shift=shift)

        return tuple(filter(ends, range(count)))


class OuterStep:
    """What a replica keeps to meet the others of its stage on some parameters: theta and the outer momentum, and what
    they sum.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        summed: Sequence[nn.Parameter],
        extras: Mapping[str, Tensor],
    ) -> None:
        """`parameters` are those on which they meet; the stage sums the changes of those in `summed`, and of others
        that are tied to them another stage does. `extras` are summed too.
        """
        self._plan = plan
        self.layout = Layout(summed, list(extras.values()))
        self._extra_dtypes = {name: extra.dtype for name, extra in extras.items()}
        self._parameters = parameters
        self._number = {id(parameter): i for i, parameter in enumerate(summed)}
        self._theta: dict[str, Tensor] = {}
        momentum = plan.outer_momentum
        self._velocity = {name: torch.zeros_like(p) for name, p in parameters.items()} if momentum else {}
        self._changes: FlatVector | None = None
        self._measured: dict[str, Tensor] = {}  # parameters and extras, until the outer step is taken late
        self._begins = False
        self.is_in_round = False  # from the first step of a round until the replicas have met

    @property
    def shared(self) -> tuple[Tensor, ...]:
        """The trained parameters with which all replicas have begun the round, or will begin the next one."""
        return tuple((self._theta if self.is_in_round else self._parameters).values())

    def begin_step(self) -> None:
        """Keep the parameters if a round begins."""
        self._begins = not self.is_in_round
        if self._begins:
            self._theta, self.is_in_round = self._beginning(), True

    def _beginning(self) -> dict[str, Tensor]:
        """Return what is to be kept of the parameters, as they are now, until the replicas meet."""
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def undo_step(self) -> None:
        """Go back to the beginning of a step in which the optimiser has not changed anything yet."""
        if self._begins:
            self._end_round()

    def _end_round(self) -> None:
        self._theta, self._changes, self._measured, self.is_in_round = {}, None, {}, False

    @property
    def changes(self) -> FlatVector:
        """The vector that the replicas sum in a meeting: theta minus the parameters of each."""
        assert self._changes is not None, "replicas sum what has changed once they have updated alone"
        return self._changes

    @torch.no_grad()
    def measure(self, extras: Mapping[str, Tensor]) -> None:
        """Compute `changes`, after the last step of a round."""
        self._fill(self._parameters, extras)

    def hold(self, extras: Mapping[str, Tensor]) -> None:
        """Keep the parameters, and `extras`, as they are after a round; `changes` are computed later."""
        self._measured = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._measured |= extras

    @torch.no_grad()
    def measure_held(self) -> None:
        """Compute `changes` from what is kept."""
        self._fill(self._measured, self._measured)

    def _fill(self, parameters: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> None:
        vector = FlatVector(self.layout, list(self._extra_dtypes.values()))
        for name, parameter in self._parameters.items():
            if id(parameter) in self._number:
                vector.fill(self._number[id(parameter)], self._contribution(name, parameters[name]))
        vector.fill_head([extras[name] for name in self._extra_dtypes])
        self._changes = vector

    @property
    def is_held(self) -> bool:
        """True between the measuring of a round and its outer step, if that is taken late."""
        return bool(self._measured)

    def _contribution(self, name: str, parameter: Tensor) -> Tensor:
        return (self._theta[name] - parameter).add_(0.0)  # -0.0 would say that there is nothing to sum

    def take(self, round_number: int, values: Tensor) -> None:
        """Replace `values`, what this replica has summed in a round of the synchronisation, by what others are to read:
        the sum itself.
        """

    def summed(self, parameter: nn.Parameter) -> Tensor:
        """Return the sum of the changes of `parameter`, which this stage sums."""
        return self.changes.parameter(self._number[id(parameter)])

    @torch.no_grad()
    def meet(self, borrowed: Callable[[nn.Parameter], Tensor]) -> tuple[Tensor, ...]:
        """Take the outer step; returns the summed extras. `borrowed` gives the sums that other stages have made."""
        self._take_outer_step(borrowed)
        for name, parameter in self._parameters.items():
            parameter.copy_(self._theta[name])
        extras = self.changes.summed_extras()
        self._end_round()
        return extras

    @torch.no_grad()
    def meet_late(self, borrowed: Callable[[nn.Parameter], Tensor]) -> tuple[Tensor, ...]:
        """Take the outer step, and keep what was trained since its changes were measured; returns the summed extras."""
        self._take_outer_step(borrowed)
        for name, parameter in self._parameters.items():
            parameter.add_(self._theta[name] - self._measured[name])
        extras = self.changes.summed_extras()
        self._changes, self._measured = None, {}
        return extras

    def _take_outer_step(self, borrowed: Callable[[nn.Parameter], Tensor]) -> None:
        plan = self._plan
        for name, parameter in self._parameters.items():
            total = self.summed(parameter) if id(parameter) in self._number else borrowed(parameter)
            delta = total / plan.replicas
            if plan.outer_momentum:
                velocity = self._velocity[name].mul_(plan.outer_momentum).add_(delta)
                delta = delta + plan.outer_momentum * velocity
            self._theta[name].sub_(plan.outer_lr * delta)

    def added_to(self, state: StageState, added: Mapping[str, Tensor]) -> StageState:
        """Return `state` with what a replica that starts again needs; `added` is that of running statistics.

        Tensors are not copied.
        """
        tensors = {**state.tensors, **{OUTER + name: velocity for name, velocity in self._velocity.items()}}
        if self.is_in_round:
            tensors |= {OWN + name: tensors[MODEL + name] for name in self._parameters}
            tensors |= {MODEL + name: theta for name, theta in self._theta.items()}
            tensors |= {ADDED + name: values for name, values in added.items()}
            tensors |= {MEASURED + name: values for name, values in self._measured.items()}
        return replace(state, tensors=tensors)

    @torch.no_grad()
    def restore(self, state: StageState) -> dict[str, Tensor]:
        """Go back to `state`, from which the model's tensors are read already; returns what was added to statistics.

        Raises CorruptMessage if it does not fit.
        """
        tensors = state.tensors
        self._end_round()
        statistics = self.layout.head > 0 and any(name.startswith(ADDED) for name in tensors)
        self.is_in_round = statistics or any(OWN + name in tensors for name in self._parameters)
        with mismatch_is_corrupt():
            self._restore(tensors)
            for name, parameter in self._parameters.items() if self.is_in_round else ():
                parameter.copy_(tensors[OWN + name])
            names = [*self._parameters, *self._extra_dtypes]
            held = {name: tensors[MEASURED + name].clone() for name in names if MEASURED + name in tensors}
            self._measured = held if self.is_in_round else {}
        return {name.removeprefix(ADDED): tensors[name] for name in tensors if name.startswith(ADDED)}

    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go back to theta, which the parameters are now, and to the outer momentum."""
        if self.is_in_round:
            self._theta = self._beginning()
        for name, velocity in self._velocity.items():
            velocity.copy_(tensors[OUTER + name]) if OUTER + name in tensors else velocity.zero_()


PART = "part/"
"""The prefix of the elements that one replica keeps of a tensor: "part/outer/NAME@8" are those of outer/NAME from 8."""


class DividedOuterStep(OuterStep):
    """The same for a replica that keeps theta and the momentum of the elements that it sums alone.

    Replicas contribute their parameters. The replica that sums some elements makes updated parameters of these, with
    theta minus the mean as delta, and the others read them in place of the sums.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        summed: Sequence[nn.Parameter],
        extras: Mapping[str, Tensor],
        pattern: Pattern,
        replica: int,
    ) -> None:
        """`pattern` says which elements `replica` sums in each round of the synchronisation."""
        super().__init__(plan, parameters, summed, extras)
        split = pattern.merges(replica)
        assert split is not None, "every replica sums a split of its own"
        ranges = [splits[split] for splits in piece_ranges(self.layout.elements, pattern, self.layout.head)]
        self._ranges = [(min(max(start, self.layout.head), stop), stop) for start, stop in ranges]
        self._heads = [border - start for (start, _), (border, _) in zip(ranges, self._ranges, strict=True)]
        kept = self._ranges if plan.outer_momentum else []
        self._velocity = {str(i): torch.zeros(b - a, dtype=self.layout.dtype) for i, (a, b) in enumerate(kept)}
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._names = [names[id(parameter)] for parameter in summed]

    @property
    def shared(self) -> tuple[Tensor, ...]:
        """The trained parameters, between rounds; within one, nothing that each replica has as a whole."""
        return () if self.is_in_round else super().shared

    def _beginning(self) -> dict[str, Tensor]:
        own = [[self._cut(self.layout.parameters[n], at) for n, at, _ in self._segments(*r)] for r in self._ranges]
        empty = torch.zeros(0, dtype=self.layout.dtype)
        return {str(i): torch.cat([empty, *(values.to(empty.dtype) for values in one)]) for i, one in enumerate(own)}

    def _contribution(self, name: str, parameter: Tensor) -> Tensor:
        return parameter

    @torch.no_grad()
    def take(self, round_number: int, values: Tensor) -> None:
        """Replace the parameters that this replica has summed in a round of the synchronisation by the updated ones."""
        plan, key, summed = self._plan, str(round_number), values[self._heads[round_number] :]
        theta = self._theta[key]
        delta = theta - summed / plan.replicas
        if plan.outer_momentum:
            velocity = self._velocity[key].mul_(plan.outer_momentum).add_(delta)
            delta = delta + plan.outer_momentum * velocity
        summed.copy_(theta.sub_(plan.outer_lr * delta))

    @torch.no_grad()
    def meet(self, borrowed: Callable[[nn.Parameter], Tensor]) -> tuple[Tensor, ...]:
        """Go on with the updated parameters; returns the summed extras. `borrowed` gives those of other stages."""
        for parameter in self._parameters.values():
            parameter.copy_(self.summed(parameter) if id(parameter) in self._number else borrowed(parameter))
        extras = self.changes.summed_extras()
        self._end_round()
        return extras

    def added_to(self, state: StageState, added: Mapping[str, Tensor]) -> StageState:
        """Return `state` with what a replica that starts again needs. Within a round it has no model that all share."""
        tensors = dict(state.tensors)
        for i, own in enumerate(self._ranges):
            for number, at, place in self._segments(*own):
                for prefix, kept in ((OUTER, self._velocity), (THETA, self._theta)):
                    if str(i) in kept:
                        tensors[f"{PART}{prefix}{self._names[number]}@{at.start}"] = kept[str(i)][place]
        if self.is_in_round:
            tensors |= {OWN + name: tensors[MODEL + name] for name in self._parameters}
            tensors |= {ADDED + name: values for name, values in added.items()}
        return replace(state, tensors=tensors)

    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        if self.is_in_round:
            self._theta = {str(i): self._read(tensors, THETA, own) for i, own in enumerate(self._ranges)}
        for i in self._velocity:
            self._velocity[i] = self._read(tensors, OUTER, self._ranges[int(i)])

    def _read(self, tensors: Mapping[str, Tensor], prefix: str, own: tuple[int, int]) -> Tensor:
        """Return the elements `own` of what is saved under `prefix`, in parts or whole; 0 where nothing is."""
        found = torch.zeros(own[1] - own[0], dtype=self.layout.dtype)
        for number, at, place in self._segments(*own):
            name = prefix + self._names[number]
            part = f"{PART}{name}@{at.start}"
            if part in tensors or name in tensors:
                found[place].copy_(tensors[part] if part in tensors else self._cut(tensors[name], at))
        return found

    def _segments(self, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield the parameters in [start, stop) by number: their elements there, and where these are behind `start`."""
        for number in self.layout.parameters_in(start, stop):
            place = self.layout.slice_of(number)
            first, last = max(start, place.start), min(stop, place.stop)
            if first < last:
                yield number, slice(first - place.start, last - place.start), slice(first - start, last - start)

    def _cut(self, tensor: Tensor, at: slice) -> Tensor:
        return as_real(tensor.detach()).reshape(-1)[at]


def joined_parts(state: StageState) -> StageState:
    """Return `state` with whole tensors in place of the parts of all replicas. Raises CorruptMessage without one."""
    parts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name in state.tensors:
        if name.startswith(PART):
            whole, _, start = name.removeprefix(PART).rpartition("@")
            parts[whole][int(start)] = state.tensors[name]
    if not parts:
        return state
    tensors = {name: tensor for name, tensor in state.tensors.items() if not name.startswith(PART)}
    with mismatch_is_corrupt():
        for whole, own in parts.items():
            like = state.tensors[MODEL + whole.partition("/")[2]]
            tensors[whole] = in_form_of(like, torch.cat([own[start] for start in sorted(own)]))
    return replace(state, tensors=tensors)
