"""Operations on a CPU, in forms whose bits do not depend on what else is in the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.cpu import attention as attention_kernel
from headwater.kernels.cpu import (
    block_activations,
    block_linear,
    block_rows,
    fp8_linear,
    group_linear,
    tile_product,
)
from headwater.kernels.cpu import draw as draw_kernel
from headwater.kernels.cpu import qk_norm_rope_store_kv as qk_kernel
from headwater.kernels.cpu import rms_norm as norm_kernel
from headwater.kernels.cpu import row_weights as weights_kernel
from headwater.kernels.cpu import silu_mul as silu_kernel
from headwater.kernels.cpu.activation import activation
from headwater.kernels.cpu.attention import AttentionPlan, attention, plan_attention
from headwater.kernels.cpu.compiler.compiled import DTYPES, Kernel
from headwater.kernels.cpu.compiler.replay import walker
from headwater.kernels.cpu.qk_norm_rope_store_kv import qk_norm_rope_store_kv
from headwater.kernels.cpu.rms_norm import add_rms_norm, rms_norm
from headwater.kernels.cpu.row_stable_linear import (
    PACKED,
    PLAIN,
    Library,
    RowRule,
    row_rule,
    row_stable_linear,
)
from headwater.kernels.cpu.silu_mul import gelu_tanh_mul, silu_mul
from headwater.kernels.quant.block_formats import FORMATS
from headwater.kernels.quant.fp8_tiles import FP8_FORMATS
from headwater.kernels.quant.group_tiles import GROUP_FORMATS

from ..config import EngineConfig
from ..layers.batch import ForwardBatch
from ..layers.linear.blocks import BlockLinear, BlockTable
from ..layers.linear.dense import DenseLinear
from ..layers.linear.fp8_tiles import Fp8TileLinear
from ..layers.linear.group_tiles import TileLinear
from ..layers.linear.kinds import Weights
from ..layers.linear.linear import Linear, Product
from ..layers.linear.packed import PackedLinear
from ..layers.routing import ExpertProduct, ExpertStack, Router, Routes
from ..sampling.operations import SamplingOperations
from ..weights.model_config import ModelConfig
from . import cpu_experts
from .cpu_experts import CpuExperts, route
from .cpu_sampling import CpuSampling

CPU_DTYPES = DTYPES
"""Types of weights that a CPU serves."""
GATES = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


class CpuPlatform:
    """See `Platform`."""

    device = torch.device("cpu")
    sampling: SamplingOperations = CpuSampling()

    def __init__(self, model: ModelConfig, block_size: int) -> None:
        self._group = model.num_heads // model.num_kv_heads
        self._libraries: dict[str, Library] = {DenseLinear.kind: PLAIN, PackedLinear.kind: PACKED}
        self._row_rules: dict[tuple[str, torch.dtype, tuple[int, ...]], RowRule] = {}

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig) -> CpuPlatform:
        return cls(model, config.block_size)

    def prepare(self, weights: Weights, progress: Callable[[int, int], None]) -> None:
        """Does what the first step would otherwise wait for: kernels are loaded, products are
        probed."""
        dtype = weights.table("embed").dtype
        compile_kernels(dtype, progress, packed_kernels(weights))
        for linear in weights.linears.values():
            self.linear(linear)
        for stack in weights.experts.values():
            # All experts of a layer have the shape of the first.
            self.linear(stack.expert(0))

    def plan_attention(self, batch: ForwardBatch, *, of_ends: bool = False) -> AttentionPlan:
        return plan_attention(batch.starts, batch.counts, batch.block_tables, self._group)

    def linear(self, linear: Linear) -> Product:
        if isinstance(linear, BlockLinear):
            return block_linear.block_product(linear.parts)
        if isinstance(linear, TileLinear):
            return group_linear.group_product(linear.tiles)
        if isinstance(linear, Fp8TileLinear):
            return fp8_linear.fp8_product(linear.tiles)
        library = self._libraries.get(linear.kind)
        if library is None:
            return linear.product
        weight: torch.Tensor = linear.weight  # type: ignore[attr-defined]  # kinds of these libraries have one
        rule = self._row_rule(linear.kind, weight)

        def product(x: torch.Tensor) -> torch.Tensor:
            # The layer, not its weight: a packed one holds the memory that its weight is a view of.
            return row_stable_linear(x, linear.weight, rule, library)  # type: ignore[attr-defined]

        return product

    def gated_linear(self, linear: Linear, activation: str) -> None:
        """None: the product is long beside its gate."""

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        return GATES[activation](x)

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return activation(x, name)

    def route(self, logits: torch.Tensor, router: Router) -> Routes:
        return route(logits, router)

    def experts(self, gate_up: ExpertStack, down: ExpertStack, activation: str) -> ExpertProduct:
        return CpuExperts(gate_up, down, GATES[activation], self.linear)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return add_rms_norm(x, residual, weight, eps)

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
        return qk_norm_rope_store_kv(
            qkv,
            batch.positions,
            batch.slots,
            cos_sin,
            kv_cache,
            bias=bias,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            pairs=pairs,
        )

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
        scale = scale or q.shape[2] ** -0.5
        return attention(
            q, kv_cache, attention_plan, scale, window=window, softcap=softcap
        ).flatten(1)

    def _row_rule(self, kind: str, weight: torch.Tensor) -> RowRule:
        key = (kind, weight.dtype, tuple(weight.shape))
        if key not in self._row_rules:
            self._row_rules[key] = row_rule(
                weight.shape[0], weight.shape[1], weight.dtype, self._libraries[kind]
            )
        return self._row_rules[key]


def with_cpu_look_up(weights: Weights) -> Weights:
    """The weights, with the CPU's kernel for rows of tables that stay packed."""
    return weights.looked_up_by(BlockTable, block_rows.block_rows)


