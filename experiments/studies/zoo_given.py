"""Inputs of single architectures of `transformers` that no rule finds, and what else is particular to one."""

from collections.abc import Mapping

from experiments.studies.zoo_inputs import LENGTH, Input

WORD = Input((LENGTH,), below=96)
MASK = Input((LENGTH,), value=1)
PAST = {
    "past_values": Input((11,)),
    "past_time_features": Input((11, 1)),
    "past_observed_mask": Input((11,), value=1.0),
    "future_values": Input((4,)),
    "future_time_features": Input((4, 1)),
}

SPEECH = {
    "input_ids": Input((LENGTH,), below=70),
    "spectrogram_labels": Input((2 * LENGTH, 80)),
    "duration_labels": Input((LENGTH,), value=2),
    "pitch_labels": Input((LENGTH, 1)),
    "energy_labels": Input((LENGTH, 1)),
}

INPUTS: Mapping[str, Mapping[str, Input]] = {
    "AudioFlamingo3Encoder": {
        "input_features": Input((128, 3000)),
        "input_features_mask": Input((3000,), value=1),
    },
    "AutoformerModel": PAST,
    "Blip2Model": {"pixel_values": Input((3, 64, 64)), "input_ids": Input((LENGTH,), below=96, first=(100,) * 4)},
    "Blip2QFormerModel": {"query_embeds": Input((4, 48)), "encoder_hidden_states": Input((5, 48))},
    "ClapModel": {
        "input_ids": WORD,
        "input_features": Input((1, 1001, 64)),
        "is_longer": Input((1,), value=False),
    },
    "DecisionTransformerModel": {
        "states": Input((5, 17)),
        "actions": Input((5, 4)),
        "rewards": Input((5, 1)),
        "returns_to_go": Input((5, 1)),
        "timesteps": Input((5,), below=60),
        "attention_mask": Input((5,), value=1),
    },
    "DiaModel": {"input_ids": WORD, "decoder_input_ids": Input((6, 9), below=96)},
    "FastSpeech2ConformerModel": SPEECH,
    "FastSpeech2ConformerWithHifiGan": SPEECH,
    "Gemma3nAudioEncoder": {"audio_mel": Input((64, 128)), "audio_mel_mask": Input((64,), value=False)},
    "FunAsrNanoEncoder": {
        "input_features": Input((20, 560)),
        "input_features_mask": Input((20,), value=True),
    },
    "Gemma4VisionModel": {"pixel_values": Input((9, 768)), "pixel_position_ids": Input((9, 2), below=3)},
    "Kosmos2Model": {
        "pixel_values": Input((3, 64, 64)),
        "input_ids": WORD,
        "image_embeds_position_mask": Input((LENGTH,), below=1, first=(1, 1, 1, 1)),
    },
    "KyutaiSpeechToTextModel": {"input_ids": Input((LENGTH, 33), below=96)},
    "MuseGlimmerAssistantModel": {
        "noise_embeds": Input((4, 48)),
        "context_hidden_states": Input((LENGTH, 96)),
    },
    "MuseSparkAudioModel": {"input_values": Input((3840,))},
    "NeuCodecModel": {"input_values": Input((1, 6400)), "input_features": Input((20, 160))},
    "Xcodec2Model": {"input_values": Input((1, 6400)), "input_features": Input((20, 160))},
    "OneFormerModel": {"pixel_values": Input((3, 64, 64)), "task_inputs": Input((77,), below=96)},
    "Qwen3ASREncoder": {"input_features": Input((128, 200)), "input_features_mask": Input((200,), value=1)},
    "TvpModel": {"input_ids": WORD, "attention_mask": MASK, "pixel_values": Input((2, 3, 64, 64))},
    "VoxtralRealtimeModel": {"input_ids": Input((16,), below=96), "input_features": Input((128, 128))},
    "Molmo2Model": {"input_ids": WORD, "mm_token_type_ids": Input((LENGTH,), value=0)},
    "EfficientLoFTRModel": {"pixel_values": Input((2, 3, 128, 128))},
    "PeAudioVideoEncoder": {"input_values": Input((1, 4000)), "pixel_values_videos": Input((4, 3, 64, 64))},
    "PeVideoEncoder": {"pixel_values_videos": Input((4, 3, 64, 64))},
    "PeVideoModel": {"input_ids": WORD, "pixel_values_videos": Input((4, 3, 64, 64))},
    "GraniteSpeech5Encoder": {"input_features": Input((40, 320))},
    "GraniteSpeech5ForCTC": {"input_features": Input((40, 320))},
    "IdeficsModel": {
        "input_ids": WORD,
        "attention_mask": MASK,
        "pixel_values": Input((1, 3, 64, 64)),
        "image_attention_mask": Input((LENGTH, 1), value=1),
    },
    "GroundingDinoModel": {"pixel_values": Input((3, 64, 64)), "input_ids": WORD},
    "InformerModel": PAST,
    "InstructBlipModel": {
        "pixel_values": Input((3, 64, 64)),
        "qformer_input_ids": WORD,
        "input_ids": Input((LENGTH,), below=96, first=(100,) * 4),
    },
    "LxmertModel": {"input_ids": WORD, "visual_feats": Input((5, 32)), "visual_pos": Input((5, 4))},
    "MMGroundingDinoModel": {"pixel_values": Input((3, 64, 64)), "input_ids": WORD},
    "SegGptModel": {
        "pixel_values": Input((3, 32, 32)),
        "prompt_pixel_values": Input((3, 32, 32)),
        "prompt_masks": Input((3, 32, 32)),
    },
    "Siglip2Model": {
        "input_ids": WORD,
        "pixel_values": Input((16, 768)),
        "pixel_attention_mask": Input((16,), value=1),
        "spatial_shapes": Input((2,), value=4),
    },
    "Siglip2VisionModel": {
        "pixel_values": Input((16, 768)),
        "pixel_attention_mask": Input((16,), value=1),
        "spatial_shapes": Input((2,), value=4),
    },
    "SpeechT5Model": {"input_values": Input((20, 48)), "decoder_input_values": Input((8, 48))},
    "TimeSeriesTransformerModel": PAST,
    "TimesFmModel": {
        "past_values": Input((512,)),
        "past_values_padding": Input((512,), value=0),
        "freq": Input((1,), value=0),
    },
}
"""Inputs by class."""

PACKED = ("grid_thw", "image_grid_thw", "inference_session")
"""Inputs that say that the others are no samples: patches of all pictures in one dimension, or an object."""

NOT_SAMPLES: Mapping[str, str] = {
    "BarkModel": "it only generates",
    "MiniCPMOcrVisionModel": "the patches of all pictures are packed into one row",
    "MiniCPMV4_7VisionModel": "the patches of all pictures are packed into one row",
}
"""Further classes whose inputs cannot be cut along their first dimension into samples, and why."""

SEVERAL_SAMPLES: Mapping[str, str] = {
    "CvtModel": "PyTorch's BatchNorm2d on the CPU has a wrong gradient for one sample with strides (C, 1, ...)",
}
"""Classes that are not given a batch of one sample, and why."""
