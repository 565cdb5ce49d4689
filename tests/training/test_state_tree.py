"""Nested data with tensors, split and joined."""

import pytest
import torch

from funcpipe.training.optimizers import join_tensors, rename_tensors, split_tensors, tensor_names_in

VALUE = {"step": 3, "moments": [torch.ones(2), (torch.zeros(1), None)], "name": "x"}


def test_what_was_split_is_joined_again_under_other_names_too() -> None:
    tensors: dict[str, torch.Tensor] = {}
    tree = split_tensors(VALUE, "optimizer/w", tensors)
    assert list(tensor_names_in(tree)) == ["optimizer/w/moments/0", "optimizer/w/moments/1/0"]
    assert join_tensors(tree, tensors)["moments"][1] == (torch.zeros(1), None)
    renamed = rename_tensors(tree, {"optimizer/w/moments/0": "other"})
    assert list(tensor_names_in(renamed)) == ["other", "optimizer/w/moments/1/0"]
    tensors["other"] = tensors.pop("optimizer/w/moments/0")
    assert torch.equal(join_tensors(renamed, tensors)["moments"][0], torch.ones(2))


def test_joined_tensors_are_copies() -> None:
    tensors = {"t": torch.zeros(2)}
    join_tensors({"tensor": "t"}, tensors).add_(1)
    assert not tensors["t"].any()


def test_a_tree_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match="unknown kind 'set'"):
        join_tensors({"set": []}, {})
