"""Find the buffers that a forward changes: running statistics that replicas can add up, and others.

Running statistics that a forward reads, or updates by another rule than torch's norms, are buffers like any other: each
forward leaves them for the next one.
"""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.draws import is_from_torch
from funcpipe.model.graph.equivalence import Example
from funcpipe.model.graph.program import attribute, is_inside
from funcpipe.model.graph.signature import Signature
from funcpipe.model.graph.statistics_trial import StatisticsTrial
from funcpipe.model.graph.user_code import class_and_line
from funcpipe.model.graph.values import Statistic


@dataclass(frozen=True)
class ChangedBuffers:
    """The buffers that a forward changes: those of running statistics that replicas can add up, and all `others`.

    `reason` says why running statistics are among the others, if they are.
    """

    statistics: tuple[Statistic, ...]
    others: tuple[str, ...]
    reason: str = ""


def changed_buffers(
    model: nn.Module, signature: Signature, examples: Sequence[Example], tied_names: Sequence[tuple[str, ...]]
) -> ChangedBuffers:
    """What a forward of `model` changes, from `examples` of it, the first with a backward.

    Raises ModelError if two modules hold one of the buffers, or if a backward changes them in another way.
    """
    changed = {name for one in examples for name in (*one.result.buffers, *one.result.written)}
    late = examples[0].result.late
    _refuse_two_owners(model, changed, tied_names)
    norms = [norm for norm in _norms(model) if not changed.isdisjoint(norm.buffers)]
    if not norms:
        _refuse_changes_in_backward(model, late)
        return ChangedBuffers((), tuple(sorted(changed)))
    trial = StatisticsTrial(model, signature, examples, norms)
    reason = trial.reader()
    found = [] if reason else [statistic for norm in norms if (statistic := trial.statistic(norm)) is not None]
    known = {name for item in found for name in item.buffers}
    _refuse_changes_in_backward(model, late if len(found) < len(norms) else late.keys() - known)
    if not reason and len(found) < len(norms):
        path = next(norm.path for norm in norms if norm.names[0] not in known)
        reason = (
            f"running statistics, which {path or 'the model'} ({class_and_line(model.get_submodule(path))}) does not "
            "update as r <- (1 - momentum) r + momentum x, with x independent of r"
        )
    return ChangedBuffers(tuple(found), tuple(sorted(changed - known)), reason)


def within_blocks(model: nn.Module, found: ChangedBuffers, blocks: Set[str]) -> ChangedBuffers:
    """`found` for a model of which `blocks` run as they are: their code may call a norm in some forwards only.

    What replicas add up there must be counted, so that this is noticed; norms that were not called are watched.
    """
    inside = {
        path
        for path, module in model.named_modules()
        if module.training
        and any(is_inside(path, outer) and (path != outer or not is_from_torch(module)) for outer in blocks)
    }
    uncounted = [s for s in found.statistics if s.count is None and s.path in inside]
    changed = {*found.others, *(name for item in found.statistics for name in item.buffers)}
    idle = [norm for norm in _norms(model) if norm.path in inside and changed.isdisjoint(norm.buffers)]
    statistics = (*(item for item in found.statistics if item not in uncounted), *(replace(s, calls=0) for s in idle))
    others = tuple(sorted({*found.others, *(name for item in uncounted for name in item.names)}))
    reason = found.reason
    if uncounted and not reason:
        reason = (
            f"running statistics of {uncounted[0].path}, which does not count its calls, in a block, whose code may "
            "call it in some forwards only"
        )
    return ChangedBuffers(statistics, others, reason)


def _refuse_two_owners(model: nn.Module, changed: Set[str], tied_names: Sequence[tuple[str, ...]]) -> None:
    for names in tied_names:
        owners = {id(attribute(model, name.rpartition(".")[0])) for name in names if "." in name}
        if len(owners) > 1 and not changed.isdisjoint(names):
            raise ModelError(
                f"the forward pass changes the buffer {names[0]}, which is {names[1]} too: two modules hold it; "
                "use one module in both places, or a buffer for each"
            )


def _refuse_changes_in_backward(model: nn.Module, names: Set[str] | Mapping[str, Tensor]) -> None:
    """Raise ModelError for buffers that a backward carries on: backwards run in another order than forwards."""
    for name in sorted(names):
        path = name.rpartition(".")[0]
        raise ModelError(
            f"the forward of {path or 'the model'} ({class_and_line(model.get_submodule(path))}) changes the buffer "
            f"{name}, and the backward pass changes it again for the next forward (by a hook, or by code that runs "
            "again in the backward, as under torch.utils.checkpoint), but micro-batches do not run backward in the "
            "order of one process; leave that module out of the checkpoint, or turn checkpointing off and let the plan "
            "recompute stages instead (recompute='allow')"
        )


def _norms(model: nn.Module) -> list[Statistic]:
    """All modules that hold running statistics as torch's norms do."""
    found = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        momentum = getattr(module, "momentum", math.nan)
        held = dict(module.named_buffers(recurse=False))
        averages = [held[name] for name in ("running_mean", "running_var") if name in held]
        if len(averages) < 2 or not all(tensor.is_floating_point() for tensor in averages):
            continue
        if momentum is None or (isinstance(momentum, int | float) and 0 <= momentum <= 1):
            count = f"{prefix}num_batches_tracked" if "num_batches_tracked" in held else None
            found.append(Statistic((f"{prefix}running_mean", f"{prefix}running_var"), count, momentum))
    return found
