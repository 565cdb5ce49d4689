"""Merge light neighbouring layers, so that a model of many small layers can be planned as one of a few.

By hand: layers weigh 5, 1, 4 (the largest share of seconds, parameters and activations), and the cuts between them send
10 and 90 bytes. To get two layers, the lightest one, in the middle, joins the neighbour with which it exchanges more
bytes: the last one. The cut that remains sends 10 bytes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from funcpipe.core import LayerProfile, ModelProfile, TensorProfile, TiedParameter, stages_of_layers
from funcpipe.errors import InvalidValue
from funcpipe.partitioner.cost import Array


def merge_layers(profile: ModelProfile, limit: int, *, keep: Collection[int] = ()) -> ModelProfile:
    """`profile` with at most `limit` layers; each names in `parts` the layers that it was made from.

    The cuts before the layers `keep` stay possible, even if that takes more layers than `limit`. Raises InvalidValue
    for a limit below 1.

    Repeatedly, the lightest layer joins the neighbour with which it exchanges more bytes (the lighter one of equals). A
    layer's weight is the largest of its shares of the model's seconds, parameters and activations. So the cuts that
    remain send few bytes, and the layers between them are of similar weight. Sums of seconds and bytes do not change;
    tensors inside a merged layer vanish, the others stay separate, each with its own consumers.
    """
    if limit < 1:
        raise InvalidValue("limit", limit, "must be at least 1")
    groups = _groups(profile, limit, frozenset(keep))
    if len(groups) == len(profile.layers):
        return profile
    group_of = stages_of_layers(groups)
    layers = tuple(_merged(profile, first, stop) for first, stop in groups)
    return replace(
        profile, layers=layers, tensors=_remapped(profile.tensors, group_of), ties=_remapped_ties(profile, group_of)
    )


def crossing_bytes(profile: ModelProfile) -> Array:
    """Element i: the bytes, both ways, of the tensors that a cut before layer i would send."""
    crossing = np.zeros(len(profile.layers) + 1)
    for tensor in profile.tensors:
        crossing[tensor.producer + 1 : tensor.consumers[-1] + 1] += tensor.forward_bytes + tensor.backward_bytes
    return crossing


def _groups(profile: ModelProfile, limit: int, keep: frozenset[int]) -> list[tuple[int, int]]:
    crossing, weight = crossing_bytes(profile), _weights(profile)
    crossing[[0, -1, *keep]] = -1.0  # never given up
    groups = [(i, i + 1) for i in range(len(profile.layers))]
    totals = [weight[i] for i in range(len(weight))]
    while len(groups) > limit:
        joinable = [i for i, (first, stop) in enumerate(groups) if max(crossing[first], crossing[stop]) >= 0]
        if not joinable:
            break
        light = min(joinable, key=lambda i: float(totals[i].max()))
        sides = [side for side in (light - 1, light + 1) if 0 <= side < len(groups)]
        other = max(sides, key=lambda side: (crossing[groups[max(side, light)][0]], -totals[side].max()))
        left, right = min(light, other), max(light, other)
        groups[left : right + 1] = [(groups[left][0], groups[right][1])]
        totals[left : right + 1] = [totals[left] + totals[right]]
    return groups


def _weights(profile: ModelProfile) -> Array:
    """A row for each layer: its shares of the model's seconds, parameters and activations."""
    rows = np.array(
        [
            (sum(layer.forward_s) + sum(layer.backward_s), layer.parameter_bytes, layer.activation_bytes)
            for layer in profile.layers
        ],
        dtype=np.float64,
    )
    totals = rows.sum(axis=0)
    shares: Array = rows / np.where(totals > 0, totals, 1.0)
    return shares


def _merged(profile: ModelProfile, first: int, stop: int) -> LayerProfile:
    layers = profile.layers[first:stop]
    if len(layers) == 1:
        return layers[0]
    return replace(
        layers[0],
        name=f"{layers[0].name}..{layers[-1].name}",
        parameter_bytes=profile.parameter_bytes(first, stop),
        activation_bytes=sum(layer.activation_bytes for layer in layers),
        forward_s=_sums([layer.forward_s for layer in layers]),
        backward_s=_sums([layer.backward_s for layer in layers]),
        constant_bytes=sum(layer.constant_bytes for layer in layers),
        input_bytes=sum(layer.input_bytes for layer in layers),
        parts=tuple(name for layer in layers for name in layer.graph_layers),
        workspace_bytes=max(layer.workspace_bytes for layer in layers),
        forward_spread=_mean([layer.forward_spread for layer in layers], [layer.forward_s for layer in layers]),
        backward_spread=_mean([layer.backward_spread for layer in layers], [layer.backward_s for layer in layers]),
    )


def _sums(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True))


def _mean(spreads: Sequence[float], seconds: Sequence[tuple[float, ...]]) -> float:
    """The mean of relative spreads, weighted with their seconds: the spread of the sum is no larger."""
    weights = [sum(row) for row in seconds]
    total = sum(weights)
    return sum(s * w for s, w in zip(spreads, weights, strict=True)) / total if total else max(spreads)


def _remapped(tensors: Sequence[TensorProfile], group_of: Sequence[int]) -> tuple[TensorProfile, ...]:
    kept = []
    for tensor in tensors:
        producer = group_of[tensor.producer]
        consumers = tuple(sorted({group_of[layer] for layer in tensor.consumers} - {producer}))
        if consumers:
            saved_by = tuple(sorted({group_of[layer] for layer in tensor.saved_by}))
            kept.append(replace(tensor, producer=producer, consumers=consumers, saved_by=saved_by))
    return tuple(kept)


def _remapped_ties(profile: ModelProfile, group_of: Sequence[int]) -> tuple[TiedParameter, ...]:
    found = [(tie, tuple(sorted({group_of[layer] for layer in tie.layers}))) for tie in profile.ties]
    return tuple(replace(tie, layers=layers) for tie, layers in found if len(layers) > 1)


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged profile and where its layers begin in the original one, the number of layers at the end."""

    profile: ModelProfile
    starts: tuple[int, ...]


def merge(profile: ModelProfile, limit: int, *, keep: Collection[int] = ()) -> Merged:
    """`merge_layers`, with the way back to the layers of `profile`."""
    merged = merge_layers(profile, limit, keep=keep)
    return Merged(merged, starts_of(merged, profile))


def starts_of(merged: ModelProfile, profile: ModelProfile) -> tuple[int, ...]:
    """Where the layers of `merged` begin in `profile`, which it was made from, the number of layers at the end."""
    place = {layer.graph_layers[0]: i for i, layer in enumerate(profile.layers)}
    return (*(place[layer.graph_layers[0]] for layer in merged.layers), len(profile.layers))
