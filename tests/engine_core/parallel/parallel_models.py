"""Random models whose heads several ranks divide, and engines of them with real processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers

from tests.engine_core.small_models import (
    FAMILIES,
    GEMMA3,
    SHAPE,
    SmallEngine,
    convert,
    random_checkpoint,
)

QWEN3 = "qwen3 of 8 and 4 heads"
EIGHT_AND_FOUR = SHAPE | {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
}
FAMILIES[QWEN3] = lambda: transformers.Qwen3Config(**EIGHT_AND_FOUR, head_dim=32)
FAMILIES["gemma3 of 4 and 2 heads"] = lambda: transformers.Gemma3TextConfig(
    **GEMMA3 | {"num_key_value_heads": 2, "head_dim": 64}
)


def folder_of(family: str, base: Path, dtype: str = "float32") -> tuple[Any, Path]:
    """The transformers model, and the folder of the same weights converted."""
    model = random_checkpoint(family, base / "hf")
    return model, convert(base / "hf", base / "ours", dtype)


@contextmanager
def engine_of(folder: Path, **options: Any) -> Iterator[SmallEngine]:
    """Ranks may be more than this machine's cores, where a thread for each is asked for."""
    num_ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    engine = SmallEngine(folder, num_threads=num_ranks, **options)
    try:
        yield engine
    finally:
        engine.close()
