"""Grouped-query attention over the KV cache, with rotary positions. Sources: Vaswani et al., 2017;
Ainslie et al., 2023."""

from __future__ import annotations

from typing import Any

import torch

from headwater.kernels.attention.rotary_pairs import RotaryPairs

from ..batch import ForwardBatch
from ..linear.linear import Linear, Tokens
from ..platform import Platform
from ..projection_norms import PaddedHeads, ProjectionNorms


class Attention:
    """Attention in two calls, so that a model's last layer can skip queries whose results are not
    needed."""

    def __init__(
        self,
        platform: Platform,
        qkv: Linear,
        o: Linear,
        cos_sin: torch.Tensor,
        *,
        qkv_bias: torch.Tensor | None = None,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        pairs: RotaryPairs | None = None,
        norms: ProjectionNorms | None = None,
        writes: bool = True,
        query_scales: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """qkv [(Hq + 2 Hk) D, H] makes queries, keys and values, or what `norms` makes these of; o
        [H, Hq D], D without the zeros of padded values; cos_sin as `rope.cos_sin_table` makes it;
        bias [(Hq + 2 Hk) D]; q_norm and k_norm [D] of each query and key head; scale,
        window, softcap and sinks as in `Platform.attention`; pairs as in
        `Platform.qk_norm_rope_store_kv`; query_scales float32 [positions]. Without `writes` qkv
        [Hq D, H] makes queries alone, and the cache is another layer's."""
        self.qkv = qkv
        self.o = o
        self.qkv_bias = qkv_bias
        self.q_norm = q_norm
        self.k_norm = k_norm
        self._platform = platform
        self._cos_sin = cos_sin
        self._eps = eps
        self._scored: dict[str, Any] = {"scale": scale, "window": window}
        if softcap:
            self._scored["softcap"] = softcap
        if sinks is not None:
            self._scored["sinks"] = sinks
        self._rotated: dict[str, Any] = {} if pairs is None else {"pairs": pairs}
        self._norms = norms
        self._writes = writes
        self._query_scales = query_scales
        self._qkv = platform.linear(qkv)
        self._o = platform.linear(o)

    def queries(self, x: Tokens, batch: ForwardBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, Hq, D]; keys and values go to the layer's kv_cache [2, num_blocks, Hk,
        block_size, D]."""
        return self.stored(self.product(x), batch, kv_cache)

    def attend(
        self, queries: torch.Tensor, kv_cache: torch.Tensor, attention_plan: Any
    ) -> torch.Tensor:
        """queries [E, Hq, D] of the tokens in the plan → [E, H]"""
        return self.projected(self.attended(queries, kv_cache, attention_plan))

    def product(self, x: Tokens) -> torch.Tensor:
        """x [T, H] → queries, keys and values [T, (Hq + 2 Hk) D]"""
        return self._qkv(x)

    def stored(
        self, qkv: torch.Tensor, batch: ForwardBatch, kv_cache: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Like `queries`, for qkv [T, (Hq + 2 Hk) D]; options of the platform's operation."""
        queries = self._platform.qk_norm_rope_store_kv(
            qkv if self._norms is None else self._norms(qkv),
            batch,
            self._cos_sin,
            # A layer without keys and values of its own stores none: the view has no heads.
            kv_cache if self._writes else kv_cache[:, :, :0],
            bias=self.qkv_bias,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self._eps,
            **self._rotated,
            **options,
        )
        if self._query_scales is None:
            return queries
        return (queries * self._query_scales[batch.positions].view(-1, 1, 1)).to(queries.dtype)

    def attended(
        self, queries: torch.Tensor, kv_cache: torch.Tensor, attention_plan: Any
    ) -> torch.Tensor:
        """queries [E, Hq, D] → [E, Hq D], D without the zeros of padded values"""
        out = self._platform.attention(queries, kv_cache, attention_plan, **self._scored)
        return self._norms.cut(out) if isinstance(self._norms, PaddedHeads) else out

    def projected(self, attended: torch.Tensor) -> torch.Tensor:
        """attended [E, Hq D], as `attended` returns it → [E, H]"""
        return self._o(attended)

    def kept(self, queries: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The queries of some tokens alone, integers [E]."""
        return queries.index_select(0, tokens)
