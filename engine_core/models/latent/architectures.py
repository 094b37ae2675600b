"""Architectures whose layers cache latents in place of keys and values."""

from __future__ import annotations

from ..architecture import own
from ..configs.latent import deepseek, minicpm3

LATENTS = ("not with `--numerics tree`",)
DEEPSEEK = "latent.deepseek:DeepSeek"
LATENT_ARCHITECTURES = {
    "DeepseekV2ForCausalLM": own(
        DEEPSEEK,
        deepseek.read_deepseek_v2,
        "DeepSeek V2, V2-Lite, Coder V2",
        "deepseek_v2",
        limits=LATENTS,
    ),
    "DeepseekV3ForCausalLM": own(
        DEEPSEEK,
        deepseek.read_deepseek_v3,
        "DeepSeek V3, R1, V3.1, Kimi K2, Moonlight",
        "deepseek_v3",
        "kimi_k2",
        limits=LATENTS,
    ),
    "DeepseekV32ForCausalLM": own(
        DEEPSEEK,
        deepseek.read_deepseek_v32,
        "DeepSeek V3.2",
        "deepseek_v32",
        limits=LATENTS,
    ),
    "Glm4MoeLiteForCausalLM": own(
        DEEPSEEK,
        deepseek.read_glm4_moe_lite,
        "GLM-4.7-Flash",
        "glm4_moe_lite",
        limits=LATENTS,
    ),
    "GlmMoeDsaForCausalLM": own(
        DEEPSEEK,
        deepseek.read_glm_moe_dsa,
        "GLM-5, GLM-5.2",
        "glm_moe_dsa",
        limits=LATENTS,
    ),
    "KimiK25ForConditionalGeneration": own(
        DEEPSEEK,
        deepseek.read_deepseek_v3,
        "Kimi K2.5, K2.6",
        "kimi_k25",
        limits=LATENTS,
        is_text_part=True,
    ),
    "MiniCPM3ForCausalLM": own(
        DEEPSEEK, minicpm3.read_minicpm3, "MiniCPM 3", "minicpm3", limits=LATENTS
    ),
}
"""Architectures with latent attention by their names in `config.json`; see `registry`."""
