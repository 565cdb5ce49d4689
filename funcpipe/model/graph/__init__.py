"""Trace an ordinary nn.Module into a graph of layers and the values that pass between them."""

from typing import TYPE_CHECKING, Any

from funcpipe.model.graph.inputs import Signature
from funcpipe.model.graph.values import Attempt, Crossing, Layer, LayerGraph, Statistic, Tie, Value

if TYPE_CHECKING:
    from funcpipe.model.graph.tracing import trace

__all__ = ["Attempt", "Crossing", "Layer", "LayerGraph", "Signature", "Statistic", "Tie", "Value", "trace"]


def __getattr__(name: str) -> Any:
    """Import the tracers on first use: functions that only run a stage need not hold them in memory."""
    if name != "trace":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from funcpipe.model.graph.tracing import trace

    return trace
