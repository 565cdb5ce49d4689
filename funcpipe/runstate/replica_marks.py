"""The parameters of each replica of a stage after a step: a hash, put with its mark that the step is done.

Replicas must hold the same bits. They would not if one of them computed on a processor with other instructions, as a
function that is restarted may: the same sum then has another last bit.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from funcpipe.core import ReplicaMark, WorkerId, worker_name
from funcpipe.platforms.base import Storage
from funcpipe.runstate.documents import find_readable_document, side_by_side
from funcpipe.runstate.keys import Keys


def digest_of(parameters: Iterable[Tensor]) -> str:
    """Return a hash of the bits of `parameters`."""
    found = xxhash.xxh3_128()
    for parameter in parameters:
        values = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
        found.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def instruction_set() -> str:
    """Return the instructions of this processor that torch uses, such as AVX512."""
    return torch.backends.cpu.get_cpu_capability()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A difference between two replicas of a stage: other parameters after `step` steps."""

    stage: int
    step: int
    replica: int
    found: ReplicaMark
    expected: ReplicaMark

    def __str__(self) -> str:
        one, other = worker_name(self.stage, self.replica), worker_name(self.stage, 0)
        return (
            f"after step {self.step} the parameters of {one} (attempt {self.found.attempt}, "
            f"{self.found.instructions} instructions) are not those of {other} (attempt {self.expected.attempt}, "
            f"{self.expected.instructions} instructions)"
        )


def compare(storage: Storage, keys: Keys, worker: WorkerId, own: Mapping[int, ReplicaMark]) -> Difference | None:
    """Return how the replica `worker`, with its `own` marks by step, differs from replica 0 at their newest step."""
    stage, replica = worker
    marks = _mark_keys(storage, keys, worker_name(stage, 0))
    step = max((step for step in marks if step in own), default=None)
    if step is None:
        return None
    expected = find_readable_document(storage, ReplicaMark, marks[step])
    if expected is None:  # deleted since it was listed, or damaged: there will be a newer one to compare with
        return None
    return difference(stage, step, replica, own[step], expected)


def difference(stage: int, step: int, replica: int, found: ReplicaMark, expected: ReplicaMark) -> Difference | None:
    """Return the difference between two marks of the same step, if there is one."""
    if found.digest == expected.digest:
        return None
    return Difference(stage=stage, step=step, replica=replica, found=found, expected=expected)


def last_differences(storage: Storage, keys: Keys, *, stages: int, replicas: int, steps: int) -> list[Difference]:
    """Return the replicas that do not agree with replica 0 of their stage after the last step."""
    found = []
    for stage in range(stages) if replicas > 1 else ():
        workers = [worker_name(stage, replica) for replica in range(replicas)]
        marks = side_by_side(functools.partial(_mark, storage, keys, step=steps), workers)
        for replica, mark in enumerate(marks):
            if mark is not None and marks[0] is not None:
                found.append(difference(stage, steps, replica, mark, marks[0]))
    return [one for one in found if one is not None]


def _mark(storage: Storage, keys: Keys, worker: str, *, step: int) -> ReplicaMark | None:
    key = _mark_keys(storage, keys, worker).get(step)
    return None if key is None else find_readable_document(storage, ReplicaMark, key)


def _mark_keys(storage: Storage, keys: Keys, worker: str) -> dict[int, str]:
    """Return the key of the newest attempt's mark of each step that `worker` has marked."""
    return {int(key.rpartition(".")[2]): key for key in storage.list(keys.progress(worker))}
