"""Refuses plans that divide an optimiser which cannot be divided, and says what to do instead."""

from collections.abc import Collection, Sequence

from funcpipe.core import Routes
from funcpipe.errors import PlanError
from funcpipe.model.graph.isolation import in_turn
from funcpipe.training.optimizer_parts import Cause, Difference, find_difference
from funcpipe.training.optimizers import ParameterShape
from funcpipe.training.recipe import OptimizerFactory


@in_turn()
def reason_for_one_stage(factory: OptimizerFactory, shapes: Sequence[ParameterShape]) -> str | None:
    """Return why a model with these trainable parameters must not be cut, in words; None if it may be.

    It is cut in the middle, and one parameter behind it: what belongs together may lie on one of these.
    """
    names = [shape.name for shape in shapes]
    found = None
    for cut in range(len(names) // 2, len(names) // 2 + 2):
        if 0 < cut < len(names):
            found = find_difference(factory, shapes, [names[:cut], names[cut:]])
            if found is None or _is_untried(found):
                return None
    return None if found is None else f"{_text(found, 'in two stages')}; for more stages, {_instead(found)}"


def check_stages(
    factory: OptimizerFactory,
    shapes: Sequence[ParameterShape],
    stages: Sequence[Collection[str]],
    *,
    together: tuple[str, str],
) -> None:
    """Raise PlanError unless optimisers of `stages`, each given by the names of its parameters, do what one for all
    trainable parameters, `shapes`, does.

    `together` are the model's first and last layer.
    """
    idle = [shape.name for shape in shapes if not any(shape.name in stage for stage in stages)]
    if len(stages) < 2 and not idle:
        return
    found = find_difference(factory, shapes, stages)
    if found is None or _is_untried(found):
        return
    if len(stages) < 2:
        if found.cause is not Cause.DRAWS:
            raise PlanError(
                f"{_text(found, 'in one stage')}; the model's forward does not use {idle[0]}, which no stage holds: "
                "leave that out of the optimiser, or choose one that updates each parameter by itself"
            )
        return
    raise PlanError(
        f"{_text(found, f'in the {len(stages)} stages of the plan')}; {_instead(found)}, or plan with one stage "
        f"(pins=Pins(together=[{together!r}]), on the command line --together {','.join(together)})"
    )


def _is_untried(found: Difference) -> bool:
    """Return True if the optimiser for all parameters cannot work with small ones, and so is not known."""
    return found.cause is Cause.FAILS and found.part is None


def _text(found: Difference, where: str) -> str:
    text = f"the optimiser, {found.optimizer}, does not train {where} as one for all parameters does: "
    if found.cause is Cause.DRAWS:
        return f"{text}it draws random numbers one parameter after the other, and each stage would draw the same ones"
    if found.cause is Cause.FAILS:
        return f"{text}it fails in stage {found.part}, where some of its groups may be empty ({found.error})"
    if found.cause is Cause.CLIPS:
        return (
            f"{text}it updates {found.parameter} otherwise where gradients are large, as if it clipped the norm of all "
            "gradients that it sees"
        )
    return f"{text}what it does to {found.parameter} depends on the parameters beside it"


def _instead(found: Difference) -> str:
    if found.cause is Cause.CLIPS:
        return (
            "let FuncPipe clip, with clip_grad_norm=... (--clip-grad-norm), and not the optimiser, or choose one that "
            "updates each parameter by itself"
        )
    return "choose one that updates each parameter by itself (SGD, Adam, AdamW, …)"


def check_sharding(
    factory: OptimizerFactory,
    shapes: Sequence[ParameterShape],
    stages: Sequence[Collection[str]],
    routes: Routes,
) -> None:
    """Raise PlanError unless the optimisers of `stages`, each given by the names of its parameters, can be divided over
    the replicas of the stage.
    """
    for shape in shapes:
        if shape.dtype.is_complex:
            raise PlanError(
                f"the optimiser cannot be divided over replicas where parameters are complex, as {shape.name} is; plan "
                "without shard_optimizer, or keep its real and imaginary parts in a parameter (torch.view_as_complex)"
            )
    if routes.ties:
        first, *others = routes.ties[0].stages
        raise PlanError(
            f"the optimiser cannot be divided over replicas where stages share parameters, as {first} and "
            f"{', '.join(map(str, others))} share {routes.ties[0].parameters[0]}; keep its layers together "
            "(--together), or plan without shard_optimizer"
        )
    found = find_difference(factory, shapes, stages, cut=True)
    if found is not None:
        raise PlanError(
            f"the state of this optimiser cannot be divided over replicas: {_fact(found)}; choose one that updates "
            "every element by itself (SGD, Adam, AdamW, …, not fused), or a plan without shard_optimizer"
        )


def _fact(found: Difference) -> str:
    if found.cause is Cause.DRAWS:
        return f"{found.optimizer} draws random numbers, and each replica would draw the same ones"
    if found.cause is Cause.FAILS:
        return f"{found.optimizer} fails on a part of a parameter ({found.error})"
    if found.cause is Cause.STATE:
        return f"{found.optimizer} keeps something for a parameter that cannot be cut with it"
    return f"{found.optimizer} does not update {found.parameter}, cut in two, as it updates it whole"
