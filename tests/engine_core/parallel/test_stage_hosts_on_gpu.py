"""Engines whose last stages are computed on GPUs of other processes over sockets, beside one
process: every bit is the same. Where there are fewer GPUs than ranks, all take turns on one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine_core.executors.ranks.rank_devices import SHARE
from headwater.engine_core.parallel.rank_facts import RankLost
from tests.engine_core.parallel.parallel_models import QWEN3, folder_of
from tests.engine_core.parallel.test_pipeline_parallel import reported
from tests.engine_core.parallel.test_ranks_on_gpu import engine
from tests.engine_core.parallel.test_stage_hosts import PROMPT, Loss
from tests.engine_core.parallel.test_stages_on_gpu import SCORED
from tests.engine_core.parallel.test_tensor_parallel import PROMPTS, SAMPLINGS
from tests.engine_core.small_models import SmallEngine, greedy
from tests.engine_core.test_device_drafts_on_gpu import PLAIN, check_own_drafts
from tests.engine_core.test_drafts_on_gpu import MAX_DRAFTS, prompts_of
from tests.forked_host import ForkedHost, forked_host, free_address, use_gpus, write_secret
from tests.polling import holds_within
from tests.services.engine.engine_process import wait_for_end

pytestmark = pytest.mark.gpu

NOTICED_SECONDS = 1.0


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(QWEN3, tmp_path_factory.mktemp("qwen3"), "bfloat16")[1]


@contextlib.contextmanager
def hosts_of(
    folder: Path,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    size: int = 2,
    num_hosts: int = 1,
    tensor: int = 1,
) -> Iterator[tuple[dict[str, Any], list[ForkedHost]]]:
    """Options of an engine and its hosts, which have GPUs of their own behind those of the
    engine."""
    address = free_address()
    secret = write_secret(base)
    first = (size - num_hosts) * tensor
    if shares := torch.cuda.device_count() < size * tensor:
        monkeypatch.setenv(SHARE, "1")
    options = {
        "pipeline_parallel_size": size,
        "tensor_parallel_size": tensor,
        "stage_hosts": num_hosts,
    }
    with contextlib.ExitStack() as stack:
        hosts = []
        for i in range(num_hosts):
            gpus = range(first + i * tensor, first + (i + 1) * tensor)
            prepare = partial(use_gpus, gpus, shares=shares)
            hosts.append(stack.enter_context(forked_host(address, secret, folder, prepare=prepare)))
        yield options | {"stage_listen": address, "stage_secret_file": secret}, hosts


@pytest.mark.parametrize(
    ("size", "num_hosts", "tensor"), [(2, 1, 1), (3, 2, 1), (3, 1, 1), (2, 1, 2)]
)
def test_stages_on_other_hosts_answer_to_the_bit_as_one_process(
    size: int,
    num_hosts: int,
    tensor: int,
    qwen3: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = {"size": size, "num_hosts": num_hosts, "tensor": tensor}
    many = [prompt[:20] for prompt in PROMPTS] * 16
    asked = [
        (PROMPTS, [SCORED]),
        (PROMPTS, SAMPLINGS),
        # Longer than the lanes of a stream, and more requests than seats.
        ([PROMPT[:700]] * 2, [greedy(4, num_logprobs=1)]),
        (many, [greedy(1 + i % 7) for i in range(len(many))]),
    ]
    with (
        hosts_of(qwen3, tmp_path, monkeypatch, **layout) as (options, _),
        engine(qwen3, **options) as several,
    ):
        answers = [reported(several.answer(prompts, *samplings)) for prompts, samplings in asked]
    with engine(qwen3, tensor_parallel_size=tensor) as one:
        assert answers == [
            reported(one.answer(prompts, *samplings)) for prompts, samplings in asked
        ]


def test_drafts_that_every_stage_looks_up_change_no_bit(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of([1 + i * 37 % 200 for i in range(40)])
    sizes: dict[str, Any] = {
        "max_num_seqs": 40,
        "num_blocks": 400,
        "max_draft_tokens": MAX_DRAFTS,
        "async_depth": 4,
    }
    with (
        hosts_of(qwen3, tmp_path, monkeypatch) as (options, _),
        engine(qwen3, **options, **sizes) as two,
    ):
        check_own_drafts(two, prompts, PLAIN)


def test_what_a_stage_on_another_host_costs(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prints it, with `pytest -s`: milliseconds a token of an answer alone, and of each of 8 at
    once."""
    prompts = [PROMPT[i : i + 20] for i in range(8)]
    asked = greedy(300)

    def measured(name: str, two: SmallEngine) -> list[list[int]]:
        answers = two.tokens(prompts, asked)
        for num_rows in (1, 8):
            two.tokens(prompts[:num_rows], asked)
            began = time.perf_counter()
            assert two.tokens(prompts[:num_rows], asked) == answers[:num_rows]
            print(
                f"\n{name}, {num_rows} at once: "
                f"{1e3 * (time.perf_counter() - began) / asked.max_tokens:.2f} ms"
            )
        return answers

    with hosts_of(qwen3, tmp_path, monkeypatch) as (options, _), engine(qwen3, **options) as two:
        answers = measured("on another host", two)
    for access in ("auto", "off"):
        with engine(qwen3, pipeline_parallel_size=2, peer_access=access) as two:
            assert measured(f"on one host, peer access {access}", two) == answers


@pytest.mark.parametrize("who", ["host", "rank"])
def test_a_host_or_its_rank_that_is_killed_ends_the_engine_at_once(
    who: str, qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        hosts_of(qwen3, tmp_path, monkeypatch) as (options, [host]),
        engine(qwen3, **options) as two,
    ):
        two.tokens(PROMPTS[:1], greedy(2))
        loss = Loss(two)
        pids = host.rank_pids
        began = [0.0]

        def strike() -> None:
            began[0] = time.monotonic()
            if who == "host":
                host.signal(signal.SIGKILL)
            else:
                os.kill(pids[0], signal.SIGKILL)

        timer = threading.Timer(0.3, strike)
        timer.start()
        with pytest.raises(RankLost):
            two.answer([PROMPTS[0]] * 8, greedy(900))
        timer.join()
        lost = str(loss.wait())
        assert loss.at - began[0] < NOTICED_SECONDS
        how = r"has closed its connection( \(.*\))?" if who == "host" else "was ended by SIGKILL"
        assert re.fullmatch(
            rf"rank 1 \(stage 1 on 127.0.0.1\) {how}; all ranks of the engine end", lost
        )
        for pid in pids:
            wait_for_end(pid, 5)


def test_a_host_that_stands_still_ends_the_engine_and_the_host_joins_the_next_one(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is noticed as late as a GPU may take to compile a kernel."""
    with hosts_of(qwen3, tmp_path, monkeypatch) as (options, [host]):
        with engine(qwen3, **options) as two:
            expected = two.tokens(PROMPTS, greedy(8))
            loss = Loss(two)
            host.signal(signal.SIGSTOP)
            assert "has been silent for" in str(loss.wait())
        host.signal(signal.SIGCONT)
        assert holds_within(lambda: host.rank_pids == [], 10)
        with engine(qwen3, **options) as again:
            assert again.tokens(PROMPTS, greedy(8)) == expected
