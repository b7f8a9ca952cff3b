"""Models of Hugging Face's ``transformers``, from small configurations; nothing is downloaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tests.measurements._loop_cases import Batch, Case, Loop

__all__ = ["library_cases"]

_WORDS = 101
_LENGTH = 12

_DECODER = {
    "vocab_size": _WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_ENCODER = {key: value for key, value in _DECODER.items() if key != "num_key_value_heads"}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SEQUENCES = {
    "vocab_size": _WORDS,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_IMAGES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}
_SMALL = {"vocab_size": _WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def _text(size: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(3, _WORDS, (size, _LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def _pairs(size: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(3, _WORDS, (size, _LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids[:, : _LENGTH // 2].clone()}


def _labelled(size: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(3, _WORDS, (size, _LENGTH), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(2, (size,), generator=generator)}


def _pictures(size: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(5, (size,), generator=generator)
    return {"pixel_values": torch.randn(size, 3, 16, 16, generator=generator), "labels": labels}


def _large_pictures(size: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(5, (size,), generator=generator)
    return {"pixel_values": torch.randn(size, 3, 32, 32, generator=generator), "labels": labels}


def _sound(size: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(2, (size,), generator=generator)
    return {"input_values": torch.randn(size, 400, generator=generator), "labels": labels}


def _speech(size: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(3, _WORDS, (size, 6), generator=generator)
    return {"input_features": torch.randn(size, 8, 24, generator=generator), "labels": labels}


Data = Callable[[int, torch.Generator], Batch]

_MODELS: Mapping[str, tuple[str, str, Mapping[str, Any], Data]] = {
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", {**_SMALL, "n_layer": 2, "n_head": 2, "n_embd": 32}, _text),
    "GPT-NeoX": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _ENCODER, _text),
    "OPT": (
        "OPTConfig",
        "OPTForCausalLM",
        {**_ENCODER, "ffn_dim": 64, "word_embed_proj_dim": 32},
        _text,
    ),
    "BLOOM": ("BloomConfig", "BloomForCausalLM", {**_SMALL, "hidden_size": 32, "n_layer": 2, "n_head": 2}, _text),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER, _text),
    "Mistral": ("MistralConfig", "MistralForCausalLM", {**_DECODER, "sliding_window": 8}, _text),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _DECODER, _text),
    "Gemma": ("GemmaConfig", "GemmaForCausalLM", {**_DECODER, "head_dim": 16}, _text),
    "Phi": ("PhiConfig", "PhiForCausalLM", _DECODER, _text),
    "Falcon": ("FalconConfig", "FalconForCausalLM", _ENCODER, _text),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", {**_DECODER, **_EXPERTS}, _text),
    "OLMoE": ("OlmoeConfig", "OlmoeForCausalLM", {**_DECODER, **_EXPERTS}, _text),
    "Qwen2-MoE": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**_DECODER, **_EXPERTS, "shared_expert_intermediate_size": 32},
        _text,
    ),
    "Mamba": ("MambaConfig", "MambaForCausalLM", {**_SMALL, "hidden_size": 16, "num_hidden_layers": 2}, _text),
    "T5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": _WORDS, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        | {"decoder_start_token_id": 0, "pad_token_id": 0},
        _pairs,
    ),
    "BART": ("BartConfig", "BartForConditionalGeneration", _SEQUENCES, _pairs),
    "BERT": ("BertConfig", "BertForMaskedLM", _ENCODER, _text),
    "RoBERTa": ("RobertaConfig", "RobertaForSequenceClassification", _ENCODER, _labelled),
    "DistilBERT": (
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        {"vocab_size": _WORDS, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "pad_token_id": 2},
        _labelled,
    ),
    "ALBERT": ("AlbertConfig", "AlbertForMaskedLM", {**_ENCODER, "embedding_size": 16}, _text),
    "ELECTRA": ("ElectraConfig", "ElectraForSequenceClassification", {**_ENCODER, "embedding_size": 16}, _labelled),
    "DeBERTa": (
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        {**_ENCODER, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
        _labelled,
    ),
    "ViT": ("ViTConfig", "ViTForImageClassification", _IMAGES, _pictures),
    "DeiT": ("DeiTConfig", "DeiTForImageClassification", _IMAGES, _pictures),
    "Swin": (
        "SwinConfig",
        "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
        | {"num_labels": 5},
        _pictures,
    ),
    "ConvNeXt": (
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 5},
        _pictures,
    ),
    "ResNet": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 5},
        _large_pictures,
    ),
    "wav2vec 2.0": (
        "Wav2Vec2Config",
        "Wav2Vec2ForSequenceClassification",
        {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        | {"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8}
        | {"mask_time_prob": 0.0, "num_labels": 2},
        _sound,
    ),
    "Whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {**_SEQUENCES, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16},
        _speech,
    ),
}


def library_cases() -> Iterator[Case]:
    """The cases of ``transformers``; an ImportError where it is not installed."""
    importlib.import_module("transformers")
    for name, (config, model, settings, data) in _MODELS.items():
        yield Case(name=name, package="transformers", make=_loop(config, model, settings, data), samples=3)


def _loop(config: str, model: str, settings: Mapping[str, Any], data: Data) -> Callable[[], Loop]:
    def make() -> Loop:
        library = importlib.import_module("transformers")
        made: Any = getattr(library, model)(getattr(library, config)(**settings))
        made.train()
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3, fused=True)

        def body(given: Batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = made(**given).loss
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
            optimizer.step()
            return loss

        return Loop(model=made, optimizer=optimizer, batch=data, body=body)

    return make
