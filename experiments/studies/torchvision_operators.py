"""The names of torchvision's compiled operators.

They exist for some builds of torch only, torchvision is not imported without them, and `timm` and `transformers` not
without torchvision where it is installed. No architecture calls them.
"""

from functools import cache

import torch


@cache
def declare() -> torch.library.Library:
    """Declare the operators that are missing; they last as long as the library that is returned."""
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}() -> ()")  # type: ignore[no-untyped-call]
    return library
