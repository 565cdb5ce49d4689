"""Time layers in functions of every size of a platform."""

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from funcpipe.comm import codec
from funcpipe.core import LayerReport, PlatformSpec, ProbeSpec, from_text
from funcpipe.errors import DeadlineExceeded, KeyMissing, ModelError
from funcpipe.model.split import StageModule, dump_stage
from funcpipe.platforms.base import Cause, Platform, Storage
from funcpipe.profiler.measure import Loss, Times, Timing
from funcpipe.profiler.remote import keys
from funcpipe.profiler.remote.budget import Budget
from funcpipe.profiler.remote.client import FinishedProbe, check, remove_objects, run_probes


@contextmanager
def platform_timer(
    platform: Platform, storage: Storage, storage_url: str, *, max_usd: float | None = None
) -> "Iterator[PlatformTimer]":
    """A Measure that runs in functions of `platform`; its objects in the storage are removed at the end."""
    measure = PlatformTimer(platform, storage, storage_url, Budget(platform.spec, max_usd))
    try:
        yield measure
    finally:
        remove_objects(storage, measure.run)


class PlatformTimer:
    """Collects layers, and times all of them in functions of every size when the first result is needed."""

    def __init__(self, platform: Platform, storage: Storage, storage_url: str, budget: Budget) -> None:
        self.run = f"profile-{secrets.token_hex(6)}"
        self.budget = budget
        self._platform = platform
        self._storage = storage
        self._url = storage_url
        self._spec = platform.spec
        self._repeats = 1
        self._code: dict[str, str] = {}
        self._found: dict[tuple[str, int], Times] = {}

    def __call__(self, stage: StageModule, values: Mapping[str, Tensor], loss: Loss | None, repeats: int) -> Timing:
        """Put a layer and its inputs into the storage."""
        number = len(self._code)
        given = {name: values[name] for name in (*stage.inputs, *stage.receives)}
        bundle, tensors = dump_stage(stage, (given, loss if stage.is_last else None))
        self._storage.put(keys.bundle(self.run, number), bundle)
        self._storage.put(keys.tensors(self.run, number), codec.encode(tensors))
        self._code[str(number)] = hashlib.sha256(bundle).hexdigest()
        self._repeats = repeats
        return lambda: self._times(number)

    def _times(self, layer: int) -> Sequence[Times]:
        if not self._found:
            self._measure()
        return times_of_sizes(self._spec, {size: t for (size, number), t in self._found.items() if number == layer})

    def _measure(self) -> None:
        """Run functions until every layer has been timed in every size with enough memory for it."""
        missing = {size.name: tuple(range(len(self._code))) for size in self._spec.sizes}
        round_of_functions = 0
        while missing:
            sizes = [self._spec.size(name) for name in missing]
            longest_s = self.budget.longest_s(sizes)
            probes = [
                ProbeSpec(
                    run=self.run,
                    number=round_of_functions * len(self._spec.sizes) + i,
                    size=size.name,
                    memory_mb=size.memory_mb,
                    storage=self._url,
                    platform=self._platform.url,
                    time_s=self.budget.working_s(longest_s),
                    repeats=self._repeats,
                    layers=missing[size.name],
                    code={str(number): self._code[str(number)] for number in missing[size.name]},
                )
                for i, size in enumerate(sizes)
            ]
            ended = run_probes(self._platform, probes, self.budget, longest_s=longest_s)
            missing = {item.probe.size: left for item in ended if (left := self._left(item))}
            round_of_functions += 1

    def _left(self, ended: FinishedProbe) -> tuple[int, ...]:
        """Read a function's reports; return the layers that another function of its size has to measure."""
        check(ended, self._storage)
        size = ended.probe.size
        for number in ended.probe.layers:
            found = self._report(size, number)
            if found is not None:
                self._found[size, number] = Times(found.forward_s, found.backward_s, found.workspace_bytes)
        left = tuple(number for number in ended.probe.layers if (size, number) not in self._found)
        if ended.status.cause is Cause.OUT_OF_MEMORY:
            return left[1:]
        if len(left) == len(ended.probe.layers):
            raise DeadlineExceeded(
                f"a function of {size} could not time one layer in {ended.probe.time_s:.1f} s; allow more money, "
                "larger sizes or a smaller micro-batch"
            )
        return left

    def _report(self, size: str, number: int) -> LayerReport | None:
        key = keys.layer(self.run, size, number)
        try:
            return from_text(LayerReport, self._storage.get(key), source=key)
        except KeyMissing:
            return None


def times_of_sizes(spec: PlatformSpec, found: Mapping[str, Times]) -> Sequence[Times]:
    """Times for each size; where a layer did not fit, those of the next larger size, scaled by vCPUs."""
    times: list[Times] = []
    known: tuple[float, Times] | None = None
    for size in reversed(spec.sizes):
        if size.name in found:
            known = (size.vcpu, found[size.name])
        if known is None:
            raise ModelError(
                f"a layer of the model does not fit a function of {size.name}, the largest of {spec.name}; "
                "choose a smaller micro-batch"
            )
        times.append(known[1].faster(size.vcpu / known[0]))
    return times[::-1]
