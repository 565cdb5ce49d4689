"""The zoo of `transformers`: every architecture, as small as its configuration allows, with inputs to call it on.

Sizes are found by the names that configurations share, inputs by the names of `forward`'s parameters. What single
architectures need besides is in `zoo_settings` and `zoo_given`.
"""

import contextlib
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers

from experiments.studies.zoo import MAX_PARAMETERS, NotSamplesError, Specimen, accepted, declare_torchvision
from experiments.studies.zoo_given import INPUTS, NOT_SAMPLES, PACKED, SEVERAL_SAMPLES
from experiments.studies.zoo_inputs import SIDE, WIDTH, WORDS, candidates
from experiments.studies.zoo_run import judge_all, parser_of
from experiments.studies.zoo_settings import SETTINGS

HEADS, DEPTH = 4, 2
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")

SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "width", "hidden_dim", "emb_dim"), WIDTH),
    **dict.fromkeys(
        ("embedding_size", "projection_dim", "conv_dim", "decoder_hidden_size", "d_inner", "hidden_size_global"), WIDTH
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), DEPTH),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "decoder_num_hidden_layers", "num_decoder_layers"), DEPTH),
    **dict.fromkeys(("num_encoder_layers", "encoder_num_layers", "decoder_num_layers", "num_block"), DEPTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "decoder_num_attention_heads"), HEADS),
    **dict.fromkeys(KEY_VALUE_HEADS, 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 2 * WIDTH),
    **dict.fromkeys(("decoder_intermediate_size", "moe_intermediate_size", "n_inner", "mlp_dim"), 2 * WIDTH),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "v_head_dim", "qk_nope_head_dim"), WIDTH // HEADS),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_queries"), 1),
    "vocab_size": WORDS,
    "image_size": SIDE,
    "max_position_embeddings": 64,
    "first_k_dense_replace": 1,
    "rotary_dim": WIDTH // HEADS,
}
"""The size that a configuration's setting of that name is cut down to, if it is larger."""

