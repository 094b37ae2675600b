"""A tiny random model with a tokenizer and a chat template, converted."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from headwater.services.models.manifest import LAYOUT, ModelManifest
from tests.engine_core.small_models import SHAPE, convert
from tests.services.text.small_tokenizers import byte_level

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor "
    "%}<|im_start|>assistant "
)


def make_chatting_model(
    path: Path, *, num_layers: int = 3, seed: int = 0, dtype: str = "float32"
) -> Path:
    """The model's folder, in `path`."""
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    shape = SHAPE | {"vocab_size": size, "eos_token_id": size - 2, "num_hidden_layers": num_layers}
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**shape), dtype=torch.float32
    )
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path / "hf")
    folder = convert(path / "hf", path / "ours", dtype)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})
    )
    ModelManifest(
        name="chatting",
        revision="1",
        dtype=dtype,
        layout=LAYOUT,
        architecture="LlamaForCausalLM",
        vocab_size=size,
        max_model_len=SHAPE["max_position_embeddings"],
        eos_token_ids=(size - 2,),
        bos_token_id=None,
        source="random numbers",
    ).write(folder)
    return folder
