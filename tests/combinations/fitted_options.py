"""Options that depend on the served model: what drafts beside it, which is the model itself or
heads of random weights that fit it, and the number of ranks that divide its layers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from headwater.engine_core.executors.model.block_bytes import set_layout
from headwater.engine_core.executors.model.kv_blocks import KvLayout
from headwater.engine_core.models import registry
from headwater.engine_core.options import ExecutorOptions
from tests.combinations.capability import Fields
from tests.engine_core.published_heads import LAYER, publish, random_eagle
from tests.engine_core.small_adapters import tensors_of, write_adapter

OWN_MODEL = "the served model"
RANDOM_HEADS = "random heads for the served model"
"""Values of `draft_model` and `draft_heads` in the options of a capability."""
FEWEST_RANKS = "the fewest ranks that divide the served model"
"""Value of `tensor_parallel_size`."""


ADAPTER_RANK = 8
ADAPTER_SPREAD = 1.0
"""Its numbers change tokens, and leave some of them as they are."""


def fitted(options: Fields, folder: Path, dtype: str) -> dict[str, Any]:
    """Options with folders that are there and a number of ranks; `folder`: of the served model, its
    weights as they are; `dtype`: of its activations."""
    found = dict(options)
    if found.get("draft_model") == OWN_MODEL:
        found["draft_model"] = folder
    if found.get("draft_heads") == RANDOM_HEADS:
        found["draft_heads"] = _heads(folder)
    if "num_blocks" in found:
        found["num_blocks"] += _blocks_of_states(folder, dtype)
    if found.get("tensor_parallel_size") == FEWEST_RANKS:
        found["tensor_parallel_size"] = _fewest_ranks(folder)
    return found


def adapter_of(folder: Path) -> Path:
    """A random adapter of a model's attention, made once, beside the model's folder."""
    made = folder.with_name(f"{folder.name}-adapter")
    if made.exists():
        return made
    model = registry.read_config(folder)
    q_size, kv_size, _ = model.qkv_sizes
    sizes = {
        "self_attn.q_proj": (q_size, model.hidden_size),
        "self_attn.v_proj": (kv_size, model.hidden_size),
        "self_attn.o_proj": (model.hidden_size, q_size),
    }
    spread = ADAPTER_SPREAD / math.sqrt(model.hidden_size)
    tensors = tensors_of(1, ADAPTER_RANK, tuple(sizes), sizes, model.num_layers, spread)
    return write_adapter(made, tensors, r=ADAPTER_RANK, lora_alpha=ADAPTER_RANK)


def _blocks_of_states(folder: Path, name: str) -> int:
    """Pages of the state sets of a context, in this dtype; 0: the model has no state layers."""
    model = registry.read_config(folder)
    options = ExecutorOptions(model_folder=folder)
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    kv_bytes = KvLayout.of(model, dtype).block_bytes(options.block_size)
    sets = set_layout(model, kv_bytes, options.block_size, dtype)
    return 0 if sets is None else sets.num_pages * (options.async_depth + 2)


def _fewest_ranks(folder: Path) -> int:
    model = registry.read_config(folder)
    num_kv_heads = model.num_kv_heads if model.latent is None else model.num_heads
    return next(
        n for n in range(2, model.num_heads + 1) if model.num_heads % n == num_kv_heads % n == 0
    )


def _heads(folder: Path) -> Path:
    """Made once, beside the model's folder."""
    heads = folder.with_name(f"{folder.name}-heads")
    if not heads.exists():
        model = registry.read_config(folder)
        # A GPU serves heads whose key heads are shared by as many query heads as the model's.
        num_heads = num_kv_heads = model.num_heads
        if model.latent is None:
            num_heads = model.hidden_size // model.head_dim
            num_kv_heads = num_heads * model.num_kv_heads // model.num_heads
        config = LAYER | {
            "hidden_size": model.hidden_size,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "vocab_size": model.vocab_size,
            "bias": False,
        }
        torch.manual_seed(1)
        publish(heads, json.loads(json.dumps(config)), random_eagle("eagle", config))
    return heads
