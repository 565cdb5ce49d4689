"""The tensors that a run did not change, beside those that it has learned."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from funcpipe.client.follow.results import RunResult
from funcpipe.client.prepare.prepared_run import PreparedRun
from funcpipe.comm.weight_files import StoredTensor, opening, sha256_of
from funcpipe.platforms.catalog import open_storage
from funcpipe.runstate.keys import Keys
from funcpipe.training.state_dict import StateDict


def with_base(prepared: PreparedRun, result: RunResult) -> RunResult:
    """`result`, which has what was learned, with the other tensors of the model.

    Those in files of weights are read when they are asked for. A module that was given as it is has the others itself,
    but for those that differ from what the run began with, which are read now: the run may be deleted next.
    """
    base = prepared.base.below(Keys(prepared.name).base)
    readers = base.state_readers(opening(prepared.storage, open_storage))
    if not readers or not prepared.job.epochs:
        return result
    if prepared.job.weights is not None:
        places: Mapping[str, Tensor | Callable[[], Tensor]] = {
            name: read if base.stored[name].file.url else read() for name, read in readers.items()
        }
        return replace(result, tensors=StateDict(places).replaced(result.tensors))
    new = {file.name for file in prepared.base.files}  # which were made of this very module
    held = _held(prepared)
    others = {
        name: read()
        for name, read in readers.items()
        if (place := base.stored[name]).file.key.rpartition("/")[2] not in new and not _holds(held[name], place)
    }
    return replace(result, tensors={**others, **result.tensors})


def _holds(tensor: Tensor, place: StoredTensor) -> bool:
    return bool(place.sha256) and sha256_of(tensor) == place.sha256


def _held(prepared: PreparedRun) -> dict[str, Tensor]:
    return {
        name: tensor
        for stage in prepared.stages
        for name, tensor in (
            *stage.module.named_parameters(remove_duplicate=False),
            *stage.module.named_buffers(remove_duplicate=False),
        )
    }
