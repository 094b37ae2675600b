"""The decoder of GPT-2. Source: Radford et al., "Language models are unsupervised multitask
learners", 2019."""

from __future__ import annotations

import torch

from ..weights.model_config import ModelConfig
from ..weights.names import CheckpointNames
from .decoder import Decoder
from .layered import UNCHANGED_NAMES


def transposed(weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """[inputs, outputs] as the checkpoint has it → [outputs, inputs]"""
    return weight.T.contiguous()


class Gpt2(Decoder):
    """See `Model`."""

    names = CheckpointNames(
        model={
            "model.wte.weight": "embed",
            "model.wpe.weight": "positions",
            "model.ln_f.weight": "final_norm",
            "model.ln_f.bias": "final_norm_bias",
            "lm_head.weight": "lm_head",
        },
        layer={
            "ln_1.weight": "input_norm",
            "ln_1.bias": "input_norm_bias",
            "ln_2.weight": "post_norm",
            "ln_2.bias": "post_norm_bias",
            "attn.c_attn.weight": "qkv",
            "attn.c_attn.bias": "qkv_bias",
            "attn.c_proj.weight": "o",
            "attn.c_proj.bias": "o_bias",
            "mlp.c_fc.weight": "up",
            "mlp.c_fc.bias": "up_bias",
            "mlp.c_proj.weight": "down",
            "mlp.c_proj.bias": "down_bias",
        },
        fused={},
        changed=dict.fromkeys(("qkv", "o", "up", "down"), transposed),
        unchanged=UNCHANGED_NAMES,
        ignored=(".attn.bias", ".attn.masked_bias"),
    )
