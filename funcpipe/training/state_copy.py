"""The copy of a stage's state on the host, made beside what its device computes.

    compute       update 3 | forwards and backwards of step 4 … | update 4, which waits for the end of the copy
    to the host              parameters, what the optimiser keeps
    background                   waits for the end of the copy, and writes it

Parameters, and what the optimiser keeps for them, change in updates alone, so they leave on a stream of their own. All
else, such as running statistics and learning rates, may change before, and is little: it is copied where the device
computes, before the next forward. The copy has the same memory every time, as long as the state has the same form.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.training.device import Device
from funcpipe.training.optimizers import OPTIMIZER
from funcpipe.training.state import MODEL, StageState, tensor_names

Complete = Callable[[StageState], StageState]
"""Adds to a state what is always on the host."""


class StateCopy:
    """The copy of the state of `stage`, which is on `device`; on the host the state itself, which is not copied."""

    def __init__(self, device: Device, stage: nn.Module) -> None:
        self._device = device
        self._trained = {MODEL + name for name, tensor in tensor_names(stage)[0].items() if tensor.requires_grad}
        self._memory: dict[str, Tensor] = {}
        self._in_use = threading.Lock()
        self._end: Any = None

    def begin(self, state: StageState, complete: Complete) -> AbstractContextManager[StageState]:
        """Begin to copy `state`. No update may begin before `settle`.

        Waits until the copy before is not in use any more. The context that is returned, which must be entered, waits
        for the end of the copy, and has it in use until it is left.
        """
        if self._device.is_host:
            return nullcontext(complete(state))
        self._in_use.acquire()
        self._memory = {name: self._place(name, tensor) for name, tensor in state.tensors.items()}
        later = [name for name, tensor in state.tensors.items() if self._lasts(name) and tensor.device.type != "cpu"]
        for name in state.tensors.keys() - later:
            self._memory[name].copy_(state.tensors[name], non_blocking=True)
        pairs = [(self._memory[name], state.tensors[name]) for name in later]
        self._end = self._device.leave(pairs, [self._device.computed()])
        return self._read(self._end, replace(state, tensors=dict(self._memory)), complete)

    @contextmanager
    def _read(self, end: Any, copied: StageState, complete: Complete) -> Iterator[StageState]:
        try:
            end.synchronize()
            yield complete(copied)
        finally:
            self._in_use.release()

    def settle(self) -> None:
        """Have the device end the copy before it computes what is asked for from now on."""
        if self._end is not None:
            self._device.wait_for(self._end)
            self._end = None

    def _lasts(self, name: str) -> bool:
        return name in self._trained or (name.startswith(OPTIMIZER) and not name.startswith(f"{OPTIMIZER}group/"))

    def _place(self, name: str, tensor: Tensor) -> Tensor:
        """Return memory for the copy of a tensor, laid out as that is."""
        like, kept = torch.empty_like(tensor, device="meta"), self._memory.get(name)
        if kept is not None and (kept.dtype, kept.shape, kept.stride()) == (like.dtype, like.shape, like.stride()):
            return kept
        return self._device.block(like.nbytes).view(like.dtype).as_strided(like.shape, like.stride())
