"""Inputs that a class of `transformers` might take, by the names of its `forward`'s parameters."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.studies.zoo import BATCH

LENGTH, WORDS, SIDE, WIDTH = 12, 128, 64, 48


@dataclass(frozen=True)
class Input:
    """What one input of a class is made of: for each sample a tensor of this `shape`."""

    shape: tuple[int, ...]
    below: int | None = None
    """Integers from 0 up to, but without, this; random numbers of any size if None."""
    value: float | bool | None = None
    """Filled with this instead."""
    first: tuple[int, ...] = ()
    """What the (last) dimension begins with instead."""

    def tensor(self) -> Tensor:
        """The input's tensor, always the same."""
        generator = torch.Generator().manual_seed(2)
        shape = (BATCH, *self.shape)
        if self.value is not None:
            return torch.full(shape, self.value)
        if self.below is None:
            return torch.randn(shape, generator=generator)
        tensor = torch.randint(0, self.below, shape, generator=generator)
        if self.first:
            tensor[..., : len(self.first)] = torch.tensor(self.first)
        return tensor


def candidates(model: nn.Module) -> Iterator[Mapping[str, Tensor]]:
    """Inputs that the model might take: its main input, words, both; with and without what goes with them."""
    names = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    others = [name for name in (main, *_CONTINUOUS) if name in names and name != "input_ids"]
    for extra in _extras(names):
        if "input_ids" in names:
            yield {"input_ids": words(below=_words_of(model.config)), **extra}
        for name in dict.fromkeys(others):
            for tensor in _continuous(name, model.config):
                if "input_ids" in names:
                    yield {"input_ids": words(below=_words_of(model.config)), name: tensor, **extra}
                yield {name: tensor, **extra}
        if not others and "input_ids" not in names:
            yield from ({name: torch.randn(BATCH, *shape)} for name in list(names)[:1] for shape in _SHAPES)


_CONTINUOUS = ("pixel_values", "input_features", "input_values", "pixel_values_videos", "inputs", "past_values")

_SHAPES: tuple[tuple[int, ...], ...] = ((LENGTH, WIDTH), (LENGTH, 64), (3, SIDE, SIDE), (WIDTH, LENGTH), (1, 4000))


def _extras(names: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Further inputs: a mask with padding, then without it; a decoder's inputs where there is one."""
    further = {"decoder_input_ids": words(LENGTH // 2)} if "decoder_input_ids" in names else {}
    for name in ("qformer_input_ids", "input_word_ids"):
        if name in names and names[name].default is inspect.Parameter.empty:
            further[name] = words()
    if "bbox" in names:
        further["bbox"] = torch.tensor([1, 1, 5, 5]).repeat(BATCH, LENGTH, 1)
    if "attention_mask" in names and "input_ids" in names:
        lengths = torch.tensor([LENGTH, LENGTH - 3, LENGTH - 1, LENGTH, 5, LENGTH, LENGTH, 7])
        yield {"attention_mask": (torch.arange(LENGTH) < lengths[:, None]).long(), **further}
    yield further
    if further:
        yield {}


def words(length: int = LENGTH, *, below: int = WORDS - 16) -> Tensor:
    """Random words."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, below, (BATCH, length), generator=generator)


def _words_of(config: Any) -> int:
    size = getattr(config, "vocab_size", None)
    return min(size, WORDS - 16) if isinstance(size, int) and size > 3 else WORDS - 16


def _continuous(name: str, config: Any) -> Iterator[Tensor]:
    """Tensors that the input `name` could be."""
    parts = [config, *(getattr(config, part, None) for part in ("vision_config", "audio_config", "text_config"))]

    def setting(name: str, default: int) -> int:
        found = next((value for part in parts if (value := getattr(part, name, None))), default)
        return int(found[0]) if isinstance(found, list | tuple) else int(found)

    side, channels, mels = setting("image_size", SIDE), setting("num_channels", 3), setting("num_mel_bins", 80)
    frames, length = setting("num_frames", 4), setting("max_length", 128)
    if name in ("pixel_values_videos", "pixel_values"):
        shapes: list[tuple[int, ...]] = [(channels, side, side), (frames, channels, side, side)]
        shapes += [(channels, frames, side, side), (channels, SIDE, SIDE), (1, channels, side, side), (side, side)]
        if isinstance(getattr(config, "image_size", None), list | tuple):
            shapes.insert(0, (channels, *config.image_size))
        shapes += [(2, channels, side, side), (2, channels, SIDE, SIDE), (channels, 4 * SIDE, 4 * SIDE)]
    elif name == "input_values":
        shapes = [(4000,), (1, 4000), (length, mels), (128, mels), (mels, 128), (2000, 1), (1, 9600)]
    elif name == "input_features":
        shapes = [(mels, 128), (128, mels), (mels, 3000), (1, mels, 128), (128, 160), (80, 128), (1, 1001, 64)]
        shapes += [(1, 1024, 64), (mels, 2 * setting("max_source_positions", 1500))]
    elif name == "past_values":
        lags = max(getattr(config, "lags_sequence", None) or [0])
        context = setting("context_length", 64)
        shapes = [(context + lags,), (context, setting("num_input_channels", 1)), (64,), (512, 1)]
    else:
        shapes = [(64,), (64, 1), (LENGTH, WIDTH), (mels, 128), (channels, side, side), (512, 1)]
    generator = torch.Generator().manual_seed(2)
    for shape in shapes:
        yield torch.randn(BATCH, *shape, generator=generator)
