"""The profile of a model that is only evaluated: forwards alone, and nothing kept for a backward.

Parameters are constants: they have no gradients, no values of an optimiser, and nothing of them is summed over replicas
or stages. Activations live only while their layer runs, so that more micro-batches fit at once.
"""

from dataclasses import replace

from funcpipe.core import LayerProfile, ModelProfile, TensorProfile


def forward_only(profile: ModelProfile) -> ModelProfile:
    """`profile` without its backward."""
    return replace(
        profile,
        layers=tuple(_layer(layer) for layer in profile.layers),
        tensors=tuple(_tensor(tensor) for tensor in profile.tensors),
        ties=(),
    )


def _layer(layer: LayerProfile) -> LayerProfile:
    return replace(
        layer,
        parameter_bytes=0,
        constant_bytes=layer.constant_bytes + layer.parameter_bytes,
        activation_bytes=0,
        workspace_bytes=max(layer.workspace_bytes, layer.activation_bytes),
        backward_s=(0.0,) * len(layer.backward_s),
        backward_spread=0.0,
    )


def _tensor(tensor: TensorProfile) -> TensorProfile:
    return replace(tensor, backward_bytes=0, saved_by=())
