"""Random weights, for measuring models whose weights are not at hand."""

from __future__ import annotations

import zlib

import torch

from headwater.kernels.quant import mxfp4
from headwater.kernels.quant.byte_weights import Fp8Weight, Int8Weight
from headwater.kernels.quant.int4_layout import WORD, Int4Weight
from headwater.kernels.quant.mxfp4 import Mxfp4Weight, num_words

from .formats.fp8 import rounds_inputs
from .formats.packing import Packing, Quantization
from .grouped import named, num_groups
from .layout import Layout, WeightSpec
from .model_file import Tensors

DUMMIES = {"dummy": False, "dummy-uniform": True}
"""Names of random weights, and whether they are uniform."""
UNIFORM_SPREAD = 1e-3
"""Largest magnitude of uniform weights, as in vLLM's dummy loader. Multiplying such small numbers
takes less power: a GPU at its power limit is faster with them than with a trained model's, so
comparisons with such figures need the same weights."""
NORMAL_SPREAD = 0.02
MXFP4_SCALE = 120
"""2**-7: numbers of e2m1 spread as about 2.5."""
HEAD = "lm_head"
"""Never packed, nor are tensors outside the layers."""


def dummy(
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    *,
    uniform: bool = False,
    quantization: Quantization | None = None,
) -> Tensors:
    """Random weights of the right shapes: normal ones, scaled so that activations stay finite, with
    norms of one; or, with `uniform`, all weights uniform within `UNIFORM_SPREAD`, norms too. With a
    quantization, linear layers have random bits, packed as most of its layers are. A weight's
    values depend on its name only."""
    generator = torch.Generator(device)
    packing = None if quantization is None else quantization.rules[-1].packing
    tensors: Tensors = {}
    for name, spec in layout.items():
        if spec.tied_to:
            continue
        generator.manual_seed(seed + zlib.crc32(name.encode()))
        if packing is not None and _is_packed(name, spec, packing):
            tensors |= _packed(name, spec.shape, packing, device, generator)
            continue
        own_dtype = torch.float32 if spec.is_wide else dtype
        tensors[name] = tensor = torch.empty(spec.shape, dtype=own_dtype, device=device)
        if uniform:
            tensor.uniform_(-UNIFORM_SPREAD, UNIFORM_SPREAD, generator=generator)
        elif spec.is_norm:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0, NORMAL_SPREAD, generator=generator)
    return tensors


def _is_packed(name: str, spec: WeightSpec, packing: Packing) -> bool:
    """Whether a weight is packed: in MXFP4, weights of experts are."""
    is_wanted = packing.format != "mxfp4" or spec.num_experts > 0
    return is_wanted and spec.is_linear and name != HEAD and not spec.is_routing


def _packed(
    name: str,
    shape: tuple[int, ...],
    packing: Packing,
    device: torch.device,
    generator: torch.Generator,
) -> Tensors:
    """Symmetric weights, spread as about `NORMAL_SPREAD`."""
    n, k = shape
    of_groups = (
        num_groups(name, k, packing.group_size if packing.block is None else packing.block[1]),
        n,
    )
    if packing.format == "fp8":
        values = torch.randn(n, k, device=device, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.full(of_groups, NORMAL_SPREAD, device=device)
        rounds_tokens = rounds_inputs(packing, k, len(scales))
        return named(Fp8Weight(values=values, scales=scales, rounds_tokens=rounds_tokens), name)
    if packing.format == "mxfp4":
        words = torch.empty(n, num_words(k), dtype=torch.int32, device=device)
        words.random_(-(1 << 31), 1 << 31, generator=generator)
        scales = torch.full((k // mxfp4.BLOCK, n), MXFP4_SCALE, dtype=torch.uint8, device=device)
        return named(Mxfp4Weight(words=words, scales=scales), name)
    middle = 1 << packing.bits - 1
    # llm-compressor's scales have the model's dtype, those of other tools float16.
    dtype = torch.bfloat16 if packing.format == "pack_quantized" else torch.float16
    scales = torch.full(of_groups, 2 * NORMAL_SPREAD / middle, dtype=dtype, device=device)
    zeros = torch.full_like(scales, middle, dtype=torch.uint8)
    if packing.bits == 4:
        words = torch.empty(n, k // WORD, dtype=torch.int32, device=device)
        words.random_(-(1 << 31), 1 << 31, generator=generator)
        return named(Int4Weight(words=words, scales=scales, zeros=zeros), name)
    numbers = torch.empty(n, k, dtype=torch.uint8, device=device).random_(
        0, 256, generator=generator
    )
    weight = Int8Weight(
        values=numbers, scales=scales, zeros=zeros, rounds_tokens=packing.rounds_whole_tokens
    )
    return named(weight, name)
