"""The fragments of a stage's parameters, on which replicas that train alone meet at different steps.

The trained parameters of a stage are cut into `sync_fragments` parts, whole parameters in their order, of about as many
elements each (`core.rounds.fragment_numbers`). Each fragment has rounds, theta, an outer momentum and rounding errors
of its own, and meets as a small stage would (`local_steps`), also where the rounds of all end. Parameters that several
stages hold belong to the first fragment in each, and running statistics meet with it. A single fragment is the whole.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from funcpipe.comm.sum_pattern import Pattern
from funcpipe.core import Plan, fragment_numbers, stages_of_layers
from funcpipe.model.graph import LayerGraph
from funcpipe.model.graph.values import NOTHING_CARRIED
from funcpipe.model.split import split, stage_bounds
from funcpipe.model.split.stage import attach_loss
from funcpipe.training.local_steps import DividedOuterStep, Meetings, OuterStep
from funcpipe.training.state import StageState


class Fragments:
    """The fragments of one replica of a stage, by number."""

    def __init__(
        self,
        meetings: Meetings,
        parameters: Mapping[str, nn.Parameter],
        summed: Sequence[nn.Parameter],
        extras: Mapping[str, Tensor],
        *,
        together: Collection[int] = (),
        divided: tuple[Pattern, int] | None = None,
    ) -> None:
        """`parameters` are all that the stage trains, of which it sums the changes of `summed`, and `extras`.

        Those with the ids `together` belong to the first fragment. With `divided`, a pattern and the number of this
        replica, each replica keeps what is needed for meetings for the elements alone that it sums.
        """
        self.meetings = meetings
        count = meetings.plan.sync_fragments
        number = _cut([parameter for parameter in summed if id(parameter) not in together], count)
        self.steps: list[OuterStep] = []
        for fragment in range(count):
            own = {name: p for name, p in parameters.items() if number.get(id(p), 0) == fragment}
            here = [p for p in summed if number.get(id(p), 0) == fragment]
            parts = meetings.plan, own, here, {} if fragment else extras
            self.steps.append(OuterStep(*parts) if divided is None else DividedOuterStep(*parts, *divided))

    @property
    def shared(self) -> tuple[Tensor, ...]:
        """The trained parameters that are the same in all replicas."""
        return tuple(tensor for step in self.steps for tensor in step.shared)

    @property
    def goes_on(self) -> bool:
        """True within a round of the first fragment, with which running statistics meet."""
        return self.steps[0].is_in_round

    def begin_step(self) -> None:
        """Keep the parameters of fragments whose round begins."""
        for step in self.steps:
            step.begin_step()

    def undo_step(self) -> None:
        """Go back to the beginning of a step in which the optimiser has not changed anything yet."""
        for step in self.steps:
            step.undo_step()

    def meet(self, number: int, borrowed: Callable[[nn.Parameter], Tensor]) -> tuple[Tensor, ...] | None:
        """Take the outer steps of the fragments that meet after step `number`; returns the summed extras, if they were
        among what was summed. `borrowed` gives the sums that other stages have made.
        """
        extras = {fragment: self.steps[fragment].meet(borrowed) for fragment in self.meetings.fragments_after(number)}
        return extras.get(0)

    def meet_late(self, number: int, borrowed: Callable[[nn.Parameter], Tensor]) -> tuple[Tensor, ...] | None:
        """Take the outer step that is due after step `number` late, if there is one; returns the same."""
        late = self.meetings.late(number)
        if late is None or late.taken != number:
            return None
        extras = self.steps[late.fragment].meet_late(borrowed)
        return None if late.fragment else extras

    def added_to(self, state: StageState, added: Mapping[str, Tensor]) -> StageState:
        """Return `state` with what a replica that starts again needs; `added` is that of running statistics.

        Tensors are not copied.
        """
        for fragment, step in enumerate(self.steps):
            state = step.added_to(state, {} if fragment else added)
        return state

    def restore(self, state: StageState) -> dict[str, Tensor]:
        """Go back to `state`, from which the model's tensors are read already; returns what was added to statistics.

        Raises CorruptMessage if it does not fit.
        """
        found = [step.restore(state) for step in self.steps]
        return found[0]


def _cut(parameters: Sequence[nn.Parameter], fragments: int) -> dict[int, int]:
    """Return the fragments of a stage's parameters by their ids."""
    numbers = fragment_numbers([parameter.numel() for parameter in parameters], fragments)
    return {id(parameter): number for parameter, number in zip(parameters, numbers, strict=True)}


def fragments_by_name(graph: LayerGraph, plan: Plan, loss: Callable[..., Any]) -> dict[str, int]:
    """Return the fragment of each parameter of the model and of the loss that is in another one than the first.

    `graph` is cut as `plan` says. Raises PlanError if it cannot be.
    """
    bounds = stage_bounds(graph, plan)
    stage_of_layer = stages_of_layers(bounds)
    shared = [tie.names for tie in graph.ties if len({stage_of_layer[layer] for layer in tie.layers}) > 1]
    together = {name for names in shared for name in names}
    first_name = {name: names[0] for names in graph.tied_names for name in names}
    stages, found = split(graph, bounds), dict[str, int]()
    attach_loss(stages[-1], loss, NOTHING_CARRIED)
    for stage in stages:
        own = {name: p for name, p in stage.named_parameters() if p.requires_grad and name not in together}
        numbers = _cut(list(own.values()), plan.sync_fragments)
        found |= {first_name.get(name, name): numbers[id(p)] for name, p in own.items() if numbers[id(p)]}
    return found
