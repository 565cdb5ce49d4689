"""Models that nobody here wrote for the occasion: `transformers`' own, with random weights, in sizes for two
processors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

WORDS, LENGTH = 4000, 64


@dataclass(frozen=True)
class Entry:
    """A model's factory, and a factory of one sample of its data by argument name (without the batch dimension)."""

    model: Callable[[], nn.Module]
    sample: Callable[[], Mapping[str, Tensor]]


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """So many samples drawn from a fixed seed."""

    def __init__(self, entry: Entry, count: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self._samples = [dict(entry.sample()) for _ in range(count)]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._samples[index]


def words(length: int = LENGTH) -> Tensor:
    return torch.randint(10, WORDS, (length,))


def text_and_class() -> Mapping[str, Tensor]:
    kept = (torch.arange(LENGTH) < torch.randint(8, LENGTH, ())).long()
    return {"input_ids": words(), "attention_mask": kept, "labels": torch.randint(0, 2, ())}


def text() -> Mapping[str, Tensor]:
    ids = words()
    return {"input_ids": ids, "labels": ids.clone()}


def text_to_text() -> Mapping[str, Tensor]:
    return {"input_ids": words(), "labels": words(LENGTH // 2)}


def picture(side: int) -> Callable[[], Mapping[str, Tensor]]:
    return lambda: {"pixel_values": torch.randn(3, side, side), "labels": torch.randint(0, 2, ())}


def sound() -> Mapping[str, Tensor]:
    return {"input_values": torch.randn(8000), "labels": torch.randint(0, 2, ())}


def picture_and_text() -> Mapping[str, Tensor]:
    return {"input_ids": words(32), "pixel_values": torch.randn(3, 64, 64)}


def of(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A model of that class with that configuration."""

    def make() -> nn.Module:
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made

    return make


def speech(**settings: Any) -> Callable[[], nn.Module]:
    convolutions = {"conv_dim": (128,) * 5, "conv_stride": (5, 2, 2, 2, 2), "conv_kernel": (10, 3, 3, 3, 3)}
    return of("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **ENCODER, **convolutions, **settings)


def with_contrastive_loss() -> nn.Module:
    """CLIP, which computes its loss only if it is asked to."""
    text_part = {**ENCODER, "vocab_size": WORDS, "eos_token_id": 2, "max_position_embeddings": 32}
    sight = {**ENCODER, "image_size": 64, "patch_size": 16}
    config = transformers.CLIPConfig(text_config=text_part, vision_config=sight, projection_dim=256)
    return Asking(transformers.CLIPModel(config))


class Asking(nn.Module):
    """A model that is always asked for its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Any:
        return self.model(input_ids=input_ids, pixel_values=pixel_values, return_loss=True)


ENCODER: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 1536,
}
LLAMA = {**ENCODER, "vocab_size": WORDS, "num_key_value_heads": 2}
GPT2 = {"vocab_size": WORDS, "n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": LENGTH}
T5 = {"vocab_size": WORDS, "d_model": 384, "d_kv": 64, "d_ff": 1536, "num_layers": 4, "num_heads": 6}
BART = {
    "vocab_size": WORDS,
    "d_model": 384,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "max_position_embeddings": LENGTH,
}
BART |= {
    f"{part}_{key}": size
    for part in ("encoder", "decoder")
    for key, size in (("attention_heads", 6), ("ffn_dim", 1536))
}
DISTIL = {"vocab_size": WORDS, "dim": 384, "n_layers": 6, "n_heads": 6, "hidden_dim": 1536}
OPT = {"vocab_size": WORDS, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "ffn_dim": 1536}
MIXTRAL = {**LLAMA, "num_hidden_layers": 3, "num_local_experts": 4}
NO_DRAWS = {"layerdrop": 0.0, "apply_spec_augment": False}

ZOO: dict[str, Entry] = {
    "BERT": Entry(of("BertForSequenceClassification", "BertConfig", **ENCODER, vocab_size=WORDS), text_and_class),
    "DistilBERT": Entry(of("DistilBertForSequenceClassification", "DistilBertConfig", **DISTIL), text_and_class),
    "GPT-2 (tied)": Entry(of("GPT2LMHeadModel", "GPT2Config", **GPT2), text),
    "OPT (tied)": Entry(of("OPTForCausalLM", "OPTConfig", **OPT, word_embed_proj_dim=384), text),
    "GPT-NeoX": Entry(of("GPTNeoXForCausalLM", "GPTNeoXConfig", **ENCODER, vocab_size=WORDS), text),
    "Llama": Entry(of("LlamaForCausalLM", "LlamaConfig", **LLAMA), text),
    "Mixtral (experts)": Entry(of("MixtralForCausalLM", "MixtralConfig", **MIXTRAL), text),
    "T5 (tied)": Entry(of("T5ForConditionalGeneration", "T5Config", **T5, decoder_start_token_id=0), text_to_text),
    "BART (tied)": Entry(of("BartForConditionalGeneration", "BartConfig", **BART), text_to_text),
    "ViT": Entry(of("ViTForImageClassification", "ViTConfig", **ENCODER, image_size=96), picture(96)),
    "ConvNeXt": Entry(of("ConvNextForImageClassification", "ConvNextConfig", image_size=64), picture(64)),
    "wav2vec 2.0": Entry(speech(**NO_DRAWS), sound),
    "wav2vec 2.0, layer drop": Entry(speech(), sound),
    "CLIP": Entry(with_contrastive_loss, picture_and_text),
}
"""By name: what `experiments/studies/model_table.py` tries besides the models of `experiments/models`."""
