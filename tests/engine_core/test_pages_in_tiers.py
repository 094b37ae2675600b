"""Pages of several kinds of layers that left the device: a prompt is continued behind those that
host memory, a disk or another engine has, with the tokens that were computed."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.devices import cpu
from headwater.engine_core.request import Holder
from tests.engine_core.direct_link import DirectLink
from tests.engine_core.small_models import SmallEngine, convert, greedy, random_checkpoint
from tests.long_values import long_but

PROMPT, *OTHERS = np.random.default_rng(0).integers(3, 512, (5, 150)).tolist()
NUM_FULL = 144
"""Tokens of the prompt's full blocks, with blocks of 16."""
MIXED_WINDOWS = "gemma3 whose last layer has a window"
MIXED_SHAPES = "gemma4"
STATES = "qwen3.5"
FAMILY_NAMES = (MIXED_WINDOWS, MIXED_SHAPES, STATES)
FEWEST_BLOCKS = {MIXED_WINDOWS: 14, MIXED_SHAPES: 20, STATES: 52}
"""Blocks that hold one context of 200 tokens and little more."""
SAMPLING = greedy(40, num_logprobs=1)


def converted(family: str, folder: Path, dtype: str = "float32") -> Path:
    random_checkpoint(family, folder / "hf")
    return convert(folder / "hf", folder / "ours", dtype)


def engine_of(folder: Path, family: str, **options: Any) -> SmallEngine:
    given = {"max_model_len": 200, "num_blocks": FEWEST_BLOCKS[family]}
    engine = SmallEngine(folder, **given | options)
    config = engine.config
    assert len(config.page_windows) > 1 or config.state_pages
    assert max(config.page_sizes.filled) <= config.page_sizes.page
    assert config.page_sizes.of_set <= config.state_pages * config.page_sizes.page
    return engine


@pytest.mark.parametrize("family", long_but(FAMILY_NAMES, STATES))
def test_a_prompt_is_continued_behind_its_pages_on_a_disk(family: str, tmp_path: Path) -> None:
    """After a new start of the engine, which has computed nothing."""
    folder = converted(family, tmp_path)
    options = {"kv_disk_dir": tmp_path / "kv"}
    with closing(engine_of(folder, family, **options)) as engine:
        [computed] = engine.answer([PROMPT], SAMPLING)
        engine.answer(OTHERS[:2], greedy(1))
        engine.settle()
    with closing(engine_of(folder, family, **options)) as engine:
        engine.settle()
        [found] = engine.answer([PROMPT], SAMPLING)
        load = engine.engine.load()
    assert (found.cached_tokens, load.hits_by_tier) == (NUM_FULL, {"disk": NUM_FULL})
    assert (found.token_ids, found.logprobs) == (computed.token_ids, computed.logprobs)


def hits_in_host_memory(folder: Path, family: str, **options: Any) -> tuple[int, dict[str, int]]:
    """Compares the answer to a prompt of which others have taken all pages on the device. Returns
    its number of cached tokens, in all and by tier."""
    with closing(engine_of(folder, family, **options | {"num_blocks": 100})) as plain:
        [expected] = plain.answer([PROMPT], SAMPLING)
    with closing(engine_of(folder, family, kv_swap_memory=64 << 20, **options)) as engine:
        for prompt in (PROMPT, *OTHERS):
            engine.answer([prompt], greedy(1))
        [again] = engine.answer([PROMPT], SAMPLING)
        load = engine.engine.load()
    assert (again.token_ids, again.logprobs) == (expected.token_ids, expected.logprobs)
    assert load.num_swapped_out > 0
    return again.cached_tokens, load.hits_by_tier


@pytest.mark.parametrize("family", long_but(FAMILY_NAMES, MIXED_WINDOWS, STATES))
def test_pages_come_back_from_host_memory(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where host memory is refused otherwise, since the cache lies there itself."""
    monkeypatch.setattr(cpu, "copy_blocks", None, raising=False)
    monkeypatch.setattr(cpu, "capabilities", replace(cpu.capabilities, host_blocks=True))
    found = hits_in_host_memory(converted(family, tmp_path), family)
    assert found == (NUM_FULL, {"host": NUM_FULL})


@pytest.mark.parametrize("family", long_but(FAMILY_NAMES, STATES))
def test_pages_come_from_another_engine(family: str, tmp_path: Path) -> None:
    """As records and as copies out of its cache, to an engine that computes none of the prompt's
    blocks."""
    folder = converted(family, tmp_path)
    link = DirectLink()
    options = {"num_blocks": 100, "kv_peer_memory": 8 << 20, "link": link}
    with closing(engine_of(folder, family, address="a", **options)) as owner:
        [computed] = owner.answer([PROMPT], SAMPLING)
        for way in ("auto", "off"):
            pulling = options | {"address": way, "kv_peer_direct": way}
            with closing(engine_of(folder, family, **pulling)) as engine:
                holder = Holder(address="a", epoch=1, num_tokens=len(PROMPT))
                [pulled] = engine.answer([PROMPT], SAMPLING, holder=holder)
                peers = engine.engine.load().peers
            assert peers is not None
            assert (pulled.cached_tokens, peers.num_pulled) == (NUM_FULL, NUM_FULL)
            assert peers.num_direct == (NUM_FULL if way == "auto" else 0)
            assert (pulled.token_ids, pulled.logprobs) == (computed.token_ids, computed.logprobs)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_pages_come_back_to_a_gpu(family: str, tmp_path: Path) -> None:
    folder = converted(family, tmp_path, "bfloat16")
    # Pages of bfloat16 are smaller, and states in them are not.
    fewest = 64 if family == STATES else FEWEST_BLOCKS[family]
    hits, _ = hits_in_host_memory(folder, family, device="cuda", num_blocks=fewest)
    # To compute so small a model may take less time than its pages.
    assert hits in (0, NUM_FULL)
