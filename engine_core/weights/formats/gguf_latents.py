"""Fields of a Hugging Face config that the metadata of a GGUF file stands for, and names of
tensors, of families with latent attention. See `gguf_fields`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...config import require
from .gguf_experts import SIGMOID
from .gguf_fields import LONG_FACTORS, SHORT_FACTORS, Config, GgufFields

SOFTMAX = 1
"""llama.cpp's number of the softmax, as `SIGMOID` is of the sigmoid."""
NAMES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
"""Names of tensors of a layer beside those of most families."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor of a checkpoint that a file has in two."""

    second: str
    """Name of the second behind `blk.N.`."""
    name: str
    """Name of the checkpoint's tensor behind `model.layers.N.`."""
    join: Callable[[Any, Any], Any]
    """Function from both to the checkpoint's tensor; torch is not imported here."""


def _raised(keys: Any, values: Any) -> Any:
    """keys [heads, kv_rank, plain_dim], values [heads, value_dim, kv_rank] → [heads * (plain_dim +
    value_dim), kv_rank], by head. Raises `ConfigError`."""
    shapes = tuple(keys.shape), tuple(values.shape)
    is_pair = keys.dim() == values.dim() == 3
    is_pair = is_pair and (keys.shape[0], keys.shape[1]) == (values.shape[0], values.shape[2])
    require(is_pair, "shapes of attn_k_b and attn_v_b", shapes, "one rank and number of heads")
    heads, rank, plain = keys.shape
    joined = keys.new_empty(heads, plain + values.shape[1], rank)
    joined[:, :plain] = keys.transpose(1, 2)
    joined[:, plain:] = values
    return joined.flatten(0, 1)


JOINED = {"attn_k_b.weight": Joined("attn_v_b.weight", "self_attn.kv_b_proj.weight", _raised)}
"""Tensors that files store as two, by the name of the first behind `blk.N.`; older files store them
as one."""


def deepseek2(file: GgufFields, config: Config) -> Config:
    """DeepSeek V2, and all that are computed as V3: Kimi K2, GLM-4.7-Flash."""
    # Files that do not state it are of V2, or of GLM-4.7-Flash, which corrects scores.
    last = f"blk.{config['num_hidden_layers'] - 1}.exp_probs_b.bias"
    default = SOFTMAX if file.shape_of(last) is None else SIGMOID
    function = file.meta("expert_gating_func", default)
    allowed = f"{SOFTMAX} or {SIGMOID}: softmax or sigmoid"
    require(function in (SOFTMAX, SIGMOID), "expert_gating_func", function, allowed)
    fields = _with_experts(file, config)
    if function == SIGMOID:
        return fields | {"architectures": ["DeepseekV3ForCausalLM"]}
    method = "greedy" if fields["n_group"] == 1 else "group_limited_greedy"
    return fields | {"topk_method": method}


def deepseek32(file: GgufFields, config: Config) -> Config:
    """DeepSeek V3.2 and GLM-5."""
    function = file.meta("expert_gating_func", SIGMOID)
    require(function == SIGMOID, "expert_gating_func", function, f"{SIGMOID}: sigmoid")
    kinds = file.meta("attention.indexer.types", 1)
    is_own = set(kinds) <= {1} if isinstance(kinds, list) else kinds in (1, True)
    require(is_own, "attention.indexer.types", kinds, "1 of all layers: each has an indexer")
    return _with_experts(file, config) | {
        "index_n_heads": file.meta("attention.indexer.head_count"),
        "index_head_dim": file.meta("attention.indexer.key_length"),
        "index_topk": file.meta("attention.indexer.top_k"),
    }


def minicpm3(file: GgufFields, config: Config) -> Config:
    """Files do not state the multipliers, which llama.cpp has as constants."""
    scaling = None
    if file.shape_of(LONG_FACTORS) is not None:
        scaling = {
            "rope_type": "longrope",
            "long_factor": file.numbers_of(LONG_FACTORS),
            "short_factor": file.numbers_of(SHORT_FACTORS),
        }
    return _latent(file, "attention.key_length") | {
        **{"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        "rope_scaling": scaling,
    }


def _with_experts(file: GgufFields, config: Config) -> Config:
    scaling = config["rope_scaling"]
    if scaling is not None and "mscale_all_dim" in scaling:
        # The converter writes a tenth of it; both are the same in all published models.
        mscale = 10 * scaling["mscale_all_dim"]
        scaling = {**scaling, "mscale": mscale, "mscale_all_dim": mscale}
    is_new = file.meta("attention.key_length_mla", None) is not None
    key = "attention.key_length_mla" if is_new else "attention.key_length"
    return _latent(file, key) | {
        "v_head_dim": file.meta(key.replace("key", "value")),
        "rope_scaling": scaling,
        "first_k_dense_replace": file.meta("leading_dense_block_count", 0),
        "n_routed_experts": file.meta("expert_count"),
        "n_shared_experts": file.meta("expert_shared_count"),
        "routed_scaling_factor": file.meta("expert_weights_scale", 1.0),
        "n_group": file.meta("expert_group_count", 1),
        "topk_group": file.meta("expert_group_used_count", 1),
    }


def _latent(file: GgufFields, key: str) -> Config:
    """Sizes of latent attention; `key` has those of a head's query."""
    rotated = file.meta("rope.dimension_count")
    whole = file.meta(key)
    is_part = type(whole) is int and type(rotated) is int and 0 < rotated < whole
    require(is_part, "rope.dimension_count", rotated, f"1…{key} ({whole}) - 1")
    return {
        "kv_lora_rank": file.meta("attention.kv_lora_rank"),
        "q_lora_rank": file.meta("attention.q_lora_rank", None),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": whole - rotated,
        # The rotating part of a head rotates as a whole.
        "partial_rotary_factor": 1.0,
    }
