# ruff: noqa: E501 - one entry a line
"""Architectures of transformers in tiny configurations: encoders, decoders, encoder-decoders, vision, audio."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.member import Member

# most configurations understand these names; each takes those that it knows
TINY = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 37, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGE = {"image_size": 32, "patch_size": 8, "num_channels": 3}


def text(length: int = 7, **more: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        ids = torch.randint(3, 90, (2, length))
        mask = torch.ones(2, length, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": mask, **more}

    return make


def ragged() -> dict[str, Any]:
    """The second example is shorter."""
    x = text()()
    x["input_ids"][1, 5:] = 0
    x["attention_mask"][1, 5:] = 0
    return x


def pair() -> dict[str, Any]:
    return {**text()(), "decoder_input_ids": torch.randint(3, 90, (2, 5))}


def image(size: int = 32) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


def wave_of(length: int = 800) -> Callable[[], dict[str, Any]]:
    return lambda: {"input_values": torch.randn(2, length)}


def both(size: int = 32) -> Callable[[], dict[str, Any]]:
    return lambda: {**text()(), "pixel_values": torch.randn(2, 3, size, size)}


Inputs = Callable[[], dict[str, Any]]
Entry = tuple[str, str, Inputs, dict[str, Any]]  # configuration, model, inputs, further settings

GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 99}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "vocab_size": 99,
}  # fmt: skip
SPEECH = {
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
}  # fmt: skip
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

ENCODERS: dict[str, Entry] = {
    "bert": ("BertConfig", "BertForSequenceClassification", ragged, {}),
    "bert-pretraining": ("BertConfig", "BertForPreTraining", text(), {}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", ragged, {}),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaForTokenClassification", text(), {}),
    "camembert": ("CamembertConfig", "CamembertForSequenceClassification", text(), {}),
    "distilbert": (
        "DistilBertConfig", "DistilBertForSequenceClassification", ragged,
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 37},
    ),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", text(), {"embedding_size": 16}),
    "electra": ("ElectraConfig", "ElectraForPreTraining", text(), {"embedding_size": 16}),
    "deberta": ("DebertaConfig", "DebertaForSequenceClassification", text(), {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "deberta-v2": (
        "DebertaV2Config", "DebertaV2ForSequenceClassification", text(),
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    ),
    "mpnet": ("MPNetConfig", "MPNetForSequenceClassification", text(), {}),
    "funnel": ("FunnelConfig", "FunnelForSequenceClassification", text(8), {"block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 37, "num_decoder_layers": 1}),
    "convbert": ("ConvBertConfig", "ConvBertForSequenceClassification", text(), {"embedding_size": 16}),
    "mobilebert": ("MobileBertConfig", "MobileBertForSequenceClassification", text(), {"embedding_size": 32, "intra_bottleneck_size": 16}),
    "squeezebert": ("SqueezeBertConfig", "SqueezeBertForSequenceClassification", text(), {"embedding_size": 32, "intermediate_size": 64}),
    "fnet": ("FNetConfig", "FNetForSequenceClassification", lambda: {"input_ids": torch.randint(3, 90, (2, 7))}, {}),
    "nystromformer": ("NystromformerConfig", "NystromformerForSequenceClassification", lambda: {"input_ids": torch.randint(3, 90, (2, 8))}, {"num_landmarks": 4, "segment_means_seq_len": 8}),
    "longformer": ("LongformerConfig", "LongformerForSequenceClassification", text(8), {"attention_window": 4}),
    "big-bird": ("BigBirdConfig", "BigBirdForSequenceClassification", text(8), {"attention_type": "original_full"}),
    "roformer": ("RoFormerConfig", "RoFormerForSequenceClassification", text(), {"embedding_size": 32}),
    "rembert": ("RemBertConfig", "RemBertForSequenceClassification", text(), {"input_embedding_size": 16, "output_embedding_size": 16}),
    "modernbert": ("ModernBertConfig", "ModernBertForSequenceClassification", ragged, {}),
    "esm": ("EsmConfig", "EsmForMaskedLM", text(), {"mask_token_id": 4}),
    "xlnet": ("XLNetConfig", "XLNetForSequenceClassification", text(), {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 37}),
    "xlm": ("XLMConfig", "XLMForSequenceClassification", text(), {"emb_dim": 32, "n_layers": 2, "n_heads": 4}),
    "flaubert": ("FlaubertConfig", "FlaubertForSequenceClassification", text(), {"emb_dim": 32, "n_layers": 2, "n_heads": 4}),
    "ibert": ("IBertConfig", "IBertForSequenceClassification", text(), {}),
    "megatron-bert": ("MegatronBertConfig", "MegatronBertForSequenceClassification", text(), {}),
    "canine": ("CanineConfig", "CanineForSequenceClassification", text(16), {"num_hash_buckets": 32, "local_transformer_stride": 8, "downsampling_rate": 4}),
    "luke": ("LukeConfig", "LukeModel", text(), {"entity_vocab_size": 10, "entity_emb_size": 16}),
    "layoutlm": ("LayoutLMConfig", "LayoutLMForSequenceClassification", text(), {}),
    "lilt": ("LiltConfig", "LiltModel", lambda: {**text()(), "bbox": torch.randint(0, 60, (2, 7, 4)).sort(-1).values}, {"max_2d_position_embeddings": 64, "hidden_size": 48}),
    "yoso": ("YosoConfig", "YosoForSequenceClassification", text(8), {"use_expectation": True}),
    "reformer": ("ReformerConfig", "ReformerForSequenceClassification", text(16), {"axial_pos_shape": (4, 4), "axial_pos_embds_dim": (16, 16), "attn_layers": ["local", "local"], "local_attn_chunk_length": 8, "is_decoder": False, "attention_head_size": 8, "feed_forward_size": 37}),
}  # fmt: skip

DECODERS: dict[str, Entry] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", ragged, GPT),
    "gpt2-classifier": ("GPT2Config", "GPT2ForSequenceClassification", text(), {**GPT, "pad_token_id": 0}),
    "openai-gpt": ("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", text(), GPT),
    "gpt-neo": ("GPTNeoConfig", "GPTNeoForCausalLM", text(), {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4}),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", text(), {}),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", text(), {**GPT, "rotary_dim": 4}),
    "gpt-bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", text(), GPT),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", text(), {**GPT, "rotary_dim": 4}),
    "ctrl": ("CTRLConfig", "CTRLLMHeadModel", text(), {**GPT, "dff": 37}),
    "opt": ("OPTConfig", "OPTForCausalLM", ragged, {"ffn_dim": 37, "word_embed_proj_dim": 32}),
    "bloom": ("BloomConfig", "BloomForCausalLM", ragged, {"n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", "FalconForCausalLM", text(), {}),
    "mpt": ("MptConfig", "MptForCausalLM", text(), {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", ragged, {}),
    "llama-cached": ("LlamaConfig", "LlamaForCausalLM", text(use_cache=True), {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", text(), {"sliding_window": 4}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", text(), MOE),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", text(), {"head_dim": 8}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", text(), {"head_dim": 8, "sliding_window": 4}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", text(), {"head_dim": 8, "sliding_window": 4}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", text(), {}),
    "qwen2-moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", text(), {**MOE, "shared_expert_intermediate_size": 16}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", text(), {"head_dim": 8}),
    "phi": ("PhiConfig", "PhiForCausalLM", text(), {}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", text(), {}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", text(), {}),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", text(), {}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", text(), {}),
    "cohere": ("CohereConfig", "CohereForCausalLM", text(), {}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", text(), {}),
    "persimmon": ("PersimmonConfig", "PersimmonForCausalLM", text(), {}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", text(), {}),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", text(), {}),
    "deepseek-v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", text(), {**MOE, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "num_key_value_heads": 4}),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", text(), {**MOE, "head_dim": 8}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", text(), {}),
    "biogpt": ("BioGptConfig", "BioGptForCausalLM", text(), {}),
    "xglm": ("XGLMConfig", "XGLMForCausalLM", text(), {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 37}),
    "mamba": ("MambaConfig", "MambaForCausalLM", text(), {"state_size": 4}),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", text(), {"state_size": 4, "num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 4}),
    "recurrent-gemma": ("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", text(), {"lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3, "head_dim": 8, "num_key_value_heads": 4}),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM", text(), {"use_cache": False}),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", text(), {"layer_types": ["conv", "full_attention"]}),
}  # fmt: skip

ENCODER_DECODERS: dict[str, Entry] = {
    "t5": ("T5Config", "T5ForConditionalGeneration", pair, T5),
    "t5-gated": ("T5Config", "T5ForConditionalGeneration", pair, {**T5, "feed_forward_proj": "gated-gelu"}),
    "mt5": ("MT5Config", "MT5ForConditionalGeneration", pair, T5),
    "umt5": ("UMT5Config", "UMT5ForConditionalGeneration", pair, T5),
    "longt5": ("LongT5Config", "LongT5ForConditionalGeneration", pair, {**T5, "local_radius": 3}),
    "switch-transformers": ("SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", pair, {**T5, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}),
    "bart": ("BartConfig", "BartForConditionalGeneration", pair, BART),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", pair, BART),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", pair, BART),
    "blenderbot": ("BlenderbotConfig", "BlenderbotForConditionalGeneration", pair, BART),
    "marian": ("MarianConfig", "MarianMTModel", pair, {**BART, "decoder_vocab_size": 99}),
    "m2m-100": ("M2M100Config", "M2M100ForConditionalGeneration", pair, BART),
    "led": ("LEDConfig", "LEDForConditionalGeneration", pair, {**BART, "attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}),
    "plbart": ("PLBartConfig", "PLBartForConditionalGeneration", pair, BART),
    "prophetnet": ("ProphetNetConfig", "ProphetNetForConditionalGeneration", pair, {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "disable_ngram_loss": True}),
    "fsmt": ("FSMTConfig", "FSMTForConditionalGeneration", pair, {**BART, "langs": ["en", "de"], "src_vocab_size": 99, "tgt_vocab_size": 99}),
}  # fmt: skip

VISION: dict[str, Entry] = {
    "vit": ("ViTConfig", "ViTForImageClassification", image(), IMAGE),
    "vit-mae": ("ViTMAEConfig", "ViTMAEModel", lambda: {**image()(), "noise": torch.rand(2, 16)}, {**IMAGE, "mask_ratio": 0.0}),
    "vit-msn": ("ViTMSNConfig", "ViTMSNForImageClassification", image(), IMAGE),
    "deit": ("DeiTConfig", "DeiTForImageClassificationWithTeacher", image(), IMAGE),
    "beit": ("BeitConfig", "BeitForImageClassification", image(), {**IMAGE, "use_relative_position_bias": True, "layer_scale_init_value": 0.1}),
    "data2vec-vision": ("Data2VecVisionConfig", "Data2VecVisionForImageClassification", image(), {**IMAGE, "use_shared_relative_position_bias": True}),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", image(), IMAGE),
    "dinov3": ("DINOv3ViTConfig", "DINOv3ViTModel", image(), IMAGE),
    "swin": ("SwinConfig", "SwinForImageClassification", image(), {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}),
    "swinv2": ("Swinv2Config", "Swinv2ForImageClassification", image(), {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}),
    "convnext": ("ConvNextConfig", "ConvNextForImageClassification", image(), {"num_stages": 4, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}),
    "convnextv2": ("ConvNextV2Config", "ConvNextV2ForImageClassification", image(), {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}),
    "resnet": ("ResNetConfig", "ResNetForImageClassification", image(), {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
    "regnet": ("RegNetConfig", "RegNetForImageClassification", image(), {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8}),
    "bit": ("BitConfig", "BitForImageClassification", image(), {"embedding_size": 8, "hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1], "num_groups": 1}),
    "poolformer": ("PoolFormerConfig", "PoolFormerForImageClassification", image(), {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}),
    "segformer": ("SegformerConfig", "SegformerForSemanticSegmentation", image(64), {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16, "num_attention_heads": [1, 2, 2, 4]}),
    "mobilevit": ("MobileViTConfig", "MobileViTForImageClassification", image(64), {"hidden_sizes": [16, 20, 24], "neck_hidden_sizes": [8, 8, 16, 16, 20, 24, 32], "image_size": 64}),
    "mobilenet-v2": ("MobileNetV2Config", "MobileNetV2ForImageClassification", image(), {"depth_multiplier": 0.25, "image_size": 32}),
    "levit": ("LevitConfig", "LevitForImageClassification", image(64), {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1], "key_dim": [8, 8, 8]}),
    "cvt": ("CvtConfig", "CvtForImageClassification", image(), {"depth": [1, 2, 3]}),
    "pvt": ("PvtConfig", "PvtForImageClassification", image(), {"image_size": 32, "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 2, 4], "depths": [1, 1, 1, 1]}),
    "focalnet": ("FocalNetConfig", "FocalNetForImageClassification", image(), {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "hidden_sizes": [16, 32], "focal_levels": [2, 2], "focal_windows": [3, 3]}),
    "efficientnet": ("EfficientNetConfig", "EfficientNetForImageClassification", image(), {"image_size": 32, "width_coefficient": 0.25, "hidden_dim": 320, "depth_coefficient": 0.5}),
    "siglip-vision": ("SiglipVisionConfig", "SiglipVisionModel", image(), IMAGE),
    "hiera": ("HieraConfig", "HieraForImageClassification", image(), {"image_size": [32, 32], "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8], "patch_stride": [2, 2], "patch_size": [3, 3], "patch_padding": [1, 1], "masked_unit_size": [8, 8]}),
    "dpt": ("DPTConfig", "DPTForDepthEstimation", image(), {**IMAGE, "backbone_out_indices": [0, 1, 2, 3], "num_hidden_layers": 4, "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}),
    "yolos": ("YolosConfig", "YolosForObjectDetection", image(), {**IMAGE, "image_size": [32, 32], "num_detection_tokens": 4}),
    "videomae": ("VideoMAEConfig", "VideoMAEForVideoClassification", lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32)}, {**IMAGE, "num_frames": 4, "tubelet_size": 2}),
    "timesformer": ("TimesformerConfig", "TimesformerForVideoClassification", lambda: {"pixel_values": torch.randn(2, 2, 3, 32, 32)}, {**IMAGE, "num_frames": 2}),
    "clip": ("CLIPConfig", "CLIPModel", both(), {"text_config": TINY, "vision_config": {**TINY, **IMAGE}, "projection_dim": 16}),
    "clip-vision": ("CLIPVisionConfig", "CLIPVisionModelWithProjection", image(), {**IMAGE, "projection_dim": 16}),
    "clip-text": ("CLIPTextConfig", "CLIPTextModelWithProjection", text(), {"projection_dim": 16}),
    "vilt": ("ViltConfig", "ViltForQuestionAnswering", both(), IMAGE),
}  # fmt: skip

AUDIO: dict[str, Entry] = {
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2ForCTC", wave_of(), SPEECH),
    "wav2vec2-classifier": ("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", wave_of(), {**SPEECH, "feat_extract_norm": "layer", "do_stable_layer_norm": True, "classifier_proj_size": 16}),
    "hubert": ("HubertConfig", "HubertForCTC", wave_of(), SPEECH),
    "wavlm": ("WavLMConfig", "WavLMForSequenceClassification", wave_of(), {**SPEECH, "num_buckets": 16, "classifier_proj_size": 16}),
    "unispeech": ("UniSpeechConfig", "UniSpeechForCTC", wave_of(), SPEECH),
    "data2vec-audio": ("Data2VecAudioConfig", "Data2VecAudioForCTC", wave_of(), {**SPEECH, "conv_pos_kernel_size": 3}),
    "sew": ("SEWConfig", "SEWForCTC", wave_of(), {**SPEECH, "squeeze_factor": 2}),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", lambda: {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": torch.randint(3, 90, (2, 5))}, {**BART, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20, "decoder_start_token_id": 1}),
    "speech-to-text": ("Speech2TextConfig", "Speech2TextForConditionalGeneration", lambda: {"input_features": torch.randn(2, 40, 8), "decoder_input_ids": torch.randint(3, 90, (2, 5))}, {**BART, "input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 40, "max_target_positions": 20}),
    "audio-spectrogram": ("ASTConfig", "ASTForAudioClassification", lambda: {"input_values": torch.randn(2, 32, 16)}, {"max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8}),
    "moonshine": ("MoonshineConfig", "MoonshineForConditionalGeneration", lambda: {"input_values": torch.randn(2, 2000), "decoder_input_ids": torch.randint(3, 90, (2, 5))}, {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4, "encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4}),
}  # fmt: skip

OTHER: dict[str, Entry] = {
    "patchtst": ("PatchTSTConfig", "PatchTSTForPrediction", lambda: {"past_values": torch.randn(2, 32, 2)}, {"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 16, "ffn_dim": 20, "prediction_length": 4, "norm_type": "layernorm"}),
    "patchtsmixer": ("PatchTSMixerConfig", "PatchTSMixerForPrediction", lambda: {"past_values": torch.randn(2, 32, 2)}, {"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 16, "prediction_length": 4, "norm_mlp": "LayerNorm"}),
    "decision-transformer": ("DecisionTransformerConfig", "DecisionTransformerModel", lambda: {"states": torch.randn(2, 5, 17), "actions": torch.randn(2, 5, 4), "rewards": torch.randn(2, 5, 1), "returns_to_go": torch.randn(2, 5, 1), "timesteps": torch.arange(5).expand(2, 5).clone(), "attention_mask": torch.ones(2, 5)}, {**GPT, "max_ep_len": 16}),
    "perceiver": ("PerceiverConfig", "PerceiverModel", lambda: {"inputs": torch.randn(2, 6, 20)}, {"d_model": 20, "d_latents": 16, "num_latents": 4, "num_self_attends_per_block": 1, "num_self_attention_heads": 2, "num_cross_attention_heads": 2}),
}  # fmt: skip

# the examples mix by design: clip gives the similarity of every text with every image, nystromformer divides by the
# largest sum in the batch
MIXES = ("clip", "nystromformer")
KINDS = {
    "encoder": ENCODERS, "decoder": DECODERS, "encoder-decoder": ENCODER_DECODERS, "vision": VISION, "audio": AUDIO,
    "other": OTHER,
}  # fmt: skip


def members() -> Iterator[Member]:
    for kind, entries in KINDS.items():
        for name, entry in entries.items():
            yield Member("transformers", kind, name, partial(build, *entry), name in MIXES)


def build(config: str, model: str, inputs: Inputs, settings: dict[str, Any]) -> tuple[nn.Module, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, config)
    renamed = getattr(kind, "attribute_map", {})
    known = set(kind().to_dict()) | set(renamed)
    tiny = {
        k: v
        for k, v in TINY.items()
        if k in known and renamed.get(k) not in settings and not _staged(k, settings)
    }
    made = getattr(transformers, model)(kind(**{**tiny, **settings}))
    if getattr(made, "_can_set_experts_implementation", lambda: False)():
        made.set_experts_implementation("batched_mm")  # grouped_mm has no float64
    return made, inputs()


def _staged(name: str, settings: dict[str, Any]) -> bool:
    """Whether the model has stages of widths and depths of their own instead of this setting."""
    return name.startswith(("hidden", "num_hidden", "num_attention")) and bool(
        {"hidden_sizes", "depths", "depth"} & set(settings)
    )
