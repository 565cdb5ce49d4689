"""`profile`: a layer graph and a sample become a ModelProfile."""

import contextlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.core import LayerProfile, LayerReport, ModelProfile, PlatformSpec, TensorProfile, TiedParameter, checks
from funcpipe.core.choices import Precision
from funcpipe.core.texts import error_text
from funcpipe.errors import DataError, FuncPipeError
from funcpipe.model.graph import Layer, LayerGraph
from funcpipe.model.graph.inputs import resized
from funcpipe.model.graph.isolation import in_turn, preserve_gradients, preserve_state
from funcpipe.model.graph.symbols import BATCH
from funcpipe.model.split import StageModule
from funcpipe.model.split.bundle import dump_stage, imported_modules
from funcpipe.model.split.cut import stage_of
from funcpipe.model.tensors import one_thread, stand_in, storage_id
from funcpipe.profiler import REPEATS
from funcpipe.profiler.equal_layers import LayerRuns, layer_fingerprint
from funcpipe.profiler.estimate import estimator
from funcpipe.profiler.measure import (
    LayerRun,
    Loss,
    Measure,
    Timing,
    base_memory_bytes,
    local_timer,
    run_layer,
    with_contents,
)


class ProfileBuilder:
    """Collects the runs of layers, in order; `output_bytes` are those of the last one's output.

    A storage that several layers save for backward counts for the first of them. `kinds` are the layers that were
    measured, `timed_as` names the one of these that each other layer is equal to.
    """

    def __init__(self, graph: LayerGraph, sizes: int, inputs: Mapping[str, Tensor]) -> None:
        self._graph = graph
        self._sizes = sizes
        self._inputs = inputs
        self._alive: dict[int, _Storage] = {}  # by address: storages of values that are still to be read
        self._saved_by: dict[str, tuple[int, ...]] = {}
        self._bytes: dict[str, int] = {}
        for name, tensor in inputs.items():
            self._alive.setdefault(_address(tensor), _Storage()).names.add(name)
        self._added: list[tuple[LayerProfile, Timing]] = []
        self.output_bytes = 0
        self.timed_as: dict[str, str] = {}
        self.kinds: list[StageModule] = []

    def add_layer(self, run: LayerRun, timing: Timing) -> None:
        """Add the next layer: its run on the values that later layers read, and its times, to be asked for later."""
        number = len(self._added)
        layer = self._graph.layers[number]
        tensors = {id(tensor): tensor for tensor in self._graph.tensors_of(layer).values()}.values()
        trainable = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter) and tensor.requires_grad]
        parameter_bytes = sum(tensor.nbytes for tensor in trainable)
        for name, tensor in run.sent.items():
            self._bytes[name] = tensor.numel() * tensor.itemsize
            self._alive.setdefault(_address(tensor), _Storage()).names.add(name)
        activation_bytes = self._newly_saved(number, run)
        device_bytes = activation_bytes - run.own_bytes + run.device_bytes
        untimed = LayerProfile(
            name=layer.name,
            parameter_bytes=parameter_bytes,
            constant_bytes=sum(tensor.nbytes for tensor in tensors) - parameter_bytes,
            activation_bytes=activation_bytes,
            device_activation_bytes=None if device_bytes == activation_bytes else device_bytes,
            input_bytes=sum(self._inputs[name].nbytes for name in layer.inputs),
            forward_s=(0.0,) * self._sizes,
            backward_s=(0.0,) * self._sizes,
        )
        self._added.append((untimed, timing))
        self.output_bytes = run.output_bytes
        self._forget(number)

    def layers(self) -> list[LayerProfile]:
        """Return all layers with their times, once all are added."""
        return [_timed(layer, timing()) for layer, timing in self._added]

    def tensors(self) -> tuple[TensorProfile, ...]:
        """Return the values that pass between layers, once all layers are added."""
        return tuple(
            TensorProfile(
                name=value.name,
                producer=value.producer,
                consumers=value.consumers,
                forward_bytes=self._bytes[value.name],
                backward_bytes=self._bytes[value.name] if value.differentiable else 0,
                saved_by=self._saved_by[value.name],
            )
            for value in self._graph.values
        )

    def _newly_saved(self, number: int, run: LayerRun) -> int:
        """Return the bytes of the storages that this layer is the first to save."""
        new = run.own_bytes
        for address, size in run.saved.items():
            storage = self._alive.get(address)
            if storage is None or not storage.saved_by:
                new += size
            if storage is not None:
                storage.saved_by.append(number)
        return new

    def _forget(self, number: int) -> None:
        """Drop the values that no layer after `number` reads: their addresses will be reused."""
        gone = set(self._graph.last_read.get(number, ()))
        for address, storage in list(self._alive.items()):
            for name in storage.names & gone:
                self._saved_by[name] = tuple(storage.saved_by)
            storage.names -= gone
            if not storage.names:
                del self._alive[address]


