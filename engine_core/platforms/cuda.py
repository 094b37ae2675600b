"""Operations on an NVIDIA GPU: the Triton kernels, and cuBLASLt where it is faster; what is chosen
is chosen here.

Every choice keeps a row's bits independent of its batch; see `kernels.gemm.gemm` and
`kernels.attention.online_softmax`.
"""

from __future__ import annotations

import torch

from headwater.kernels.adapters.row_additions import RowAdditions
from headwater.kernels.attention.gate_heads import gate_heads
from headwater.kernels.attention.qk_norm_rope_store_kv import qk_norm_rope_store_kv
from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.gemm.gemm import configure_blas
from headwater.kernels.norm import silu_mul
from headwater.kernels.norm.activation import ACTIVATIONS
from headwater.kernels.norm.rms_norm import (
    add_rms_norm,
    rms_norm,
    rounded_add_rms_norm,
    rounded_rms_norm,
)
from headwater.kernels.norm.row_sum import row_sum
from headwater.kernels.quant.token_rounding import RoundedTokens, Rounding

from ..config import EngineConfig
from ..layers.batch import ForwardBatch
from ..layers.linear.linear import Linear, Product, ProductPair
from ..sampling.operations import SamplingOperations
from ..weights.model_config import ModelConfig
from .cuda_attention import ANY_GPU, AttentionKernels, attention_kernels, given
from .cuda_attention_plans import AttentionPlan
from .cuda_experts import CudaMixtures
from .cuda_products import EARLY_ROWS, CudaProducts
from .cuda_sampling import CudaSampling
from .encoders.cuda import CudaTexts
from .latents.cuda import CudaLatents
from .latents.cuda_plans import plans_for
from .states.cuda import CudaStates


