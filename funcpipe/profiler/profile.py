"""`profile`: a layer graph and a sample become a ModelProfile."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from funcpipe.core import ModelProfile, PlatformSpec
from funcpipe.graph import LayerGraph
from funcpipe.graph.quiet import gradients_kept, untouched
from funcpipe.graph.signature import resized
from funcpipe.profiler.base_memory import base_memory_bytes
from funcpipe.profiler.book import Book
from funcpipe.profiler.likeness import likeness
from funcpipe.profiler.measure import Loss, Measure, Times, measure_here, run_layer
from funcpipe.split.cut import stage_of


def profile(
    graph: LayerGraph,
    sample: tuple[Any, ...],
    sample_kwargs: Mapping[str, Any] = {},
    *,
    spec: PlatformSpec,
    micro_batch: int,
    loss: Loss | None = None,
    repeats: int = 5,
    progress: Callable[[str, float], None] | None = None,
    on: Measure = measure_here,
) -> ModelProfile:
    """Measure the layers of `graph`, with one thread, on `micro_batch` samples cut or repeated from the sample.

    Seconds are the median of `repeats` runs, divided by the vCPUs of each of the sizes of `spec`; on any platform but
    the local one they are marked as estimated. Equal layers are measured once. `loss` turns the model's output into a
    number; what it costs counts with the last layer. `progress` is told each layer's name and the share of layers
    that is done. `on` is where layers are timed: by default this process.
    """
    values: dict[str, Tensor] = resized(graph.signature.bind(sample, sample_kwargs), micro_batch)
    book = Book(graph, spec, dict(values))
    known: dict[str, Times] = {}
    with untouched(graph.module), one_thread(), gradients_kept(graph.module):
        for i, layer in enumerate(graph.layers):
            stage = stage_of(graph, i, i + 1, {})
            run = run_layer(stage, values)
            like = likeness(stage, values)
            if like not in known:
                known[like] = on(stage, values, loss, repeats)
                stage.zero_grad()
            book.enter(run, known[like])
            values.update(run.sent)
            for value in graph.values:
                if value.consumers[-1] == i:
                    del values[value.name]
            if progress is not None:
                progress(layer.name, (i + 1) / len(graph.layers))
    return ModelProfile(
        model=graph.name,
        micro_batch=micro_batch,
        platform=spec.name,
        sizes=tuple(size.name for size in spec.sizes),
        base_memory_bytes=base_memory_bytes(),
        layers=tuple(book.layers),
        tensors=book.tensors(),
        estimated=spec.name != "local",
    )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as the share of processors that a function has is counted in threads like it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
