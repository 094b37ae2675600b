"""Architectures whose layers keep states in place of keys and values. Imports no model."""

from __future__ import annotations

from ..architecture import own
from ..configs.states import falcon_h1, granite_hybrid, lfm2, nemotron_h, qwen3_next

_QWEN35 = "states.qwen3_next:Qwen35"
STATE_ARCHITECTURES = {
    "FalconH1ForCausalLM": own(
        "states.falcon_h1:FalconH1",
        falcon_h1.read_falcon_h1,
        "Falcon-H1",
        "falcon_h1",
    ),
    "GraniteMoeHybridForCausalLM": own(
        "states.granite_hybrid:GraniteHybrid",
        granite_hybrid.read_granite_hybrid,
        "Granite 4 with Mamba-2 (H Micro, Tiny, Small)",
        "granitemoehybrid",
        limits=("not with `--numerics tree`",),
    ),
    "Lfm2ForCausalLM": own("states.lfm2:Lfm2", lfm2.read_lfm2, "LFM2", "lfm2"),
    "Lfm2MoeForCausalLM": own(
        "states.lfm2:Lfm2", lfm2.read_lfm2_moe, "LFM2 (experts): 8B-A1B", "lfm2_moe"
    ),
    "NemotronHForCausalLM": own(
        "states.nemotron_h:NemotronH",
        nemotron_h.read_nemotron_h,
        "Nemotron-H, Nemotron Nano 2; Nemotron 3 Nano on CPUs",
        "nemotron_h",
    ),
    "Qwen3NextForCausalLM": own(
        "states.qwen3_next:Qwen3Next",
        qwen3_next.read_qwen3_next,
        "Qwen3-Next, Qwen3-Coder-Next",
        "qwen3_next",
    ),
    "Qwen3_5ForCausalLM": own(_QWEN35, qwen3_next.read_qwen3_5, "Qwen3.5 (dense)", "qwen3_5_text"),
    "Qwen3_5ForConditionalGeneration": own(
        _QWEN35,
        qwen3_next.read_qwen3_5,
        "Qwen3.5 and Qwen3.6 (dense)",
        "qwen3_5",
        is_text_part=True,
    ),
    "Qwen3_5MoeForCausalLM": own(
        _QWEN35,
        qwen3_next.read_qwen3_5_moe,
        "Qwen3.5 (experts)",
        "qwen3_5_moe_text",
    ),
    "Qwen3_5MoeForConditionalGeneration": own(
        _QWEN35,
        qwen3_next.read_qwen3_5_moe,
        "Qwen3.5 and Qwen3.6 (experts): 35B-A3B",
        "qwen3_5_moe",
        is_text_part=True,
    ),
}
