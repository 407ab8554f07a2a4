"""The zoo: model classes of Hugging Face with random weights, some other models, and their batches.

Sizes are chosen so that a training step takes a tenth of a second. The engine's own memory is some 4 MiB for
every model. Each model's largest kernel needs much more memory than that, and enough other tensors can be
evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from zoo_others import Convolutions, NanoGPT, Spectral, Tied

VOCABULARY = 1024
IMAGE = 64

Batch = dict[str, Any]
Optimizer = Literal["sgd", "adamw"]


@dataclass(frozen=True)
class Row:
    """A model class with its configuration, batches and optimizer. Models under SGD are larger, because SGD's
    step needs half as much memory as AdamW's.
    """

    name: str
    optimizer: Optimizer
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]


# ---- batches


def text(batch: int = 5, length: int = 96, **more: Any) -> Callable[[torch.Generator], Batch]:
    """Return a function that makes batches of token ids. The token ids are also the labels."""

    def make(generator: torch.Generator) -> Batch:
        ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
        return {"input_ids": ids, "labels": ids, **more}

    return make


def images(batch: int = 8, size: int = IMAGE) -> Callable[[torch.Generator], Batch]:
    def make(generator: torch.Generator) -> Batch:
        pixels = torch.randn(batch, 3, size, size, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 2, (batch,), generator=generator)}

    return make


def pairs(generator: torch.Generator) -> Batch:
    """Return a batch of images and their captions."""
    ids = torch.randint(3, VOCABULARY, (8, 64), generator=generator)
    pixels = torch.randn(8, 3, IMAGE, IMAGE, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "return_loss": True}


def spectra(generator: torch.Generator) -> Batch:
    labels = torch.randint(3, VOCABULARY, (8, 64), generator=generator)
    return {"input_features": torch.randn(8, 80, 128, generator=generator), "labels": labels}


def waves(generator: torch.Generator) -> Batch:
    labels = torch.randint(0, 2, (4,), generator=generator)
    return {"input_values": torch.randn(4, 2000, generator=generator), "labels": labels}


# ---- configurations


def of(name: str, **config: Any) -> Callable[[], nn.Module]:
    """Return a function that makes a model of the class `name`, such as `LlamaForCausalLM`. `config` has the
    settings of the model's configuration.
    """

    def make() -> nn.Module:
        import transformers

        model = getattr(transformers, name)
        made: nn.Module = model(model.config_class(**config))
        return made

    return make


def sized(optimizer: Optimizer, layers: int) -> dict[str, int]:
    small = optimizer == "adamw"
    width = 288 if small else 448
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def decoder(name: str, optimizer: Optimizer, layers: int = 3, batch: Any = None, **more: Any) -> Row:
    settings = {**sized(optimizer, layers), "use_cache": False, **more}
    return Row(name, optimizer, of(f"{name}ForCausalLM", **settings), batch or text())


def encoder(name: str, optimizer: Optimizer, layers: int = 4, **more: Any) -> Row:
    settings = {**sized(optimizer, layers), **more}
    return Row(name, optimizer, of(f"{name}ForMaskedLM", **settings), text())


def vision(name: str, optimizer: Optimizer, **more: Any) -> Row:
    settings = sized(optimizer, 4 if optimizer == "sgd" else 5)
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {"image_size": IMAGE, "patch_size": 8, **{key: settings[key] for key in kept}}
    return Row(name, optimizer, of(f"{name}ForImageClassification", **{**sizes, **more}), images())


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
GPT = {"vocab_size": VOCABULARY, "n_positions": 128, "n_layer": 3, "n_head": 4, "use_cache": False}
GPT |= {"bos_token_id": 0, "eos_token_id": 1}
HALVES = {"vocab_size": VOCABULARY, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
HALVES |= {"decoder_attention_heads": 4, "max_position_embeddings": 128, "use_cache": False}
HALVES |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 2}
SMALL_HALVES = {**HALVES, "d_model": 288, "encoder_ffn_dim": 704, "decoder_ffn_dim": 704}
LARGE_HALVES = {**HALVES, "d_model": 416, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024}
TOWER = {"hidden_size": 416, "intermediate_size": 1248, "num_hidden_layers": 2, "num_attention_heads": 4}

HUGGING_FACE = [
    decoder("Llama", "sgd", num_key_value_heads=2),
    decoder("Qwen2", "adamw", num_key_value_heads=2),
    decoder("Qwen3", "sgd", num_key_value_heads=2, head_dim=64),
    decoder("Mistral", "adamw", num_key_value_heads=2),
    decoder("Mixtral", "sgd", 1, text(8, 96), num_key_value_heads=2, num_local_experts=4),
    decoder(
        "Qwen2Moe",
        "adamw",
        2,
        text(6, 96),
        num_key_value_heads=2,
        shared_expert_intermediate_size=256,
        **EXPERTS,
    ),
    decoder("Olmoe", "sgd", 1, text(8, 96), num_key_value_heads=4, **EXPERTS),
    decoder("Gemma", "adamw", num_key_value_heads=2, head_dim=64),
    decoder("Gemma2", "sgd", num_key_value_heads=2, head_dim=64, sliding_window=32),
    decoder("Gemma3", "adamw", num_key_value_heads=2, head_dim=64, sliding_window=32),
    decoder("Phi", "sgd", 4),
    decoder("Phi3", "adamw", num_key_value_heads=2),
    Row("GPT2", "sgd", of("GPT2LMHeadModel", **GPT, n_embd=448), text()),
    Row("GPTJ", "adamw", of("GPTJForCausalLM", **GPT, n_embd=304, rotary_dim=32), text()),
    Row("GPTBigCode", "sgd", of("GPTBigCodeForCausalLM", **GPT, n_embd=480), text()),
    decoder("GPTNeoX", "adamw", 4),
    decoder("OPT", "sgd", 4, text(8, 96), ffn_dim=1344, word_embed_proj_dim=448),
    decoder("Bloom", "adamw", n_layer=3, n_head=4),
    decoder("Falcon", "sgd", 4, text(7, 96), new_decoder_architecture=False),
    decoder("Cohere", "adamw", num_key_value_heads=2),
    decoder("Olmo", "sgd", num_key_value_heads=4),
    decoder("Olmo2", "adamw", num_key_value_heads=4),
    decoder("StableLm", "sgd", num_key_value_heads=4),
    decoder("Starcoder2", "adamw", 5, num_key_value_heads=2),
    decoder("Mamba", "sgd", 4, text(10, 12), state_size=8, conv_kernel=3),
    encoder("Bert", "adamw"),
    encoder("Roberta", "sgd"),
    Row(
        "DistilBert",
        "adamw",
        of("DistilBertForMaskedLM", vocab_size=VOCABULARY, dim=304, hidden_dim=912, n_layers=4, n_heads=4),
        text(),
    ),
    encoder("Electra", "sgd", embedding_size=448),
    encoder("Albert", "adamw", 2, embedding_size=256, hidden_size=512, intermediate_size=2048),
    encoder("Deberta", "sgd", 3, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    Row(
        "T5",
        "adamw",
        of(
            "T5ForConditionalGeneration",
            vocab_size=VOCABULARY,
            d_model=288,
            d_kv=72,
            d_ff=704,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=2,
            use_cache=False,
        ),
        text(),
    ),
    Row("Bart", "sgd", of("BartForConditionalGeneration", **LARGE_HALVES), text()),
    Row("Pegasus", "adamw", of("PegasusForConditionalGeneration", **SMALL_HALVES), text()),
    vision("ViT", "sgd"),
    vision("DeiT", "adamw"),
    vision("Beit", "sgd"),
    Row(
        "Swin",
        "adamw",
        of(
            "SwinForImageClassification", image_size=112, embed_dim=128, depths=[1, 1, 1], num_heads=[2, 4, 8]
        ),
        images(4, 112),
    ),
    Row(
        "CLIP",
        "sgd",
        of(
            "CLIPModel",
            text_config={**TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 64},
            vision_config={**TOWER, "image_size": IMAGE, "patch_size": 8},
        ),
        pairs,
    ),
    Row(
        "Whisper",
        "adamw",
        of(
            "WhisperForConditionalGeneration",
            **SMALL_HALVES,
            num_mel_bins=80,
            max_source_positions=64,
            max_target_positions=64,
        ),
        spectra,
    ),
    Row(
        "Wav2Vec2",
        "sgd",
        of(
            "Wav2Vec2ForSequenceClassification",
            hidden_size=448,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
            conv_dim=[128] * 3,
            conv_kernel=[10, 3, 2],
            conv_stride=[5, 2, 2],
            num_feat_extract_layers=3,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            mask_time_prob=0.0,
            layerdrop=0.0,
        ),
        waves,
    ),
]

OTHERS = [
    Row("convolutions", "sgd", Convolutions, Convolutions.batch),
    Row("nanoGPT", "adamw", NanoGPT, NanoGPT.batch),
    Row("tied", "sgd", Tied, Tied.batch),
    Row("spectral", "adamw", Spectral, Spectral.batch),
]

ROWS = [*HUGGING_FACE, *OTHERS]
