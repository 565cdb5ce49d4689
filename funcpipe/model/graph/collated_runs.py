"""The runs of a model that it is traced by, where only the user's collate function can make batches.

How large the inputs are follows from the samples, and each size may change by itself: nodes, edges and graphs. So the
runs take other samples each, and the free sizes are whatever differs among them.
"""

import contextlib
from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import Tensor, nn

from funcpipe.errors import DataError, ModelError
from funcpipe.model.graph.equivalence import Example
from funcpipe.model.graph.examples import ExampleSet, Runs
from funcpipe.model.graph.input_batches import Collated, CollatedBatches
from funcpipe.model.graph.signature import Signature
from funcpipe.model.graph.symbols import symbols_of_collated

_COUNTS = (2, 3, 4, 1)
"""How many samples the runs have."""

_PLACES = range(10)
"""Where batches may begin among the samples at hand: of these, the runs take those that differ most in size."""


class CollatedRuns(Runs):
    """Runs on a few samples each, `collated` as for the user's `inputs`."""

    def __init__(
        self, model: nn.Module, signature: Signature, inputs: Mapping[str, Tensor], collated: Collated
    ) -> None:
        super().__init__(model, signature, inputs, CollatedBatches(signature, collated))
        self._examples = self._start()
        self.first = self._examples[0]

    @property
    def pair(self) -> list[Example]:
        """Two runs of different batch sizes, if the model takes such."""
        return self._examples[:2]

    @property
    def batched(self) -> frozenset[str]:
        """The inputs whose first dimension was the number of samples in all runs, and is so in the user's inputs."""
        counts = [(one.inputs, one.samples) for one in self._examples] + [(self._inputs, self.batches.samples)]
        return frozenset(
            name for name in self._inputs if all(inputs[name].shape[:1] == (count,) for inputs, count in counts)
        )

    @cached_property
    def same_lengths(self) -> ExampleSet:
        """All runs."""
        runs = [one.inputs for one in self._examples]
        symbols = symbols_of_collated(self._inputs, runs, [one.samples for one in self._examples])
        sample = {name: tuple(tensor.shape) for name, tensor in self._inputs.items()}
        return ExampleSet(self._examples, symbols, sample, self.later)

    @property
    def other_lengths(self) -> ExampleSet | None:
        """None: lengths differ already."""
        return None

    def _start(self) -> list[Example]:
        """The runs; if the model or its inputs are for one number of samples alone, all have that many."""
        count, failure = self.batches.samples, Exception()
        for counts in (_COUNTS, (count, 2 * count, 3 * count), (count,) * len(_COUNTS)):
            try:
                self._given = self._unlike(counts)
                found = [self._first(counts[0]), self._second(counts[1])]
            except ModelError:
                raise
            except Exception as error:  # noqa: BLE001 - a model may refuse some batch sizes, but not the sample's
                failure = error
                continue
            for number, samples in enumerate(counts[2:], start=2):
                with contextlib.suppress(Exception):  # such as BatchNorm raises
                    found.append(self._run(samples, number))
            return found
        if isinstance(failure, DataError):
            raise failure
        raise self._failed(failure) from failure

    def _unlike(self, counts: Sequence[int]) -> list[dict[str, Tensor]]:
        """A batch of so many samples for each run, of which each differs from those before it in many sizes."""
        found = [self.batches.batch(counts[0])]
        for samples in counts[1:]:
            batches = [self.batches.batch(samples, place) for place in _PLACES]
            found.append(max(batches, key=lambda batch: sum(_differing_sizes(batch, other) for other in found)))
        return found

    def _run(self, batch: int, seed: int) -> Example:
        return self._example(self._given[seed], batch, seed)


def _differing_sizes(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> int:
    pairs = [pair for name in one for pair in zip(one[name].shape, other[name].shape, strict=False)]
    return sum(a != b for a, b in pairs)
