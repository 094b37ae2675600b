"""Small packed checkpoints as published tools write them, and the same models expanded.

Packed here from the definitions of the formats, number by number; the code under test is not asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file


class Matrix(Protocol):
    """A packed matrix [N, K]."""

    def expanded(self) -> torch.Tensor:
        """float64 [N, K]"""


AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column that the i-th four bits of a word hold, lowest first."""
Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(slots=True)
class PackedMatrix:
    """Random integers with scales and zero points: q, of_inputs [K] into groups; a weight is (q -
    zero) * scale."""

    q: Integers
    """[N, K] of 0…15"""
    zeros: Integers
    """[groups, N] of 0…15"""
    scales: torch.Tensor
    """[groups, N]"""
    of_inputs: Integers
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def random(
        cls,
        n: int,
        k: int,
        group_size: int,
        rng: np.random.Generator,
        of_inputs: Integers,
        *,
        symmetric: bool,
    ) -> PackedMatrix:
        num_groups = k // (k if group_size == -1 else group_size)
        zeros = np.full((num_groups, n), 8) if symmetric else rng.integers(0, 16, (num_groups, n))
        scales = torch.from_numpy(rng.uniform(0.02, 0.06, (num_groups, n))).half()
        return cls(rng.integers(0, 16, (n, k)), zeros, scales, of_inputs)

    def expanded(self) -> torch.Tensor:
        """float64 [N, K]"""
        zeros = self.zeros[self.of_inputs]
        scales = self.scales.double().numpy()[self.of_inputs]
        return torch.from_numpy((self.q - zeros.T) * scales.T)


def words_along(
    values: Integers, axis: int, columns: tuple[int, ...] = tuple(range(8))
) -> torch.Tensor:
    """Eight numbers of an axis in an int32; `columns` names the one that each four bits hold,
    lowest first."""
    moved = np.moveaxis(values, axis, -1)
    eights = moved.reshape(*moved.shape[:-1], -1, 8)
    words = sum(eights[..., column] << 4 * i for i, column in enumerate(columns))
    return torch.from_numpy(
        np.ascontiguousarray(np.moveaxis(words, -1, axis)).astype(np.uint32).view(np.int32)
    )


def gptq_tensors(matrix: PackedMatrix, zero_offset: int) -> dict[str, torch.Tensor]:
    return {
        "qweight": words_along(matrix.q.T, 0),
        "qzeros": words_along((matrix.zeros - zero_offset) % 16, 1),
        "scales": matrix.scales,
        "g_idx": torch.from_numpy(matrix.of_inputs).int(),
    }


def awq_tensors(matrix: PackedMatrix) -> dict[str, torch.Tensor]:
    return {
        "qweight": words_along(matrix.q.T, 1, AWQ_COLUMNS),
        "qzeros": words_along(matrix.zeros, 1, AWQ_COLUMNS),
        "scales": matrix.scales,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A published form of a checkpoint."""

    config: dict[str, Any]
    write: Callable[[Any], dict[str, torch.Tensor]]
    """The tensors of a matrix that `make` made."""
    group_size: int = 32
    symmetric: bool = False
    act_order: bool = False
    make: Callable[[str, int, int, np.random.Generator], Matrix] | None = None
    """From a layer's name and sizes to a random matrix; None: four bits, by the three fields
    above."""


def _gptq(zero_offset: int = 1, **more: Any) -> Form:
    form = {key: more.pop(key) for key in ("group_size", "symmetric", "act_order") if key in more}
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": form.get("group_size", 32),
        "desc_act": form.get("act_order", False),
        "sym": form.get("symmetric", False),
    }
    return Form(
        config=config | more, write=lambda matrix: gptq_tensors(matrix, zero_offset), **form
    )


def _awq(config: dict[str, Any], **form: Any) -> Form:
    return Form(config=config, write=awq_tensors, **form)


FORMS = {
    "gptq": _gptq(),
    "gptq symmetric, groups of 64": _gptq(group_size=64, symmetric=True),
    "gptq in one group": _gptq(group_size=-1),
    "gptq in act order": _gptq(act_order=True),
    "gptq, version 2": _gptq(0, checkpoint_format="gptq_v2"),
    "awq": _awq(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    ),
    "awq as its own tool names fields": _awq(
        {
            "quant_method": "awq",
            "w_bit": 4,
            "q_group_size": 64,
            "zero_point": True,
            "version": "GEMM",
        },
        group_size=64,
    ),
    "auto-round as gptq": Form(
        config={
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 32,
            "sym": True,
            "data_type": "int",
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
        },
        write=lambda matrix: gptq_tensors(matrix, 1),
        symmetric=True,
    ),
    "auto-round as awq": Form(
        config={
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 32,
            "packing_format": "auto_round:auto_awq",
        },
        write=awq_tensors,
    ),
}


PROJECTIONS = re.compile(r".*(_proj|_proj_with_mqa)")
"""Names of linear layers within a decoder's layers, but for routers."""


def write_packed(
    source: Path,
    packed: Path,
    expanded: Path,
    form: Form,
    dtype: torch.dtype,
    packs: re.Pattern[str] = PROJECTIONS,
) -> None:
    """From a checkpoint in Hugging Face's layout one of the form, whose linear layers are random,
    and the same model with its weights rounded to the dtype. `packs`: names of these layers."""
    rng = np.random.default_rng(0)
    tensors = load_file(source / "model.safetensors")
    packed_tensors = {}
    expanded_tensors = {}
    orders = dict[str, Integers]()
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if not packs.fullmatch(layer) or name.endswith(".bias"):
            packed_tensors[name] = expanded_tensors[name] = tensor
            continue
        n, k = tensor.shape
        # Projections that read the same inputs have one order, as tools make it from these inputs.
        reads = (
            layer.replace("k_proj", "q_proj")
            .replace("v_proj", "q_proj")
            .replace("gate_proj", "up_proj")
        )
        size = k if form.group_size == -1 else form.group_size
        if reads not in orders:
            orders[reads] = (
                rng.permutation(np.arange(k) // size) if form.act_order else np.arange(k) // size
            )
        matrix: Matrix = PackedMatrix.random(
            n, k, form.group_size, rng, orders[reads], symmetric=form.symmetric
        )
        if form.make is not None:
            matrix = form.make(layer, n, k, rng)
        packed_tensors |= {f"{layer}.{suffix}": own for suffix, own in form.write(matrix).items()}
        expanded_tensors[name] = matrix.expanded().to(dtype)
    config = json.loads((source / "config.json").read_text())
    for folder, own, more in (
        (packed, packed_tensors, {"quantization_config": form.config}),
        (expanded, expanded_tensors, {}),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | more))
        save_file(
            {name: tensor.clone().contiguous() for name, tensor in own.items()},
            folder / "model.safetensors",
        )
