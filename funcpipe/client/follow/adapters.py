"""Adapters of peft merged into the weights of their base model, a layer at a time."""

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from funcpipe.errors import ModelError
from funcpipe.model.tensors import named_tensors
from funcpipe.training.state_dict import Read, StateDict

_BY_LAYER = "layer by layer (load the run into the model, and use merge_and_unload of peft)"


def merge_adapters(model: nn.Module, state: Mapping[str, Tensor]) -> StateDict:
    """The `state_dict` of the base model of `model`, with the adapters merged into it that are active there.

    `model` is a PeftModel, whose contents are not read (it may be on the meta device), and `state` its tensors. Each
    tensor is read and merged, as by peft's `merge_and_unload`, when it is asked for. Raises ModelError where adapters
    are not parts of layers.
    """
    try:
        from peft import PeftModel
        from peft.tuners.tuners_utils import BaseTuner
    except ImportError:
        raise ModelError("adapters are merged by peft, which is not installed: pip install peft") from None
    if not isinstance(model, PeftModel) or not isinstance(model.base_model, BaseTuner):
        raise ModelError(
            f"a {type(model).__name__} has no adapters that can be merged into its layers; give the model that "
            "get_peft_model of peft returns for LoRA or the like"
        )
    places = list(_places(model, state))
    layers: dict[int, tuple[str, Read]] = {}
    for name, place, tensor, is_merged in places:
        if is_merged and layers.setdefault(id(tensor), (name, place))[0] != name:
            raise ModelError(
                f"{name} is the same tensor as {layers[id(tensor)][0]}; their adapters cannot be merged {_BY_LAYER}"
            )
    prefix = next(path for path, module in model.named_modules() if module is model.base_model.model) + "."
    return StateDict(
        {name.removeprefix(prefix): layers.get(id(tensor), (name, place))[1] for name, place, tensor, _ in places}
    )


def _places(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Read, Tensor, bool]]:
    """Each tensor of the base model: its name, what reads it, itself without contents, and whether it is merged."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    wrappers: dict[str, Any] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in wrappers)
        if inside or not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            continue
        wrappers[path] = module
        if isinstance(module, ModulesToSaveWrapper) and module.active_adapters:
            saved = f"modules_to_save.{module.active_adapter}"
            for name, tensor in named_tensors(module.get_submodule(saved)).items():
                yield f"{path}.{name}", partial(state.__getitem__, f"{path}.{saved}.{name}"), tensor, False
        else:
            base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.original_module
            for name, tensor in named_tensors(base).items():
                yield f"{path}.{name}", partial(_merged, module, path, name, state), tensor, True
    for name, tensor in named_tensors(model).items():
        if not any(name.startswith(f"{path}.") for path in wrappers):
            yield name, partial(state.__getitem__, name), tensor, False


def _merged(layer: Any, path: str, name: str, state: Mapping[str, Tensor]) -> Tensor:
    """The tensor `name` of the base of `layer` after its adapters are merged into it."""
    own = copy.deepcopy(layer)
    own.load_state_dict({inner: state[f"{path}.{inner}"] for inner in own.state_dict()}, assign=True)
    try:
        if hasattr(own, "unload_and_optionally_merge_module"):
            own = own.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=None)
        else:
            own.merge(safe_merge=True)
            own = own.get_base_layer()
    except (ValueError, RuntimeError) as error:  # torch's own for what has no contents: tensors of other layers
        raise ModelError(f"the adapters of {path} cannot be merged {_BY_LAYER}: {error}") from error
    found = named_tensors(own)[name].detach()
    if found.is_meta:
        raise ModelError(f"the adapters of {path} cannot be merged {_BY_LAYER}: they use tensors of other layers")
    return found
