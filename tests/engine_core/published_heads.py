"""Small random draft heads in the layouts in which they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
VOCAB_SIZE = 512
HIDDEN = 64
NUM_DRAFT_TOKENS = 200
LAYER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "medusa": {"medusa_num_heads": 5, "medusa_num_layers": 1},
    "medusa of two blocks": {"medusa_num_heads": 5, "medusa_num_layers": 2},
    "eagle": LAYER | {"bias": False},
    "eagle with biases": LAYER | {"num_key_value_heads": 4, "rope_theta": 500_000.0},
    "eagle3": LAYER
    | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": NUM_DRAFT_TOKENS},
    "eagle3 over all tokens": LAYER
    | {"draft_vocab_size": VOCAB_SIZE, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}


def random_heads(kind: str, seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    config = CONFIGS[kind]
    if kind.startswith("medusa"):
        shapes = _medusa_shapes(config["medusa_num_heads"], config["medusa_num_layers"])
        return {name: _random(name, shape) for name, shape in shapes.items()}
    tensors = random_eagle(kind, config)
    if kind == "eagle3":
        ids = torch.randperm(VOCAB_SIZE)[:NUM_DRAFT_TOKENS].sort().values
        tensors["d2t"] = ids - torch.arange(NUM_DRAFT_TOKENS)
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def random_eagle(kind: str, config: dict[str, Any]) -> Tensors:
    """Tensors of EAGLE's layer of the config's sizes, but for the token ids that EAGLE-3 drafts
    among."""
    return {name: _random(name, shape) for name, shape in _eagle_shapes(kind, config).items()}


def _random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A product is about as large as its input: scores that were much larger would let attention
    jump from one key to another with the rounding of a chain that reads its own states."""
    if len(shape) == 1:
        return 0.3 * torch.randn(shape) + (1.0 if "norm" in name else 0.0)
    return torch.randn(shape) / shape[1] ** 0.5


def publish(
    folder: Path, config: dict[str, Any], tensors: Tensors, *, pickled: bool = False
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(
            tensors,
            folder / ("medusa_lm_head.pt" if "medusa_num_heads" in config else "pytorch_model.bin"),
        )
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def _medusa_shapes(num_heads: int, num_blocks: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(num_heads):
        for j in range(num_blocks):
            shapes |= {
                f"{i}.{j}.linear.weight": (HIDDEN, HIDDEN),
                f"{i}.{j}.linear.bias": (HIDDEN,),
            }
        shapes[f"{i}.{num_blocks}.weight"] = (VOCAB_SIZE, HIDDEN)
    return shapes


def _eagle_shapes(kind: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    is_third = kind.startswith("eagle3")
    has_biases = kind == "eagle with biases"
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    prefix, inputs = ("midlayer.", 2 * hidden) if is_third else ("layers.0.", hidden)
    kv_size = config["num_key_value_heads"] * (hidden // config["num_attention_heads"])
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (hidden, inputs),
        "self_attn.k_proj.weight": (kv_size, inputs),
        "self_attn.v_proj.weight": (kv_size, inputs),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
    }
    if has_biases:
        layer |= {
            f"self_attn.{name}_proj.bias": (hidden if name == "q" else kv_size,) for name in "qkv"
        }
    if is_third:
        layer |= {"hidden_norm.weight": (hidden,), "input_layernorm.weight": (hidden,)}
    shapes = {prefix + name: shape for name, shape in layer.items()}
    shapes["fc.weight"] = (hidden, (3 if is_third else 2) * hidden)
    if is_third:
        return shapes | {
            "norm.weight": (hidden,),
            "lm_head.weight": (config["draft_vocab_size"], hidden),
        }
    shapes["embed_tokens.weight"] = (config["vocab_size"], hidden)
    return shapes | ({"fc.bias": (hidden,)} if has_biases else {})
