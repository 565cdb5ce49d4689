"""The stages of a model in eval mode, cut where a plan cuts the model in training.

Code may do something else in eval mode: an auxiliary head is left out, a dropout is no node any more. So the model is
traced once more, and each layer goes to the stage that holds the layer of its name in training; a layer that training
does not have goes with the layer before it.
"""

from collections.abc import Sequence

from funcpipe.core import Plan
from funcpipe.errors import ModelError, PlanError
from funcpipe.model.graph import LayerGraph
from funcpipe.model.split.stage import StageModule


def matched_bounds(graph: LayerGraph, plan: Plan) -> tuple[tuple[int, int], ...]:
    """The layers of `graph`, a model in eval mode, in each stage of `plan`, which was made for the model in training.

    Raises PlanError if a stage has no layers in eval mode, or the layers come in another order.
    """
    stage_of = {name: number for number, stage in enumerate(plan.stages) for name in stage.layers}
    chosen: list[int] = []
    for layer in graph.layers:
        before = chosen[-1] if chosen else 0
        own = stage_of.get(layer.name, before)
        if own < before:
            raise PlanError(
                f"{graph.name} cannot be evaluated by this plan: in eval mode, layer {layer.name!r} of stage {own} "
                f"comes after layers of stage {before}; plan with both in one stage (together=), or with one stage"
            )
        chosen.append(own)
    empty = sorted(set(range(len(plan.stages))) - set(chosen))
    if empty:
        layers = plan.stages[empty[0]].layers
        raise PlanError(
            f"{graph.name} cannot be evaluated by this plan: in eval mode, stage {empty[0]} ({layers[0]!r} to "
            f"{layers[-1]!r}) has no layers; profile this model and plan again, with fewer stages"
        )
    starts = [chosen.index(number) for number in range(len(plan.stages))]
    return tuple(zip(starts, [*starts[1:], len(chosen)], strict=True))


def check_shared(stages: Sequence[StageModule], trained: Sequence[StageModule]) -> None:
    """Raise ModelError unless each of `stages`, in eval mode, uses only tensors that its stage in training holds."""
    for number, (stage, own) in enumerate(zip(stages, trained, strict=True)):
        held = {id(tensor) for tensor in (*own.parameters(), *own.buffers())}
        named = (*stage.named_parameters(remove_duplicate=False), *stage.named_buffers(remove_duplicate=False))
        missing = [name for name, tensor in named if id(tensor) not in held and _is_trained(tensor, trained)]
        if missing:
            raise ModelError(
                f"in eval mode, stage {number} of the model uses {missing[0]}, which it does not hold in training; "
                "use it in training in the same module, or plan with all that use it in one stage"
            )


def _is_trained(tensor: object, trained: Sequence[StageModule]) -> bool:
    """Whether a tensor changes in training: one of another stage. What no stage holds stays as it was uploaded."""
    return any(tensor is other for stage in trained for other in (*stage.parameters(), *stage.buffers()))
