"""Small random checkpoints of architectures whose modelling code is that of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from headwater.engine_core.models import conversion, registry
from tests.engine_core.small_models import FAMILIES, LLAMA3_ROPE, SHAPE

PADDED = SHAPE | {"pad_token_id": 0}
FOREIGN: dict[str, Callable[[], Any]] = {
    "cohere": lambda: transformers.CohereConfig(**PADDED, logit_scale=0.25, use_qk_norm=True),
    "nemotron": lambda: transformers.NemotronConfig(**PADDED),
    "apertus": lambda: transformers.ApertusConfig(**PADDED, rope_parameters=LLAMA3_ROPE),
    "glm": lambda: transformers.GlmConfig(**PADDED, head_dim=32),
    "olmo": lambda: transformers.OlmoConfig(**PADDED, clip_qkv=8.0),
    "persimmon": lambda: transformers.PersimmonConfig(**PADDED),
    "arcee": lambda: transformers.ArceeConfig(**PADDED, rope_parameters={"rope_theta": 1e4}),
    "helium": lambda: transformers.HeliumConfig(**PADDED, head_dim=16),
    "phi": lambda: transformers.PhiConfig(**PADDED),
    "gpt-bigcode": lambda: transformers.GPTBigCodeConfig(
        vocab_size=512, n_embd=64, n_layer=3, n_head=4, n_positions=1024
    ),
    "nanochat": lambda: transformers.NanoChatConfig(**PADDED),
    "modernbert-decoder": lambda: transformers.ModernBertDecoderConfig(
        **PADDED, local_attention=80, global_attn_every_n_layers=3
    ),
    "vaultgemma": lambda: transformers.VaultGemmaConfig(
        **PADDED, head_dim=32, sliding_window=40, attn_logit_softcapping=5.0
    ),
    "jais2": lambda: transformers.Jais2Config(**PADDED),
    "bitnet": lambda: transformers.BitNetConfig(**PADDED, hidden_act="relu2"),
}
"""Architectures without a file of ours."""
OWN_TOO = ("llama3 with scaled rope", "gemma2", "qwen3", "mistral with a window")
"""Families with a file of ours, whose code may be that of transformers all the same."""
ALL = FOREIGN | {family: FAMILIES[family] for family in OWN_TOO}


def convert_foreign(source: Path, folder: Path, dtype: str = "float32", **more: Any) -> Path:
    """A checkpoint converted for transformers' code."""
    folder.mkdir(exist_ok=True)
    conversion.convert(
        source,
        folder,
        dtype=dtype,
        progress=lambda done, total: None,
        model_code=registry.TRANSFORMERS,
        **more,
    )
    return folder


def config_folder(config: Any, folder: Path) -> Path:
    """A folder with nothing but a config."""
    folder.mkdir(exist_ok=True)
    name = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    named = {"model_type": type(config).model_type, "architectures": [name]}
    fields = json.loads(config.to_json_string(use_diff=False)) | named
    (folder / "config.json").write_text(json.dumps(fields))
    return folder
