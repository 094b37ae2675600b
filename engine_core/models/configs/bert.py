"""Configs of BERT, RoBERTa, XLM-RoBERTa and MPNet: encoders whose layers end with a norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...config import require
from ...weights.encoders.config import DenseConfig, EncoderConfig, dense_of, layers_of_tokens
from ...weights.encoders.sentence_files import KEY
from ...weights.model_config import ModelConfig, activation_of, size_of
from ...weights.rope.config import positive_of
from .fields import Config
from .labels import labels_of

MOST_TYPES = 16


def read_bert(config: Config) -> ModelConfig:
    return _read(config, num_types=num_types(config))


def read_roberta(config: Config) -> ModelConfig:
    """Positions are counted behind the id of the padding token."""
    return _read(config, offset=_first_position(config), num_types=num_types(config))


def read_mpnet(config: Config) -> ModelConfig:
    num_buckets = config.get("relative_attention_num_buckets", 32)
    is_even = type(num_buckets) is int and 2 < num_buckets <= 1024 and num_buckets % 2 == 0
    require(is_even, "relative_attention_num_buckets", num_buckets, "an even number, 4…1024")
    return _read(config, offset=_first_position(config), num_buckets=num_buckets)


def read_bert_classifier(config: Config) -> ModelConfig:
    return _with_head(read_bert(config), config, "tanh")


def read_roberta_classifier(config: Config) -> ModelConfig:
    return _with_head(read_roberta(config), config, "tanh")


def _with_head(model: ModelConfig, config: Config, activation: str) -> ModelConfig:
    """The model with a dense layer and one output a label behind the state of its first token."""
    assert model.encoder is not None
    require(not model.encoder.dense, KEY, "dense layers", "none behind a classifier")
    labels = labels_of(config)
    size = model.hidden_size
    dense = (
        DenseConfig(in_features=size, out_features=size, has_bias=True, activation=activation),
        DenseConfig(in_features=size, out_features=len(labels), has_bias=True),
    )
    return replace(model, encoder=replace(model.encoder, dense=dense), labels=labels)


def _read(config: Config, *, offset: int = 0, **traits: Any) -> ModelConfig:
    kind = config.get("position_embedding_type", "absolute")
    require(kind == "absolute", "position_embedding_type", kind, "absolute")
    for name in ("is_decoder", "add_cross_attention"):
        require(not config.get(name), name, config.get(name), "false")
    num_positions = size_of(config, "max_position_embeddings")
    longest = num_positions - offset
    require(longest > 0, "max_position_embeddings", num_positions, f"more than {offset}")
    sentence = config.get(KEY)
    return ModelConfig.from_hf(
        {
            **config,
            # The length that the checkpoint was trained with, where a file says it.
            "max_position_embeddings": min((sentence or {}).get("max_length") or longest, longest),
            "num_key_value_heads": None,
            "tie_word_embeddings": False,
        },
        has_layer_norms=True,
        norm_bias=True,
        rms_norm_eps=positive_of(config, "layer_norm_eps", 1e-12),
        activation=activation_of(config, "hidden_act", "gelu"),
        is_gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        num_learned_positions=num_positions,
        position_offset=offset,
        encoder=EncoderConfig(dense=dense_of(sentence), **layers_of_tokens(sentence), **traits),
    )


def _first_position(config: Config) -> int:
    pad = config.get("pad_token_id", 1)
    require(type(pad) is int and 0 <= pad < 1 << 22, "pad_token_id", pad, "a token id")
    return int(pad) + 1


def num_types(config: Config) -> int:
    number = config.get("type_vocab_size", 2)
    is_number = type(number) is int and 1 <= number <= MOST_TYPES
    require(is_number, "type_vocab_size", number, f"1…{MOST_TYPES}")
    return int(number)
