"""A small model whose layers have several blocks of 128 x 128 weights, and its conversion."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.engine_core.byte_checkpoint import BYTE_FORMS
from tests.engine_core.packed_checkpoint import write_packed
from tests.engine_core.small_models import convert, random_checkpoint

BLOCKS = "fp8, blocks larger than a matrix"
"""The form of 128 x 128: matrices of most small models are smaller than a block."""
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def written_blocks(tmp_path: Path, family: str = "qwen3", **sizes: int) -> tuple[Path, Path]:
    """Converted folders of the packed checkpoint, in bfloat16, and of the same weights expanded;
    `sizes` are fields of its config."""
    random_checkpoint(family, tmp_path / "hf", **WIDE | sizes)
    write_packed(
        tmp_path / "hf",
        tmp_path / "packed",
        tmp_path / "expanded",
        BYTE_FORMS[BLOCKS],
        torch.bfloat16,
    )
    packed, expanded = (
        convert(tmp_path / each, tmp_path / f"our {each}", "bfloat16")
        for each in ("packed", "expanded")
    )
    return packed, expanded
