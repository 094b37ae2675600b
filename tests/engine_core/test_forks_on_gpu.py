"""Sequences that begin alike on a GPU: what is copied of a block is all that its models know of the
tokens in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine_core.published_heads import CONFIGS, publish, random_heads
from tests.engine_core.small_models import SmallEngine, convert, random_checkpoint
from tests.engine_core.test_forks import check_copies

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {"device": "cuda", "block_size": 16, "num_blocks": 300, "max_num_seqs": 8}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"async_depth": 4},
    {"max_num_batched_tokens": 24},
    {"kv_cache_dtype": "fp8"},
    {"kv_swap_memory": 64 << 20},
    {"block_size": 64},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("forks")
    random_checkpoint("qwen3", home / "hf")
    return convert(home / "hf", home / "ours", "bfloat16")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_model_answers_the_same_from_copies(folder: Path, options: dict[str, Any]) -> None:
    check(folder, SIZES | options)


def test_what_draft_heads_know_of_a_block_is_copied_with_it(folder: Path, tmp_path: Path) -> None:
    heads = publish(tmp_path / "heads", CONFIGS["eagle"], random_heads("eagle"))
    check(folder, SIZES | {"draft_heads": heads, "max_draft_tokens": 5})


def check(folder: Path, options: dict[str, Any]) -> None:
    for prompt_len in (9, 50, 64):
        alone = SmallEngine(folder, **options)
        together = SmallEngine(folder, **options)
        check_copies(alone, together, prompt_len)
        for small in (alone, together):
            small.close()