def packed_kernels(weights: Weights) -> list[Kernel]:
    """Kernels that multiply and look up these packed weights."""
    joined = (stack.linear for stack in weights.experts.values())
    linears = [*weights.linears.values(), *joined]
    tables = weights.tables.values()
    of_blocks = [
        part.format
        for linear in linears
        if isinstance(linear, BlockLinear)
        for part in linear.parts
    ]
    in_groups = [linear.tiles for linear in linears if isinstance(linear, TileLinear)]
    used = [tile_product.kernel_of(each) for each in of_blocks]
    used += [
        tile_product.kernel_of(each.format, rounds_tokens=each.rounds_tokens) for each in in_groups
    ]
    used += [block_rows.kernel_of(table.weight.format) for table in tables]
    if weights.experts:
        used += [*cpu_experts.KERNELS, *cpu_experts.kernels_of([*weights.experts.values()])]
    used += [
        tile_product.kernel_of(linear.tiles.format)
        for linear in linears
        if isinstance(linear, Fp8TileLinear)
    ]
    if of_blocks or not all(each.rounds_tokens for each in in_groups):
        used.append(block_activations.KERNEL)
    if any(each.rounds_tokens for each in in_groups):
        used.append(block_activations.TOKEN_KERNEL)
    return list(dict.fromkeys(used))


def _every_packed_kernel() -> list[Kernel]:
    """Kernels that multiply and look up packed weights of any format."""
    of_blocks = [
        kernel_of(each)
        for each in FORMATS.values()
        for kernel_of in (tile_product.kernel_of, block_rows.kernel_of)
    ]
    in_groups = [
        tile_product.kernel_of(each, rounds_tokens=rounds_tokens)
        for each in GROUP_FORMATS
        for rounds_tokens in (False, True)
    ]
    of_fp8 = [tile_product.kernel_of(each) for each in FP8_FORMATS]
    return [
        *of_blocks,
        *in_groups,
        *of_fp8,
        block_activations.KERNEL,
        block_activations.TOKEN_KERNEL,
    ]


def compile_kernels(
    dtype: torch.dtype, progress: Callable[[int, int], None], of_blocks: Sequence[Kernel] = ()
) -> None:
    """Compiles what most models of this type need, unless it was compiled before; the rest is
    compiled when an engine warms up. float16 is served on GPUs only."""
    modules = (attention_kernel, qk_kernel, norm_kernel, silu_kernel, draw_kernel, weights_kernel)
    kernels = [*(module.KERNEL for module in modules), *of_blocks]
    walker()
    for done, kernel in enumerate(kernels, start=1):
        if dtype in DTYPES:
            kernel.compile(dtype)
        progress(done, len(kernels))


def compile_for_every_model() -> Iterator[tuple[str, int, int]]:
    """(phase, done, total): compiles what models of each type that CPUs compute in need, packed
    weights included."""
    # Packed weights go with bfloat16 elsewhere in the model, unless --dtype says otherwise.
    for dtype, packed in ((torch.float32, []), (torch.bfloat16, _every_packed_kernel())):
        yield f"kernels for {str(dtype).removeprefix('torch.')}", 0, 1
        compile_kernels(dtype, lambda done, total: None, packed)
