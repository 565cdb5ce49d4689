"""A warm-up: a stage runs forward and backward once before its first step, on zeros of the sample's shapes.

The first call of an operator loads and compiles what it needs for these shapes, and takes memory from the system. While
a function has to wait for others anyway, that costs nothing.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.model.draws import is_from_torch
from funcpipe.model.graph import Signature
from funcpipe.model.graph.isolation import in_turn, preserve_gradients, preserve_state
from funcpipe.model.graph.program import WHOLE, attribute
from funcpipe.model.split import StageModule
from funcpipe.model.tensors import flatten
from funcpipe.training.device import HOST, Device

_log = logging.getLogger(__name__)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = ("torch", "_operator", "operator", "math", "builtins", "funcpipe")


def warm_up(stage: StageModule, signature: Signature, *, seed: int, device: Device = HOST) -> bool:
    """Run `stage`, on `device`, forward and backward once; `signature`, the model's, knows the shapes of its inputs.

    Parameters, gradients, buffers and generators are as before. Code of the user's may do more than compute, so it is
    not run: returns False for a stage that has any, and for one that cannot be run on zeros.
    """
    torch.get_num_threads()  # makes torch apply its number of threads to this thread too
    checks = signature.checks
    if checks is None or not _is_plain(stage):
        return False
    values = {name: torch.zeros(checks.shapes[name], dtype=checks.dtypes[name]) for name in stage.inputs}
    for name in stage.receives:
        value = stage.program.values[name]
        values[name] = torch.zeros(value.shape, dtype=value.dtype, requires_grad=name in stage.differentiable)
    with in_turn(), preserve_state(stage), preserve_gradients(stage), torch.enable_grad():
        try:
            sent, output = stage(device.to_device(values), (seed, 0, 0))
            roots = [x for x in (*sent.values(), *flatten(output)[0]) if isinstance(x, Tensor) and x.requires_grad]
            torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
        except Exception as error:  # noqa: BLE001 - zeros may be no input; the first step then finds nothing loaded
            _log.info("the stage is not warmed up: %s", error)
            return False
    return True


def _is_plain(stage: StageModule) -> bool:
    """True if a forward and a backward of `stage` run code of torch alone."""
    if WHOLE in vars(stage) or stage.carried.names:
        return False
    calls = [call for layer in stage.program.layers for call in layer.calls]
    called: list[nn.Module] = [attribute(stage, call.target) for call in calls if call.op == "call_module"]
    functions: list[Any] = [call.target for call in calls if call.op == "call_function"]
    hooked = any(getattr(part, hooks) for module in called for part in module.modules() for hooks in _HOOKS)
    return (
        not hooked
        and all(map(is_from_torch, called))
        and all((getattr(one, "__module__", None) or "torch").partition(".")[0] in _PLAIN for one in functions)
    )
