"""A draft model and draft heads beside ranks on a CPU: answers are those of one process, and all
ranks draft alike."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from headwater.engine_core.config import ConfigError
from headwater.engine_core.devices import cpu, cuda
from headwater.engine_core.executor import Int32Array
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.ranks import multi
from headwater.engine_core.executors.ranks.multi import PATIENCE, MultiExecutor
from headwater.engine_core.executors.step_executor import StepExecutor
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.parallel.rank_facts import RankLost
from headwater.engine_core.platforms.cpu_sampling import CpuSampling
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.heads_twin import HeadsTwin
from tests.engine_core.oracle_speculator import SAMPLINGS, answers_of_a_new_engine
from tests.engine_core.parallel.parallel_models import engine_of, folder_of
from tests.engine_core.parallel.thread_ranks import ThreadEngine
from tests.engine_core.published_heads import CONFIGS, publish, random_heads
from tests.engine_core.small_models import (
    FAMILIES,
    SHAPE,
    Answer,
    SmallEngine,
    convert,
    greedy,
    random_checkpoint,
)
from tests.engine_core.test_draft_heads import Recorder
from tests.engine_core.test_draft_model import LENGTHS, MAX_DRAFTS, PROMPTS, WholeDrafts
from tests.long_values import long_but

KINDS = [kind for kind in SAMPLINGS if kind != "a stop"]
ASKED = [
    SamplingParams(max_tokens=n, **SAMPLINGS[kind]) for n, kind in zip(LENGTHS, KINDS, strict=True)
]
DRAFTED = {"tensor_parallel_size": 2, "max_draft_tokens": MAX_DRAFTS}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return folder_of("qwen3", tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def folder(served: tuple[Any, Path]) -> Path:
    return served[1]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model of other weights, whose heads and width two ranks could not divide."""
    path = tmp_path_factory.mktemp("other")
    random_checkpoint("gemma3", path / "hf")
    return convert(path / "hf", path / "ours", "bfloat16")


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Answer]:
    """Those of one process that drafts nothing."""
    with engine_of(folder) as one:
        return answers_of_a_new_engine(one, PROMPTS, ASKED)[0]


@contextmanager
def threads_of(folder: Path, **options: Any) -> Iterator[ThreadEngine]:
    engine = ThreadEngine(folder, **DRAFTED | options)
    try:
        yield engine
    finally:
        engine.close()


def heads_of(kind: str, path: Path, *, is_broken: bool = False) -> Path:
    tensors = random_heads(kind)
    if is_broken:
        tensors = {
            name: t * torch.nan if t.is_floating_point() else t for name, t in tensors.items()
        }
    return publish(path / f"{kind}-{is_broken}", CONFIGS[kind], tensors)