@dataclass
class _Storage:
    """The storage of some values: their names, and the layers that save it."""

    names: set[str] = field(default_factory=set)
    saved_by: list[int] = field(default_factory=list)


def _address(tensor: Tensor) -> int:
    return storage_id(tensor)


def _timed(layer: LayerProfile, times: Sequence[LayerReport]) -> LayerProfile:
    largest = times[-1]
    return replace(
        layer,
        forward_s=tuple(statistics.median(size.forward_s) for size in times),
        backward_s=tuple(statistics.median(size.backward_s) for size in times),
        workspace_bytes=max(size.workspace_bytes for size in times),
        forward_spread=_spread(largest.forward_s),
        backward_spread=_spread(largest.backward_s),
        forward_work=largest.forward_work,
        backward_work=largest.backward_work,
    )


def _spread(seconds: Sequence[float]) -> float:
    if len(seconds) < 2 or statistics.median(seconds) == 0:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle


_WAY_OUT = (
    "Tensors whose first dimension is not the batch (graphs in one tensor, packed sequences, time first) do not tell "
    "how many samples they hold: give profile the DataLoader as sample_inputs, whose collate_fn makes micro-batches"
)


def cut_sample(graph: LayerGraph, inputs: Mapping[str, Tensor], micro_batch: int) -> dict[str, Tensor]:
    """Return so many samples of `inputs`, cut or repeated along the first dimension. Raises DataError."""
    if graph.output_sizes and BATCH not in graph.output_sizes:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
        raise DataError(
            f"the output of {graph.name} does not grow with the first dimension of the sample ({shapes}), but with "
            f"another one. {_WAY_OUT}"
        )
    return resized(inputs, micro_batch)


@contextlib.contextmanager
def cutting(graph: LayerGraph, micro_batch: int) -> Iterator[None]:
    """Raise DataError for a layer that fails on samples that were cut."""
    try:
        yield
    except FuncPipeError:
        raise
    except Exception as error:
        raise DataError(
            f"{graph.name} takes the sample, but fails on {micro_batch} samples cut from it along the first dimension: "
            f"{error_text(error)}. {_WAY_OUT}"
        ) from error


