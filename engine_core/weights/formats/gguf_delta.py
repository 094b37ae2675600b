"""Gated delta nets in GGUF files: fields of a Hugging Face config, names of tensors, and the order
of their rows. See `gguf_fields`.

Files of Qwen3.5 have value heads in turns, the first one of each key head, then the second ones;
ours are those of a key head together."""

from __future__ import annotations

from typing import Any

from ...config import require
from .gguf_fields import FULL, Config, GgufFields
from .gguf_states import LINEAR, Change

RECURRENT = "attention.recurrent_layers"
NARROW = "ssm_ba.weight"
"""Shares and decays of Qwen3-Next, by key head."""
OUT = "ssm_out.weight"
NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
CHANGES: dict[str, Change] = {
    # A file has −exp(A_log).
    "ssm_a": lambda rates: (-rates.flatten()).log(),
    # Its factors have no offset, unlike those of other norms.
    "ssm_norm.weight": lambda factors: factors,
}


def qwen3_5(file: GgufFields, config: Config) -> Config:
    num_heads, num_values, key_dim, value_dim = _sizes(file)
    return {
        "linear_num_key_heads": num_heads,
        "linear_num_value_heads": num_heads * num_values,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": file.meta("ssm.conv_kernel"),
        "layer_types": _kinds(file, config),
        "shared_expert_intermediate_size": file.meta("expert_shared_feed_forward_length", None),
    }


def rows_of(file: GgufFields, name: str) -> list[int] | None:
    """Rows of Qwen3-Next's tensor in our order, by its name after `blk.N.`; None: the order is
    ours."""
    if name != NARROW:
        return None
    num_heads, num_values, _, _ = _sizes(file)
    of_head = range(num_heads)
    return [
        head * 2 * num_values + kind * num_values + value
        for kind in range(2)
        for head in of_head
        for value in range(num_values)
    ]


def rows_in_turns(file: GgufFields, name: str) -> list[int] | None:
    """Like `rows_of`, for Qwen3.5."""
    num_heads, num_values, key_dim, value_dim = _sizes(file)
    if name in ("attn_qkv.weight", "ssm_conv1d.weight"):
        num_keys = 2 * num_heads * key_dim
        values = _together(num_heads, num_values, value_dim)
        return [*range(num_keys), *(num_keys + row for row in values)]
    if name == "attn_gate.weight":
        return _together(num_heads, num_values, value_dim)
    if name in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"):
        return _together(num_heads, num_values, 1)
    return None


def columns_in_turns(file: GgufFields, name: str) -> list[int] | None:
    """Columns of Qwen3.5's tensor in our order; None: the order is ours."""
    num_heads, num_values, _, value_dim = _sizes(file)
    if name != OUT or num_values == 1:
        return None
    return _together(num_heads, num_values, value_dim)


def _together(num_heads: int, num_values: int, size: int) -> list[int]:
    """Numbers of value heads in turns, in the order of key heads."""
    return [
        (value * num_heads + head) * size + i
        for head in range(num_heads)
        for value in range(num_values)
        for i in range(size)
    ]


def _sizes(file: GgufFields) -> tuple[int, int, int, int]:
    """Key heads, value heads of each, and sizes of a key and of a value. Raises `ConfigError`."""
    heads = file.meta("ssm.group_count")
    values = file.meta("ssm.time_step_rank")
    inner = file.meta("ssm.inner_size")
    key_dim = file.meta("ssm.state_size")
    for name, size in (("group_count", heads), ("time_step_rank", values), ("inner_size", inner)):
        is_size = type(size) is int and 1 <= size <= 1 << 20
        require(is_size, f"ssm.{name}", size, "a whole number, 1…1048576")
    allowed = f"a multiple of ssm.group_count ({heads})"
    require(values % heads == 0, "ssm.time_step_rank", values, allowed)
    allowed = f"a multiple of ssm.time_step_rank ({values})"
    require(inner % values == 0, "ssm.inner_size", inner, allowed)
    return heads, values // heads, key_dim, inner // values


def _kinds(file: GgufFields, config: Config) -> Any:
    """Kinds of layers; None: all but every so many-th are gated delta nets, as configs say it.
    Raises `ConfigError`."""
    num_layers = config["num_hidden_layers"]
    recurrent = file.meta(RECURRENT, None)
    if recurrent is None:
        interval = file.meta("full_attention_interval", 4)
        is_count = type(interval) is int and interval >= 1
        require(is_count, "full_attention_interval", interval, "a whole number, 1…")
        recurrent = [(i + 1) % interval != 0 for i in range(num_layers)]
    is_list = isinstance(recurrent, list) and len(recurrent) >= num_layers
    require(is_list, RECURRENT, recurrent, f"true or false for {num_layers} layers")
    return [LINEAR if is_delta else FULL for is_delta in recurrent[:num_layers]]