class CudaPlatform(RowAdditions, CudaTexts, CudaStates, CudaLatents, CudaMixtures):
    """See `Platform`. Holds the workspace of decode attention, so a platform object serves one
    stream of launches."""

    _products_class = CudaProducts

    def __init__(
        self,
        model: ModelConfig,
        block_size: int,
        *,
        max_decodes: int,
        max_model_len: int,
        device: torch.device,
        has_drafts: bool = False,
    ) -> None:
        """`has_drafts`: a sequence may have several decoding rows in a batch."""
        configure_blas()
        self.block_size = block_size
        self.has_drafts = has_drafts
        self.device = device
        self.sampling: SamplingOperations = CudaSampling()
        num_chosen = 0 if model.experts is None else model.experts.num_chosen
        self.products = self._products_class(device, num_chosen)
        self.mixtures = self.products.experts
        self.plans = plans_for(
            model,
            block_size,
            max_decodes=max_decodes,
            max_model_len=max_model_len,
            device=device,
        )
        # Scale of an fp8 cache for each head: it stores value / scale. Keys and values of the
        # models served lie well within the range of e4m3, whose precision is the same at every
        # scale.
        self._kv_scale = torch.ones(
            max(model.num_kv_heads, model.of_global_layers.num_kv_heads), device=device
        )
        self._is_mixed = model.mixed is not None
        self._window = model.window_mask
        self._attention_kernels: dict[tuple[object, ...], AttentionKernels] = {}
        """The table's rows by kind of queries, cache and layer."""

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig) -> CudaPlatform:
        return cls(
            model,
            config.block_size,
            max_decodes=config.max_positions,
            max_model_len=config.max_model_len,
            device=torch.device("cuda"),
            has_drafts=config.max_draft_tokens > 0,
        )

    def plan_attention(self, batch: ForwardBatch, *, of_ends: bool = False) -> AttentionPlan:
        return self.plans.of_batch(batch, of_ends=of_ends)

    def linear(self, linear: Linear) -> Product:
        return self.products.of(linear)

    def linear_pair(self, first: Linear, second: Linear) -> ProductPair:
        return self.products.pair(first, second)

    def gated_linear(self, linear: Linear, activation: str) -> Product | None:
        return self.products.gated(linear, activation)

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return silu_mul.GATES[activation](x, dependent=_is_early(x), early=self.products.are_early)

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return ACTIVATIONS[name](x)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps, dependent=_is_early(x), early=self.products.are_early)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return add_rms_norm(
            x, residual, weight, eps, dependent=_is_early(x), early=self.products.are_early
        )

    def row_sum(self, x: torch.Tensor) -> torch.Tensor:
        return row_sum(x)

    def rounded_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, rounds_to: Rounding
    ) -> RoundedTokens:
        return rounded_rms_norm(x, weight, eps, rounds_to, dependent=_is_early(x))

    def rounded_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        rounds_to: Rounding,
    ) -> RoundedTokens:
        return rounded_add_rms_norm(x, residual, weight, eps, rounds_to, dependent=_is_early(x))

    def rounded_gate(self, x: torch.Tensor, activation: str, rounds_to: Rounding) -> RoundedTokens:
        return silu_mul.rounded_mul(
            x, rounds_to, is_gelu=activation == "gelu_tanh", dependent=_is_early(x)
        )

    def qk_norm_rope_store_kv(
        self,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        pairs: RotaryPairs | None = None,
        has_gates: bool = False,
    ) -> torch.Tensor:
        num_kv_heads = kv_cache.shape[2]
        head_dim = kv_cache.shape[4]
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        q = qkv.new_empty(len(qkv), num_heads // 2 if has_gates else num_heads, head_dim)
        qk_norm_rope_store_kv(
            qkv,
            batch.positions,
            batch.slots,
            cos_sin,
            kv_cache[0],
            kv_cache[1],
            q,
            bias=bias,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            **self._scales(kv_cache),
            pairs=pairs,
            has_gates=has_gates,
            dependent=_is_early(qkv),
        )
        return q

    def gate_heads(self, attended: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return gate_heads(attended, gates, dependent=_is_early(attended))

    def attention(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        attention_plan: AttentionPlan,
        *,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert window in (0, self._window)
        plan = attention_plan
        n = attention_plan.num_decodes
        scales = self._scales(kv_cache)
        kernels = self._kernels_for(q, kv_cache[0], window, is_capped=bool(softcap))
        scored = given(softcap=softcap or None, sinks=sinks)
        out = torch.empty_like(q)
        if n:
            decode = plan.of_keys()[1 if window else 0]
            where = (
                kv_cache[0],
                kv_cache[1],
                plan.seq_lens,
                plan.table_rows,
                plan.block_tables,
                decode,
                out[:n],
            )
            if plan.shares and not window:
                kernels.shared(q[:n], *where, **scales, **scored, scale=scale)
            kernels.attend_decodes(
                q[:n],
                *where,
                k_scale=scales.get("k_scale"),
                v_scale=scales.get("v_scale"),
                scale=scale,
                window=window,
                sinks=sinks,
                softcap=softcap,
                dependent=plan.dependent or not decode.is_direct,
                early=self.products.are_early,
            )
        if len(plan.tiles):
            kernels.prefill(
                q,
                kv_cache[0],
                kv_cache[1],
                plan.query_starts,
                plan.chunk_lens,
                plan.chunk_rows,
                plan.block_tables,
                plan.tiles,
                out,
                **scales,
                **given(window=window or None),
                **given(tile_tokens=self.plans.tile_tokens if self._is_mixed else None),
                **scored,
                scale=scale,
            )
        return out.flatten(1)

    def _kernels_for(
        self, q: torch.Tensor, k_cache: torch.Tensor, window: int, *, is_capped: bool
    ) -> AttentionKernels:
        """The table's row, looked up once for each kind of queries, cache and layer."""
        of_cache = k_cache.dtype, k_cache.shape, k_cache.stride()
        kind = (q.dtype, q.shape[2], *of_cache, window, is_capped)
        found = self._attention_kernels.get(kind)
        if found is None:
            # Work lists and partial states are for one shape of heads.
            found = (
                ANY_GPU
                if self._is_mixed
                else attention_kernels(q, k_cache, window=window, is_capped=is_capped)
            )
            self._attention_kernels[kind] = found
        return found

    def _scales(self, kv_cache: torch.Tensor) -> dict[str, torch.Tensor]:
        """float32 [Hk] of keys and of values; none where what is stored is the value."""
        is_fp8 = kv_cache.dtype == torch.float8_e4m3fn
        scale = self._kv_scale[: kv_cache.shape[2]]
        return {"k_scale": scale, "v_scale": scale} if is_fp8 else {}


def _is_early(x: torch.Tensor) -> bool:
    return x.shape[0] <= EARLY_ROWS
