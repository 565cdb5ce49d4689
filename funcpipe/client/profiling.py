"""A user's module is traced and measured for each length that its data has."""

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import nn

from funcpipe.client.site import Site
from funcpipe.core import ModelProfile
from funcpipe.model.graph import trace
from funcpipe.model.graph.held import with_followed
from funcpipe.profiler import profile
from funcpipe.profiler.buckets import Bucket, combined, described
from funcpipe.training.adapters import LossWithTarget, call_arguments
from funcpipe.training.recipe import Recipe
from funcpipe.training.teacher_checks import followed


def profile_buckets(
    model: nn.Module,
    buckets: Sequence[Bucket],
    *,
    recipe: Recipe,
    blocks: Sequence[str],
    on: Site | None,
    max_usd: float | None,
    **settings: Any,
) -> ModelProfile:
    """The layers of `model`, measured for each of `buckets` with `settings` of `profile`.

    They compute in the precision of `recipe`, with its loss and its teachers. They are timed in functions `on` a site,
    if it is given, for at most `max_usd` dollars in all. Raises ModelError.
    """
    each_usd = None if max_usd is None else max_usd / len(buckets)
    profiles, shares, follows = [], [], followed(recipe.teachers, model)
    for bucket in buckets:
        args, kwargs = call_arguments(bucket.inputs)
        own_loss = None if bucket.target is None else LossWithTarget(recipe.cast_loss, bucket.target)
        graph = trace(model, args, kwargs, blocks=blocks, precision=recipe.precision)
        graph = with_followed(graph, model, follows)
        with on.timing(max_usd=each_usd) if on is not None else contextlib.nullcontext() as timer:
            profiles.append(profile(graph, args, kwargs, **settings, loss=own_loss, on=timer))
        shares.append(described(graph.signature.bind(args, kwargs), bucket.share))
    return combined(profiles, shares)
