"""The index of checkpoints, by the names of their manifests, and the workers that can restart from each.

A manifest is called STEP.WRITER.json, or STEP.PART.WRITER.json where the optimiser is divided over the replicas and
each saves a part. PART is `0of2m`: replica 0 of 2, with the model's tensors (m). So of

    00000004.0of2m.s0.r0.a00000000.json    00000004.1of2.s0.r1.a00000000.json    00000008.0of2m.s0.r0.a00000000.json

stage 0 is saved as a whole after 4 steps. After 8 steps only replica 0 could restart, and replica 1 could not.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from funcpipe.core import WorkerId
from funcpipe.platforms.base import Storage
from funcpipe.runstate.keys import Keys

_MANIFEST = re.compile(r"(\d{8})\.([a-z0-9.]+)\.json", re.ASCII)
_DONE = re.compile(r"s(\d+)\.r(\d+)/(\d{8}\.\d{4})\.(\d{8})", re.ASCII)
_PART = re.compile(r"\d{8}\.(\d+)of(\d+)(m?)\..+", re.ASCII)


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """The part of a checkpoint that `replica` of `replicas` saves; with `model` if it holds the model's tensors too."""

    replica: int
    replicas: int
    model: bool

    def __str__(self) -> str:
        return f"{self.replica}of{self.replicas}{'m' * self.model}"


def parse_part(name: str) -> CheckpointPart | None:
    """Return the part that the manifest called `name` describes; None if it describes a whole checkpoint."""
    match = _PART.fullmatch(name)
    return None if match is None else CheckpointPart(int(match[1]), int(match[2]), bool(match[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """`saved` holds, for each stage, the step and manifest of each checkpoint or part of one, in ascending order.

    `done` holds how many steps each worker has certainly finished, including all its writes. A checkpoint of its stage
    may be newer if another replica has written it. `files` are the names of the other objects of each stage.
    """

    saved: Mapping[int, tuple[tuple[int, str], ...]]
    done: Mapping[WorkerId, int]
    first_step: int
    files: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def saved_steps(self, stage: int) -> frozenset[int]:
        """The steps after which `stage` is saved as a whole, and the first step, where nothing needs to be saved."""
        steps = {step for step, _ in self.saved.get(stage, ())}
        return frozenset(step for step in steps if self.manifests(stage, step)) | {self.first_step}

    def restart_step(self, worker: WorkerId, done: int | None = None) -> int:
        """Return the step at which `worker` restarts if it dies: its newest checkpoint that it has itself reached.

        `done` is the number of steps that it has done, by default by its mark.
        """
        done = self.done.get(worker, self.first_step) if done is None else done
        steps = {step for step, _ in self.saved.get(worker[0], ()) if step <= done}
        return max((step for step in steps if self.manifests_for(worker, step)), default=self.first_step)

    def common_step(self, stages: int, replicas: int) -> int:
        """The newest step that all stages have saved, and whose loss all replicas of the last stage have reported."""
        reported = min(self.done.get((stages - 1, replica), self.first_step) for replica in range(replicas))
        return next((step for step in self.common_steps(stages) if step <= reported), self.first_step)

    def resume_step(self, stages: int, replicas: int) -> int:
        """As `common_step`; if nothing is known of what the last stage has done, by what is saved alone."""
        is_lost = not any((stages - 1, replica) in self.done for replica in range(replicas))
        return self.common_steps(stages)[0] if is_lost else self.common_step(stages, replicas)

    def common_steps(self, stages: int) -> tuple[int, ...]:
        """Return the steps that all stages have saved, the newest first; the last is the first step."""
        steps = frozenset.intersection(*(self.saved_steps(stage) for stage in range(stages)))
        return tuple(sorted(steps, reverse=True))

    def outdated(self, stage: int, stages: int, replicas: int) -> tuple[str, ...]:
        """Return the manifests of `stage` that no worker would restart from; the last two steps are always kept."""
        entries = self.saved.get(stage, ())
        last = sorted({step for step, _ in entries})[-2:]
        restarts = (self.restart_step((stage, replica)) for replica in range(replicas))
        oldest_needed = min([self.common_step(stages, replicas), *restarts, *last])
        return tuple(name for step, name in entries if step < oldest_needed)

    def files_of(self, stage: int, manifests: Collection[str]) -> tuple[str, ...]:
        """Return the files of the checkpoints of `stage` whose `manifests` have these names."""
        prefixes = tuple(name.removesuffix("json") for name in manifests)
        return tuple(name for name in self.files.get(stage, ()) if name.startswith(prefixes))

    def manifests(self, stage: int, step: int) -> tuple[str, ...]:
        """Return the manifests that together hold `stage` after `step` steps; empty if it is not completely saved."""
        whole, parts = self._after(stage, step)
        if whole is not None:
            return (whole,)
        by_replica = {part.replica: name for part, name in sorted(parts.items(), key=lambda item: item[0].model)}
        complete = len(by_replica) == next((part.replicas for part in parts), 0)
        has_model = any(part.model for part in parts)
        return tuple(name for _, name in sorted(by_replica.items())) if complete and has_model else ()

    def manifests_for(self, worker: WorkerId, step: int) -> tuple[str, ...]:
        """Return the manifests that hold the state of `worker` after `step` steps; empty if it is not saved.

        Its own part comes first, followed by one with the model if its own has none.
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
        """The newest whole checkpoint of `stage` after `step` steps, if any, and the newest manifest of each part."""
        whole, parts = None, {}
        for at, name in self.saved.get(stage, ()):
            part = parse_part(name) if at == step else None
            if part is not None:
                parts[part] = name
            elif at == step:
                whole = name
        return whole, parts


def read_index(storage: Storage, keys: Keys, *, first_step: int) -> CheckpointIndex:
    """Return the index of a generation that began at `first_step`, read with two requests.

    Checkpoints are listed before marks: of a checkpoint that is found, each worker that repeats the steps before it has
    said so, see `take_over_marks`.
    """
    saved: dict[int, list[tuple[int, str]]] = {}
    files: dict[int, list[str]] = {}
    for key in storage.list(keys.checkpoints):
        folder, _, name = key.removeprefix(keys.checkpoints).rpartition("/")
        match = _MANIFEST.fullmatch(name)
        if match is not None and folder[1:].isdecimal():
            saved.setdefault(int(folder[1:]), []).append((int(match[1]), name))
        elif folder[1:].isdecimal():
            files.setdefault(int(folder[1:]), []).append(name)
    newest: dict[WorkerId, tuple[str, int]] = {}  # the attempt and turn, and the step, of the mark that counts
    for key in storage.list(keys.all_progress):
        match = _DONE.fullmatch(key.removeprefix(keys.all_progress))
        if match is not None:
            worker = int(match[1]), int(match[2])
            newest[worker] = max(newest.get(worker, ("", 0)), (match[3], int(match[4])))
    entries = {stage: tuple(sorted(found)) for stage, found in saved.items()}
    names = {stage: tuple(found) for stage, found in files.items()}
    return CheckpointIndex(
        saved=entries, files=names, done={worker: step for worker, (_, step) in newest.items()}, first_step=first_step
    )
