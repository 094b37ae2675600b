"""Kernels that a CPU's steps launch, compiled or loaded ahead of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from headwater.kernels.cpu import attention as attention_kernel
from headwater.kernels.cpu import block_activations, block_rows, tile_kernel
from headwater.kernels.cpu import qk_norm_rope_store_kv as qk_kernel
from headwater.kernels.cpu import rms_norm as norm_kernel
from headwater.kernels.cpu import row_weights as weights_kernel
from headwater.kernels.cpu import silu_mul as silu_kernel
from headwater.kernels.cpu.compiler.compiled import DTYPES, Kernel
from headwater.kernels.cpu.compiler.replay import walker
from headwater.kernels.cpu.delta import delta_net as delta_kernel
from headwater.kernels.cpu.encoders import add_layer_norm as layer_norm_kernel
from headwater.kernels.cpu.encoders import mutual_attention as text_attention
from headwater.kernels.cpu.sampling import draw_candidates as draw_kernel
from headwater.kernels.cpu.states import mamba as mamba_kernel
from headwater.kernels.cpu.states import short_conv as conv_kernel
from headwater.kernels.quant.block_formats import FORMATS
from headwater.kernels.quant.fp8_tiles import FP8_FORMATS
from headwater.kernels.quant.group_tiles import GROUP_FORMATS

from ..layers.linear.blocks import BlockLinear, BlockTable
from ..layers.linear.fp8_tiles import Fp8TileLinear
from ..layers.linear.group_tiles import TileLinear
from ..layers.linear.kinds import Weights
from ..weights.model_config import ModelConfig
from . import cpu_experts
from .latents.cpu import INDEX_KERNELS, LATENT_KERNELS


def packed_kernels(weights: Weights, of_layers: Sequence[Kernel] = ()) -> list[Kernel]:
    """Kernels that multiply and look up these packed weights, and kernels of other layers."""
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
    used = [tile_kernel.kernel_of(each) for each in of_blocks]
    used += [
        tile_kernel.kernel_of(each.format, rounds_tokens=each.rounds_tokens) for each in in_groups
    ]
    used += [block_rows.kernel_of(table.weight.format) for table in tables]
    if weights.experts:
        used += [*cpu_experts.KERNELS, *cpu_experts.kernels_of([*weights.experts.values()])]
    used += [
        tile_kernel.kernel_of(linear.tiles.format)
        for linear in linears
        if isinstance(linear, Fp8TileLinear)
    ]
    if of_blocks or not all(each.rounds_tokens for each in in_groups):
        used.append(block_activations.KERNEL)
    if any(each.rounds_tokens for each in in_groups):
        used.append(block_activations.TOKEN_KERNEL)
    return list(dict.fromkeys([*used, *of_layers]))


def with_cpu_look_up(weights: Weights) -> Weights:
    """The weights, with the CPU's kernel for rows of tables that stay packed."""
    return weights.looked_up_by(BlockTable, block_rows.block_rows)


def layer_kernels(model: ModelConfig) -> list[Kernel]:
    """Kernels of a model's state layers, of latent attention and of an encoder's norms and
    attention."""
    kernels = (
        (model.encoder, (layer_norm_kernel.KERNEL, text_attention.kernel())),
        (model.delta, (delta_kernel.KERNEL,)),
        (model.conv, (conv_kernel.KERNEL,)),
        (model.mamba, (mamba_kernel.KERNEL,)),
        (model.latent, LATENT_KERNELS),
        (model.index, INDEX_KERNELS),
    )
    return [kernel for config, own in kernels if config is not None for kernel in own]


def _every_packed_kernel() -> list[Kernel]:
    """Kernels that multiply and look up packed weights of any format."""
    of_blocks = [
        kernel_of(each)
        for each in FORMATS.values()
        for kernel_of in (tile_kernel.kernel_of, block_rows.kernel_of)
    ]
    in_groups = [
        tile_kernel.kernel_of(each, rounds_tokens=rounds_tokens)
        for each in GROUP_FORMATS
        for rounds_tokens in (False, True)
    ]
    of_fp8 = [tile_kernel.kernel_of(each) for each in FP8_FORMATS]
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
