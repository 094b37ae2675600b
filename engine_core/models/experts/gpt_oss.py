"""The decoder of gpt-oss, whose checkpoints have gates and ups of experts in turns. Source: OpenAI,
"gpt-oss-120b and gpt-oss-20b model card", 2025."""

from __future__ import annotations

from dataclasses import replace

import torch

from headwater.kernels.quant.mxfp4 import Mxfp4Weight, reordered

from ...weights.model_config import ModelConfig
from ..decoder import Decoder
from .mixture import DOWN, DOWN_BIAS, GATE_UP, GATE_UP_BIAS, outputs_first


def _gates_first(weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """[experts, inputs, outputs] → [experts * outputs, inputs], of each expert gates before ups."""
    return outputs_first(weight, config)[_gates_then_ups(config)]


def _packed_gates_first(weight: Mxfp4Weight, config: ModelConfig) -> Mxfp4Weight:
    """Like `_gates_first`, of a weight whose outputs come first."""
    return reordered(weight, _gates_then_ups(config))


def _biases_of_gates_first(biases: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """[experts, outputs] → [experts * outputs], of each expert gates before ups."""
    return biases.flatten()[_gates_then_ups(config)]


def _gates_then_ups(config: ModelConfig) -> torch.Tensor:
    """Places of all experts' outputs, which lie in pairs of a gate and an up."""
    assert config.experts is not None
    num_experts, inner = config.experts.num_experts, config.experts.intermediate_size
    places = torch.arange(2 * num_experts * inner)
    return places.view(num_experts, inner, 2).transpose(1, 2).flatten()


class GptOss(Decoder):
    """See `Model`."""

    names = replace(
        Decoder.names,
        changed={
            GATE_UP: _gates_first,
            GATE_UP_BIAS: _biases_of_gates_first,
            DOWN: outputs_first,
            DOWN_BIAS: lambda biases, config: biases.flatten(),
        },
        changed_packed={
            GATE_UP: _packed_gates_first,
            DOWN: lambda weight, config: weight,
        },
    )
