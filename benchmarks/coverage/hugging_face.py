"""Models of the transformers library, built from configurations at tiny sizes: nothing is downloaded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

TOKENS, LENGTH, WIDTH, INNER, HEADS, LAYERS = 97, 8, 64, 96, 4, 2
BATCH = 2

DECODER = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "vocab_size": TOKENS, "max_position_embeddings": 32, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**DECODER, "num_key_value_heads": 2}
# Each token's experts are gathered and multiplied as a batch: it can be exported, and computes in fp64.
BATCHED = {**GROUPED, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
EXPERTS = {**BATCHED, "moe_intermediate_size": 32}
LATENT = {
    **EXPERTS, "num_key_value_heads": HEADS, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
ENCODER = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "vocab_size": TOKENS, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
SEQ2SEQ = {
    "d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER,
    "vocab_size": TOKENS, "max_position_embeddings": 32, "use_cache": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
T5 = {
    "d_model": WIDTH, "d_kv": 16, "d_ff": INNER, "num_layers": LAYERS, "num_heads": HEADS,
    "vocab_size": TOKENS, "use_cache": False, "decoder_start_token_id": 0,
}  # fmt: skip
SERIES = {
    "d_model": 32, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER,
    "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 4], "num_time_features": 2,
    "use_cache": False,
}  # fmt: skip
PATCHES = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "image_size": 32, "patch_size": 8, "num_labels": 5,
}  # fmt: skip
STAGES = {"hidden_sizes": [16, 24], "depths": [1, 2], "num_labels": 5}


def tokens(length: int = LENGTH, batch: int = BATCH) -> torch.Tensor:
    return torch.randint(3, TOKENS, (batch, length))


def image(size: int = 32) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, size, size)}


def _text() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens()}


def _masked_text() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)}


def _two_texts() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "decoder_input_ids": tokens(5)}


def _speech_features() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, 10, 16), "decoder_input_ids": tokens(5)}


def _audio() -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(BATCH, 160)}


def _image_and_text() -> dict[str, torch.Tensor]:
    return {**_masked_text(), **image()}


def _image_and_mask() -> dict[str, torch.Tensor]:
    return {**image(), "pixel_mask": torch.ones(BATCH, 32, 32, dtype=torch.long)}


def _image_and_points() -> dict[str, torch.Tensor]:
    return {**image(), "input_points": 32 * torch.rand(BATCH, 1, 2, 2)}


def _time_series() -> dict[str, torch.Tensor]:
    return {
        "past_values": torch.randn(BATCH, 12), "past_time_features": torch.randn(BATCH, 12, 2),
        "past_observed_mask": torch.ones(BATCH, 12), "future_values": torch.randn(BATCH, 4),
        "future_time_features": torch.randn(BATCH, 4, 2),
    }  # fmt: skip


def _past_values() -> dict[str, torch.Tensor]:
    return {"past_values": torch.randn(BATCH, 16, 3)}


Builder = Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]


def _build(
    kind: str, head: str, inputs: Callable[[], dict[str, torch.Tensor]], attention: str | None, options: Any
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(kind, **options)
    chosen = {"attn_implementation": attention} if attention else {}
    automatic = getattr(transformers, f"AutoModel{head}", None)
    model = automatic.from_config(config, **chosen) if automatic else getattr(transformers, head)(config)
    return model, inputs()


def _model(
    kind: str,
    head: str = "ForCausalLM",
    inputs: Callable[[], dict[str, torch.Tensor]] = _text,
    attention: str | None = None,
    **options: Any,
) -> Builder:
    return functools.partial(_build, kind, head, inputs, attention, options)


def _clip() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    patches = {key: value for key, value in PATCHES.items() if key != "num_labels"}
    text = {**ENCODER, "eos_token_id": 2, "bos_token_id": 1}
    return _build("clip", "", _image_and_text, None, {
        "text_config": text, "vision_config": patches, "projection_dim": 32,
    })  # fmt: skip


def _siglip() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    patches = {key: value for key, value in PATCHES.items() if key != "num_labels"}
    text = {**ENCODER, "eos_token_id": 2, "bos_token_id": 1}
    return _build("siglip", "", _image_and_text, None, {"text_config": text, "vision_config": patches})


def _detr() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 24], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    options = {**SEQ2SEQ, "num_queries": 5, "num_labels": 4}
    for name in ("vocab_size", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id",
                 "decoder_start_token_id", "max_position_embeddings"):  # fmt: skip
        del options[name]
    return _build("detr", "ForObjectDetection", _image_and_mask, None, {
        **options, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
        "backbone_config": backbone,
    })  # fmt: skip


def _sam() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    vision = {
        "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": 32, "patch_size": 8, "mlp_dim": 48, "window_size": 2, "global_attn_indexes": [1],
        "num_pos_feats": 8,
    }  # fmt: skip
    prompt = {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}
    mask = {
        "hidden_size": 16, "mlp_dim": 24, "num_attention_heads": 2, "num_hidden_layers": 2,
        "iou_head_hidden_dim": 16,
    }  # fmt: skip
    return _build("sam", "ForMaskGeneration", _image_and_points, None, {
        "vision_config": vision, "prompt_encoder_config": prompt, "mask_decoder_config": mask,
    })  # fmt: skip


_sequence = "ForSequenceClassification"
_masked = "ForMaskedLM"
_seq2seq = "ForSeq2SeqLM"
_image = "ForImageClassification"

DECODERS: dict[str, Builder] = {
    "Llama": _model("llama", **GROUPED),
    "Llama, eager attention": _model("llama", attention="eager", **GROUPED),
    "Qwen2": _model("qwen2", **GROUPED),
    "Qwen3": _model("qwen3", **GROUPED, head_dim=16),
    "Qwen3-MoE": _model("qwen3_moe", **EXPERTS, num_experts=4, head_dim=16),
    "Mistral": _model("mistral", **GROUPED),
    "Mistral, eager attention": _model("mistral", attention="eager", **GROUPED),
    "Mixtral": _model("mixtral", **BATCHED, num_local_experts=4),
    "Mixtral, experts in a loop": _model(
        "mixtral", **{**BATCHED, "experts_implementation": "eager"}, num_local_experts=4
    ),
    "Mixtral, grouped experts, fp32": _model(
        "mixtral", **{**BATCHED, "experts_implementation": "grouped_mm"}, num_local_experts=4
    ),
    "Gemma": _model("gemma", **GROUPED, head_dim=16),
    "Gemma 2": _model("gemma2", **GROUPED, head_dim=16),
    "Gemma 3": _model("gemma3_text", **GROUPED, head_dim=16),
    "Phi": _model("phi", **DECODER),
    "Phi-3": _model("phi3", **GROUPED),
    "OLMo": _model("olmo", **GROUPED),
    "OLMo-2": _model("olmo2", **GROUPED),
    "OLMoE": _model("olmoe", **BATCHED, num_experts=4),
    "DeepSeek-V2": _model("deepseek_v2", **LATENT),
    "DeepSeek-V3": _model("deepseek_v3", **LATENT),
    "GPT-OSS": _model("gpt_oss", **BATCHED, head_dim=16, num_local_experts=4),
    "Granite": _model("granite", **GROUPED),
    "StarCoder2": _model("starcoder2", **GROUPED),
    "GLM-4": _model("glm4", **GROUPED, head_dim=16),
    "Nemotron": _model("nemotron", **GROUPED, head_dim=16),
    "GPT-2": _model(
        "gpt2", n_embd=WIDTH, n_inner=INNER, n_layer=LAYERS, n_head=HEADS, n_positions=32,
        vocab_size=TOKENS, use_cache=False,
    ),
    "GPT-Neo": _model(
        "gpt_neo", hidden_size=WIDTH, intermediate_size=INNER, num_layers=LAYERS, num_heads=HEADS,
        attention_types=[[["global", "local"], 1]], vocab_size=TOKENS, max_position_embeddings=32,
        use_cache=False,
    ),
    "GPT-NeoX": _model("gpt_neox", **DECODER),
    "GPT-J": _model(
        "gptj", n_embd=WIDTH, n_inner=INNER, n_layer=LAYERS, n_head=HEADS, n_positions=32, rotary_dim=8,
        vocab_size=TOKENS, use_cache=False,
    ),
    "OPT": _model("opt", **DECODER, ffn_dim=INNER, word_embed_proj_dim=WIDTH),
    "Bloom": _model(
        "bloom", hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=TOKENS, use_cache=False
    ),
    "Falcon": _model("falcon", **DECODER, ffn_hidden_size=INNER),
    "MPT": _model(
        "mpt", d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS, expansion_ratio=2, max_seq_len=32,
        vocab_size=TOKENS, use_cache=False,
    ),
    "Cohere": _model("cohere", **GROUPED),
    "StableLM": _model("stablelm", **GROUPED),
    "Mamba": _model(
        "mamba", hidden_size=WIDTH, state_size=8, num_hidden_layers=LAYERS, vocab_size=TOKENS, use_cache=False
    ),
    "Mamba-2": _model(
        "mamba2", hidden_size=WIDTH, state_size=8, num_hidden_layers=LAYERS, vocab_size=TOKENS, num_heads=8,
        head_dim=16, n_groups=1, chunk_size=4, use_cache=False,
    ),
    "RWKV": _model(
        "rwkv", hidden_size=WIDTH, attention_hidden_size=WIDTH, intermediate_size=INNER,
        num_hidden_layers=LAYERS, vocab_size=TOKENS, context_length=32, use_cache=False,
    ),
    "RecurrentGemma": _model(
        "recurrent_gemma", **{**GROUPED, "num_hidden_layers": 3}, lru_width=WIDTH, attention_window_size=8
    ),
    "LFM2": _model("lfm2", **GROUPED, layer_types=["conv", "full_attention"]),
}  # fmt: skip

ENCODERS: dict[str, Builder] = {
    "BERT": _model("bert", _sequence, **ENCODER),
    "RoBERTa": _model("roberta", _sequence, **ENCODER),
    "DistilBERT": _model(
        "distilbert", _sequence, dim=WIDTH, hidden_dim=INNER, n_layers=LAYERS, n_heads=HEADS,
        vocab_size=TOKENS, max_position_embeddings=32,
    ),
    "ALBERT": _model("albert", _sequence, **ENCODER, embedding_size=32),
    "ModernBERT": _model(
        "modernbert", _masked, **ENCODER, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2
    ),
    "DeBERTa-v2": _model(
        "deberta-v2", _sequence, **ENCODER, relative_attention=True, pos_att_type=["c2p", "p2c"],
        position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True,
    ),
    "ELECTRA": _model("electra", _sequence, **ENCODER, embedding_size=32),
    "FNet": _model("fnet", _sequence, **ENCODER),
    "T5": _model("t5", _seq2seq, _two_texts, **T5),
    "mT5": _model("mt5", _seq2seq, _two_texts, **T5),
    "BART": _model("bart", _seq2seq, _two_texts, **SEQ2SEQ),
    "Pegasus": _model("pegasus", _seq2seq, _two_texts, **SEQ2SEQ),
}  # fmt: skip

SPEECH_AND_SERIES: dict[str, Builder] = {
    "Whisper": _model(
        "whisper", "ForSpeechSeq2Seq", _speech_features, **SEQ2SEQ, num_mel_bins=10,
        max_source_positions=8, max_target_positions=16,
    ),
    "Wav2Vec2": _model(
        "wav2vec2", "ForCTC", _audio, **ENCODER, conv_dim=[16, 16], conv_stride=[5, 2], conv_kernel=[10, 3],
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_feat_extract_layers=2,
    ),
    "TimeSeriesTransformer": _model("time_series_transformer", "", _time_series, **SERIES),
    "TimeSeriesTransformer, with its distribution": _model(
        "time_series_transformer", "TimeSeriesTransformerForPrediction", _time_series, **SERIES
    ),
    "PatchTST": _model(
        "patchtst", "PatchTSTForPrediction", _past_values, context_length=16, prediction_length=4,
        num_input_channels=3, patch_length=4, patch_stride=4, d_model=WIDTH, ffn_dim=INNER,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    ),
}  # fmt: skip

VISION: dict[str, Builder] = {
    "ViT": _model("vit", _image, image, **PATCHES),
    "DeiT": _model("deit", "DeiTForImageClassification", image, **PATCHES),
    "BEiT": _model("beit", _image, image, **PATCHES),
    "DINOv2": _model("dinov2", _image, image, **PATCHES),
    "Swin": _model(
        "swin", _image, image, image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
        window_size=4, num_labels=5,
    ),
    "SegFormer": _model(
        "segformer", "ForSemanticSegmentation", image, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
        hidden_sizes=[16, 32], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2],
        mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=5,
    ),
    "LeViT": _model(
        "levit", "LevitForImageClassification", image, image_size=32, hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8], patch_size=16, num_labels=5,
    ),
    "DETR": _detr,
    "CLIP": _clip,
    "SigLIP": _siglip,
    "SAM": _sam,
    "ConvNeXt": _model("convnext", _image, image, **STAGES, num_stages=2),
    "ResNet": _model("resnet", _image, image, **STAGES, embedding_size=8),
    "RegNet": _model("regnet", _image, image, **STAGES, embedding_size=8, groups_width=8, layer_type="y"),
    "MobileNetV1": _model("mobilenet_v1", _image, image, image_size=32, depth_multiplier=0.25, num_labels=5),
    "MobileNetV2": _model("mobilenet_v2", _image, image, image_size=32, depth_multiplier=0.25, num_labels=5),
    "EfficientNet": _model(
        "efficientnet", _image, image, image_size=32, width_coefficient=0.25, depth_coefficient=0.3,
        hidden_dim=320, num_labels=5,
    ),
    "PoolFormer": _model(
        "poolformer", _image, image, depths=[1, 1, 1, 1], hidden_sizes=[16, 16, 24, 32], num_labels=5
    ),
}  # fmt: skip

# At full size, as published: only for the meta device.
FULL_SIZE = {
    "GPT-2": _model("gpt2", use_cache=False),
    "Llama-3 8B": _model(
        "llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, use_cache=False,
    ),
    "Qwen3 8B": _model(
        "qwen3", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, use_cache=False,
    ),
    "Gemma-2 9B": _model(
        "gemma2", hidden_size=3584, intermediate_size=14336, num_hidden_layers=42, num_attention_heads=16,
        num_key_value_heads=8, head_dim=256, vocab_size=256000, use_cache=False,
    ),
    "Mixtral 8x7B": _model(
        "mixtral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=8, vocab_size=32000, use_cache=False,
    ),
}  # fmt: skip
