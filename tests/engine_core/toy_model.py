"""An architecture and a kind of weights that Headwater does not know, as a distribution of its own
would bring them.

Attention and gate read the same norm side by side, as in GPT-J. Weights of kind "signs" are a sign
for each number and a scale for each output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch

from headwater.engine_core.executor import Int32Array
from headwater.engine_core.layers.batch import ForwardBatch, last_tokens
from headwater.engine_core.layers.embedding import Embedding
from headwater.engine_core.layers.linear import kind_table
from headwater.engine_core.layers.linear.kinds import Weights
from headwater.engine_core.layers.linear.linear import Parameter, StoredLinear
from headwater.engine_core.layers.lm_head import LMHead
from headwater.engine_core.layers.mixers.attention import Attention
from headwater.engine_core.layers.mlp import Mlp
from headwater.engine_core.layers.norm import RMSNorm
from headwater.engine_core.layers.platform import Platform
from headwater.engine_core.layers.rope import cos_sin_table
from headwater.engine_core.models.architecture import Architecture
from headwater.engine_core.models.model import LastTokens, LayerInputs
from headwater.engine_core.weights.formats.gguf_families import JOINED, GgufFamily
from headwater.engine_core.weights.layout import Layout, linear, norm, table
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.engine_core.weights.names import CheckpointNames

NAME = "ToyForCausalLM"
ARCHITECTURE = Architecture(
    model=f"{__name__}:Toy",
    read_config=ModelConfig.from_hf,
    gguf={"toy": GgufFamily(architecture=NAME, layer_names=JOINED)},
)


class SignLinear(StoredLinear):
    kind = "signs"
    suffixes = (".signs", ".scales")

    def __init__(self, signs: torch.Tensor, scales: torch.Tensor) -> None:
        """signs int8 [N, K], scales [N]"""
        self.signs = signs
        self.scales = scales
        self.out_features, self.in_features = signs.shape

    @classmethod
    def parameters(
        cls,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        stored: Mapping[str, torch.Tensor],
    ) -> tuple[Parameter, ...]:
        return (
            Parameter(
                suffix=".signs",
                shape=(out_features, in_features),
                dtype=torch.int8,
                out_axis=0,
                in_axis=1,
            ),
            Parameter(
                suffix=".scales", shape=(out_features,), dtype=dtype, out_axis=0, in_axis=None
            ),
        )

    @classmethod
    def load(cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Self:
        return cls(tensors[".signs"], tensors[".scales"])

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Row by row, so that a row's bits are its own."""
        signs = self.signs.to(x.dtype)
        return (
            torch.stack([(signs @ row) * self.scales for row in x])
            if len(x)
            else x.new_empty(0, self.out_features)
        )


kind_table.register(SignLinear)


class Toy:
    names = CheckpointNames(
        model={
            "model.embed_tokens.weight": "embed",
            "model.norm.weight": "final_norm",
            "lm_head.weight": "lm_head",
        },
        layer={
            "input_layernorm.weight": "input_norm",
            "self_attn.qkv_proj.weight": "qkv",
            "self_attn.o_proj.weight": "o",
            "mlp.gate_up_proj.weight": "gate_up",
            "mlp.down_proj.weight": "down",
        },
        fused={},
    )

    def __init__(
        self, config: ModelConfig, weights: Weights, platform: Platform, max_model_len: int
    ) -> None:
        self.config = config
        self._platform = platform
        linears = weights.linears
        tensors = weights.tensors
        eps = config.rms_norm_eps
        cos_sin = cos_sin_table(config, max_model_len).to(platform.device)
        self.embedding = Embedding(tensors["embed"])
        self.dtype = tensors["embed"].dtype
        prefixes = [f"layers.{i}." for i in range(config.num_layers)]
        norms = [tensors[prefix + "input_norm"] for prefix in prefixes] + [tensors["final_norm"]]
        self.norms = [RMSNorm(platform, weight, eps) for weight in norms]
        self.attentions = [
            Attention(
                platform,
                linears[prefix + "qkv"],
                linears[prefix + "o"],
                cos_sin,
                qkv_bias=None,
                q_norm=None,
                k_norm=None,
                eps=eps,
            )
            for prefix in prefixes
        ]
        self.mlps = [
            Mlp(platform, linears[p + "gate_up"], linears[p + "down"], "silu") for p in prefixes
        ]
        self.lm_head = LMHead(platform, linears["lm_head"])

    @staticmethod
    def layout(config: ModelConfig) -> Layout:
        hidden = config.hidden_size
        layer = {
            "input_norm": norm(hidden),
            "qkv": linear(config.qkv_size, hidden),
            "o": linear(hidden, config.num_heads * config.head_dim),
            "gate_up": linear(2 * config.intermediate_size, hidden),
            "down": linear(hidden, config.intermediate_size),
        }
        return {
            "embed": table(config.vocab_size, hidden),
            "final_norm": norm(hidden),
            "lm_head": linear(config.vocab_size, hidden),
            **{
                f"layers.{i}.{name}": spec
                for i in range(config.num_layers)
                for name, spec in layer.items()
            },
        }

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: torch.Tensor,
        attention_plan: Any = None,
        *,
        ends: LastTokens | None = None,
        num_layers: int | None = None,
        inputs: LayerInputs | None = None,
    ) -> torch.Tensor:
        plan = attention_plan or self._platform.plan_attention(batch)
        residual = self.embedding(batch.token_ids)
        x = self.norms[0](residual)
        parts = zip(self.attentions, self.mlps, self.norms[1:], kv_cache, strict=True)
        for i, (attention, mlp, following, cache) in enumerate(parts):
            if inputs is not None:
                inputs.take(i, residual)
            attended = attention.attend(attention.queries(x, batch, cache), cache, plan)
            x = following.add(attended + mlp(x), residual)
        return x if ends is None else x[ends.tokens]

    def ends(self, batch: ForwardBatch, num_wanted: Int32Array) -> LastTokens:
        own = last_tokens(batch, num_wanted)
        return LastTokens(own.sampled, None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)
