"""Small checkpoints of eight bits as published tools write them, and those of compressed-tensors of
four.

Written here from the definitions of the formats, number by number; the code under test is not
asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tests.engine_core.packed_checkpoint import Form, Integers

FP8 = torch.float8_e4m3fn


@dataclass(slots=True)
class IntMatrix:
    """Random integers [N, K] with scales and zero points [N, groups]: a weight is (q - zero) *
    scale."""

    bits: int
    q: Integers
    """As stored without sign."""
    zeros: Integers
    scales: torch.Tensor
    of_inputs: Integers

    @classmethod
    def random(
        cls,
        layer: str,
        n: int,
        k: int,
        rng: np.random.Generator,
        *,
        bits: int = 8,
        group_size: int = -1,
        symmetric: bool = True,
        act_order: bool = False,
        scale_dtype: torch.dtype = torch.float16,
    ) -> IntMatrix:
        size = k if group_size == -1 else group_size
        most = 1 << bits
        zeros = (
            np.full((n, k // size), most // 2)
            if symmetric
            else rng.integers(0, most, (n, k // size))
        )
        scales = torch.from_numpy(rng.uniform(0.3, 0.9, (n, k // size)) / most).to(scale_dtype)
        of_inputs = np.arange(k) // size
        if act_order:
            # Projections that read the same inputs have one order.
            of_inputs = np.random.default_rng(k).permutation(of_inputs)
        return cls(bits, rng.integers(0, most, (n, k)), zeros, scales, of_inputs)

    def expanded(self) -> torch.Tensor:
        """float64 [N, K]"""
        zeros = self.zeros[:, self.of_inputs]
        scales = self.scales.double().numpy()[:, self.of_inputs]
        return torch.from_numpy((self.q - zeros) * scales)


def words_of(values: Integers, axis: int, bits: int) -> torch.Tensor:
    """32 / bits numbers of an axis in an int32, the first in the lowest bits; zeros fill the last
    one."""
    count = 32 // bits
    moved = np.moveaxis(values, axis, -1)
    moved = np.pad(moved, [*[(0, 0)] * (moved.ndim - 1), (0, -moved.shape[-1] % count)])
    parts = moved.reshape(*moved.shape[:-1], -1, count)
    words = sum(parts[..., i] << bits * i for i in range(count))
    return torch.from_numpy(
        np.ascontiguousarray(np.moveaxis(words, -1, axis)).astype(np.uint32).view(np.int32)
    )


def gptq_tensors(matrix: IntMatrix, zero_offset: int) -> dict[str, torch.Tensor]:
    zeros = (matrix.zeros.T - zero_offset) % (1 << matrix.bits)
    return {
        "qweight": words_of(matrix.q.T, 0, matrix.bits),
        "qzeros": words_of(zeros, 1, matrix.bits),
        "scales": matrix.scales.t(),
        "g_idx": torch.from_numpy(matrix.of_inputs).int(),
    }


def pack_quantized_tensors(matrix: IntMatrix) -> dict[str, torch.Tensor]:
    tensors = {
        "weight_packed": words_of(matrix.q, 1, matrix.bits),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.q.shape),
    }
    if (matrix.zeros != 1 << matrix.bits - 1).any():
        tensors["weight_zero_point"] = words_of(matrix.zeros, 0, matrix.bits)
    if (np.diff(matrix.of_inputs) < 0).any():
        tensors["weight_g_idx"] = torch.from_numpy(matrix.of_inputs).int()
    return tensors


def int_quantized_tensors(
    matrix: IntMatrix, *, has_static_activations: bool = False
) -> dict[str, torch.Tensor]:
    middle = 1 << matrix.bits - 1
    tensors = {
        "weight": torch.from_numpy(matrix.q - middle).to(torch.int8),
        "weight_scale": matrix.scales,
    }
    if (matrix.zeros != middle).any():
        tensors["weight_zero_point"] = torch.from_numpy(matrix.zeros - middle).to(torch.int8)
    if has_static_activations:
        tensors |= {
            "input_scale": torch.tensor([0.04]),
            "input_zero_point": torch.zeros(1, dtype=torch.int8),
        }
    return tensors


@dataclass(slots=True)
class Fp8Matrix:
    """Random numbers [N, K] of eight bits, with scales of blocks of (outputs, inputs)."""

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    @classmethod
    def random(
        cls,
        layer: str,
        n: int,
        k: int,
        rng: np.random.Generator,
        *,
        block: tuple[int, int],
        **more: Any,
    ) -> Fp8Matrix:
        """A block's size of 0 is all of an axis."""
        outputs = block[0] or n
        inputs = block[1] or k
        values = torch.from_numpy(rng.normal(0, 40, (n, k))).clamp(-448, 448).to(FP8)
        shape = -(-n // outputs), -(-k // inputs)
        scales = torch.from_numpy(rng.uniform(0.003, 0.009, shape)).to(
            more.get("scale_dtype", torch.float32)
        )
        return cls(values, scales, (outputs, inputs))

    def expanded(self) -> torch.Tensor:
        """float64 [N, K]: the product of two float32 numbers that is rounded once more is what
        tools compute too."""
        n, k = self.values.shape
        outputs = torch.arange(n) // self.block[0]
        inputs = torch.arange(k) // self.block[1]
        return (self.values.float() * self.scales.float()[outputs][:, inputs]).double()


def fp8_tensors(
    matrix: Fp8Matrix, *, scale: str = "weight_scale", **more: torch.Tensor
) -> dict[str, torch.Tensor]:
    scales = (
        matrix.scales.reshape(())
        if matrix.scales.numel() == 1 and scale == "weight_scale"
        else matrix.scales
    )
    return {"weight": matrix.values, scale: scales, **more}


def _gptq(
    zero_offset: int = 1, *, act_order: bool = False, symmetric: bool = True, **more: Any
) -> Form:
    size = more.pop("group_size", 32)
    config = {
        "quant_method": "gptq",
        "bits": 8,
        "group_size": size,
        "desc_act": act_order,
        "sym": symmetric,
    }
    make = partial(IntMatrix.random, group_size=size, symmetric=symmetric, act_order=act_order)
    return Form(
        config=config | more, write=lambda matrix: gptq_tensors(matrix, zero_offset), make=make
    )


def scheme(
    bits: int,
    strategy: str,
    *,
    activations: dict[str, Any] | None = None,
    targets: tuple[str, ...] = ("Linear",),
    **more: Any,
) -> dict[str, Any]:
    """A group of layers, as compressed-tensors writes it."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    } | more
    return {
        "targets": list(targets),
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }


def compressed(format: str, *groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
    } | more


INT8_TOKENS = {
    "num_bits": 8,
    "type": "int",
    "strategy": "token",
    "symmetric": True,
    "dynamic": True,
}
INT8_STATIC = {
    "num_bits": 8,
    "type": "int",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
FP8_TOKENS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "token",
    "symmetric": True,
    "dynamic": True,
}


def _ints(
    config: dict[str, Any], write: Callable[[Any], dict[str, torch.Tensor]], **make: Any
) -> Form:
    return Form(config=config, write=write, make=partial(IntMatrix.random, **make))


def _fp8s(
    config: dict[str, Any],
    write: Callable[[Any], dict[str, torch.Tensor]],
    block: tuple[int, int],
    **more: Any,
) -> Form:
    return Form(config=config, write=write, make=partial(Fp8Matrix.random, block=block, **more))


def _mixed(layer: str, n: int, k: int, rng: np.random.Generator) -> IntMatrix:
    """Values of attention in 8 bits, its outputs in 8 bits and one group, the others in 4."""
    if "v_proj" in layer:
        return IntMatrix.random(layer, n, k, rng, bits=8, group_size=32)
    if "o_proj" in layer:
        return IntMatrix.random(layer, n, k, rng, bits=8)
    return IntMatrix.random(layer, n, k, rng, bits=4, group_size=32)


BYTE_FORMS = {
    "gptq of 8 bits": _gptq(),
    "gptq of 8 bits, not symmetric, in act order": _gptq(act_order=True, symmetric=False),
    "gptq of 8 bits, version 2, in one group": _gptq(0, checkpoint_format="gptq_v2", group_size=-1),
    "auto-round of 8 bits": Form(
        config={
            "quant_method": "auto-round",
            "bits": 8,
            "group_size": 32,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
        },
        write=lambda matrix: gptq_tensors(matrix, 1),
        make=partial(IntMatrix.random, group_size=32),
    ),
    "pack-quantized, 4 bits": _ints(
        compressed("pack-quantized", scheme(4, "group", group_size=32)),
        pack_quantized_tensors,
        bits=4,
        group_size=32,
    ),
    "pack-quantized, 4 bits, not symmetric, ordered": _ints(
        compressed(
            "pack-quantized", scheme(4, "group", group_size=32, symmetric=False, actorder="group")
        ),
        pack_quantized_tensors,
        bits=4,
        group_size=32,
        symmetric=False,
        act_order=True,
    ),
    "pack-quantized, 8 bits, a channel a group": _ints(
        compressed("pack-quantized", scheme(8, "channel")),
        pack_quantized_tensors,
        scale_dtype=torch.bfloat16,
    ),
    "pack-quantized, mixed by layer": Form(
        config=compressed(
            "pack-quantized",
            scheme(4, "group", group_size=32),
            scheme(8, "group", group_size=32, targets=("re:.*v_proj$",)),
            scheme(
                8, "channel", targets=tuple(f"model.layers.{i}.self_attn.o_proj" for i in range(3))
            ),
        ),
        write=pack_quantized_tensors,
        make=_mixed,
    ),
    "int-quantized, weights alone": _ints(
        compressed("int-quantized", scheme(8, "group", group_size=64, symmetric=False)),
        int_quantized_tensors,
        group_size=64,
        symmetric=False,
    ),
    "int-quantized W8A8": _ints(
        compressed("int-quantized", scheme(8, "channel", activations=INT8_TOKENS)),
        int_quantized_tensors,
        scale_dtype=torch.bfloat16,
    ),
    "int-quantized W8A8, activations static": _ints(
        compressed("int-quantized", scheme(8, "channel", activations=INT8_STATIC)),
        partial(int_quantized_tensors, has_static_activations=True),
        scale_dtype=torch.float32,
    ),
    "float-quantized, a scale a channel": _fp8s(
        compressed("float-quantized", scheme(8, "channel", type="float", activations=FP8_TOKENS)),
        fp8_tensors,
        (1, 0),
        scale_dtype=torch.bfloat16,
    ),
    "float-quantized, one scale, activations static": _fp8s(
        compressed(
            "float-quantized",
            scheme(8, "tensor", type="float", activations=FP8_TOKENS | {"dynamic": False}),
        ),
        partial(fp8_tensors, input_scale=torch.tensor(0.02)),
        (0, 0),
    ),
    "float-quantized, blocks": _fp8s(
        compressed("float-quantized", scheme(8, "block", type="float", block_structure=[16, 32])),
        fp8_tensors,
        (16, 32),
    ),
    "fp8, one scale": _fp8s(
        {"quant_method": "fp8", "activation_scheme": "static"},
        partial(fp8_tensors, input_scale=torch.tensor(0.02)),
        (0, 0),
    ),
    "fp8, blocks": _fp8s(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [16, 32],
        },
        partial(fp8_tensors, scale="weight_scale_inv"),
        (16, 32),
    ),
    "fp8, blocks of which the last are cut off": _fp8s(
        {"quant_method": "fp8", "weight_block_size": [24, 48]},
        partial(fp8_tensors, scale="weight_scale_inv"),
        (24, 48),
        scale_dtype=torch.bfloat16,
    ),
    "fp8, blocks larger than a matrix": _fp8s(
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        partial(fp8_tensors, scale="weight_scale_inv"),
        (128, 128),
    ),
    "fbgemm_fp8": _fp8s(
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": ["lm_head"],
        },
        partial(fp8_tensors, input_scale_ub=torch.tensor([1200.0])),
        (1, 0),
    ),
}