def profile(
    graph: LayerGraph,
    sample: tuple[Any, ...],
    sample_kwargs: Mapping[str, Any] = {},
    *,
    spec: PlatformSpec,
    micro_batch: int,
    loss: Loss | None = None,
    repeats: int = REPEATS,
    progress: Callable[[str, float], None] | None = None,
    on: Measure | None = None,
    whole: bool = False,
) -> ModelProfile:
    """Measure the layers of `graph`, with one thread, on `micro_batch` samples cut or repeated from the sample.

    The sample is one micro-batch itself if it is `whole`; raises DataError where it cannot be cut otherwise.
    Seconds are the median of `repeats` runs; with none, they are estimated from operations and bytes. `on` measures
    them in functions of every size; without it they are measured in this process and divided by the vCPUs of each size,
    which is marked as an estimate unless the platform is the local one; those on accelerators are estimated by their
    published rates. Equal layers are measured once, and run once if they are without weights. `loss` turns the model's
    output into a number; its time counts as part of the last layer. `progress` is called with each layer's name and the
    share of layers done.
    """
    checks.at_least("repeats", repeats, 0 if on is None else 1)
    given = graph.signature.bind(sample, sample_kwargs)
    values = given if whole else cut_sample(graph, given, micro_batch)
    builder = ProfileBuilder(graph, len(spec.sizes), dict(values))
    time = on or (local_timer(spec) if repeats else estimator(spec))

    def measure(stage: StageModule, given: dict[str, Tensor]) -> Timing:
        with with_contents(stage) if repeats else contextlib.nullcontext():
            found = time(stage, stand_in(given) if repeats else given, loss, repeats)
            stage.zero_grad()
        return found

    def run(stage: StageModule, given: dict[str, Tensor]) -> LayerRun:
        with _undisturbed(stage), contextlib.nullcontext() if whole else cutting(graph, micro_batch):
            return run_layer(stage, given, loss)

    with _undisturbed(graph.module) if on is None else contextlib.nullcontext():
        for i, layer in enumerate(_measured(graph, builder, values, run, measure)):
            if progress is not None:
                progress(layer.name, (i + 1) / len(graph.layers))
    *layers, end = builder.layers()
    base_bytes, end_bytes = _code_bytes(builder.kinds, forked=spec.name == "local")
    if spec.base_memory_bytes is not None:
        base_bytes += spec.base_memory_bytes - base_memory_bytes(forked=spec.name == "local")
    found = ModelProfile(
        model=graph.name,
        micro_batch=micro_batch,
        platform=spec.name,
        sizes=tuple(size.name for size in spec.sizes),
        base_memory_bytes=base_bytes,
        layers=(*layers, replace(end, constant_bytes=end.constant_bytes + end_bytes)),
        tensors=builder.tensors(),
        ties=tuple(
            TiedParameter(name=tie.names[0], layers=tie.layers, parameter_bytes=tie.bytes) for tie in graph.ties
        ),
        carried=graph.carried.names,
        estimated=on is None and (spec.name != "local" or not repeats),
        blocks=graph.blocks,
        precision=graph.precision,
        output_bytes=builder.output_bytes,
        timed_as=builder.timed_as,
    )
    if on is not None or not any(size.accelerator for size in spec.sizes):
        return found
    return found.on_sizes(spec.name, spec.sizes, precision=_computed_in(graph))


def _computed_in(graph: LayerGraph) -> Precision:
    """The number format that most of the weights of `graph` are multiplied in."""
    tensors = {id(tensor): tensor for layer in graph.layers for tensor in graph.tensors_of(layer).values()}.values()
    sizes = Counter[torch.dtype]()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.nbytes
    most = max(sizes, key=sizes.__getitem__, default=torch.float32)
    return {torch.bfloat16: Precision.BF16, torch.float16: Precision.FP16}.get(most, graph.precision)


@contextlib.contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Within this context layers of `module` may run here, with one thread."""
    with in_turn(), preserve_state(module), one_thread(), preserve_gradients(module):
        yield


def _measured(
    graph: LayerGraph,
    builder: ProfileBuilder,
    values: dict[str, Tensor],
    run_once: Callable[[StageModule, dict[str, Tensor]], LayerRun],
    measure: Callable[[StageModule, dict[str, Tensor]], Timing],
) -> Iterator[Layer]:
    """Yield each layer after adding it to `builder`; `values` holds what later layers will read."""
    known: dict[str, tuple[str, Timing]] = {}
    runs = LayerRuns(run_once)
    for i, layer in enumerate(graph.layers):
        stage = stage_of(graph, i, i + 1)
        fingerprint = layer_fingerprint(stage, values)
        run = runs.of(stage, values, fingerprint)
        if fingerprint not in known:
            known[fingerprint] = layer.name, measure(stage, values)
            builder.kinds.append(stage)
        else:
            builder.timed_as[layer.name] = known[fingerprint][0]
        builder.add_layer(run, known[fingerprint][1])
        values.update(run.sent)
        for name in graph.last_read.get(i, ()):
            del values[name]
        yield layer


def _code_bytes(kinds: Sequence[StageModule], *, forked: bool) -> tuple[int, int]:
    """The memory of any function of this model before it holds layers, and what the last layer's code adds to it.

    The last layer, which is the last of the `kinds`, makes the model's output, whose class is often the only thing that
    it needs of a large package.
    """
    pieces = [piece for piece in (kinds[:-1], kinds[-1:]) if piece]
    modules = [imported_modules(dump_stage(piece[0], piece[1:])[0]) for piece in pieces]
    base_bytes = base_memory_bytes(forked=forked, modules=modules[0])
    whole_bytes = base_memory_bytes(forked=forked, modules=modules[0] | modules[-1])
    return base_bytes, max(0, whole_bytes - base_bytes)  # measurements vary even where nothing is added
