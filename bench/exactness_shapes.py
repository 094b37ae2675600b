"""Model shapes for `headwater bench exactness`: the demo model's, and some that divide by nothing
convenient.

Knows nothing about engines.
"""

from __future__ import annotations

from typing import Any


def _shape(
    hidden: int, intermediate: int, heads: tuple[int, int], head_dim: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "num_hidden_layers": 6,
        "vocab_size": 8192,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    } | more


QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}
SHAPES = {
    "demo": _shape(576, 1536, (9, 3), 64, num_hidden_layers=30, vocab_size=49_152),
    "hidden-576": _shape(576, 1600, (9, 3), 64),
    "hidden-640": _shape(640, 2048, (4, 1), 128, **QWEN3),
    "hidden-704": _shape(704, 1856, (11, 1), 64),
    "hidden-768": _shape(768, 2048, (12, 12), 64),
    "hidden-896": _shape(896, 4864, (14, 2), 64, **QWEN2),
    "hidden-960": _shape(960, 2560, (15, 5), 64),
    "hidden-1024": _shape(1024, 3072, (16, 8), 128, **QWEN3),
    "hidden-1152": _shape(1152, 3456, (4, 1), 128),
    "hidden-1344": _shape(1344, 3584, (21, 7), 64),
    "hidden-1536": _shape(1536, 8960, (12, 2), 128, **QWEN2),
    "hidden-1600": _shape(1600, 4288, (25, 5), 64),
    "hidden-2112": _shape(2112, 5632, (33, 3), 64),
}
"""Shapes by name; heads and key heads 9/3, 14/2 and 4/1 among them."""
TINY = _shape(
    64, 128, (4, 2), 16, num_hidden_layers=2, vocab_size=512, max_position_embeddings=1024
)
"""Shape for a machine without a GPU, where it shows that the benchmark works."""
