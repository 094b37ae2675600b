"""Fields of latent attention in configs."""

from __future__ import annotations

from typing import Any

from ....config import require
from ....weights.latent_config import IndexConfig, LatentConfig
from ....weights.model_config import ModelConfig
from ....weights.rope.config import DEFAULT_THETA, grown_scale, rope_of
from ..fields import Config, count_of


def read_index(
    config: Config, *, is_interleaved: bool, is_shared: tuple[bool, ...] = ()
) -> IndexConfig:
    """Sizes of a model's sparse indexers. Raises `ConfigError`."""
    return IndexConfig(
        num_heads=count_of(config, "index_n_heads"),
        head_dim=count_of(config, "index_head_dim"),
        num_chosen=count_of(config, "index_topk"),
        is_interleaved=is_interleaved,
        is_shared=is_shared,
    )


def read_latent(config: Config, *, index: IndexConfig | None = None, **traits: Any) -> ModelConfig:
    """The config of a model whose layers have latent attention. `traits` as in
    `ModelConfig.from_hf`. Raises `ConfigError`."""
    for name in ("attention_bias", "mlp_bias"):
        given = config.get(name, False)
        require(not given, name, given, "false")
    latent = LatentConfig(
        kv_rank=count_of(config, "kv_lora_rank"),
        rotary_dim=count_of(config, "qk_rope_head_dim"),
        plain_dim=count_of(config, "qk_nope_head_dim"),
        value_dim=count_of(config, "v_head_dim"),
        query_rank=count_of(
            {"q_lora_rank": config.get("q_lora_rank") or 0}, "q_lora_rank", least=0
        ),
        index=index,
    )
    is_even = latent.rotary_dim % 2 == 0
    require(is_even, "qk_rope_head_dim", latent.rotary_dim, "an even number")
    # Rotary frequencies are those of a head of the rotating size; old configs name another head
    # size.
    rotated = {**config, "head_dim": latent.rotary_dim, "num_key_value_heads": None}
    scale = latent.query_dim**-0.5 * grown_scale(rope_of(config, DEFAULT_THETA), config)
    own = {"head_dim": latent.cached_width, "num_kv_heads": 1, "attention_scale": scale}
    return ModelConfig.from_hf(rotated, latent=latent, **own | traits)
