"""Plans of one stage, where the optimiser needs that."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from funcpipe.core import ModelProfile, Pins, Plan, PlatformSpec, TrainingSpec
from funcpipe.errors import Infeasible, PlanError
from funcpipe.training.optimizer_division import reason_for_one_stage
from funcpipe.training.optimizers import trainable_shapes
from funcpipe.training.recipe import Recipe, no_optimizer

_log = logging.getLogger(__name__)


def search(
    recipe: Recipe,
    model: nn.Module,
    way: Callable[..., Plan],
    profile: ModelProfile,
    spec: PlatformSpec,
    training: TrainingSpec,
    pins: Pins,
    time_limit_s: float | None,
) -> Plan:
    """The plan that is found in some `way`; of one stage if the optimiser of `recipe` trains `model`
    otherwise in several.

    Raises PlanError if cuts are pinned then, Infeasible if no plan fits.
    """
    planned = partial(way, profile, spec, training, time_limit_s=time_limit_s)
    is_cut = len(profile.layers) > 1 and recipe.optimizer is not no_optimizer
    why = reason_for_one_stage(recipe.optimizer, trainable_shapes(model, recipe.loss)) if is_cut else None
    if why is None:
        return planned(pins=pins)
    if pins.cuts:
        raise PlanError(f"the pins begin a stage with {pins.cuts[0]}, but {why}")
    _log.warning("all layers are planned in one stage, because %s", why)
    everything = (profile.layers[0].name, profile.layers[-1].name)
    try:
        return planned(pins=replace(pins, together=(*pins.together, everything)))
    except Infeasible as error:
        raise Infeasible(f"{error}; all layers must be in one stage, because {why}") from error
