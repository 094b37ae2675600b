"""Converted models whose matrices are in any block formats, and the same expanded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from headwater.engine_core.layers.linear.division import outputs_of
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import model_class
from headwater.engine_core.weights import blocks
from headwater.engine_core.weights.layout import WeightSpec
from headwater.engine_core.weights.model_file import DTYPES, WEIGHTS_NAME
from headwater.engine_core.weights.shards import Shard
from headwater.kernels.quant.block_formats import BlockFormat, BlockWeight, pack
from tests.engine_core.small_models import SHAPE, convert
from tests.kernels.random_blocks import random_rows

WIDE = SHAPE | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Sizes that blocks of 256 inputs divide."""


def write_blocks(
    tmp_path: Path, formats: Sequence[BlockFormat], dtype: str, *, is_tied: bool = False
) -> tuple[Path, Path]:
    """Two converted folders, in blocks and expanded to the dtype. Formats take turns with
    projections."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**WIDE | {"tie_word_embeddings": is_tied})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    folders = tuple(
        convert(tmp_path / "hf", tmp_path / name, dtype) for name in ("blocks", "expanded")
    )
    model = registry.read_config(folders[0])
    tensors = load_file(folders[0] / WEIGHTS_NAME)
    turn = 0
    in_blocks = dict(tensors)
    dense = dict(tensors)
    for name, spec in model_class(model).layout(model).items():
        if spec.tied_to or len(spec.shape) != 2:
            continue
        parts = []
        for num_rows in _rows_of_parts(spec):
            parts.append(_random(formats[turn % len(formats)], num_rows, spec.shape[1], turn))
            turn += 1
        del in_blocks[name]
        in_blocks |= blocks.named(parts, name)
        dense[name] = blocks.dense(parts, DTYPES[dtype])
    for folder, kept in zip(folders, (in_blocks, dense), strict=True):
        save_file(
            {name: tensor.contiguous() for name, tensor in kept.items()}, folder / WEIGHTS_NAME
        )
    return folders[0], folders[1]


def _rows_of_parts(spec: WeightSpec) -> list[int]:
    return (
        [len(rows) for rows in outputs_of(spec, Shard(0, 1))]
        if not spec.parts
        else list(spec.parts)
    )


def _random(format: BlockFormat, num_rows: int, num_inputs: int, seed: int) -> BlockWeight:
    """Weights of a tenth or so, whatever the format."""
    rows = random_rows(format, num_rows, num_inputs, seed)
    units = rows.view(num_rows, -1, format.unit_bytes)
    scale = 0.3 / (1 << format.bits) / (32 if format.has_min else 64 if format.is_nested else 1)
    first = format.unit_bytes - 2 if format.name == "q6_k" else 0
    halves = torch.empty(*units.shape[:2]).uniform_(
        scale / 2, scale, generator=torch.Generator().manual_seed(seed)
    )
    if not format.is_nested and format.has_min:
        halves *= 32
    units[:, :, first : first + 2] = halves.half().unsqueeze(2).view(torch.uint8)
    if format.has_min:
        middle = halves * (1 << (format.bits - 1)) * (1 if format.is_nested else -1)
        units[:, :, 2:4] = middle.half().unsqueeze(2).view(torch.uint8)
    return pack(rows, format)
