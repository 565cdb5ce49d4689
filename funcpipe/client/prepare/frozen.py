"""The base of a run: the tensors that no step changes, found, and laid into files once or left where they lie."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from funcpipe.client.prepare.weights import ModelWeights
from funcpipe.comm.weight_files import NAMES, StoredTensor, TensorFile, make_file
from funcpipe.errors import PlanError
from funcpipe.model.graph.program import is_inside
from funcpipe.model.split import StageModule
from funcpipe.model.split.stage import LOSS
from funcpipe.model.tensors import fingerprint, is_dense, named_tensors
from funcpipe.runstate.base import StoredBase
from funcpipe.runstate.checkpoints import FILE_BYTES, in_files
from funcpipe.training.averaging import Teacher, TeacherUpdate
from funcpipe.training.state import tensor_names


@dataclass(frozen=True, kw_only=True)
class JobBase(StoredBase):
    """The base of a job, of which `files` are to be uploaded."""

    files: tuple[TensorFile, ...] = ()


def mark_fixed(stages: Sequence[StageModule], teachers: Sequence[Teacher]) -> None:
    """Note in each of `stages` which of its tensors no step is to change.

    These are parameters that neither the optimiser nor `teachers` update, and buffers that no forward was seen to
    change.
    """
    taught = {id(tensor) for stage in stages for tensor in TeacherUpdate(teachers, stage).parameters}
    for stage in stages:
        stage.fixed = frozenset(
            name
            for name, tensor in tensor_names(stage)[0].items()
            if not tensor.requires_grad and id(tensor) not in taught and _can_be_fixed(stage, name, tensor)
        )


def _can_be_fixed(stage: StageModule, name: str, tensor: Tensor) -> bool:
    changing = {*stage.carried.buffers, *(buffer for item in stage.statistics for buffer in item.buffers)}
    own = {name, *(other for other, held in _named(stage) if held is tensor)}
    is_plain = fingerprint(tensor) is not None or type(tensor) in (Tensor, nn.Parameter)
    return (
        is_plain
        and tensor.device.type == "cpu"
        and is_dense(tensor)
        and tensor.dtype in NAMES
        and own.isdisjoint(changing)
        and not any(is_inside(other, block) for other in own for block in (LOSS, *stage.carried.blocks))
    )


def _named(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from stage.named_parameters(remove_duplicate=False)
    yield from stage.named_buffers(remove_duplicate=False)


def make_base(
    stages: Sequence[StageModule], weights: ModelWeights | None, seed: int, before: StoredBase | None
) -> JobBase:
    """The base of a run of `stages`, with the `weights` of the model if they lie in files, and the `seed` by which
    others are computed; the base that it had `before`, if it goes on.

    Raises PlanError if it has trained what is frozen now, or the other way round, or had other weights.
    """
    if before is not None:
        _check_trained(stages, before)
    stored: dict[str, StoredTensor] = {}
    new: dict[int, tuple[list[str], Tensor]] = {}
    transient = frozenset(name for stage in stages for name in _transient(stage))
    for stage in stages:
        fixed = {id(tensor): name for name, tensor in tensor_names(stage)[0].items() if name in stage.fixed}
        for name, tensor in _named(stage):
            if id(tensor) not in fixed:
                continue
            place = _place(name, tensor, weights, before, is_transient=name in transient)
            if place is not None:
                stored[name] = place
            elif weights is not None and name in weights.made and name in transient:
                continue  # which each function computes
            else:
                new.setdefault(id(tensor), ([], tensor))[0].append(name)
    files, added = _files(new.values(), weights, seed)
    return JobBase(stored={**stored, **added}, transient=transient & (stored.keys() | added.keys()), files=files)


def _transient(stage: StageModule) -> set[str]:
    return dict(stage.named_buffers(remove_duplicate=False)).keys() - named_tensors(stage).keys()


def _place(
    name: str, tensor: Tensor, weights: ModelWeights | None, before: StoredBase | None, *, is_transient: bool
) -> StoredTensor | None:
    """Where the tensor lies already; None if it is to be uploaded."""
    given = None if weights is None else weights.stored.get(name)
    if before is None:
        return given
    there = before.stored.get(name)
    if there is None:
        if is_transient:
            return given
        raise PlanError(
            f"{name} is frozen, and the run that is to go on has trained it; leave trainable what was "
            "(requires_grad), or begin a new run"
        )
    if (there.shape, there.dtype) != (tuple(tensor.shape), tensor.dtype):
        raise PlanError(
            f"the run is of another model: {name!r} has shape {list(there.shape)} of {there.dtype} there, "
            f"{list(tensor.shape)} of {tensor.dtype} here"
        )
    if given is None or not there.file.url:
        return there
    if (given.file.header_sha256, given.start) != (there.file.header_sha256, there.start):
        raise PlanError(
            f"the run has begun with the weights in {there.file.place}, and {given.file.place} is another file; give "
            "the weights that it was started with, wherever they lie now"
        )
    return given


def _check_trained(stages: Sequence[StageModule], before: StoredBase) -> None:
    for stage in stages:
        for name, tensor in _named(stage):
            if name in before.stored and tensor.requires_grad:
                raise PlanError(
                    f"{name} is trainable, and was frozen in the run that is to go on, whose optimiser does not know "
                    "it; freeze what was frozen (requires_grad_(False)), or begin a new run"
                )


def _files(
    new: Collection[tuple[list[str], Tensor]], weights: ModelWeights | None, seed: int
) -> tuple[tuple[TensorFile, ...], dict[str, StoredTensor]]:
    """The files of tensors that lie nowhere yet, and their places under all names."""
    contents: Mapping[str, Tensor] = {
        names[0]: tensor if fingerprint(tensor) is None or weights is None else weights.made[names[0]].compute(seed)
        for names, tensor in new
    }
    files: list[TensorFile] = []
    stored: dict[str, StoredTensor] = {}
    for part in in_files(contents, FILE_BYTES):
        file, places = make_file(part)
        files.append(file)
        stored |= places
    return tuple(files), {name: stored[names[0]] for names, _ in new for name in names}