def token_ids(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def check_drafts(engine: SmallEngine, plain: list[Answer]) -> int:
    """Tokens with drafts are the plain ones, prompts that are cached included. Returns the number
    of accepted ones."""
    num_accepted = 0
    for is_ahead in (False, True):
        speculator = WholeDrafts(is_ahead=is_ahead).beside(engine.config)
        answers, load = answers_of_a_new_engine(engine, PROMPTS, ASKED, speculator, num_rounds=2)
        assert token_ids(answers) == token_ids(plain) * 2
        assert load.num_draft_tokens > 50
        assert load.prefix_hits > 0
        num_accepted += load.num_accepted_tokens
    return num_accepted


def test_processes_draft_by_a_model_and_answer_as_one_process_without(
    folder: Path, plain: list[Answer]
) -> None:
    with engine_of(folder, draft_model=folder, **DRAFTED) as engine:
        assert isinstance(engine.executor, MultiExecutor)
        for is_ahead in (False, True):
            speculator = WholeDrafts(is_ahead=is_ahead).beside(engine.config)
            answers, load = answers_of_a_new_engine(engine, PROMPTS, ASKED, speculator)
            assert token_ids(answers) == token_ids(plain)
            # The draft model is the served one, whose sums two ranks round in another order.
            assert load.num_accepted_tokens > 0.9 * load.num_draft_tokens > 50


@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.long
def test_sizes_that_divide_the_model_divide_its_drafts(size: int, tmp_path: Path) -> None:
    heads = {
        "num_attention_heads": size,
        "num_key_value_heads": size,
        "intermediate_size": 32 * size,
    }
    family = f"qwen3 of {size} heads"
    FAMILIES[family] = lambda: transformers.Qwen3Config(**SHAPE | heads, head_dim=32)
    _, folder = folder_of(family, tmp_path)
    with engine_of(folder) as one:
        expected, _ = answers_of_a_new_engine(one, PROMPTS, ASKED)
    with engine_of(
        folder, draft_model=folder, **DRAFTED | {"tensor_parallel_size": size}
    ) as engine:
        assert check_drafts(engine, expected) > 50


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.long
def test_processes_draft_by_heads_and_answer_as_one_process_without(
    kind: str, folder: Path, plain: list[Answer], tmp_path: Path
) -> None:
    with engine_of(folder, draft_heads=heads_of(kind, tmp_path), **DRAFTED) as engine:
        check_drafts(engine, plain)


@pytest.mark.parametrize("what", ["a draft model", *CONFIGS])
@pytest.mark.long
def test_drafts_beside_tree_numerics_change_no_bit_on_any_number_of_ranks(
    what: str, folder: Path, tmp_path: Path
) -> None:
    asked = [replace(each, num_logprobs=2) for each in ASKED]
    drafting = (
        {"draft_model": folder}
        if what == "a draft model"
        else {"draft_heads": heads_of(what, tmp_path)}
    )
    with engine_of(folder, numerics="tree") as one:
        expected, _ = answers_of_a_new_engine(one, PROMPTS, asked)
    for size in (1, 2):
        options = DRAFTED | drafting | {"tensor_parallel_size": size}
        with engine_of(folder, numerics="tree", **options) as engine:
            speculator = WholeDrafts(is_ahead=size == 2).beside(engine.config)
            answers, load = answers_of_a_new_engine(engine, PROMPTS, asked, speculator)
        assert token_ids(answers) == token_ids(expected)
        assert [each.logprobs for each in answers] == [each.logprobs for each in expected]
        assert load.num_draft_tokens > 50
        assert what != "a draft model" or load.num_accepted_tokens > 0.9 * load.num_draft_tokens


@pytest.mark.long
def test_a_draft_model_of_another_kind_changes_no_token(
    folder: Path, other: Path, plain: list[Answer]
) -> None:
    with threads_of(folder, draft_model=other) as engine:
        check_drafts(engine, plain)


@pytest.mark.parametrize("kind", long_but(CONFIGS, "medusa", "eagle3"))
def test_ranks_draft_what_the_published_definition_drafts(
    kind: str, served: tuple[Any, Path], tmp_path: Path
) -> None:
    twin = HeadsTwin(served[0], CONFIGS[kind], random_heads(kind))
    prompts = PROMPTS[1:4]
    with threads_of(served[1], draft_heads=heads_of(kind, tmp_path)) as engine:
        recorder = Recorder(engine.ranks.ranks[1])
        speculator = WholeDrafts().beside(engine.config)
        answers_of_a_new_engine(engine, prompts, [greedy(12)], speculator)
    assert len(recorder.noted) > 10
    for known, drafts in recorder.noted:
        assert drafts == twin.drafts(known, len(drafts))


def spoil(rank: StepExecutor[Any, Any]) -> None:
    """Has a rank draw its drafts from other logits than it has computed."""
    drafts = rank._drafter._drafts
    draw = drafts.draw

    def spoilt(logits: torch.Tensor, rows: Int32Array, at: Int32Array) -> Int32Array:
        return draw(logits + torch.randn_like(logits), rows, at)

    drafts.draw = spoilt


@pytest.mark.parametrize("what", long_but(("a draft model", *CONFIGS), "medusa"))
def test_ranks_draft_alike_whatever_one_of_them_computes(
    what: str, folder: Path, plain: list[Answer], tmp_path: Path
) -> None:
    """`ThreadExecutor` compares the ranks' tables after each step, drafts included."""
    drafting = (
        {"draft_model": folder}
        if what == "a draft model"
        else {"draft_heads": heads_of(what, tmp_path)}
    )
    with threads_of(folder, **drafting) as engine:
        for rank in engine.ranks.ranks:
            spoil(rank)
        check_drafts(engine, plain)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.long
def test_heads_whose_logits_are_no_numbers_change_no_token(
    kind: str, folder: Path, plain: list[Answer], tmp_path: Path
) -> None:
    with threads_of(folder, draft_heads=heads_of(kind, tmp_path, is_broken=True)) as engine:
        check_drafts(engine, plain)


class WholeSampling:
    """The operations of a platform that draws from whole rows of logits alone."""

    def __init__(self) -> None:
        own = CpuSampling()
        self.draw = own.draw
        self.draw_filtered = own.draw_filtered
        self.mask_tokens = own.mask_tokens
        self.logprobs = own.logprobs


@pytest.mark.long
def test_a_platform_that_draws_from_whole_rows_alone_drafts_too(
    folder: Path, plain: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu.CpuPlatform, "sampling", WholeSampling())
    for drafting in ({"draft_model": folder}, {"draft_heads": heads_of("eagle3", tmp_path)}):
        with threads_of(folder, **drafting) as engine:
            check_drafts(engine, plain)


@pytest.mark.parametrize("what", long_but(("draft_model", "draft_heads"), "draft_model"))
def test_the_death_of_a_rank_that_drafts_ends_the_executor(
    what: str, folder: Path, tmp_path: Path
) -> None:
    drafting = {what: folder if what == "draft_model" else heads_of("eagle", tmp_path)}
    with engine_of(folder, **DRAFTED | drafting) as engine:
        speculator = WholeDrafts().beside(engine.config)
        answers_of_a_new_engine(engine, PROMPTS[:2], [greedy(4)], speculator)
        assert isinstance(engine.executor, MultiExecutor)
        os.kill(engine.executor.ranks.pids[1], signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 was ended by SIGKILL"):
            answers_of_a_new_engine(
                engine, PROMPTS, [greedy(400)], WholeDrafts().beside(engine.config)
            )


def test_ranks_may_be_silent_for_longer_where_a_step_has_drafts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(folder, draft_model=folder, **DRAFTED) as engine:
        executor = engine.executor
        allowed = set()
        assert isinstance(executor, MultiExecutor)
        allow = executor.ranks.allow_silence
        monkeypatch.setattr(
            executor.ranks, "allow_silence", lambda seconds: (allowed.add(seconds), allow(seconds))
        )
        executor.warm_up()
        # Steps of a busy machine may be slower than the slowest so far.
        monkeypatch.setattr(multi, "time", SimpleNamespace(monotonic=lambda: 0.0))
        executor._times = multi.StepTimes(0.0, 1, 0.0)
        executor._slowest_step = 1.0
        answers_of_a_new_engine(engine, PROMPTS[:1], [greedy(4)])
        assert allowed == {PATIENCE}
        answers_of_a_new_engine(
            engine, PROMPTS[:1], [greedy(30)], WholeDrafts().beside(engine.config)
        )
        assert max(allowed) == PATIENCE + MAX_DRAFTS


@pytest.mark.long
def test_planes_of_what_drafts_go_to_the_disk_and_come_back(folder: Path, tmp_path: Path) -> None:
    """Drafts behind a prefix whose planes were lost would be wrong."""
    few = {"num_blocks": 18, "max_model_len": 160, "kv_disk_dir": tmp_path, "draft_model": folder}
    prompts = [PROMPTS[-1], *([i + 3] * 100 for i in range(4)), PROMPTS[-1]]
    answers = []
    drafts = []
    with engine_of(
        folder, speculate=lambda config: WholeDrafts().beside(config), **DRAFTED | few
    ) as engine:
        for prompt in prompts:
            answers += engine.answer([prompt], greedy(40))
            engine.settle()
            load = engine.engine.load()
            drafts.append((load.num_draft_tokens, load.num_accepted_tokens))
    assert answers[-1].cached_tokens == 96
    assert answers[-1].token_ids == answers[0].token_ids
    assert load.hits_by_tier == {"disk": 96}
    (drafted, accepted), (drafted_before, accepted_before) = drafts[-1], drafts[-2]
    assert accepted - accepted_before > 0.9 * (drafted - drafted_before) > 20


@pytest.mark.long
def test_the_memory_of_a_cache_counts_the_planes_of_what_drafts_on_every_rank(folder: Path) -> None:
    sized = {"num_blocks": 0, "kv_cache_memory": 64 << 20, "tensor_parallel_size": 2}
    with (
        engine_of(folder, **sized) as plain,
        engine_of(folder, **DRAFTED | sized, draft_model=folder) as drafting,
    ):
        assert drafting.config.num_blocks == plain.config.num_blocks // 3


def test_what_drafts_is_refused_beside_stages_and_where_a_platform_does_not_build_it(
    folder: Path, tmp_path: Path
) -> None:
    heads = heads_of("eagle", tmp_path)
    for name, value in (("draft_model", folder), ("draft_heads", heads)):
        options = ExecutorOptions(model_folder=folder, max_draft_tokens=3, **{name: value})
        staged = replace(options, tensor_parallel_size=2, pipeline_parallel_size=2)
        for device in (cpu, cuda):
            with pytest.raises(
                ConfigError, match=f"{name} is .*; allowed: none with pipeline_parallel_size 2"
            ):
                checked(staged, device.name, device.capabilities)
        with pytest.raises(
            ConfigError, match=f"{name} is .*; allowed: none with tensor_parallel_size 2"
        ):
            checked(
                replace(options, tensor_parallel_size=2),
                "cpu",
                replace(cpu.capabilities, rank_drafts=False),
            )


@pytest.mark.parametrize("name", ["kv_swap_memory", "kv_peer_memory", "kv_disk_dir"])
def test_ranks_on_gpus_that_draft_keep_blocks_in_their_cache(
    name: str, folder: Path, tmp_path: Path
) -> None:
    value: Any = tmp_path if name == "kv_disk_dir" else 64 << 20
    options = ExecutorOptions(
        model_folder=folder, block_size=64, tensor_parallel_size=2, **{name: value}
    )
    drafting = replace(options, draft_model=folder, max_draft_tokens=3)
    checked(drafting, "cpu", replace(cpu.capabilities, host_blocks=True))
    with pytest.raises(
        ConfigError, match=f"{name} is .*; allowed: .* with draft_model and tensor_parallel_size 2"
    ):
        checked(drafting, "cuda", cuda.capabilities)
