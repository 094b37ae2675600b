"""The forward pass of one decoding row on a GPU in five launches a layer, each of which starts while the one before it
ends. Other bits than `Decoder.forward`, and its layers. Knows nothing about requests or sampling."""

from __future__ import annotations

from typing import TypeGuard

import torch

from headwater.engine_core.layers.dense import DenseLinear
from headwater.engine_core.layers.linear import Linear
from headwater.engine_core.models.decoder import Decoder
from headwater.engine_core.models.model import Model
from headwater.kernels.rms_norm import rms_norm
from headwater.kernels.row_attention import RowWorkspace, row_attention
from headwater.kernels.row_embedding import row_embedding
from headwater.kernels.row_gemv import gemv_add, norm_gemv, norm_gemv_silu_mul


def serves(model: Model) -> TypeGuard[Decoder]:
    """Whether `OneRow` computes this model."""
    if not isinstance(model, Decoder):
        return False
    linears = [
        linear
        for layer in model.layers
        for linear in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down)
    ]
    return all(linear.kind == DenseLinear.kind for linear in linears)


class OneRow:
    """Holds its activations, so that it serves one stream of launches."""

    def __init__(self, decoder: Decoder, device: torch.device, kv_scale: torch.Tensor | None) -> None:
        """kv_scale float32 [Hk] of an fp8 cache."""
        config = decoder.config
        self._decoder, self._kv_scale = decoder, kv_scale

        def activation(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=decoder.dtype, device=device)

        self._residual, self._hidden = activation(config.hidden_size), activation(config.hidden_size)
        self._qkv = activation(config.qkv_size)
        self._attended = activation(config.num_heads * config.head_dim)
        self._gated = activation(config.intermediate_size)
        self._workspace = RowWorkspace.allocate(
            num_q_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, device=device
        )

    def forward(
        self,
        row: torch.Tensor,
        position: torch.Tensor,
        seq_len: torch.Tensor,
        token_table: torch.Tensor,
        block_tables: torch.Tensor,
        kv_cache: torch.Tensor,
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """Normed hidden state [1, H] of the token at `position` of a row of both tables, int32 [1] each; seq_len 0: of
        nobody, and nothing is written. kv_cache as `Decoder.forward`; with num_layers only the first so
        many, which launch what all do."""
        decoder, eps = self._decoder, self._decoder.config.rms_norm_eps
        residual, qkv, attended, product = self._residual, self._qkv, self._attended, self._gated
        # The only launch that waits for all before it: what a step finds is there when the others begin, however early.
        row_embedding(row, position, token_table, decoder.embedding.table, residual, releases=True)
        for layer, (k_cache, v_cache) in zip(decoder.layers[:num_layers], kv_cache, strict=False):
            attention, mlp = layer.attention, layer.mlp
            norm = layer.input_norm.weight
            norm_gemv(residual, norm, eps, _matrix(attention.qkv), qkv, bias=attention.qkv_bias, dependent=True)
            row_attention(
                qkv,
                seq_len,
                row,
                block_tables,
                decoder.cos_sin,
                k_cache,
                v_cache,
                self._workspace,
                attended,
                q_norm=attention.q_norm,
                k_norm=attention.k_norm,
                eps=eps,
                k_scale=self._kv_scale,
                v_scale=self._kv_scale,
                dependent=True,
            )
            gemv_add(attended, _matrix(attention.o), residual, dependent=True)
            norm = layer.post_norm.weight
            norm_gemv_silu_mul(residual, norm, eps, _matrix(mlp.gate_up), product, dependent=True)
            gemv_add(product, _matrix(mlp.down), residual, dependent=True)
        return rms_norm(residual[None], decoder.final_norm.weight, eps, self._hidden[None], dependent=True)


def _matrix(linear: Linear) -> torch.Tensor:
    assert isinstance(linear, DenseLinear)
    return linear.weight
