"""The demo model as the text stages see it, without converting its weights."""

from __future__ import annotations

from pathlib import Path

from headwater.services.models.demo_model import DEMO_NAME, DEMO_REVISION, demo_gguf
from headwater.services.models.manifest import LAYOUT, ModelManifest
from headwater.services.models.store import default_cache_dir
from headwater.services.runtime.progress import silent
from headwater.services.text.gguf_tokenizer import write_tokenizer


def demo_text_folder(folder: Path) -> Path:
    """Fills `folder` with the tokenizer's files and a manifest."""
    write_tokenizer(demo_gguf(default_cache_dir(), silent), folder)
    ModelManifest(
        name=DEMO_NAME,
        revision=DEMO_REVISION,
        dtype="float32",
        layout=LAYOUT,
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        max_model_len=8192,
        eos_token_ids=(2, 0),
        bos_token_id=1,
        source="the demo model's GGUF file",
    ).write(folder)
    return folder
