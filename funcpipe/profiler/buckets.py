"""Profiles for data of several lengths: each length is measured, and the planner gets one profile of them all.

By hand: batches of length 10, 3 of 4, take a layer 1 s and leave 8 MB, those of length 30 take 3 s and leave 24 MB. On
average the layer takes 1.5 s; a function needs room for 24 MB.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from funcpipe.core import LayerProfile, ModelProfile, ProfiledBucket, TensorProfile, checks
from funcpipe.core.accelerator import Work
from funcpipe.errors import InvalidValue, ModelError


@dataclass(frozen=True)
class Bucket:
    """Inputs of one length or size, as a sample of the `share` of batches that are like them, with their target.

    Shares are relative to each other.
    """

    inputs: Tensor | tuple[Any, ...] | Mapping[str, Any]
    share: float = 1.0
    target: Any = None

    def __post_init__(self) -> None:
        checks.positive("share", self.share)


def buckets_of(sample_inputs: Any, target: Any) -> tuple[Bucket, ...]:
    """Return the buckets that a user has given, or the only one. Raises InvalidValue."""
    items = sample_inputs if isinstance(sample_inputs, list) else []
    if not any(isinstance(item, Bucket) for item in items):
        return (Bucket(sample_inputs, target=target),)
    if not all(isinstance(item, Bucket) for item in items):
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise InvalidValue("sample_inputs", f"a list of {kinds}", "must hold Buckets alone if it holds one")
    if target is not None:
        raise InvalidValue("sample_target", "a target", "must not be given beside buckets, which have their own")
    return tuple(items)


def described(inputs: Mapping[str, Tensor], share: float) -> ProfiledBucket:
    """Return the profile's description of a bucket with these inputs, by name."""
    shapes = ", ".join(f"{name} {'×'.join(map(str, tensor.shape[1:])) or '1'}" for name, tensor in inputs.items())
    return ProfiledBucket(shapes=shapes, share=share)


def combined(profiles: Sequence[ModelProfile], buckets: Sequence[ProfiledBucket]) -> ModelProfile:
    """One profile of those of several buckets: what is spent is the mean by share, what must fit is the largest.

    Seconds of layers and bytes of the tensors between them are spent; activations, inputs and workspace must fit.
    Raises ModelError unless all have the same layers, and the same tensors between them.
    """
    first, total = profiles[0], sum(bucket.share for bucket in buckets)
    shares = [bucket.share / total for bucket in buckets]
    if len(profiles) == 1:
        return first
    for other, bucket in zip(profiles[1:], buckets[1:], strict=True):
        difference = _difference(first, other)
        if difference is not None:
            raise ModelError(
                f"inputs of shapes {bucket.shapes} lead to other layers than those of shapes {buckets[0].shapes}: "
                f"{difference}; profile one of the buckets alone, or pad the inputs to one shape"
            )
    return replace(
        first,
        base_memory_bytes=max(profile.base_memory_bytes for profile in profiles),
        output_bytes=max(profile.output_bytes or 0 for profile in profiles),
        layers=tuple(_layer(layers, shares) for layers in zip(*(p.layers for p in profiles), strict=True)),
        tensors=tuple(_tensor(tensors, shares) for tensors in zip(*(p.tensors for p in profiles), strict=True)),
        buckets=tuple(replace(bucket, share=share) for bucket, share in zip(buckets, shares, strict=True)),
    )


def _difference(one: ModelProfile, other: ModelProfile) -> str | None:
    names, others = ([layer.name for layer in profile.layers] for profile in (one, other))
    if names != others:
        apart = [name for name in (*names, *others) if (name in names) != (name in others)]
        return f"only one of them has the layer {apart[0]!r}" if apart else "they are in another order"
    ends, other_ends = ([(t.producer, t.consumers) for t in profile.tensors] for profile in (one, other))
    return None if ends == other_ends else "other tensors pass between them"


def _layer(layers: Sequence[LayerProfile], shares: Sequence[float]) -> LayerProfile:
    def seconds(of: Callable[[LayerProfile], tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(_mean(column, shares) for column in zip(*map(of, layers), strict=True))

    return replace(
        layers[0],
        forward_s=seconds(lambda layer: layer.forward_s),
        backward_s=seconds(lambda layer: layer.backward_s),
        forward_spread=_mean([layer.forward_spread for layer in layers], shares),
        backward_spread=_mean([layer.backward_spread for layer in layers], shares),
        constant_bytes=max(layer.constant_bytes for layer in layers),
        activation_bytes=max(layer.activation_bytes for layer in layers),
        input_bytes=max(layer.input_bytes for layer in layers),
        workspace_bytes=max(layer.workspace_bytes for layer in layers),
        device_activation_bytes=max(layer.kept_on_device_bytes for layer in layers),
        forward_work=_mean_work([layer.forward_work for layer in layers], shares),
        backward_work=_mean_work([layer.backward_work for layer in layers], shares),
    )


def _mean_work(parts: Sequence[Work | None], shares: Sequence[float]) -> Work | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return Work(
        flop=round(_mean([part.flop for part in known], shares)),
        dense_bytes=round(_mean([part.dense_bytes for part in known], shares)),
        other_bytes=round(_mean([part.other_bytes for part in known], shares)),
    )


def _tensor(tensors: Sequence[TensorProfile], shares: Sequence[float]) -> TensorProfile:
    return replace(
        tensors[0],
        forward_bytes=round(_mean([tensor.forward_bytes for tensor in tensors], shares)),
        backward_bytes=round(_mean([tensor.backward_bytes for tensor in tensors], shares)),
        saved_by=tuple(sorted({layer for tensor in tensors for layer in tensor.saved_by})),
    )


def _mean(values: Sequence[float], shares: Sequence[float]) -> float:
    return sum(value * share for value, share in zip(values, shares, strict=True))
