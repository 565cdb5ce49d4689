"""What the smallest specimens of single architectures of `transformers` need, where no rule finds it."""

from collections.abc import Mapping
from typing import Any

from experiments.studies.zoo_inputs import WORDS

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8, "use_cache": False}
FORECAST = {
    "prediction_length": 4,
    "feature_size": 6,
    "context_length": 8,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 1,
}
EFFICIENT = {"hidden_dim": 640, "width_coefficient": 0.5, "depth_coefficient": 0.3}
DETR = {"d_model": 64, "encoder_hidden_dim": 64, "decoder_in_channels": [64] * 3, "num_queries": 20, "num_denoising": 0}
SWIN = {
    "model_type": "swin",
    "embed_dim": 24,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 4, 8],
    "window_size": 2,
    "image_size": 64,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
PERCEPTION = {
    "model_type": "timm_wrapper",
    "architecture": "vit_pe_core_tiny_patch16_384",
    "do_pooling": True,
    "num_classes": 64,
    "model_args": {"embed_dim": 192, "img_size": 64},
}
ACOUSTIC = {"num_filters": 4, "downsampling_ratios": [2, 4], "depths": [1, 1, 1], "hidden_size": 8}
SAM = {"output_channels": 64, "num_pos_feats": 32}

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "align": {"projection_dim": 160},
    "align_vision_model": EFFICIENT,
    "autoformer": {**FORECAST, "label_length": 4},
    "bailing_hybrid": {"layer_group_size": 2, "num_expert_group": 1, "num_key_value_heads": 4, "head_dim": 16},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "blip-2": {"num_query_tokens": 4, "image_token_index": 100},
    "blt": {"use_cache": False, "encoder_hash_byte_group_vocab": 64},
    "bridgetower_vision_model": {"patch_size": 16},
    "chameleon": {"vocabulary_map": {"<image>": 100}},
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 48, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    **dict.fromkeys(("d_fine", "deimv2", "rt_detr", "rt_detr_v2", "pp_doclayout_v3", "pp_doclayout_v4"), DETR),
    "dia_decoder": {"cross_num_attention_heads": 4, "cross_head_dim": 12, "cross_num_key_value_heads": 4}
    | {"cross_hidden_size": 48},
    "efficientnet": EFFICIENT,
    "emu3": {"vocabulary_map": {"<image>": 100}},
    "ernie4_5_moe": {"moe_k": 2},
    "ernie4_5_vl_moe_text": {"moe_k": 2, "moe_intermediate_size": [64, 32]}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}},
    "esm": {"vocab_size": WORDS, "pad_token_id": 1, "mask_token_id": 2},
    "blip_2_qformer": {"encoder_hidden_size": 48},
    "instructblip_qformer": {"encoder_hidden_size": 48},
    "instructblipvideo_qformer": {"encoder_hidden_size": 48},
    "opt": {"word_embed_proj_dim": 48},
    "clap_audio_model": {"patch_embeds_hidden_size": 24},
    "depth_pro": {"patch_size": 16, "intermediate_hook_ids": [1, 0]},
    "efficientloftr": {"hidden_size": 256, "num_attention_heads": 8},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "mimi": {"upsample_groups": 16},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots3_note_text": {"head_dim": 24, "num_key_value_heads": 4},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 2], "codebook_size": 64},
    "esmc": {"num_key_value_heads": 4},
    "fun_asr_nano": {
        "adaptor_config": {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 12}
        | {"num_hidden_layers": 2, "projector_hidden_size": 96},
    },
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16},
    "gemma4_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16},
    "glm5_next_vision": {"projection_intermediate_size": 96, "out_hidden_size": 64},
    "granite_docling_vision": {"out_hidden_size": 48},
    "inkling2_vision": {"text_hidden_size": 48},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "kosmos-2": {"latent_query_num": 4},
    "mask2former": {"backbone_config": SWIN},
    "oneformer": {"backbone_config": SWIN, "conv_dim": 64, "mask_dim": 64, "hidden_dim": 64},
    "lw_detr_vit": {
        "out_features": ["stage1", "stage2"],
        "window_block_indices": [0],
        "num_windows": 4,
        "pretrain_image_size": 64,
    },
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "muse_glimmer": {"out_hidden_size": 96, "projector_hidden_size": 96},
    "muse_spark": {"out_hidden_size": 96, "projector_hidden_size": 96},
    "muse_spark_audio": {"out_hidden_size": 48},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    **dict.fromkeys(("sam_vision_model", "sam_hq_vision_model"), SAM),
    "sam_hq_mask_decoder": {"vit_dim": 64},
    "sam3_vision_model": {"fpn_hidden_size": 64, "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "sam2_hiera_det_model": {
        "hidden_size": 24,
        "image_size": [64, 64],
        "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": [24, 48, 96, 192],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "window_size_per_stage": [8, 4, 4, 4],
        "global_attention_blocks": [3],
    },
    "sam2_vision_model": {"backbone_channel_list": [192, 96, 48, 24], "fpn_hidden_size": 48}
    | {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "lw_detr": {"projector_scale_factors": [1.0], "num_queries": 10, "group_detr": 2, "d_model": 64},
    "siglip2_text_model": {"projection_size": 48},
    "step3p5": {"sliding_window": 8},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "timm_backbone": {"backbone": "resnet18"},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 8, "num_frames": 2},
    "dots3_note_vision_encoder": {"adapter_in_dim": 48, "adapter_out_dim": 48},
    "dots3_note_audio_encoder": {"adapter_input_size": 48, "adapter_out_dim": 48},
    "glm5_next_text": {"num_key_value_heads": 4, "linear_head_dim": 16, "linear_num_heads": 4, "index_head_dim": 16},
    "vits": {"upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4], "upsample_initial_channel": 32},
    "neucodec": {"quantization_dim": 128},
    "xcodec2": {"quantization_dim": 128},
    "edgetam_vision_model": {
        "backbone_config": {
            "model_type": "timm_wrapper",
            "architecture": "resnet18",
            "num_classes": 2,
            "model_args": {"features_only": True, "out_indices": [1, 2, 3, 4]},
        },
        "backbone_channel_list": [512, 256, 128, 64],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "fpn_hidden_size": 48,
    },
    "fast_vlm": {"vision_config": {"model_type": "timm_wrapper", "architecture": "fastvit_mci0", "hidden_size": 1024}},
    "pp_ocrv6_small_det": {
        "backbone_config": {"model_type": "pp_lcnet_v4", "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "layer_list_out_channels": [96, 96, 192, 384],
    },
    "uvdoc_backbone": {"out_features": ["stage1", "stage2", "stage3", "stage4", "stage5", "stage6"]},
    "pe_video_encoder": {"vision_config": PERCEPTION},
    "perception_lm": {"vision_config": PERCEPTION},
    "granite_speech5_encoder": {"context_size": 16},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 64},
    "informer": FORECAST,
    "instructblip": {"num_query_tokens": 4, "image_token_index": 100},
    "instructblipvideo": {"num_query_tokens": 4, "video_token_index": 100},
    "jamba": {"use_cache": False, "attn_layer_period": 2, "attn_layer_offset": 1},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1, 2], "num_embeddings": 64, "latent_channels": 32},
    "kosmos_2_text_model": {"layers": 2, "embed_dim": 48, "attention_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 48,
        "zero_expert_num": 2,
        "num_key_value_heads": 4,
        "qk_head_dim": 24,
    },
    "luke": {"entity_vocab_size": 64, "entity_emb_size": 16},
    "lxmert": {"visual_feat_dim": 32, "l_layers": 2, "x_layers": 2, "r_layers": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "perceiver": {"d_latents": 64, "num_latents": 16, "num_self_attends_per_block": 2},
    "recurrent_gemma": {"use_cache": False},
    "reformer": {
        "axial_pos_embds_dim": [16, 32],
        "axial_pos_shape": [3, 4],
        "attn_layers": ["local", "lsh", "local"],
        "attention_head_size": 12,
        "feed_forward_size": 96,
        "hidden_size": 48,
        "num_buckets": 2,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "seamless_m4t": {"t2u_vocab_size": 64, "unit_hifi_gan_vocab_size": 64, "t2u_encoder_layers": 2}
    | {"t2u_decoder_layers": 2, "speech_encoder_layers": 2, "upsample_initial_channel": 32, "unit_embed_dim": 32}
    | {"lang_embed_dim": 16, "spkr_embed_dim": 16, "t2u_encoder_ffn_dim": 96, "t2u_decoder_ffn_dim": 96},
    "seamless_m4t_v2": {"t2u_vocab_size": 64, "unit_hifi_gan_vocab_size": 64, "t2u_encoder_layers": 2}
    | {"t2u_decoder_layers": 2, "speech_encoder_layers": 2, "upsample_initial_channel": 32, "unit_embed_dim": 32}
    | {"lang_embed_dim": 16, "spkr_embed_dim": 16, "t2u_encoder_ffn_dim": 96, "t2u_decoder_ffn_dim": 96},
    "seggpt": {"image_size": [64, 32], "pretrain_image_size": 32, "intermediate_hidden_state_indices": [0, 1]}
    | {"merge_index": 0},
    "speecht5": {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "time_series_transformer": FORECAST,
    "vibevoice_acoustic_tokenizer": ACOUSTIC,
    "vibevoice_acoustic_tokenizer_decoder": ACOUSTIC,
    "vibevoice_acoustic_tokenizer_encoder": ACOUSTIC,
    "xmod": {"default_language": "en_XX"},
    "zamba": {"use_cache": False, "use_mamba_kernels": False, "num_hidden_layers": 4}
    | {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 96, "attention_head_dim": 24},
    "zamba2": {"use_cache": False, "n_mamba_heads": 8, "mamba_d_state": 16, "chunk_size": 8}
    | {"layers_block_type": ["mamba", "hybrid"] * 2, "use_mamba_kernels": False, "adapter_rank": 8}
    | {
        "num_hidden_layers": 4,
        "mamba_headdim": 12,
        "attention_hidden_size": 96,
        "attention_head_dim": 24,
        "hybrid_layer_ids": [1, 3],
    },
}
"""Settings by the `model_type` of the configuration, or of a part of one."""
