"""The demo model in transformers, float32: what ours is compared with."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from headwater.engine_core.weights.formats.gguf_file import GgufFile
from headwater.services.models.demo_model import demo_gguf
from headwater.services.models.store import default_cache_dir
from headwater.services.runtime.progress import silent
from tests.engine_core.small_models import expanded


def demo_reference() -> Any:
    file = GgufFile(demo_gguf(default_cache_dir(), silent))
    config = {
        key: value
        for key, value in file.hf_config().items()
        if value is not None and key != "architectures"
    }
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    # What weights are not in the file is computed from the configuration, not from nothing.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.load_state_dict(expanded(file), strict=False, assign=True)
    model.tie_weights()
    return model.eval()
