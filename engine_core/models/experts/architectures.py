"""Architectures whose layers have mixtures of experts in the place of MLPs."""

from __future__ import annotations

from ..architecture import OF_SHAPES, own
from ..configs.experts import corrected_moe, gpt_oss, llama4, mimo, mixtral, qwen_moe

DECODER = "decoder:Decoder"
WIDTH_NORMS = ("not with `--numerics tree`",)
MIXTURES = {
    "Ernie4_5_MoeForCausalLM": own(
        DECODER,
        corrected_moe.read_ernie45_moe,
        "ERNIE 4.5 (experts)",
        "ernie4_5_moe",
    ),
    "Glm4MoeForCausalLM": own(
        DECODER,
        corrected_moe.read_glm4_moe,
        "GLM-4.5, 4.6, 4.7",
        "glm4_moe",
    ),
    "GptOssForCausalLM": own(
        "experts.gpt_oss:GptOss", gpt_oss.read_gpt_oss, "gpt-oss 20B and 120B", "gpt_oss"
    ),
    "GraniteMoeForCausalLM": own(
        DECODER,
        mixtral.read_granite_moe,
        "Granite 3 (experts)",
        "granitemoe",
    ),
    "HYV3ForCausalLM": own(DECODER, corrected_moe.read_hy3, "Hy3", "hy_v3"),
    "Llama4ForCausalLM": own(
        "experts.llama4:Llama4",
        llama4.read_llama4,
        "Llama 4 (text)",
        "llama4_text",
    ),
    "Llama4ForConditionalGeneration": own(
        "experts.llama4:Llama4",
        llama4.read_llama4,
        "Llama 4 Scout, Maverick",
        "llama4",
        is_text_part=True,
    ),
    "MiMoV2FlashForCausalLM": own(
        DECODER, mimo.read_mimo_v2_flash, "MiMo V2 Flash", "mimo_v2_flash", limits=OF_SHAPES
    ),
    "MiniMaxM2ForCausalLM": own(
        DECODER,
        corrected_moe.read_minimax_m2,
        "MiniMax M2",
        "minimax_m2",
        limits=WIDTH_NORMS,
    ),
    "MixtralForCausalLM": own(DECODER, mixtral.read_mixtral, "Mixtral", "mixtral"),
    "OlmoeForCausalLM": own(DECODER, mixtral.read_olmoe, "OLMoE", "olmoe", limits=WIDTH_NORMS),
    "Qwen2MoeForCausalLM": own(
        DECODER,
        qwen_moe.read_qwen2_moe,
        "Qwen1.5-MoE, Qwen2 (experts)",
        "qwen2_moe",
    ),
    "Qwen3MoeForCausalLM": own(
        DECODER,
        qwen_moe.read_qwen3_moe,
        "Qwen3 (experts): 30B-A3B, 235B-A22B, Coder",
        "qwen3_moe",
    ),
}
"""Keyed by their names in `config.json`; see `registry`."""
