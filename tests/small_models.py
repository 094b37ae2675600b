"""Model folders for tests of text: the demo model's, with tokens and a template as models have that
think and call."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

MARKS = {8: "<think>", 9: "</think>", 11: "<tool_call>", 12: "</tool_call>"}
"""Ordinary tokens, as Qwen has them, in the place of special ones that no test needs."""
SPECIAL_MARKS = {13: "[TOOL_CALLS]", 14: "<|python_tag|>"}
THINKING_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}, called by <tool_call>{"name": …, "arguments": …}</tool_call><|im_end|>
{% endif %}
{%- if verbosity is defined %}<|im_start|>system
Verbosity: {{ verbosity }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% elif opens_thoughts is defined %}<think>
{% endif %}{% endif %}"""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
"""What a simulated engine reads of a folder."""


def make_thinking_folder(
    plain: Path, folder: Path, *, name: str, template: str = THINKING_TEMPLATE
) -> Path:
    """A copy of `plain`, weights left out, for a model that thinks and calls."""
    folder.mkdir(parents=True)
    tokenizer = json.loads((plain / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        mark = MARKS.get(token["id"]) or SPECIAL_MARKS.get(token["id"])
        if mark is not None:
            vocab = tokenizer["model"]["vocab"]
            del vocab[token["content"]]
            vocab[mark] = token["id"]
            token.update(content=mark, special=token["id"] in SPECIAL_MARKS)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = json.loads((plain / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    manifest = json.loads((plain / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(manifest | {"name": name}))
    if (plain / "generation_config.json").exists():
        shutil.copy(plain / "generation_config.json", folder)
    return folder


def with_special_tokens(plain: Path, folder: Path, texts: list[str]) -> None:
    """Copies a folder; the last special tokens that no test needs have these texts."""
    shutil.copytree(plain, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    for token, text in zip(tokenizer["added_tokens"][-len(texts) :], texts, strict=True):
        del vocab[token["content"]]
        vocab[text] = token["id"]
        token.update(content=text, special=True)
    path.write_text(json.dumps(tokenizer))
