"""The parts of a model's layers, made of its config and weights: norms, attention, MLPs."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from headwater.kernels.attention.rotary_pairs import RotaryPairs

from ..layers.biased import BiasedLinear, LogitLinear
from ..layers.embedding import Embedding
from ..layers.experts import Experts
from ..layers.layer_vectors import LayerVector, LayerVectors, NoVectors
from ..layers.linear.kinds import Weights
from ..layers.linear.linear import Linear
from ..layers.lm_head import LMHead
from ..layers.mixers.attention import Attention
from ..layers.mixers.gated_attention import GatedAttention
from ..layers.mixers.mixer import Mixer
from ..layers.mlp import Mlp, PlainMlp
from ..layers.norm import InputNorm, LayerNorm, Norm, RMSNorm
from ..layers.platform import Platform
from ..layers.positions import Positions
from ..layers.projection_norms import projection_norms
from ..layers.rope import cos_sin_table, query_scales, unrotated_table
from ..weights.model_config import ModelConfig
from .experts.expert_parts import ExpertParts, check_unrounded
from .latent.latent_parts import LatentMixers
from .states.state_parts import state_mixer


class Parts:
    """Builds parts of layers from weights by their names in the layout. Optional parts are built if
    their weights exist."""

    def __init__(
        self, config: ModelConfig, weights: Weights, platform: Platform, max_model_len: int
    ) -> None:
        self._config = config
        self._weights = weights
        self._platform = platform
        self._max_model_len = max_model_len

    def embedding(self) -> Embedding:
        return Embedding(self._weights.table("embed"), scale=self._config.embedding_scale)

    def positions(self) -> Positions | None:
        """Table of positions; None: the model has none."""
        if not self._config.num_learned_positions:
            return None
        return Positions(self._weights.tensors["positions"], self._config.position_offset)

    def lm_head(self) -> LMHead:
        config = self._config
        linear = self._weights.linears["lm_head"]
        if config.logit_scale != 1 or config.logit_softcap:
            linear = LogitLinear(self._platform, linear, config.logit_scale, config.logit_softcap)
        return LMHead(self._platform, linear)

    def norm(self, name: str) -> RMSNorm | LayerNorm:
        config = self._config
        if config.has_layer_norms:
            bias = self._weights.tensors.get(name + "_bias")
            return LayerNorm(self._weights.tensors[name], bias, config.rms_norm_eps)
        return RMSNorm(self._platform, self.factors(name), config.rms_norm_eps)

    def input_norm(self, name: str, reader: str) -> Norm:
        """The norm that one linear layer reads."""
        if not self._config.has_layer_norms:
            linear = self._weights.linears[reader]
            eps = self._config.rms_norm_eps
            return InputNorm(self._platform, self.factors(name), eps, linear)
        self.check_unrounded(reader)
        return self.norm(name)

    def check_unrounded(self, name: str) -> None:
        """Raises `ConfigError` for a linear layer that reads 8-bit activations, where nothing
        rounds them."""
        check_unrounded(self._weights.linears[name], self._config)

    def unrounded(self, name: str) -> Linear:
        """A linear layer that reads tokens in the model's dtype. Raises `ConfigError`."""
        self.check_unrounded(name)
        return self._weights.linears[name]

    def factors(self, name: str) -> torch.Tensor:
        """The factors of a norm. A sum with an offset is one that only float32 holds."""
        offset = self._config.norm_offset
        factors = self._weights.tensors[name]
        return offset + factors.float() if offset else factors

    def linear(self, name: str) -> Linear:
        """A linear layer with its bias, if it has one."""
        linear = self._weights.linears[name]
        bias = self._weights.tensors.get(name + "_bias")
        return linear if bias is None else BiasedLinear(self._platform, linear, bias)

    def attention(self, i: int) -> Attention | GatedAttention:
        config = self._config
        plain = self._attention(i)
        if not config.has_output_gate:
            return plain
        return GatedAttention(self._platform, plain, config.num_heads, config.head_dim)

    def mixer(self, i: int) -> Mixer:
        """Attention of layer i, or the state mixer that replaces it."""
        if self._config.latent is not None:
            return self._latent_mixers(i)
        if not self._config.has_state(i):
            return self.attention(i)
        return state_mixer(self._config, self._weights, self._platform, i)

    def _attention(self, i: int) -> Attention:
        config = self._config.at(i)
        prefix = f"layers.{i}."
        tensors = self._weights.tensors
        q_norm = self.factors(prefix + "q_norm") if config.qk_norm else None
        k_norm = q_norm
        if config.plain_qk_norm and config.is_rotary[i]:
            q_norm = k_norm = self._no_factors
        elif config.qk_norm and config.num_kv_projections:
            k_norm = self.factors(prefix + "k_norm")
        return Attention(
            self._platform,
            self._weights.linears[prefix + "qkv"],
            self.linear(prefix + "o"),
            self._table_of(i),
            qkv_bias=tensors.get(prefix + "qkv_bias"),
            q_norm=q_norm,
            k_norm=k_norm,
            eps=config.rms_norm_eps,
            scale=config.attention_scale,
            window=config.mask_of(i),
            softcap=config.attention_softcap,
            pairs=self._pairs,
            norms=projection_norms(config, self._weights, self._platform, prefix),
            writes=config.num_kv_projections > 0,
            query_scales=self._query_scales_of(i),
            sinks=tensors[prefix + "sinks"].float() if config.has_sinks else None,
        )

    def norm_of_mixer(self, name: str, i: int) -> Norm:
        """The norm that the mixer of layer i reads."""
        if self._config.has_state(i) or self._config.latent is not None:
            return self.norm(name)
        return self.input_norm(name, f"layers.{i}.qkv")

    def norm_of_mlp(self, name: str, i: int) -> Norm:
        """The norm that the MLP of layer i reads, or its experts."""
        if self._config.has_experts(i):
            return self.norm(name)
        up = "gate_up" if self._config.is_gated else "up"
        return self.input_norm(name, f"layers.{i}.{up}")

    def mlp(self, i: int, norm: Norm | None = None) -> Mlp | PlainMlp | Experts:
        """`norm`: whose result it reads, for `Experts.behind`."""
        config = self._config.at(i)
        if config.has_experts(i) and not self._has_experts_beside:
            return self._expert_parts(i).experts(norm)
        prefix = f"layers.{i}."
        down = self.linear(prefix + "down")
        if config.is_gated:
            gate_up = self.linear(prefix + "gate_up")
            return Mlp(self._platform, gate_up, down, config.activation)
        self.check_unrounded(prefix + "down")
        return PlainMlp(self._platform, self.linear(prefix + "up"), down, config.activation)

    def experts_beside_mlp(self, i: int) -> ExpertParts | None:
        """Makes the experts beside the MLP of layer i; None: it has an MLP alone."""
        has_both = self._has_experts_beside and self._config.has_experts(i)
        return self._expert_parts(i) if has_both else None

    def _expert_parts(self, i: int) -> ExpertParts:
        own = self._weights, self._platform, f"layers.{i}.", self.expert_counts[i]
        return ExpertParts(self._config.at(i), *own)

    @property
    def _has_experts_beside(self) -> bool:
        return self._config.experts is not None and self._config.experts.are_beside_mlp

    @cached_property
    def expert_counts(self) -> torch.Tensor:
        """int64 [layers, experts]: rows of each expert so far."""
        assert self._config.experts is not None
        shape = self._config.num_layers, self._config.experts.num_experts
        return torch.zeros(shape, dtype=torch.int64, device=self._platform.device)

    @cached_property
    def layer_vectors(self) -> LayerVectors | NoVectors:
        """Vectors of tokens for each layer; one object for all layers."""
        config = self._config
        if config.mixed is None or not config.mixed.input_size:
            return NoVectors()
        size = config.mixed.input_size
        self.check_unrounded("layer_projection")
        return LayerVectors(
            self._platform,
            Embedding(self._weights.table("layer_table"), scale=size**0.5),
            self._weights.linears["layer_projection"],
            self.norm("layer_projection_norm"),
            config.num_layers,
        )

    def layer_vector(self, i: int) -> LayerVector | None:
        """The reader of layer i's vectors; None: it has none."""
        vectors = self.layer_vectors
        if isinstance(vectors, NoVectors):
            return None
        prefix = f"layers.{i}."
        for name in ("vector_gate", "vector_projection"):
            self.check_unrounded(prefix + name)
        return LayerVector(
            self._platform,
            vectors,
            i,
            self._weights.linears[prefix + "vector_gate"],
            self._weights.linears[prefix + "vector_projection"],
            self.norm(prefix + "vector_norm"),
            self._config.activation,
        )

    def scalar(self, name: str) -> torch.Tensor:
        """[1], a factor of the residual stream."""
        return self._weights.tensors[name]

    def _table_of(self, i: int) -> torch.Tensor:
        config = self._config
        if config.is_rotary and not config.is_rotary[i]:
            return self._unrotated
        return self._local if config.local_rope_theta and config.window_of(i) else self._rotated

    @cached_property
    def _latent_mixers(self) -> LatentMixers:
        return LatentMixers(self._config, self._weights, self._platform, self._max_model_len)

    @cached_property
    def _rotated(self) -> torch.Tensor:
        config = self._config.of_global_layers
        return cos_sin_table(config, self._max_model_len).to(self._platform.device)

    @cached_property
    def _local(self) -> torch.Tensor:
        theta = self._config.local_rope_theta
        config = replace(self._config, rope_theta=theta, rope_scaling=None)
        return cos_sin_table(config, self._max_model_len).to(self._platform.device)

    @cached_property
    def _unrotated(self) -> torch.Tensor:
        return unrotated_table(self._config, self._max_model_len).to(self._platform.device)

    @cached_property
    def _no_factors(self) -> torch.Tensor:
        """float32 [head size]: factors of norms without any."""
        return torch.ones(self._config.head_dim, device=self._platform.device)

    def _query_scales_of(self, i: int) -> torch.Tensor | None:
        """Scale of layer i's queries by position; None: they are not scaled."""
        config = self._config
        if config.query_scale_beta:
            return self._query_scales
        is_unrotated = bool(config.is_rotary) and not config.is_rotary[i]
        return self._unrotated_scales if is_unrotated and config.unrotated_scale_beta else None

    @cached_property
    def _query_scales(self) -> torch.Tensor:
        config = self._config
        assert config.rope_scaling is not None
        original = config.rope_scaling["original_max_position_embeddings"]
        scales = query_scales(config.query_scale_beta, original, self._max_model_len)
        return scales.to(self._platform.device)

    @cached_property
    def _unrotated_scales(self) -> torch.Tensor:
        """Positions count from 1."""
        config = self._config
        growth = config.unrotated_scale_beta, config.unrotated_scale_length
        return query_scales(*growth, self._max_model_len + 1)[1:].to(self._platform.device)

    @property
    def _pairs(self) -> RotaryPairs | None:
        config = self._config
        width = config.rotary_dim or config.head_dim
        if width == config.head_dim and not config.is_interleaved:
            return None
        return RotaryPairs(width, config.is_interleaved)
