"""Local steps: a replica trains alone for a round, then meets the others of its stage (DiLoCo).

All replicas begin a round with the same parameters theta. Each updates its own with its own gradients only. Where they
meet, they sum theta minus their own parameters as they would sum gradients, in the order of ranks, and go on from

    delta   = the sum, divided by the number of replicas
    v       = momentum v + delta
    theta  <- theta - lr (delta + momentum v)        without a momentum: theta - lr delta

with the outer learning rate `lr`. `plain_rounds` is the same algorithm in one process.

In the middle of a round, a stage's state has theta under the names of the model's tensors, as it is the model that all
replicas share; this replica's parameters are under "own/NAME", and what its forwards have added to running statistics
is under "added/NAME". The outer momentum is under "outer/NAME".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from funcpipe.core import Plan, round_of
from funcpipe.training.gradients import FlatVector, Layout
from funcpipe.training.state import ADDED, MODEL, OUTER, OWN, StageState, mismatch_is_corrupt


@dataclass(frozen=True, slots=True, kw_only=True)
class Meetings:
    """When the replicas of `plan` meet, in a run of `steps` that is validated after every `validate_every` of them."""

    plan: Plan
    steps: int
    validate_every: int | None = None

    def round_of(self, step: int) -> range:
        """Return the steps of the round with `step`."""
        every = self.plan.sync_every
        return round_of(step, sync_every=every, steps=self.steps, validate_every=self.validate_every)

    def is_after(self, step: int) -> bool:
        """Return True if replicas meet after `step`."""
        return self.round_of(step)[-1] == step

    def is_begun(self, done: int) -> bool:
        """Return True if `done` steps end in the middle of a round."""
        return 0 < done < self.steps and not self.is_after(done - 1)


class OuterStep:
    """What a replica keeps to meet the others of its stage: theta and the outer momentum, and what they sum."""

    def __init__(
        self,
        meetings: Meetings,
        parameters: Mapping[str, nn.Parameter],
        summed: Sequence[nn.Parameter],
        extras: Sequence[Tensor],
    ) -> None:
        """`parameters` are all that the stage trains; it sums the changes of those in `summed`, and of others that are
        tied to them another stage does. `extras` are summed too.
        """
        self.meetings = meetings
        self.layout = Layout(summed, extras)
        self._extra_dtypes = [extra.dtype for extra in extras]
        self._parameters = parameters
        self._number = {id(parameter): i for i, parameter in enumerate(summed)}
        self._theta: dict[str, Tensor] = {}
        momentum = meetings.plan.outer_momentum
        self._velocity = {name: torch.zeros_like(p) for name, p in parameters.items()} if momentum else {}
        self._changes: FlatVector | None = None
        self._begins = False

    @property
    def shared(self) -> tuple[Tensor, ...]:
        """The trained parameters with which all replicas have begun the round, or will begin the next one."""
        return tuple(self._theta.values()) or tuple(self._parameters.values())

    @property
    def is_in_round(self) -> bool:
        """True from the first step of a round until the replicas have met."""
        return bool(self._theta)

    def begin_step(self) -> None:
        """Keep the parameters if a round begins."""
        self._begins = not self._theta
        if self._begins:
            self._theta = {name: p.detach().clone() for name, p in self._parameters.items()}

    def undo_step(self) -> None:
        """Go back to the beginning of a step in which the optimiser has not changed anything yet."""
        if self._begins:
            self._theta = {}

    @property
    def changes(self) -> FlatVector:
        """What the replicas sum in a meeting: theta minus the parameters of each."""
        assert self._changes is not None, "replicas sum what has changed once they have updated alone"
        return self._changes

    @torch.no_grad()
    def measure(self, extras: Sequence[Tensor]) -> None:
        """Compute `changes`, after the last step of a round."""
        vector = FlatVector(self.layout, self._extra_dtypes)
        for name, parameter in self._parameters.items():
            if id(parameter) in self._number:
                changed = (self._theta[name] - parameter).add_(0.0)  # -0.0 would say that there is nothing to sum
                vector.fill(self._number[id(parameter)], changed)
        vector.fill_head(extras)
        self._changes = vector

    def summed(self, parameter: nn.Parameter) -> Tensor:
        """Return the sum of the changes of `parameter`, which this stage sums."""
        return self.changes.in_form_of(self._number[id(parameter)])

    @torch.no_grad()
    def meet(self, borrowed: Callable[[nn.Parameter], Tensor]) -> tuple[Tensor, ...]:
        """Take the outer step; returns the summed extras. `borrowed` gives the sums that other stages have made."""
        plan = self.meetings.plan
        for name, parameter in self._parameters.items():
            total = self.summed(parameter) if id(parameter) in self._number else borrowed(parameter)
            delta = total / plan.replicas
            if plan.outer_momentum:
                velocity = self._velocity[name].mul_(plan.outer_momentum).add_(delta)
                delta = delta + plan.outer_momentum * velocity
            parameter.copy_(self._theta[name].sub_(plan.outer_lr * delta))
        extras = self.changes.summed_extras()
        self._theta, self._changes = {}, None
        return extras

    def added_to(self, state: StageState, added: Mapping[str, Tensor]) -> StageState:
        """Return `state` with what a replica that starts again needs; `added` is that of running statistics.

        Tensors are not copied.
        """
        tensors = {**state.tensors, **{OUTER + name: velocity for name, velocity in self._velocity.items()}}
        if self._theta:
            tensors |= {OWN + name: tensors[MODEL + name] for name in self._theta}
            tensors |= {MODEL + name: theta for name, theta in self._theta.items()}
            tensors |= {ADDED + name: values for name, values in added.items()}
        return replace(state, tensors=tensors)

    @torch.no_grad()
    def restore(self, state: StageState) -> dict[str, Tensor]:
        """Go back to `state`, from which the model's tensors are read already; returns what was added to statistics.

        Raises CorruptMessage if it does not fit.
        """
        tensors, self._changes = state.tensors, None
        with mismatch_is_corrupt():
            for name, velocity in self._velocity.items():
                velocity.copy_(tensors[OUTER + name]) if OUTER + name in tensors else velocity.zero_()
            own = {name for name in self._parameters if OWN + name in tensors}
            self._theta = {name: self._parameters[name].detach().clone() for name in self._parameters if own}
            for name in own:
                self._parameters[name].copy_(tensors[OWN + name])
        return {name.removeprefix(ADDED): values for name, values in tensors.items() if name.startswith(ADDED)}
