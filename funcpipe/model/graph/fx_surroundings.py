"""What symbolic tracing reads of the code that runs, and what it leaves in the model."""

import contextlib
import dis
from collections.abc import Iterator
from types import FrameType

from torch import Tensor, nn


def unpacked_names(frame: FrameType) -> int | None:
    """Into how many names the code that a frame is running unpacks a value; None if it does something else."""
    if frame.f_code.co_code[frame.f_lasti] != dis.opmap["UNPACK_SEQUENCE"]:
        return None
    return next(int(one.argval) for one in dis.get_instructions(frame.f_code) if one.offset == frame.f_lasti)


@contextlib.contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Remove the constants that fx adds to the model's attributes while it traces."""
    before = set(vars(model))
    try:
        yield
    finally:
        for name in set(vars(model)) - before:
            if isinstance(vars(model)[name], Tensor):
                delattr(model, name)
