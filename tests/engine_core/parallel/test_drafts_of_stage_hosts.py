"""A draft model or heads of the first stage beside stages on other hosts, which have neither: every
bit is that of an engine that drafts nothing."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu
from headwater.engine_core.executors.build import checked
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.rank_facts import RankLost
from tests.engine_core.oracle_speculator import answers_of_a_new_engine
from tests.engine_core.parallel.parallel_models import engine_of, folder_of
from tests.engine_core.parallel.test_drafts_of_ranks import ASKED, heads_of
from tests.engine_core.parallel.test_stage_hosts import Loss, engine_with_hosts
from tests.engine_core.published_heads import CONFIGS
from tests.engine_core.small_models import convert, greedy, random_checkpoint
from tests.engine_core.test_draft_model import MAX_DRAFTS, PROMPTS, WholeDrafts
from tests.long_values import long_but

SIZES = [(2, 1, 1), (3, 2, 1), (3, 1, 1), (2, 1, 2)]
"""Stages, those of them on other hosts, and ranks of each."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("qwen3", tmp_path_factory.mktemp("served"))[1]


@pytest.mark.parametrize("sizes", long_but(SIZES, (3, 2, 1)))
def test_guesses_of_the_first_stage_reach_other_hosts_and_change_no_bit(
    sizes: tuple[int, int, int], served: Path, tmp_path: Path
) -> None:
    (size, num_hosts, tensor), asked = sizes, [replace(each, num_logprobs=2) for each in ASKED]
    with engine_of(served, tensor_parallel_size=tensor) as plain:
        expected, _ = answers_of_a_new_engine(plain, PROMPTS, asked)
    layout = {"size": size, "num_hosts": num_hosts, "tensor_parallel_size": tensor}
    drafting: dict[str, Any] = {"draft_model": served, "max_draft_tokens": MAX_DRAFTS}
    with engine_with_hosts(served, tmp_path, **layout, **drafting) as (engine, _):
        for is_ahead in (False, True):
            speculator = WholeDrafts(is_ahead=is_ahead).beside(engine.config)
            answers, load = answers_of_a_new_engine(
                engine, PROMPTS, asked, speculator, num_rounds=2
            )
            assert [each.token_ids for each in answers] == [each.token_ids for each in expected] * 2
            assert [each.logprobs for each in answers] == [each.logprobs for each in expected] * 2
            # The draft model is the served one, whose sums ranks round in another order.
            assert load.num_accepted_tokens > 0.8 * load.num_draft_tokens > 50


HEADED = [(kind, (3, 2, 1)) for kind in CONFIGS]


@pytest.mark.parametrize(
    "headed", long_but([*HEADED, ("eagle3", (2, 1, 2))], ("eagle3", (3, 2, 1)))
)
def test_other_hosts_show_heads_what_they_read(
    headed: tuple[str, tuple[int, int, int]], served: Path, tmp_path: Path
) -> None:
    kind, (size, num_hosts, tensor) = headed
    asked = [replace(each, num_logprobs=2) for each in ASKED]
    drafting: dict[str, Any] = {
        "draft_heads": heads_of(kind, tmp_path),
        "max_draft_tokens": MAX_DRAFTS,
    }
    told = list[Any]()
    counted = list[tuple[int, int]]()
    alone = engine_of(served, tensor_parallel_size=tensor, **drafting)
    layout = {"size": size, "num_hosts": num_hosts, "tensor_parallel_size": tensor}
    with alone as one, engine_with_hosts(served, tmp_path, **layout, **drafting) as (several, _):
        for engine in (one, several):
            speculator = WholeDrafts().beside(engine.config)
            answers, load = answers_of_a_new_engine(engine, PROMPTS, asked, speculator)
            told.append([(each.token_ids, each.logprobs) for each in answers])
            counted.append((load.num_draft_tokens, load.num_accepted_tokens))
    assert told[0] == told[1]
    assert counted[0] == counted[1]
    assert counted[0][0] > 50


@pytest.mark.long
def test_hosts_without_the_draft_model_have_as_many_blocks_as_the_host_with_it(
    served: Path, tmp_path: Path
) -> None:
    """All ranks have to find the same config where blocks are counted from bytes, which planes of
    both models share."""
    random_checkpoint("gemma3", tmp_path / "hf")
    other = convert(tmp_path / "hf", tmp_path / "other", "bfloat16")
    drafting: dict[str, Any] = {"draft_model": other, "max_draft_tokens": MAX_DRAFTS}
    sized: dict[str, Any] = {"num_blocks": 0, "kv_cache_memory": 64 << 20}
    with engine_of(served, **sized) as plain:
        num_blocks = plain.config.num_blocks
        expected = plain.tokens(PROMPTS, greedy(12))
    with engine_with_hosts(served, tmp_path, **drafting, **sized) as (engine, _):
        assert engine.config.num_blocks < num_blocks
        assert engine.executor.can_draft
        assert engine.tokens(PROMPTS, greedy(12)) == expected


def test_a_host_that_is_killed_while_the_first_stage_drafts_ends_the_engine(
    served: Path, tmp_path: Path
) -> None:
    drafting: dict[str, Any] = {"draft_model": served, "max_draft_tokens": MAX_DRAFTS}
    with engine_with_hosts(served, tmp_path, **drafting) as (engine, [host]):
        speculator = WholeDrafts().beside(engine.config)
        answers_of_a_new_engine(engine, PROMPTS[:2], [greedy(4)], speculator)
        loss = Loss(engine)
        host.signal(signal.SIGKILL)
        with pytest.raises(
            RankLost, match=r"rank 1 \(stage 1 on 127.0.0.1\) has closed its connection"
        ):
            answers_of_a_new_engine(
                engine, PROMPTS, [greedy(400)], WholeDrafts().beside(engine.config)
            )
        loss.wait()


def test_a_disk_beside_stages_on_other_hosts_is_refused_with_a_draft_model_too(
    served: Path, tmp_path: Path
) -> None:
    options = ExecutorOptions(
        model_folder=served,
        draft_model=served,
        max_draft_tokens=3,
        pipeline_parallel_size=2,
        stage_hosts=1,
    )
    assert checked(options, "cpu", cpu.capabilities).stage_drafts is not None
    with pytest.raises(ConfigError, match=r"kv_disk_dir is .*; allowed: none with stage_hosts 1"):
        checked(replace(options, kv_disk_dir=tmp_path), "cpu", cpu.capabilities)
