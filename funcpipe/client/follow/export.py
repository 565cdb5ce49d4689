"""What a run has trained: of model and loss, read from its storage and written into the user's own.

The run has finished, was stopped, or still trains.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.client.follow.adapters import merge_adapters
from funcpipe.comm.weight_files import opening
from funcpipe.errors import CorruptMessage, InvalidValue, KeyMissing, ModelError, RunUnknown
from funcpipe.model.graph.reachable import reached_values
from funcpipe.model.split.module_state import Attributes, write_attributes
from funcpipe.model.split.stage import block_names, hold, of_loss
from funcpipe.model.tensors import load_tensors, named_tensors, saved_state
from funcpipe.platforms.base import Storage
from funcpipe.platforms.catalog import open_storage
from funcpipe.runstate.reader import RunReader
from funcpipe.runstate.signing import signed
from funcpipe.training.losses import LossFunction
from funcpipe.training.state import ATTRIBUTES, MODEL, StageState
from funcpipe.training.state_dict import StateDict

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainedLoss:
    """The `tensors` of a loss that are trained or change with its calls, under the names that it has for them.

    `averaged` are the same with the average over steps, and `best` those of the best validation; empty without.
    `attributes` are the Python attributes that calls change for the next ones, of modules in `blocks`.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    averaged: Mapping[str, Tensor] = field(default_factory=dict)
    best: Mapping[str, Tensor] = field(default_factory=dict)
    attributes: Attributes = field(default_factory=dict)
    blocks: tuple[str, ...] = ()

    @classmethod
    def of(cls, learned: StageState, best: StageState | None = None) -> "TrainedLoss":
        """The loss in `learned`, all of a checkpoint; `best` is that of the best validation."""
        return cls(
            tensors=learned.loss_state_dict(),
            averaged=learned.averaged_loss_state_dict(),
            best={} if best is None else best.loss_state_dict(),
            attributes=learned.loss_attributes(),
            blocks=block_names(learned.settings.get(ATTRIBUTES, {})),
        )

    def places_in(self, loss: Callable[..., Any]) -> dict[str, Tensor]:
        """The tensors of `loss` that these are written into. Raises ModelError if it has no such modules."""
        modules = {path: value for path, value in reached_values(loss) if isinstance(value, nn.Module)}
        for path in of_loss(dict.fromkeys(self.blocks)):
            if path not in modules:
                raise ModelError(f"the run trained a loss with a module {path!r}; make the loss as it was for the run")
        return named_tensors(hold(loss, self.blocks))

    def write_to(self, loss: Callable[..., Any]) -> None:
        """Write it into `loss`."""
        holder = hold(loss, self.blocks)
        load_tensors(holder, self.tensors)
        write_attributes(holder, self.attributes)

    def with_all_of(self, loss: Callable[..., Any]) -> "TrainedLoss":
        """The same with all tensors of a `loss` that is a module, as its `state_dict` has them."""
        if not isinstance(loss, nn.Module) or not self.tensors:
            return self
        whole = saved_state(loss)
        return replace(
            self,
            tensors={**whole, **self.tensors},
            averaged={**whole, **self.averaged} if self.averaged else {},
            best={**whole, **self.best} if self.best else {},
        )


def write_trained(
    model: nn.Module, tensors: Mapping[str, Tensor], attributes: Attributes, learned: StageState | None
) -> None:
    """Write trained tensors, and what forwards leave for the next ones, into `model`."""
    load_tensors(model, tensors)
    write_attributes(model, attributes)
    if learned is None:
        return
    buffers = dict(model.named_buffers())
    with torch.no_grad():  # those that a state_dict leaves out
        for name in learned.transient & buffers.keys():
            trained = learned.tensors.get(MODEL + name)
            if trained is not None and trained.shape == buffers[name].shape:
                buffers[name].copy_(trained)


_LOOKUPS = 5
"""The tries to read the newest checkpoint, if functions delete the one that was found before it is read."""


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """The model of a run as saved after `step` of its `steps` steps: what it had learned as `state`, and the `base`,
    what it does not change.
    """

    run: str
    step: int
    steps: int
    state: StageState
    base: StateDict

    def state_dict(self, merged: nn.Module | None = None) -> Mapping[str, Tensor]:
        """The model's parameters and buffers, for its `load_state_dict`; a tied one under each of its names.

        Those that the run does not change, if there are any, are read when they are asked for. With the model as
        `merged`, it is that of its base model, as `export` returns it.
        """
        learned = self.state.state_dict()
        found = self.base.replaced(learned) if self.base else learned
        if merged is None:
            return found
        result = merge_adapters(merged, found)
        _check_names("model", self.run, found, named_tensors(merged))
        return result


