"""Operations on an NVIDIA GPU: the Triton kernels, and cuBLASLt where it is faster; what is chosen
is chosen here.

Every choice keeps a row's bits independent of its batch; see `kernels.gemm.gemm` and
`kernels.attention.online_softmax`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from headwater.kernels.attention.decode_plan import DecodePlan, plan_decode
from headwater.kernels.attention.prefill_attention import list_tiles, tokens_per_tile
from headwater.kernels.attention.qk_norm_rope_store_kv import qk_norm_rope_store_kv
from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.gemm import product_probe
from headwater.kernels.gemm.gemm import configure_blas
from headwater.kernels.gemm.product_probe import Product as ProbedProduct
from headwater.kernels.gemm.wide_gemm import launch_all_tiles
from headwater.kernels.launch.device import kernel_cache_dir, upload
from headwater.kernels.norm.activation import ACTIVATIONS
from headwater.kernels.norm.rms_norm import (
    add_rms_norm,
    rms_norm,
    rounded_add_rms_norm,
    rounded_rms_norm,
)
from headwater.kernels.norm.silu_mul import gelu_tanh_mul, rounded_mul, silu_mul
from headwater.kernels.quant.token_rounding import RoundedTokens, Rounding

from ..config import EngineConfig
from ..executor import Int32Array
from ..layers.batch import ForwardBatch
from ..layers.linear.dense import DenseLinear
from ..layers.linear.int4 import Int4Linear
from ..layers.linear.kinds import Weights
from ..layers.linear.linear import Linear, Product
from ..layers.linear.ordered import OrderedLinear
from ..layers.linear.planes import PlanesLinear
from ..layers.linear.rounded import RoundedLinear
from ..layers.routing import ExpertProduct, ExpertStack, Router, Routes
from ..sampling.operations import SamplingOperations
from ..weights.model_config import ModelConfig
from .cuda_attention import AttentionKernels, attention_kernels, given
from .cuda_experts import CudaExperts
from .cuda_packed import (
    expanded_product,
    expander,
    is_expanded,
    is_packed,
    launch_planes,
    launch_rounded,
    packed_product,
    rounded_product,
)
from .cuda_sampling import CudaSampling
from .dense_products import (
    ProductChoice,
    dense_matrices,
    dense_product,
    dense_silu_product,
    matrix_of,
)
from .product_verdicts import ProductVerdicts, own_products

DEPENDENT_ROWS = 8
"""Up to this many tokens attention of a few rows starts while the kernel before it ends."""
EARLY_ROWS = 512
"""Up to this many tokens everything else does, but cuBLASLt's products; of more it is a loss."""
GATES = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}
SHARING_ROWS = 8
"""From this many decoding rows on, plans look for blocks that rows share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """The first tokens of a batch decode, one a request; the others are chunks of any size. Tensors
    are on the device.

    A plan of fixed size serves many steps: a decode of length 0 and a tile of a negative chunk are
    nobody's, and the tokens that they name are left to others.
    """

    num_decodes: int
    seq_lens: torch.Tensor
    """int32 [num_decodes]: keys that each reads, its own included."""
    table_rows: torch.Tensor
    """int32 [num_decodes] into block_tables."""
    block_tables: torch.Tensor
    """int32 [rows, blocks]"""
    decode: DecodePlan
    windowed: DecodePlan
    """As `decode`, of layers with a sliding window."""
    shares: bool
    chunk_lens: torch.Tensor
    """int32 [chunks]: keys that the last token of each reads."""
    chunk_rows: torch.Tensor
    """int32 [chunks] into block_tables."""
    query_starts: torch.Tensor
    """int32 [chunks + 1] into the tokens of the batch."""
    tiles: torch.Tensor
    """int32 [tiles, 2] of the chunks, as `list_tiles` makes them."""
    dependent: bool


class CudaPlatform:
    """See `Platform`. Holds the workspace of decode attention, so one platform serves one stream of
    launches."""

    def __init__(
        self,
        model: ModelConfig,
        block_size: int,
        *,
        max_decodes: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        configure_blas()
        self.device = device
        self.sampling: SamplingOperations = CudaSampling()
        self._block_size = block_size
        # Scale of an fp8 cache for each head: it stores value / scale. Keys and values of the
        # models served lie well within the range of e4m3, whose precision is the same at every
        # scale.
        self._kv_scale = torch.ones(model.num_kv_heads, device=device)
        self._tokens_per_tile = tokens_per_tile(model.num_heads // model.num_kv_heads, device)
        self._decode_plans = [
            DecodePlan.allocate(
                max_rows=max_rows,
                max_seq_len=max_model_len,
                num_q_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                device=device,
                fold=True,
            )
            for max_rows in sorted({1, max_decodes})
        ]
        self._ends_plan = self._decode_plans[-1].beside()
        self._window = model.sliding_window
        # Without a window nobody asks for these.
        self._windowed_plans = [
            plan.without_folds().beside() if self._window else plan for plan in self._decode_plans
        ]
        self._windowed_ends_plan = (
            self._ends_plan.without_folds().beside() if self._window else self._ends_plan
        )
        self._early = False
        """Whether products of few tokens fill rings with weights before their tokens are there."""
        self._attention_kernels: dict[tuple[object, ...], AttentionKernels] = {}
        """The table's rows by kind of queries, cache and layer."""
        self._choices: dict[ProbedProduct, ProductChoice] = {}
        self._products: dict[str, Callable[[Linear], Product]] = {
            DenseLinear.kind: self._dense,
            Int4Linear.kind: self._packed,
            OrderedLinear.kind: self._packed,
            PlanesLinear.kind: self._packed,
            RoundedLinear.kind: partial(rounded_product, early_rows=EARLY_ROWS),
        }
        self._experts = CudaExperts(EARLY_ROWS)
        self._num_chosen = 0 if model.experts is None else model.experts.num_chosen
        self._gated_products = {(DenseLinear.kind, "silu"): self._dense_silu}

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig) -> CudaPlatform:
        return cls(
            model,
            config.block_size,
            max_decodes=config.max_positions,
            max_model_len=config.max_model_len,
            device=torch.device("cuda"),
        )

    @property
    def own_products(self) -> frozenset[ProbedProduct]:
        """Products that the library makes with other bits, see `prepare`, and those of expanded
        matrices."""
        return frozenset(product for product, choice in self._choices.items() if choice.is_own)

    def prepare(
        self, weights: Weights, row_counts: Sequence[int], head_row_counts: Sequence[int]
    ) -> None:
        """Probes products of these weights with so many rows, where this machine has not done so
        before: what the library makes with other bits than our kernels is made by ours from now on,
        also by layers that are there."""
        dense = dense_matrices(weights)
        products = {name: ProbedProduct.of(weight) for name, weight in dense.items()}
        counts = {
            product: head_row_counts for name, product in products.items() if name == "lm_head"
        }
        counts |= {product: row_counts for name, product in products.items() if name != "lm_head"}
        verdicts = ProductVerdicts(
            kernel_cache_dir() / "products", product_probe.facts(self.device)
        )
        matrices = {products[name]: weight for name, weight in dense.items()}
        probe = partial(product_probe.differing, device=self.device, weights=matrices)
        for product in own_products(counts, verdicts, probe):
            self._choice(product).is_own = True
        # Nothing was compared of what is no linear layer's: routers that keep float32.
        for product in self._choices.keys() - counts.keys():
            self._choice(product).is_own = True
        torch.cuda.empty_cache()

    def probes(self, weights: Weights) -> bool:
        """Whether `prepare` has products of these weights to compare."""
        return bool(dense_matrices(weights))

    def launch_probe(self, weights: Weights) -> None:
        """Once with each kernel that `prepare` compares with."""
        for weight in {
            weight.dtype: weight for weight in dense_matrices(weights).values()
        }.values():
            product_probe.launch_reference(weight)

    def launch_own_products(self, weights: Weights) -> None:
        """Once with all kernels that serve where the library does not, so that no step compiles
        them."""
        dense = {ProbedProduct.of(weight): weight for weight in dense_matrices(weights).values()}
        expanders = {
            expanded_product(each): expander(each)
            for each in weights.linears.values()
            if is_packed(each)
        }
        for product in self.own_products:
            if product in dense:
                launch_all_tiles(dense[product])
            elif product in expanders:
                launch_all_tiles(expanders[product]())
        launch_planes(weights.linears.values(), EARLY_ROWS)
        launch_rounded(weights.linears.values())
        if weights.experts:
            self._experts.launch_all(self._num_chosen)

    def decode_plan(self, num_rows: int, *, folds: bool = False) -> DecodePlan:
        """The workspace for this many decoding rows: a single row has one of its own, which needs
        no work list. With `folds`, first splits are folded: of rows that share nothing."""
        plan = next(plan for plan in self._decode_plans if num_rows <= plan.max_rows)
        return plan if folds else plan.without_folds()

    def windowed_plan(self, num_rows: int) -> DecodePlan:
        """As `decode_plan`, for layers with a sliding window."""
        return next(plan for plan in self._windowed_plans if num_rows <= plan.max_rows)

    def plan_attention(self, batch: ForwardBatch, *, of_ends: bool = False) -> AttentionPlan:
        """Rows of one token at the front of the batch take the decode kernels; one elsewhere is a
        chunk of one."""
        if of_ends:
            lens = self._to_device(batch.starts + 1)
            rows = self._to_device(np.arange(len(batch.starts)))
            return self.plan_ends(lens, rows, batch.block_tables, shares=len(rows) >= SHARING_ROWS)
        longer = np.flatnonzero(batch.counts != 1)
        n = int(longer[0]) if len(longer) else len(batch.counts)
        seq_lens = batch.starts + batch.counts
        table_rows = np.arange(len(batch.counts))
        plan = AttentionPlan(
            num_decodes=n,
            seq_lens=self._to_device(seq_lens[:n]),
            table_rows=self._to_device(table_rows[:n]),
            block_tables=batch.block_tables,
            decode=self.decode_plan(n),
            windowed=self.windowed_plan(n),
            shares=n >= SHARING_ROWS,
            chunk_lens=self._to_device(seq_lens[n:]),
            chunk_rows=self._to_device(table_rows[n:]),
            query_starts=self._to_device(n + np.concatenate(([0], np.cumsum(batch.counts[n:])))),
            tiles=self._to_device(self.list_tiles(batch.counts[n:], batch.starts[n:])),
            dependent=len(batch.token_ids) <= DEPENDENT_ROWS,
        )
        self.refresh(plan)
        return plan

    def plan_ends(
        self,
        seq_lens: torch.Tensor,
        table_rows: torch.Tensor,
        block_tables: torch.Tensor,
        *,
        shares: bool,
        folds: bool = False,
    ) -> AttentionPlan:
        """Plan of the last layer, where every row that is looked at decodes; beside that of the
        other layers."""
        nothing = seq_lens[:0]
        plan = AttentionPlan(
            num_decodes=len(seq_lens),
            seq_lens=seq_lens,
            table_rows=table_rows,
            block_tables=block_tables,
            decode=self._ends_plan if folds else self._ends_plan.without_folds(),
            windowed=self._windowed_ends_plan,
            shares=shares,
            chunk_lens=nothing,
            chunk_rows=nothing,
            query_starts=nothing,
            tiles=nothing.view(-1, 2),
            dependent=False,
        )
        self.refresh(plan)
        return plan

    def list_tiles(self, counts: Int32Array, starts: Int32Array) -> Int32Array:
        """The work list of prompt chunks, on the host: [tiles, 2]."""
        return list_tiles(counts, starts, self._tokens_per_tile)

    def max_tiles(self, num_tokens: int, num_chunks: int) -> int:
        """The longest work list of so many chunks with so many tokens in all."""
        return num_tokens // self._tokens_per_tile + num_chunks

    def refresh(self, plan: AttentionPlan) -> None:
        """Launches what follows a change of lengths or block tables; in a graph, it goes before the
        first layer."""
        n = plan.num_decodes
        if n and not plan.decode.is_direct:
            where = plan.seq_lens, plan.table_rows, plan.block_tables, self._block_size
            plan_decode(plan.decode, *where, share=plan.shares)
            if self._window:
                plan_decode(plan.windowed, *where, share=False, window=self._window)

    def linear(self, linear: Linear) -> Product:
        make = self._products.get(linear.kind)
        return linear.product if make is None else make(linear)

    def gated_linear(self, linear: Linear, activation: str) -> Product | None:
        make = self._gated_products.get((linear.kind, activation))
        return None if make is None else make(linear)

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return GATES[activation](x, dependent=_is_early(x), early=self._early)

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return ACTIVATIONS[name](x)

    def route(self, logits: torch.Tensor, router: Router) -> Routes:
        return self._experts.route(logits, router)

    def experts(self, gate_up: ExpertStack, down: ExpertStack, activation: str) -> ExpertProduct:
        return self._experts.product(gate_up, down, activation)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps, dependent=_is_early(x), early=self._early)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return add_rms_norm(x, residual, weight, eps, dependent=_is_early(x), early=self._early)

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
        return rounded_mul(x, rounds_to, is_gelu=activation == "gelu_tanh", dependent=_is_early(x))

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
    ) -> torch.Tensor:
        num_kv_heads = kv_cache.shape[2]
        head_dim = kv_cache.shape[4]
        q = qkv.new_empty(qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads, head_dim)
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
            dependent=_is_early(qkv),
        )
        return q

    def attention(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        attention_plan: AttentionPlan,
        *,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        assert window in (0, self._window)
        assert not softcap
        plan = attention_plan
        n = attention_plan.num_decodes
        scales = self._scales(kv_cache)
        kernels = self._kernels_for(q, kv_cache[0], window)
        out = torch.empty_like(q)
        if n:
            decode = plan.windowed if window else plan.decode
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
                kernels.shared(q[:n], *where, **scales, scale=scale)
            kernels.attend_decodes(
                q[:n],
                *where,
                k_scale=scales.get("k_scale"),
                v_scale=scales.get("v_scale"),
                scale=scale,
                window=window,
                dependent=plan.dependent or not decode.is_direct,
                early=self._early,
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
                scale=scale,
            )
        return out.flatten(1)

    def _kernels_for(self, q: torch.Tensor, k_cache: torch.Tensor, window: int) -> AttentionKernels:
        """The table's row, looked up once for each kind of queries, cache and layer."""
        kind = (q.dtype, q.shape[2], k_cache.dtype, k_cache.shape, k_cache.stride(), window)
        found = self._attention_kernels.get(kind)
        if found is None:
            found = attention_kernels(q, k_cache, window=window)
            self._attention_kernels[kind] = found
        return found

    def _scales(self, kv_cache: torch.Tensor) -> dict[str, torch.Tensor]:
        """float32 [Hk] of keys and of values; none where what is stored is the value."""
        is_fp8 = kv_cache.dtype == torch.float8_e4m3fn
        return {"k_scale": self._kv_scale, "v_scale": self._kv_scale} if is_fp8 else {}

    def _dense(self, linear: Linear) -> Product:
        weight = matrix_of(linear)
        return dense_product(weight, self._choice(ProbedProduct.of(weight)), EARLY_ROWS)

    def _dense_silu(self, linear: Linear) -> Product:
        weight = matrix_of(linear)
        return dense_silu_product(weight, self._choice(ProbedProduct.of(weight)), EARLY_ROWS)

    def _packed(self, linear: Linear) -> Product:
        assert is_packed(linear)
        self._early = True
        # Only our kernels multiply the matrix that many rows are worth, so that there is nothing to
        # probe.
        if is_expanded(linear):
            self._choice(expanded_product(linear)).is_own = True
        return packed_product(linear, EARLY_ROWS)

    def _choice(self, product: ProbedProduct) -> ProductChoice:
        return self._choices.setdefault(product, ProductChoice())

    def _to_device(self, values: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> torch.Tensor:
        return upload(values.astype(np.int32), self.device)


def _is_early(x: torch.Tensor) -> bool:
    return x.shape[0] <= EARLY_ROWS
