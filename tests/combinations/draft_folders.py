"""What drafts beside a served model: the model itself, or heads of random weights that fit it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from headwater.engine_core.models import registry
from tests.combinations.capability import Fields
from tests.engine_core.published_heads import LAYER, publish, random_eagle

OWN_MODEL = "the served model"
RANDOM_HEADS = "random heads for the served model"
"""Values of `draft_model` and `draft_heads` in the options of a capability."""


def with_drafts(options: Fields, folder: Path) -> dict[str, Any]:
    """Options whose folders are there; `folder`: of the served model, its weights as they are."""
    found = dict(options)
    if found.get("draft_model") == OWN_MODEL:
        found["draft_model"] = folder
    if found.get("draft_heads") == RANDOM_HEADS:
        found["draft_heads"] = _heads(folder)
    return found


def _heads(folder: Path) -> Path:
    """Made once, beside the model's folder."""
    heads = folder.with_name(f"{folder.name}-heads")
    if not heads.exists():
        model = registry.read_config(folder)
        # A GPU serves heads whose key heads are shared by as many query heads as the model's.
        num_heads = model.hidden_size // model.head_dim
        config = LAYER | {
            "hidden_size": model.hidden_size,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads * model.num_kv_heads // model.num_heads,
            "vocab_size": model.vocab_size,
            "bias": False,
        }
        torch.manual_seed(1)
        publish(heads, json.loads(json.dumps(config)), random_eagle("eagle", config))
    return heads
