"""Configs of NomicBERT, as transformers writes them and as they were published before."""

from __future__ import annotations

from ...config import require
from ...weights.encoders.config import EncoderConfig, dense_of, longest_text
from ...weights.encoders.sentence_files import KEY
from ...weights.model_config import ModelConfig
from ...weights.rope.config import positive_of
from .bert import num_types
from .fields import Config

OLDER = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "max_trained_positions": "max_position_embeddings",
    "rotary_emb_base": "rope_theta",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""Fields by their names in configs that were published before transformers had the model."""
THETA = 1000.0
SWIGLU = ("swiglu", "silu")
SWITCHES: dict[str, tuple[object, ...]] = {
    "prenorm": (False,),
    "causal": (False,),
    "parallel_block": (False,),
    "use_rms_norm": (False, None),
    "rotary_emb_fraction": (1.0, 1),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (None, 1, 1.0),
    "qkv_proj_bias": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "moe_every_n_layers": (0, None),
}
"""Values of switches that are served; a mixture of experts is not."""


def read_nomic(config: Config) -> ModelConfig:
    """Raises `ConfigError` naming what is not served."""
    for name, served in SWITCHES.items():
        value = config.get(name, served[0])
        require(value in served, name, value, f"{served[0]}")
    named = {new: config[old] for old, new in OLDER.items() if config.get(old) is not None}
    own = {"rope_theta": THETA, **config, **named}
    activation = config.get("activation_function", config.get("hidden_act", "silu"))
    require(activation in SWIGLU, "activation_function", activation, " or ".join(SWIGLU))
    sentence = config.get(KEY)
    own |= {"num_key_value_heads": None, "tie_word_embeddings": False}
    return ModelConfig.from_hf(
        longest_text(own, sentence),
        default_theta=THETA,
        has_layer_norms=True,
        norm_bias=True,
        rms_norm_eps=positive_of(own, "layer_norm_eps", 1e-12),
        activation="silu",
        encoder=EncoderConfig(num_types=num_types(config), dense=dense_of(sentence)),
    )
