"""The parameter server's arithmetic: it sums gradients in a fixed order, updates the parameters, and is saved.

The sum of a synchronous step is that of one process, which adds up the gradients of micro-batches one after another:
workers push each by itself, and the server adds them by number, in whatever order and from whatever worker they came.
"""

import threading
from collections.abc import Iterable, Mapping

from torch import Tensor

from funcpipe.errors import PlanError
from funcpipe.neighbours.parameter_server.replica import ServerJob
from funcpipe.neighbours.parameter_server.values import Progress, Push
from funcpipe.training.batches import Step
from funcpipe.training.passes import Batch
from funcpipe.training.state import StageState


class Applied:
    """The ids of all micro-batches that have been applied: all below `below`, and those in `beyond`."""

    def __init__(self, below: int = 0, beyond: Iterable[int] = ()) -> None:
        self.below = below
        self.beyond = set(beyond)

    def __contains__(self, number: int) -> bool:
        return number < self.below or number in self.beyond

    def add(self, numbers: Iterable[int]) -> None:
        """Count `numbers` as applied."""
        self.beyond |= {number for number in numbers if number >= self.below}
        while self.below in self.beyond:
            self.beyond.remove(self.below)
            self.below += 1


class ParameterServer:
    """The parameters and the optimiser. `version` counts updates; methods may be called from several threads."""

    def __init__(self, job: ServerJob) -> None:
        self._stage, _, self._computation = job.load()
        self._lock = threading.Lock()
        self._collected: dict[int, tuple[Tensor, float]] = {}
        self.version = 0
        self.samples = 0
        self.applied = Applied()

    @property
    def parameter_bytes(self) -> int:
        """Bytes that a pull moves, and about those of a push."""
        return sum(parameter.nbytes for parameter in self._stage.parameters())

    def pull(self) -> tuple[int, dict[str, Tensor]]:
        """The version and a copy of the parameters."""
        with self._lock:
            return self.version, {name: p.detach().clone() for name, p in self._stage.named_parameters()}

    def collect(self, push: Push) -> None:
        """Keep the gradients of a synchronous push until its step's `update`; those of another version are dropped.

        A micro-batch that comes twice, because its first worker seemed lost, has the same bits both times.
        """
        with self._lock:
            if push.version == self.version:
                found = zip(push.vectors, push.loss_sums, strict=True)
                self._collected |= dict(zip(push.chunk.numbers, found, strict=True))

    def update(self, step: Step, ids: Iterable[int]) -> float:
        """Sum what was collected of `step`, in order of micro-batches, and take the step; returns its mean loss.

        Raises NotFinite if the recipe says so.
        """
        with self._lock:
            missing = set(range(len(step.micro_batches))) - self._collected.keys()
            if missing:
                raise PlanError(f"step {step.number} cannot be taken: micro-batches {sorted(missing)} were not pushed")
            parts = [self._collected[number] for number in range(len(step.micro_batches))]
            self._collected = {}
            self._take(step, [vector for vector, _ in parts])
            self.applied.add(ids)
            self.samples += step.samples
            return sum(loss for _, loss in parts) / step.samples

    def apply(self, push: Push, step: Step) -> tuple[float, int] | None:
        """Take an asynchronous step with one push; return its mean loss and its staleness.

        None if it was applied before: its worker seemed lost, and was not.
        """
        with self._lock:
            if any(number in self.applied for number in push.chunk.ids):
                return None
            staleness = self.version - push.version
            self._take(step, push.vectors)
            self.applied.add(push.chunk.ids)
            self.samples += step.samples
            return sum(push.loss_sums) / step.samples, staleness

    def progress(self) -> Progress:
        """The updates, the samples and the ids applied so far."""
        with self._lock:
            return Progress(
                version=self.version,
                samples=self.samples,
                below=self.applied.below,
                beyond=tuple(sorted(self.applied.beyond)),
            )

    def state(self) -> tuple[StageState, dict[str, object]]:
        """A copy of the trained state, and the progress of the run, as JSON."""
        with self._lock:
            state = self._computation.state()
            tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
            copied = StageState(
                tensors=tensors, aliases=state.aliases, transient=state.transient, settings=state.settings
            )
            progress: dict[str, object] = {"version": self.version, "samples": self.samples}
            progress |= {"below": self.applied.below, "beyond": sorted(self.applied.beyond)}
            return copied, progress

    def restore(self, state: StageState, progress: Mapping[str, object]) -> None:
        """Go back to what `state` returned. Raises CorruptMessage if it is another model's."""
        numbers = {name: progress[name] for name in ("version", "samples", "below")}
        beyond = progress["beyond"]
        assert isinstance(beyond, list), "checked where it was read"
        with self._lock:
            self._computation.restore(state)
            self.version, self.samples, below = (int(str(number)) for number in numbers.values())
            self.applied = Applied(below, beyond)
            self._collected = {}

    def state_dict(self) -> dict[str, Tensor]:
        """The model's `state_dict`."""
        return dict(self.state()[0].state_dict())

    def _take(self, step: Step, vectors: Iterable[Tensor]) -> None:
        computation = self._computation
        computation.begin_step(step, _nothing_is_loaded, own=())
        first, *others = vectors
        computation.flatten()
        total = computation.flat.vector.copy_(first)
        for vector in others:
            total.add_(vector)
        if computation.norm.is_needed:
            computation.measure_norm()
        computation.update()
        self.version += 1


def _nothing_is_loaded(micro_batch: int) -> Batch:
    raise AssertionError(f"the server computes no micro-batch, not {micro_batch}")