EVEN = {name: {WIDTH: 64, 2 * WIDTH: 128, WIDTH // HEADS: 16}.get(size, size) for name, size in SIZES.items()}
"""Powers of two, which more classes can have."""

SHALLOW = {name: size for name, size in SIZES.items() if size == DEPTH or name in ("vocab_size", "intermediate_size")}
"""The settings that can be cut without regard to others."""

NARROW = {name: size for name, size in SIZES.items() if "head" not in name and name not in ("d_kv", "image_size")}
"""The settings but for those of attention's heads."""

DERIVED = ("image_embedding_size", "stage_names", "out_features", "out_indices", "_out_features", "_out_indices")
"""Settings that a configuration derives from others."""


def class_names(*, heads: bool = False) -> list[str]:
    """The names of the base classes of all architectures, or of the classes with heads on them."""
    modeling_auto = _module("models.auto.modeling_auto")
    mappings = [modeling_auto.MODEL_MAPPING_NAMES]
    if heads:
        mappings = [getattr(modeling_auto, name) for name in dir(modeling_auto) if name.startswith("MODEL_FOR_")]
        mappings = [mapping for mapping in mappings if isinstance(mapping, Mapping)]
    found: dict[str, None] = {}
    for mapping in mappings:
        for names in mapping.values():
            found.update(dict.fromkeys([names] if isinstance(names, str) else names))
    return sorted(found)


def specimen(name: str) -> Specimen:
    """The smallest specimen of the class that runs; raises what the first try was refused with if none does."""
    cls = getattr(transformers, name)
    _check_samples(cls)
    default: Any = cls.config_class()
    error: Exception | None = None
    for sizes, fill in _levels(cls, default):
        try:
            config = shrunk(default, sizes, fill=fill)
            if (parameters := _parameters(cls, config)) > MAX_PARAMETERS:
                raise ValueError(f"{parameters / 1e6:.0f} million parameters at the least")
            torch.manual_seed(0)
            model = cls(config).train()
            given = {key: made.tensor() for key, made in INPUTS.get(name, {}).items()}
            inputs = accepted(model, [given] if given else candidates(model))
            return Specimen(model, inputs, several=name in SEVERAL_SAMPLES)
        except Exception as problem:  # noqa: BLE001 - whatever a class says of sizes that it cannot have
            error = error or problem
    assert error is not None
    raise error


def _check_samples(cls: Any) -> None:
    if cls.__name__ in NOT_SAMPLES:
        raise NotSamplesError(NOT_SAMPLES[cls.__name__])
    for parameter in inspect.signature(cls.forward).parameters.values():
        if parameter.name in PACKED and parameter.default is parameter.empty:
            raise NotSamplesError(f"it asks for {parameter.name}")


def _levels(cls: Any, default: Any) -> Iterator[tuple[Mapping[str, int], bool]]:
    """Sizes to cut the settings to, and whether to fill in those that are None.

    The smallest come first, and last those that the class can be built with, found one by one.
    """
    multi_head = {**EVEN, **dict.fromkeys(KEY_VALUE_HEADS, HEADS)}
    yield from ((SIZES, False), (EVEN, False), (multi_head, False), (EVEN, True), (NARROW, False), (SHALLOW, False))
    yield {}, False
    sizes: dict[str, int] = {}
    for name, size in {**SHALLOW, **EVEN}.items():
        with contextlib.suppress(Exception):
            _parameters(cls, shrunk(default, {**sizes, name: size}))
            sizes[name] = size
    yield sizes, False


def _parameters(cls: Any, config: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in cls(config).parameters())


def shrunk(config: Any, sizes: Mapping[str, int], *, fill: bool = False) -> Any:
    """A configuration of the same class with its settings cut down to `sizes`, or set to them if None and `fill`."""
    return type(config).from_dict(_cut(config.to_dict(), sizes, fill=fill))


def _cut(settings: Mapping[str, Any], sizes: Mapping[str, int], *, fill: bool) -> dict[str, Any]:
    depth = next((settings[name] for name in sizes if sizes[name] == DEPTH and settings.get(name)), None)
    words = min(settings.get("vocab_size") or WORDS, sizes.get("vocab_size", 10**9))
    stages = len(settings.get("depths") or ())
    cut: dict[str, Any] = {}
    for name, value in settings.items():
        if name in DERIVED and not (name == "out_features" and (depth is None or stages not in (0, depth))):
            continue
        if isinstance(value, Mapping) and name not in ("id2label", "label2id", "per_layer_config"):
            cut[name] = _cut(value, sizes, fill=fill)
        elif isinstance(value, int) and str(name).endswith(("token_id", "token_index")) and value >= words:
            cut[name] = words - 1 - len(name) % 8
        elif (isinstance(value, int) and not isinstance(value, bool)) or (value is None and fill):
            cut[name] = min(value or 10**9, sizes[name]) if name in sizes and value != 0 else value
        else:
            cut[name] = _by_layer(name, value, depth) if sizes else value
    heads = cut.get("num_heads")
    if isinstance(heads, list) and isinstance(cut.get("embed_dim"), int):
        cut["embed_dim"] = 8 * heads[0]
    return _with_sections({**cut, **SETTINGS.get(settings.get("model_type", ""), {})}, fill=fill)


def _by_layer(name: str, value: Any, depth: Any) -> Any:
    """A setting that has a value for each of `depth` layers, for `DEPTH` of them; each kind of layer is kept first."""
    if name == "per_layer_config" and isinstance(value, Mapping):
        return {layer: each for layer, each in value.items() if int(layer) < DEPTH}
    if isinstance(value, list) and isinstance(depth, int) and len(value) == depth > DEPTH:
        return [*dict.fromkeys(map(str, value)), *value][:DEPTH] if isinstance(value[0], str) else value[:DEPTH]
    if name in ("depths", "num_blocks", "layer_depths") and isinstance(value, list):
        return [1 if isinstance(item, int) else item for item in value]
    return value


def _with_sections(cut: dict[str, Any], *, fill: bool) -> dict[str, Any]:
    """With the sections of a rotary embedding (time, height, width) made to add up to half of a head's size."""
    rope = cut.get("rope_parameters") or {}
    heads = cut.get("num_attention_heads")
    if (fill or "mrope_section" in rope) and isinstance(heads, int) and "rope_theta" in rope:
        size = cut.get("head_dim") or cut["hidden_size"] // heads
        half = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
        cut["rope_parameters"] = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    return cut


def _module(name: str) -> Any:
    declare_torchvision()
    return importlib.import_module(f"transformers.{name}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--heads", action="store_true", help="the classes with heads instead of the base classes")
    options = parser.parse_args()
    _module("modeling_utils")  # which every class imports: once here, not in every process
    judge_all(options.names or class_names(heads=options.heads), specimen, options)


if __name__ == "__main__":
    main()