def export(
    run: str, *, storage: str | Storage, step: int | None = None, merged: nn.Module | None = None
) -> Mapping[str, Tensor]:
    """The `state_dict` of the model of `run`, whose objects lie in `storage`, a URL or an open one.

    It is that of the newest checkpoint that is whole, or the one after `step` steps: of a finished run the result, of
    one that still trains what it saved last. Nothing is written, and a run that trains is not disturbed. Tensors that
    the run does not change, such as frozen weights, are read from where they lie when they are asked for.

    With the model of the run as `merged`, a PeftModel, which may be on the meta device, it is that of its base model
    with the adapters merged into it, each tensor when it is asked for.

    Raises RunUnknown, RunKeyMissing for a run of another machine, InvalidValue where `step` is not saved, or ModelError
    where `merged` is another model, or has no adapters that can be merged.
    """
    return load_saved(run, storage=storage, step=step, opened=merged is not None).state_dict(merged)


def load_saved(run: str, *, storage: str | Storage, step: int | None = None, opened: bool = False) -> SavedModel:
    """The model that `export` reads, with its step; if it is only `opened`, no tensor is read before it is asked for,
    and a file at a time is in memory.
    """
    own = signed(open_storage(storage) if isinstance(storage, str) else storage)
    return read_saved(run, own, step=step, opened=opened)


def _steps_of(reader: RunReader, step: int | None) -> list[int]:
    """The steps whose model is wanted, the newest first. Raises InvalidValue or RunUnknown if there is none."""
    run, record, saved = reader.keys.run, reader.record, reader.saved
    if step is not None and step not in saved:
        rule = f"must be a step that run {run} has saved: {', '.join(map(str, sorted(saved))) or 'there is none'}"
        raise InvalidValue("step", step, rule)
    if not saved:
        raise RunUnknown(
            f"run {run} has not saved its model yet, of {record.steps} steps; try again later, or train with a "
            "shorter interval between checkpoints (--set training.checkpoint=N)"
        )
    return list(saved) if step is None else [step]


def read_saved(run: str, own: Storage, *, step: int | None = None, opened: bool = False) -> SavedModel:
    """The same from a storage that is signed already."""
    damage = ""
    for _ in range(_LOOKUPS):
        reader = RunReader.newest(own, run)
        record = reader.record
        for one in _steps_of(reader, step):
            try:
                state = reader.model(one, opened=opened)
                base = reader.base.state_readers(opening(own, open_storage))
                return SavedModel(run=run, step=one, steps=record.steps, state=state, base=StateDict(base))
            except (CorruptMessage, KeyMissing) as error:
                _log.info("run %s: the checkpoint after step %d cannot be read: %s", run, one, error)
                damage = str(error)
    raise RunUnknown(f"run {run}: no checkpoint can be read: {damage}")


def load_into(
    model: nn.Module, loss: LossFunction, run: str, *, storage: str | Storage, step: int | None = None
) -> int:
    """Write the model that `export` reads into `model`, and the trained loss into `loss`; return the step.

    Raises ModelError if it is another model or another loss.
    """
    saved = load_saved(run, storage=storage, step=step)
    found, trained = saved.state_dict(), TrainedLoss.of(saved.state)
    _check_same("model", run, found, named_tensors(model))
    _check_same("loss", run, trained.tensors, trained.places_in(loss))
    write_trained(model, found, saved.state.attributes(), saved.state)
    trained.write_to(loss)
    return saved.step


def _check_names(what: str, run: str, found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    for name in sorted(found.keys() ^ own.keys()):
        where = f"the {what} has no {name!r}" if name in found else f"{name!r} is not in the run"
        raise ModelError(f"run {run} trained another {what}: {where}; make the {what} as it was for the run")


def _check_same(what: str, run: str, found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    _check_names(what, run, found, own)
    for name, tensor in found.items():
        if tensor.shape != own[name].shape:
            raise ModelError(
                f"run {run} trained another {what}: {name!r} has shape {list(tensor.shape)} there, "
                f"{list(own[name].shape)} here; make the {what} as it was for the run"
            )
