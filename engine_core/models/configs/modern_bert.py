"""Configs of ModernBERT, as transformers writes them and as they were published before."""

from __future__ import annotations

from dataclasses import replace

from ...config import require
from ...weights.encoders.config import DenseConfig, EncoderConfig, dense_of, longest_text
from ...weights.encoders.sentence_files import KEY
from ...weights.model_config import ModelConfig, activation_of
from ...weights.rope.config import positive_of
from .fields import MAX_WINDOW, Config, kinds_of_layers, windows
from .gemma3 import rope_of_kinds
from .labels import labels_of

GLOBAL_THETA = 160_000.0
LOCAL_THETA = 10_000.0
PATTERN = 3
"""Default distance between layers that see all keys; the others see a window."""
WINDOW = 128
UNSERVED = ("attention_bias", "mlp_bias")
CLASSIFIER_POOLINGS = ("cls", "mean")
ROTATION = ("rope_scaling", "rope_theta")


def read_modern_bert(config: Config) -> ModelConfig:
    """Raises `ConfigError` naming what is not served."""
    for name in UNSERVED:
        require(not config.get(name), name, config.get(name), "false")
    thetas = {
        "rope_theta": positive_of(config, "global_rope_theta", GLOBAL_THETA),
        "rope_local_base_freq": positive_of(config, "local_rope_theta", LOCAL_THETA),
    }
    rope, local = rope_of_kinds({**config, **thetas})
    every = _whole(config, "global_attn_every_n_layers", PATTERN)
    kinds = kinds_of_layers(config, lambda i: i % every != 0)
    # Half of the published width lies on each side of a token.
    windowed = {**config, "sliding_window": _whole(config, "local_attention", WINDOW) // 2 + 1}
    sentence = config.get(KEY)
    own = {name: value for name, value in config.items() if name not in ROTATION}
    own |= {"rope_parameters": rope, "num_key_value_heads": None, "tie_word_embeddings": False}
    return ModelConfig.from_hf(
        longest_text(own, sentence),
        has_layer_norms=True,
        norm_bias=bool(config.get("norm_bias", False)),
        rms_norm_eps=positive_of(config, "norm_eps", 1e-5),
        activation=activation_of(config, "hidden_activation", "gelu"),
        local_rope_theta=positive_of(local, "rope_theta", LOCAL_THETA),
        encoder=EncoderConfig(dense=dense_of(sentence)),
        **windows(windowed, kinds, by_kind=True),
    )


def read_modern_bert_classifier(config: Config) -> ModelConfig:
    """The encoder with a dense layer, its norm and one output a label behind the pooled state."""
    model = read_modern_bert(config)
    assert model.encoder is not None
    require(not model.encoder.dense, KEY, "dense layers", "none behind a classifier")
    pooling = config.get("classifier_pooling", "cls")
    allowed = " or ".join(CLASSIFIER_POOLINGS)
    require(pooling in CLASSIFIER_POOLINGS, "classifier_pooling", pooling, allowed)
    labels = labels_of(config)
    size = model.hidden_size
    dense = (
        DenseConfig(
            in_features=size,
            out_features=size,
            has_bias=bool(config.get("classifier_bias", False)),
            activation=activation_of(config, "classifier_activation", "gelu"),
            has_norm=True,
        ),
        DenseConfig(in_features=size, out_features=len(labels), has_bias=True),
    )
    encoder = replace(model.encoder, dense=dense, label_pooling=str(pooling))
    return replace(model, encoder=encoder, labels=labels)


def _whole(config: Config, name: str, default: int) -> int:
    """Raises `ConfigError` for what is no number of layers or keys."""
    given = config.get(name, default)
    is_whole = type(given) is int and 1 <= given <= MAX_WINDOW
    require(is_whole, name, given, f"a whole number, 1…{MAX_WINDOW}")
    return int(str(given))
