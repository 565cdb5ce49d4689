"""The zoo of `timm`: a small architecture of every module, with pictures to call it on."""

from functools import cache
from typing import Any

import torch
from torch import nn

from experiments.studies.zoo import BATCH, MAX_PARAMETERS, Specimen, accepted, declare_torchvision
from experiments.studies.zoo_run import judge_all, parser_of

SMALL = (
    "test",
    "atto",
    "femto",
    "pico",
    "nano",
    "xxs",
    "xxt",
    "xt",
    "tiny",
    "_s0",
    "_b0",
    "_050",
    "small",
    "_18",
    "26",
)
"""Parts of names of small architectures, the smallest first."""

SIDES = (64, 96, 128, 160, 192, 224, 256)
"""The sides of pictures that are tried, in pixels."""


def names() -> list[str]:
    """One small architecture of every module of timm."""
    timm = _timm()
    found = [timm.list_models(module=module) for module in timm.list_modules()]
    return sorted({min(inside, key=_rank) for inside in found if inside})


def specimen(name: str) -> Specimen:
    """The architecture for ten classes, with the smallest pictures that it takes; raises the last error if none."""
    timm = _timm()
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in timm.create_model(name, num_classes=10).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{name} is too large")
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, num_classes=10).train()
    pictures = (torch.randn(BATCH, 3, side, side, generator=torch.Generator().manual_seed(2)) for side in SIDES)
    return Specimen(model, accepted(model, ({"x": tensor} for tensor in pictures)))


def _rank(name: str) -> tuple[int, int, str]:
    return next((i for i, word in enumerate(SMALL) if word in name), len(SMALL)), len(name), name


@cache
def _timm() -> Any:
    declare_torchvision()
    import timm  # type: ignore[import-not-found]

    return timm


def main() -> None:
    options = parser_of(__doc__).parse_args()
    judge_all(options.names or names(), specimen, options)


if __name__ == "__main__":
    main()
