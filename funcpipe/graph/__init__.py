"""An ordinary nn.Module and a sample become a graph of layers, with the values that pass between them."""

from funcpipe.graph.signature import Signature
from funcpipe.graph.trace import trace
from funcpipe.graph.values import Attempt, Crossing, Layer, LayerGraph, Statistic, Value

__all__ = ["Attempt", "Crossing", "Layer", "LayerGraph", "Signature", "Statistic", "Value", "trace"]
