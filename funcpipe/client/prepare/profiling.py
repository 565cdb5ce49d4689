"""Profiles of a user's module, traced and measured for each length that its data has."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from funcpipe.client.prepare.open_data import open_data
from funcpipe.client.prepare.site import Site
from funcpipe.core import ModelProfile
from funcpipe.errors import InvalidValue
from funcpipe.model.graph import trace
from funcpipe.model.graph.inputs import Collated
from funcpipe.model.graph.values import with_followed
from funcpipe.profiler.buckets import Bucket, buckets_of, combined, described
from funcpipe.profiler.profile import profile
from funcpipe.training.averaging import followed
from funcpipe.training.data_source import call_arguments
from funcpipe.training.first_batch import largest_batch
from funcpipe.training.losses import LossWithTarget, loss_of_output
from funcpipe.training.recipe import Recipe

SampleInputs = Tensor | tuple[Any, ...] | Mapping[str, Any] | list[Bucket] | DataLoader[Any]
"""Samples for `profile`: inputs, by position or by name, Buckets of them, or the DataLoader of micro-batches."""


def profile_inputs(
    model: nn.Module, sample_inputs: SampleInputs, target: Any, *, micro_batch: int, **settings: Any
) -> ModelProfile:
    """The layers of `model`, measured on what a user gives as sample: inputs, Buckets, or a DataLoader.

    `settings` are those of `profile_buckets`. Raises ModelError, DataError or InvalidValue.
    """
    if not isinstance(sample_inputs, DataLoader):
        return profile_buckets(model, buckets_of(sample_inputs, target), micro_batch=micro_batch, **settings)
    if target is not None:
        raise InvalidValue("sample_target", "a target", "must not be given beside a DataLoader, which has its own")
    _, source = open_data(sample_inputs)
    found = largest_batch(source.dataset, micro_batch, source.options.collate, model)
    arguments = dict(found.batch.kwargs)
    inside = arguments and settings["recipe"].loss is loss_of_output  # the loss is measured with the model
    bucket = Bucket(arguments or found.batch.args, target=None if inside else found.batch.target)
    return profile_buckets(model, [bucket], micro_batch=micro_batch, loaded=True, collated=found.collated, **settings)


def profile_buckets(
    model: nn.Module,
    buckets: Sequence[Bucket],
    *,
    recipe: Recipe,
    blocks: Sequence[str],
    logged_notes: set[str],
    on: Site | None,
    max_usd: float | None,
    loaded: bool = False,
    collated: Collated | None = None,
    **settings: Any,
) -> ModelProfile:
    """The layers of `model`, measured for each of `buckets` with `settings` of `profile`.

    They compute in the precision of `recipe`, with its loss and its teachers. They are timed in functions `on` a site,
    if it is given, for at most `max_usd` dollars in all. If the bucket was `loaded`, it is a micro-batch itself; others
    are `collated`, where they cannot be cut from it. `logged_notes` on the model are not logged again. Raises
    ModelError.
    """
    each_usd = None if max_usd is None else max_usd / len(buckets)
    profiles, shares, follows = [], [], followed(recipe.teachers, model)
    for bucket in buckets:
        args, kwargs = call_arguments(bucket.inputs)
        own_loss = None if bucket.target is None else LossWithTarget(recipe.cast_loss, bucket.target)
        graph = trace(
            *(model, args, kwargs),
            blocks=blocks,
            precision=recipe.precision,
            collated=collated,
            logged_notes=logged_notes,
        )
        graph = with_followed(graph, model, follows)
        with on.timing(max_usd=each_usd) if on is not None else contextlib.nullcontext() as timer:
            profiles.append(profile(graph, args, kwargs, **settings, loss=own_loss, on=timer, whole=loaded))
        shares.append(described(graph.signature.bind(args, kwargs), bucket.share))
    return combined(profiles, shares)
