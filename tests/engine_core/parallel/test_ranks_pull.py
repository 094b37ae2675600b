"""Engines of several ranks that pull blocks from each other, as records: a block there is as one
process has it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.executors.ranks.multi import MultiExecutor
from headwater.engine_core.parallel.rank_facts import RankLost
from headwater.engine_core.request import Holder
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.direct_link import DirectLink
from tests.engine_core.parallel.parallel_models import QWEN3, engine_of, folder_of
from tests.engine_core.small_models import Answer, SmallEngine
from tests.long_values import long_but

RNG = np.random.default_rng(8)
PROMPTS = [RNG.integers(3, 512, 100).tolist() for _ in range(4)]
NUM_CACHED = 96
LAYOUTS = [(2, 1), (1, 2), (2, 2)]
SAMPLING = SamplingParams(temperature=0.8, seed=3, max_tokens=8, num_logprobs=2)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, folder = folder_of(QWEN3, tmp_path_factory.mktemp("qwen3"))
    return folder


def sized(layout: tuple[int, int], **more: Any) -> dict[str, Any]:
    sizes = {"tensor_parallel_size": layout[0], "pipeline_parallel_size": layout[1]}
    return {**sizes, "max_model_len": 160, "num_blocks": 80, "kv_peer_memory": 4 << 20, **more}


def at(address: str) -> Holder:
    return Holder(address=address, epoch=1, num_tokens=len(PROMPTS[0]))


def asked(engine: SmallEngine, number: int, holder: str = "") -> Answer:
    [answer] = engine.answer([PROMPTS[number]], SAMPLING, holder=at(holder) if holder else None)
    return answer


def same(one: Answer, other: Answer) -> bool:
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def counts(engine: SmallEngine) -> tuple[int, int, int]:
    """Tokens pulled and lent, and those that came directly."""
    peers = engine.engine.load().peers
    assert peers is not None
    return peers.num_pulled, peers.num_lent, peers.num_direct


@pytest.mark.parametrize("layout", long_but(LAYOUTS, (2, 1)), ids=str)
def test_pulled_blocks_of_ranks_have_the_bits_of_computed_ones(
    layout: tuple[int, int], qwen3: Path
) -> None:
    link = DirectLink()
    with (
        engine_of(qwen3, link=link, address="a", **sized(layout)) as first,
        engine_of(qwen3, link=link, address="b", **sized(layout)) as second,
    ):
        for number, (one, other, holder) in enumerate([(first, second, "a"), (second, first, "b")]):
            computed = asked(one, number)
            pulled = asked(other, number, holder)
            assert same(computed, pulled)
            assert (computed.cached_tokens, pulled.cached_tokens) == (0, NUM_CACHED)
        assert counts(first) == counts(second) == (NUM_CACHED, NUM_CACHED, 0)
        assert first.engine.load().num_used_blocks == second.engine.load().num_used_blocks == 0


@pytest.mark.long
def test_one_process_and_two_ranks_share_blocks_under_tree_numerics(qwen3: Path) -> None:
    """One process copies out of caches of others of its kind; what ranks have comes as records."""
    link = DirectLink()
    with (
        engine_of(qwen3, link=link, address="one", numerics="tree", **sized((1, 1))) as one,
        engine_of(qwen3, link=link, address="two", numerics="tree", **sized((2, 1))) as two,
    ):
        for number, (owner, puller, holder) in enumerate([(one, two, "one"), (two, one, "two")]):
            computed = asked(owner, number)
            pulled = asked(puller, number, holder)
            assert same(computed, pulled)
            assert pulled.cached_tokens == NUM_CACHED
        assert counts(one) == counts(two) == (NUM_CACHED, NUM_CACHED, 0)


def test_blocks_of_another_layout_are_computed_where_bits_depend_on_it(qwen3: Path) -> None:
    link = DirectLink()
    with (
        engine_of(qwen3, link=link, address="one", **sized((1, 1))) as one,
        engine_of(qwen3, link=link, address="two", **sized((2, 1))) as two,
    ):
        asked(one, 0)
        expected = asked(two, 1)
        assert asked(two, 0, "one").cached_tokens == 0
        assert asked(one, 1, "two").cached_tokens == 0
        assert same(asked(two, 1), expected)
        assert counts(one) == counts(two) == (0, 0, 0)


@pytest.mark.long
def test_ranks_lend_what_left_their_cache_for_the_disk(qwen3: Path, tmp_path: Path) -> None:
    link = DirectLink()
    small = sized((2, 1), num_blocks=18, kv_disk_dir=tmp_path)
    with (
        engine_of(qwen3, link=link, address="a", **small) as owner,
        engine_of(qwen3, link=link, address="b", **sized((2, 1))) as puller,
    ):
        computed = []
        for number in range(len(PROMPTS)):
            computed.append(asked(owner, number))
            owner.settle()
        for number, known in enumerate(computed):
            pulled = asked(puller, number, "a")
            assert same(pulled, known)
            assert pulled.cached_tokens == NUM_CACHED


@pytest.mark.long
def test_a_rank_that_is_lost_ends_an_engine_that_pulls(qwen3: Path) -> None:
    link = DirectLink()
    with (
        engine_of(qwen3, link=link, address="a", **sized((2, 1))) as owner,
        engine_of(qwen3, link=link, address="b", **sized((2, 1))) as puller,
    ):
        asked(owner, 0)
        assert isinstance(puller.executor, MultiExecutor)
        os.kill(puller.executor.ranks.pids[1], signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 was ended by SIGKILL"):
            asked(puller, 0, "a")
        # The engine that lends goes on.
        assert asked(owner, 0).cached_tokens == NUM_CACHED
