"""Profiles of data of several lengths: means of what is spent, the largest of what must fit."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcpipe.api import FuncPipe
from funcpipe.core import LayerProfile, ModelProfile, ProfiledBucket, TensorProfile, TrainingSpec, from_text, to_text
from funcpipe.errors import InvalidValue, ModelError
from funcpipe.partitioner.optimize import optimize
from funcpipe.platforms.catalog import load_spec
from funcpipe.profiler.buckets import Bucket, combined


class Words(nn.Module):
    """Two layers over words, and a third where they are more than five."""

    def __init__(self, *, third: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.third = third

    def forward(self, words: Tensor) -> Any:
        x = torch.relu(self.table(words))
        if self.third and words.shape[1] > 5:
            x = self.middle(x)
        return self.head(x)


def words(length: int) -> Tensor:
    return torch.arange(2 * length).reshape(2, length) % 9


def pipe(model: nn.Module) -> FuncPipe:
    return FuncPipe(model, loss_fn=lambda output, _: output.sum(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


def measured(model: nn.Module, sample: Any) -> ModelProfile:
    return pipe(model).profile(sample, platform="local", micro_batch=2, repeats=1)


def profiled(seconds: float, size: int) -> ModelProfile:
    layers = tuple(
        LayerProfile(
            name=name,
            parameter_bytes=40,
            activation_bytes=size,
            workspace_bytes=2 * size,
            forward_s=(seconds,),
            backward_s=(2 * seconds,),
        )
        for name in "ab"
    )
    tensor = TensorProfile(name="t", producer=0, consumers=(1,), forward_bytes=size, backward_bytes=size)
    return ModelProfile(
        model="m",
        micro_batch=2,
        platform="local",
        sizes=("1024MB",),
        base_memory_bytes=size,
        layers=layers,
        tensors=(tensor,),
    )


def test_seconds_and_bytes_sent_are_means_and_memory_is_the_largest() -> None:
    buckets = ProfiledBucket(shapes="x 10", share=3), ProfiledBucket(shapes="x 30", share=1)
    found = combined([profiled(1.0, 800), profiled(3.0, 2400)], buckets)
    for layer in found.layers:
        assert layer.forward_s == (1.5,)
        assert layer.backward_s == (3.0,)
        assert (layer.activation_bytes, layer.workspace_bytes, layer.parameter_bytes) == (2400, 4800, 40)
    assert (found.tensors[0].forward_bytes, found.tensors[0].backward_bytes) == (1200, 1200)
    assert found.base_memory_bytes == 2400
    assert [bucket.share for bucket in found.buckets] == [0.75, 0.25]


def test_a_module_is_measured_for_each_length() -> None:
    short, long = measured(Words(), words(3)), measured(Words(), words(12))
    both = measured(Words(), [Bucket(words(3), share=1), Bucket(words(12), share=3)])
    assert [layer.activation_bytes for layer in both.layers] == [layer.activation_bytes for layer in long.layers]
    for tensor, one, other in zip(both.tensors, short.tensors, long.tensors, strict=True):
        assert tensor.forward_bytes == (one.forward_bytes + 3 * other.forward_bytes) / 4
    assert [(bucket.shapes, bucket.share) for bucket in both.buckets] == [("words 3", 0.25), ("words 12", 0.75)]
    assert short.buckets == ()
    assert from_text(ModelProfile, to_text(both), source="both") == both
    assert optimize(both, load_spec("local"), TrainingSpec(global_batch=4)).estimate is not None


def test_a_profile_written_before_there_were_buckets_is_read() -> None:
    plain = json.loads(to_text(profiled(1.0, 8)))
    assert plain.pop("buckets") == []
    assert from_text(ModelProfile, json.dumps(plain), source="older") == profiled(1.0, 8)


def test_lengths_with_other_layers_are_refused() -> None:
    with pytest.raises(ModelError, match=r"words 12 lead to other layers than those of shapes words 3.*'middle'"):
        measured(Words(third=True), [Bucket(words(3)), Bucket(words(12))])
    measured(Words(third=True), [Bucket(words(12))])  # the way out: one bucket alone
    profiles = profiled(1.0, 8), replace(profiled(1.0, 8), tensors=())
    with pytest.raises(ModelError, match="other tensors pass between them"):
        combined(profiles, [ProfiledBucket(shapes="x 1", share=1)] * 2)


def test_shares_and_lists_are_checked() -> None:
    with pytest.raises(InvalidValue, match="share must"):
        Bucket(words(3), share=0)
    with pytest.raises(InvalidValue, match="must hold Buckets alone if it holds one, got 'a list of Bucket, Tensor'"):
        measured(Words(), [Bucket(words(3)), words(3)])
    with pytest.raises(InvalidValue, match="sample_target must not be given beside buckets"):
        pipe(Words()).profile([Bucket(words(3))], platform="local", sample_target=words(3))
