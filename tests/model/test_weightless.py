"""Fingerprints tell computations on tensors without contents apart, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.deferred import Construction
from funcpipe.model.graph import LayerGraph, trace
from funcpipe.model.graph.equivalence import check_batch_sizes
from funcpipe.model.tensors import fingerprint, same, stand_in, storage_id
from funcpipe.model.weightless import Weightless
from tests.examples import in_long_run

MODE = Weightless()
X = torch.arange(12.0).view(3, 4)


def weight(name: str, *shape: int) -> Tensor:
    return MODE.empty(nn.Parameter(torch.empty(shape, device="meta")), name)


A, B = weight("a", 4, 4), weight("b", 4, 4)

COMPUTATIONS: dict[str, Callable[[], Tensor]] = {
    "product": lambda: X @ A,
    "other weight": lambda: X @ B,
    "other order": lambda: A @ X.T,
    "other input": lambda: (X + 1) @ A,
    "transposed": lambda: X @ A.T,
    "scaled": lambda: X @ A * 2,
    "scaled otherwise": lambda: X @ A * 2.0000002,
    "rows": lambda: (X @ A)[:2],
    "other rows": lambda: (X @ A)[1:],
    "activated": lambda: (X @ A).relu(),
    "written": lambda: (X @ A).mul_(3),
    "written in part": lambda: (X @ A).index_fill_(0, torch.tensor([1]), 0.0),
    "bf16": lambda: (X @ A).bfloat16(),
}


def test_computations_have_fingerprints_of_their_own() -> None:
    found = {name: fingerprint(compute()) for name, compute in COMPUTATIONS.items()}
    assert len(set(found.values())) == len(COMPUTATIONS)
    assert found == {name: fingerprint(compute()) for name, compute in COMPUTATIONS.items()}
    assert fingerprint(X) is None


def test_what_is_written_through_a_view_shows_in_what_it_is_a_view_of() -> None:
    value = X @ A
    before, copy, view = fingerprint(value), value.clone(), value[0]
    assert same(copy, value)
    view.add_(1)
    assert fingerprint(value) != before
    assert fingerprint(copy) == before
    assert storage_id(view) == storage_id(value) != storage_id(copy)
    value.copy_(copy)
    assert same(copy, value)


def test_gradients_have_the_fingerprint_of_their_computation() -> None:
    found = []
    for scale in (2.0, 2.0, 3.0):
        A.grad = None
        (X @ A * scale).sum().backward()  # type: ignore[no-untyped-call]
        found.append(fingerprint(A.grad))  # type: ignore[arg-type]
    A.grad = None
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(("rate", "draws"), [(0.0, False), (0.5, True)])
def test_what_would_draw_advances_the_generator(rate: float, draws: bool) -> None:
    state = torch.get_rng_state()
    one = nn.functional.dropout(X @ A, rate)
    assert torch.equal(torch.get_rng_state(), state) is not draws
    assert same(one, nn.functional.dropout(X @ A, rate)) is not draws
    torch.set_rng_state(state)
    assert same(one, nn.functional.dropout(X @ A, rate))


def test_an_attention_without_dropout_draws_nothing() -> None:
    state, heads = torch.get_rng_state(), (X @ A).view(1, 1, 3, 4)
    nn.functional.scaled_dot_product_attention(heads, heads, heads)
    assert torch.equal(torch.get_rng_state(), state)


def test_tensors_with_contents_take_none_that_follow_from_weights() -> None:
    with pytest.raises(ModelError, match=r"writes what follows from weights .* x\.new_zeros"):
        torch.zeros(3, 4).add_(X @ A)


def test_numbers_stand_in_for_contents() -> None:
    value = {"logits": X @ A, "labels": (X @ A).argmax(1), "x": X}
    found = stand_in(value)
    assert fingerprint(found["logits"]) is None
    assert found["logits"].requires_grad
    assert found["logits"].std() > 0
    assert not found["labels"].any()
    assert found["x"] is X


@pytest.mark.parametrize("masked", [True, *in_long_run([False])])
def test_a_llama_has_the_layers_and_the_operators_that_it_has_with_weights(masked: bool) -> None:
    """A given mask is read in a shortcut of its code. Without one attention is causal, with other gradients in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=20,
        max_position_embeddings=16,
    )
    dtype = torch.float32 if masked else torch.bfloat16
    model = Construction().run(lambda: nn.Module.to(LlamaForCausalLM(config), dtype))
    mode = Weightless()
    for path, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                own[name] = None if tensor is None else mode.empty(tensor, f"{path}.{name}")
    ids = torch.arange(16).view(2, 8)
    given = {"input_ids": ids, "labels": ids} | ({"attention_mask": torch.ones_like(ids)} if masked else {})
    found = trace(model, (), given)
    expected = trace(nn.Module.to(LlamaForCausalLM(config), dtype), (), given)
    assert found.tracer == expected.tracer == ("fx" if masked else "eager")
    assert found.shortcuts is not masked
    assert [str(one.kwargs) for one in _attentions(found)] == [str(one.kwargs) for one in _attentions(expected)]
    assert [layer.name for layer in found.layers] == [layer.name for layer in expected.layers]
    assert found.values == expected.values
    check_batch_sizes(found, model, given, [1, 2])


def _attentions(graph: LayerGraph) -> list[torch.fx.Node]:
    found = [node for node in graph.module.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
    assert found
    return found


def test_contents_of_a_large_tensor_are_seen_to_change() -> None:
    mask = torch.zeros(256, 256)
    before = MODE.fingerprint(mask)
    mask.data[3, 4] = 1.0  # which does not raise the version of the tensor
    changed = MODE.fingerprint(mask)
    assert changed != before
    assert MODE.fingerprint(mask.clone()) == MODE.fingerprint(mask.view(256, 256)) == changed
    mask.data[3, 4] = 0.0
    assert MODE.fingerprint(mask) == before
    assert MODE.fingerprint(mask[1:]) != before
