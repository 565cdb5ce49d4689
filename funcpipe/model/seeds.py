"""The seed of every layer's random numbers: a function of run, step, micro-batch and layer, never of the plan.

The generators belong to the whole process, and functions load samples while they compute. So whoever draws takes them
with `SHARED_GENERATORS`, seeds them, draws, and gives them back; nobody goes on with what another one has left in them.
"""

import contextlib
import hashlib
import os
import random
import threading
from collections.abc import Collection, Iterator

import numpy as np
import torch


def layer_seed(seed: int, step: int, micro_batch: int, layer_name: str) -> int:
    """The seed of the random number generators at the start of a layer: the same under any plan and when recomputed."""
    text = f"{seed}/{step}/{micro_batch}/{layer_name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def reseed(seed: int, generators: Collection[str] = ("torch",)) -> None:
    """Seed global generators: "torch" (of the CPU), "numpy" and "random"."""
    if "torch" in generators:
        torch.default_generator.manual_seed(seed)
    if "numpy" in generators:
        np.random.seed(seed % 2**32)
    if "random" in generators:
        random.seed(seed)


class Generators:
    """Gives the process's random number generators to one thread at a time; who computes goes before who loads.

    Computing waits for no more than the sample that is being loaded. A thread that has them may take them again.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._owner: int | None = None
        self._computing = 0  # threads that wait to compute

    @property
    def are_held(self) -> bool:
        """Whether this thread has them."""
        return self._owner == threading.get_ident()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Take the generators for a computation."""
        if self.are_held:
            yield
            return
        try:
            with self._free:
                self._computing += 1
                try:
                    self._free.wait_for(lambda: self._owner is None)
                finally:
                    self._computing -= 1
                self._owner = threading.get_ident()
            yield
        finally:
            self._give_back()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Take the generators to load one sample, once no computation wants them."""
        if self.are_held:
            yield
            return
        try:
            with self._free:
                self._free.wait_for(lambda: self._owner is None and not self._computing)
                self._owner = threading.get_ident()
            yield
        finally:
            self._give_back()

    def forget(self) -> None:
        """Begin anew, in a forked process, which has none of the threads that had or wanted the generators."""
        self._free = threading.Condition()
        self._owner, self._computing = None, 0

    def _give_back(self) -> None:
        """Let others take them; whoever was interrupted while it waited has nothing to give, but is not waited for."""
        with self._free:
            if self.are_held:
                self._owner = None
            self._free.notify_all()


SHARED_GENERATORS = Generators()
"""The generators of this process."""

os.register_at_fork(after_in_child=SHARED_GENERATORS.forget)
