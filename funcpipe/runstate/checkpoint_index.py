"""Which checkpoints there are, by the names of their manifests, and who can start again from them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

Worker = tuple[int, int]
"""Stage and replica."""

_PART = re.compile(r"\d{8}\.(\d+)of(\d+)(m?)\..+", re.ASCII)


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """The part of a checkpoint that one of so many replicas saves; `model` if it holds the model's tensors too."""

    replica: int
    replicas: int
    model: bool

    def __str__(self) -> str:
        return f"{self.replica}of{self.replicas}{'m' * self.model}"


def part_of(name: str) -> CheckpointPart | None:
    """What the manifest of that name is a part of a checkpoint for; None if it is whole."""
    match = _PART.fullmatch(name)
    return None if match is None else CheckpointPart(int(match[1]), int(match[2]), bool(match[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """What is saved: for each stage the step and the name of its checkpoints or their parts, in ascending order.

    `done` holds how many steps a worker has certainly done, with all that it writes in them. A checkpoint of its stage
    may be newer: another replica has written it.
    """

    saved: Mapping[int, tuple[tuple[int, str], ...]]
    done: Mapping[Worker, int]
    first_step: int

    def steps(self, stage: int) -> frozenset[int]:
        """After which steps `stage` is saved as a whole; at first it was as it is when nothing is."""
        steps = {step for step, _ in self.saved.get(stage, ())}
        return frozenset(step for step in steps if self.names(stage, step)) | {self.first_step}

    def restart(self, worker: Worker) -> int:
        """Where `worker` starts again if it dies: the newest checkpoint with its state that it has come to itself."""
        done = self.done.get(worker, self.first_step)
        steps = {step for step, _ in self.saved.get(worker[0], ()) if step <= done}
        return max((step for step in steps if self.names_for(worker, step)), default=self.first_step)

    def common(self, stages: int, replicas: int) -> int:
        """The newest step that all stages are saved after, and whose loss all replicas of the last have reported."""
        reported = min(self.done.get((stages - 1, replica), self.first_step) for replica in range(replicas))
        steps = frozenset.intersection(*(self.steps(stage) for stage in range(stages)))
        return max((step for step in steps if step <= reported), default=self.first_step)

    def outdated(self, stage: int, stages: int, replicas: int) -> tuple[str, ...]:
        """The checkpoints of `stage` that nobody needs; the last two are kept in any case."""
        entries = self.saved.get(stage, ())
        last = sorted({step for step, _ in entries})[-2:]
        restarts = (self.restart((stage, replica)) for replica in range(replicas))
        least = min([self.common(stages, replicas), *restarts, *last])
        return tuple(name for step, name in entries if step < least)

    def names(self, stage: int, step: int) -> tuple[str, ...]:
        """The manifests that hold `stage` after `step` steps together, if it is saved then."""
        whole, parts = self._after(stage, step)
        if whole is not None:
            return (whole,)
        by_replica = {part.replica: name for part, name in sorted(parts.items(), key=lambda item: item[0].model)}
        complete = len(by_replica) == next((part.replicas for part in parts), 0)
        has_model = any(part.model for part in parts)
        return tuple(name for _, name in sorted(by_replica.items())) if complete and has_model else ()

    def names_for(self, worker: Worker, step: int) -> tuple[str, ...]:
        """The manifests that hold the state of `worker` after `step` steps, if it is saved: its own part comes first,
        with another one for the model if need be.
        """
        whole, parts = self._after(worker[0], step)
        if whole is not None:
            return (whole,)
        own = {part.model: name for part, name in parts.items() if part.replica == worker[1]}
        models = [name for part, name in parts.items() if part.model]
        if True in own:
            return (own[True],)
        return (own[False], models[0]) if own and models else ()

    def _after(self, stage: int, step: int) -> tuple[str | None, dict[CheckpointPart, str]]:
        """What is saved of `stage` after `step` steps: the newest whole checkpoint, the newest of each part."""
        whole, parts = None, {}
        for at, name in self.saved.get(stage, ()):
            part = part_of(name) if at == step else None
            if part is not None:
                parts[part] = name
            elif at == step:
                whole = name
        return whole, parts
