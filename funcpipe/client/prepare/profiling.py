"""Profiles of a user's module, traced and measured for each length that its data has."""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from funcpipe.client.prepare.data import open_data
from funcpipe.client.prepare.session import Site
from funcpipe.core import DataProfile, ModelProfile
from funcpipe.errors import InvalidValue
from funcpipe.model.graph import trace
from funcpipe.model.graph.inputs import Collated
from funcpipe.model.graph.isolation import in_turn, preserve_state
from funcpipe.model.graph.values import with_followed
from funcpipe.model.tensors import flatten
from funcpipe.profiler.buckets import Bucket, buckets_of, combined, described
from funcpipe.profiler.profile import profile
from funcpipe.training.averaging import followed
from funcpipe.training.data import LoadedBatch, user_code_errors
from funcpipe.training.data_source import DatasetFactory, DataSource, call_arguments, is_factory, prepare_data
from funcpipe.training.first_batch import check_enough, largest_batch, spread
from funcpipe.training.loading import SeededDataset
from funcpipe.training.losses import LossWithTarget, loss_of_output
from funcpipe.training.recipe import Recipe
from funcpipe.training.tensor_table import as_table

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


BATCHES = 5
"""The micro-batches that are measured, after a first one; they are spread over the dataset."""


@in_turn()
def profile_data(
    dataset: Any, micro_batch: int, *, batches: int = BATCHES, clock: Callable[[], float] = time.perf_counter
) -> DataProfile:
    """Load some micro-batches of `dataset`, which is what `train` takes: seconds are their median.

    Processes of a DataLoader load as many at once. The memory of a factory's dataset is what this process grows by when
    it makes it, that of a dataset given itself what it takes to send. Raises DataError.
    """
    before = _resident_bytes()
    _, source = open_data(dataset)
    grown = max(0, _resident_bytes() - before)
    check_enough(source.dataset, micro_batch)
    resident_bytes = grown if isinstance(dataset, str) or is_factory(dataset) else _sent_bytes(source)
    seeded, seconds, sizes = SeededDataset(source.dataset, 0, 0), [], []
    with preserve_state(torch.nn.Module()):
        for indices in spread(len(source.dataset), micro_batch, batches + 1):
            began_s = clock()
            with user_code_errors(f"samples {indices[0]} to {indices[-1]} of the dataset cannot be loaded"):
                loaded = seeded.batch(indices, source.options.collate)
            seconds.append(clock() - began_s)
            sizes.append((_bytes(loaded), sum(tensor.nbytes for tensor in _tensors(loaded.target))))
    return DataProfile(
        load_s=statistics.median(seconds[1:]) / max(1, source.options.workers),
        batch_bytes=max(size for size, _ in sizes),
        target_bytes=max(target for _, target in sizes),
        resident_bytes=resident_bytes,
    )


def _sent_bytes(source: DataSource) -> int:
    """Bytes that functions hold of a dataset that is sent: its shards, or its pickle and its objects."""
    table = as_table(source.dataset)
    if table is not None:
        return table.form.kept_bytes
    prepared = prepare_data(DatasetFactory(source.dataset), source.options, table=None)
    return 2 * (len(prepared.bundle) + sum(tensor.nbytes for tensor in prepared.tensors.values()))


def _bytes(loaded: LoadedBatch) -> int:
    return sum(tensor.nbytes for tensor in _tensors((loaded.args, dict(loaded.kwargs), loaded.target)))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096
