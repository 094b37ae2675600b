"""Engines of small models on a GPU, for tests of several files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_core.small_models import SmallEngine, convert, random_checkpoint
from tests.forked_rank import forked_ranks

MAX_DRAFTS = 15


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_forked() -> Iterator[None]:
    with forked_ranks():
        yield


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            base = tmp_path_factory.mktemp("drafts")
            random_checkpoint(family, base / "hf")
            config = json.loads((base / "hf" / "config.json").read_text())
            (base / "hf" / "config.json").write_text(
                json.dumps(config | {"max_position_embeddings": 2048})
            )
            folders[family] = convert(base / "hf", base / "ours", "bfloat16")
        return folders[family]

    return folder


@pytest.fixture
def engine_of(folder_of: Callable[[str], Path]) -> Iterator[Callable[..., SmallEngine]]:
    """Makes engines, closed at the end."""
    engines: list[SmallEngine] = []

    def engine(family: str = "qwen3", **options: Any) -> SmallEngine:
        given = {
            "device": "cuda",
            "block_size": 64,
            "num_blocks": 700,
            "max_num_batched_tokens": 1024,
        }
        given |= {"max_draft_tokens": MAX_DRAFTS, "max_num_seqs": 256, "spare_rows": 2} | options
        engines.append(SmallEngine(folder_of(family), **given))
        return engines[-1]

    yield engine
    for each in engines:
        each.close()
