"""`profile`: a layer graph and a sample become a ModelProfile."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from funcpipe.core import ModelProfile, PlatformSpec, TiedParameter, checks
from funcpipe.model.graph import Layer, LayerGraph
from funcpipe.model.graph.isolation import in_turn, preserve_gradients, preserve_state
from funcpipe.model.split import StageModule
from funcpipe.model.split.bundle import dump_stage, imported_modules
from funcpipe.model.split.cut import stage_of
from funcpipe.model.tensors import one_thread
from funcpipe.profiler import REPEATS
from funcpipe.profiler.base_memory import base_memory_bytes
from funcpipe.profiler.cut_sample import cut_sample, cutting
from funcpipe.profiler.layer_fingerprint import layer_fingerprint
from funcpipe.profiler.measure import LayerRun, Loss, Measure, Timing, local_timer, run_layer
from funcpipe.profiler.profile_builder import ProfileBuilder


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
    Seconds are the median of `repeats` runs. `on` measures them in functions of every size; without it they are
    measured in this process and divided by the vCPUs of each size, which is marked as an estimate unless the platform
    is the local one. Equal layers are measured once. `loss` turns the model's output into a number; its time counts as
    part of the last layer. `progress` is called with each layer's name and the share of layers done.
    """
    checks.at_least("repeats", repeats, 1)
    given = graph.signature.bind(sample, sample_kwargs)
    values = given if whole else cut_sample(graph, given, micro_batch)
    builder = ProfileBuilder(graph, len(spec.sizes), dict(values))
    time = on or local_timer(spec)

    def measure(stage: StageModule, given: dict[str, Tensor]) -> Timing:
        return time(stage, given, loss, repeats)

    def run(stage: StageModule, given: dict[str, Tensor]) -> LayerRun:
        with _undisturbed(graph.module), contextlib.nullcontext() if whole else cutting(graph, micro_batch):
            return run_layer(stage, given)

    with _undisturbed(graph.module) if on is None else contextlib.nullcontext():
        for i, layer in enumerate(_measured(graph, builder, values, run, measure)):
            if progress is not None:
                progress(layer.name, (i + 1) / len(graph.layers))
    *layers, end = builder.layers()
    base_bytes, end_bytes = _code_bytes(graph, forked=spec.name == "local")
    if spec.base_memory_bytes is not None:
        base_bytes += spec.base_memory_bytes - base_memory_bytes(forked=spec.name == "local")
    return ModelProfile(
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
        estimated=on is None and spec.name != "local",
        blocks=graph.blocks,
        precision=graph.precision,
        output_bytes=builder.output_bytes,
    )


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
    known: dict[str, Timing] = {}
    for i, layer in enumerate(graph.layers):
        stage = stage_of(graph, i, i + 1)
        run = run_once(stage, values)
        fingerprint = layer_fingerprint(stage, values)
        if fingerprint not in known:
            known[fingerprint] = measure(stage, values)
            stage.zero_grad()
        builder.add_layer(run, known[fingerprint])
        values.update(run.sent)
        for value in graph.values:
            if value.consumers[-1] == i:
                del values[value.name]
        yield layer


def _code_bytes(graph: LayerGraph, *, forked: bool) -> tuple[int, int]:
    """The memory of any function of this model before it holds layers, and what the last layer's code adds to it.

    The last layer makes the model's output, whose class is often the only thing that it needs of a large package.
    """
    count = len(graph.layers)
    pieces = [stage_of(graph, first, stop) for first, stop in ((0, count - 1), (count - 1, count)) if first < stop]
    modules = [imported_modules(dump_stage(piece, None)[0]) for piece in pieces]
    base_bytes = base_memory_bytes(forked=forked, modules=modules[0])
    whole_bytes = base_memory_bytes(forked=forked, modules=modules[0] | modules[-1])
    return base_bytes, max(0, whole_bytes - base_bytes)  # measurements vary even where nothing is added
