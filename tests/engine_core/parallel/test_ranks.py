"""Messages that an engine gets from its ranks while they start, and the loss of one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.executor import Executor, StepPlan, StepResult
from headwater.engine_core.executors.device.warmup_plans import warmup_plans
from headwater.engine_core.executors.rank_process import RankProcess
from headwater.engine_core.executors.ranks import multi, start_ranks
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.page_groups import PageSizes
from headwater.engine_core.parallel import rank_processes
from headwater.engine_core.parallel.copied_process import CopiedProcess
from headwater.engine_core.parallel.plan_messages import PREPARE, encode_warm_up
from headwater.engine_core.parallel.rank_facts import RankLost
from headwater.engine_core.parallel.rank_start import RankStart
from headwater.engine_core.parallel.ranks import Ranks
from headwater.engine_core.parallel.result_messages import (
    Hello,
    Loading,
    RankPrepared,
    Refusal,
    WarmedUp,
    decode_report,
    decode_result,
    encode_report,
)
from headwater.engine_core.system.ring import RING_BYTES, PeerGone, RingReader, RingWriter
from tests.polling import holds_within

SIZES = PageSizes(page=100, filled=(96, 80), of_set=250)
HELLO = Hello(config=EngineConfig(num_blocks=9, max_model_len=64, page_sizes=SIZES))
HALF = Loading(phase="loading weights", done=1, total=2)


@contextmanager
def two_ranks(run: Callable[[RankStart], None]) -> Iterator[Ranks]:
    """Two ranks, each of which calls `run` and does nothing else."""

    def started(start: RankStart, variables: Mapping[str, str]) -> CopiedProcess:
        return CopiedProcess(partial(run, start), start.descriptors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "_started", started)
        ranks = Ranks(ExecutorOptions(model_folder=None, tensor_parallel_size=2), 2, [{}, {}])
    try:
        yield ranks
    finally:
        ranks.close()


def wait_for_the_second(start: RankStart) -> None:
    """Waits for the second rank, as ranks do before they exchange data. The second rank reports its
    progress, and continues when the engine has received the report."""
    reports = RingWriter(start.rings.reports)
    plans = RingReader(start.rings.plans)
    if start.rank == 0:
        os.read(start.group.from_peers[0], 1)
    else:
        reports.write(encode_report(HALF))
        plans.wait(60)
        assert plans.read() == [b"heard"]
        os.write(start.group.to_peers[0], b"\0")
    reports.write(encode_report(HELLO))
    os.read(start.lifeline, 1)


def test_a_report_is_what_the_rank_reported() -> None:
    assert decode_report(encode_report(HELLO)) == HELLO


def test_progress_of_a_rank_is_reported_while_another_one_waits_for_it() -> None:
    reported = []

    def progress(phase: str, done: int, total: int) -> None:
        reported.append((phase, done, total))
        ranks.send(b"heard")

    with two_ranks(wait_for_the_second) as ranks:
        assert start_ranks._hellos(ranks, progress) == [HELLO, HELLO]
    assert reported == [("loading weights", 1, 2)]


def end_as_the_second(number: int, start: RankStart) -> None:
    if start.rank == 1:
        os.kill(os.getpid(), number)
    threading.Event().wait()


REAL_TIME = signal.SIGRTMIN + 1


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (REAL_TIME, f"signal {REAL_TIME:d}")]
)
def test_the_end_of_a_rank_by_any_signal_is_noticed_while_nothing_is_asked_of_it(
    number: int, name: str
) -> None:
    with two_ranks(partial(end_as_the_second, number)) as ranks:
        lost = list[RankLost]()
        ranks.on_lost(lost.append)
        assert holds_within(lambda: bool(lost), 60)
    assert str(lost[0]) == f"rank 1 was ended by {name}; all ranks of the engine end"


def close_all_as_the_second(start: RankStart) -> None:
    """Closes the pipes of the second rank long before its process ends. Freeing GPU memory may take
    seconds."""
    if start.rank == 1:
        os.closerange(3, max(start.descriptors) + 1)
    threading.Event().wait()


def test_a_rank_that_ends_slowly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Forks of tests have longer: see `forked_ranks`.
    monkeypatch.setattr(rank_processes, "EXIT_SECONDS", 0.5)
    with (
        two_ranks(close_all_as_the_second) as ranks,
        pytest.raises(RankLost, match="rank 1 has closed its pipes;"),
    ):
        ranks.receive(1)


def refuse_as_the_second(start: RankStart) -> None:
    if start.rank == 0:
        os.read(start.lifeline, 1)
    RingWriter(start.rings.reports).write(
        encode_report(Refusal(name="dtype", value="float8", allowed="float32"))
    )
    raise SystemExit(1)


def test_a_refusal_of_any_rank_is_raised() -> None:
    with (
        two_ranks(refuse_as_the_second) as ranks,
        pytest.raises(ConfigError, match="dtype is 'float8'; allowed: float"),
    ):
        start_ranks._hellos(ranks, lambda phase, done, total: None)


def compute_a_step(start: RankStart) -> None:
    """Says that a step of the whole budget takes 4 s, then answers nothing."""
    reports = RingWriter(start.rings.reports)
    plans = RingReader(start.rings.plans)
    plans.wait(60)
    assert plans.read() == [encode_warm_up()]
    reports.write(encode_report(WarmedUp(seconds=4.0)))
    os.read(start.lifeline, 1)


def plan_of(start: int, count: int) -> StepPlan:
    """A row that computes so many tokens behind a prefix."""
    plan = next(
        plan for plan in warmup_plans(HELLO.config, vocab_size=8) if isinstance(plan, StepPlan)
    )
    return replace(plan, starts=np.array([start], np.int32), counts=np.array([count], np.int32))


@pytest.mark.parametrize(
    ("start", "count", "seconds"),
    [
        (0, 1, 2.0),
        (0, 1024, 10 * 4.0 * (0.5 + 0.25)),
        (1 << 20, 1024, 10 * 4.0 * (0.5 + 0.25 + 256)),
    ],
    ids=["one token", "half the budget", "half the budget behind a long cached prefix"],
)
def test_the_silence_that_a_first_step_is_allowed_counts_what_its_tokens_attend_to(
    start: int, count: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention to 2,048 positions takes as long as all else of a token."""
    monkeypatch.setattr(multi, "LEAST_SILENCE", 2.0)
    with two_ranks(compute_a_step) as ranks:
        executor = multi.MultiExecutor(ranks, HELLO, attention_work=1 / 2048)
        assert executor.warm_up() == 4.0
        executor.submit(plan_of(start, count))
        assert ranks.allowed_silence == pytest.approx(seconds)


LONG_RESULT = StepResult(
    token_ids=np.arange(64, dtype=np.int32).reshape(64, 1),
    num_tokens=np.ones(64, np.int32),
    embeddings={row: bytes([row]) * (RING_BYTES // 8) for row in range(64)},
)
"""Eight times what a ring holds."""


def report_in_two_threads(start: RankStart) -> None:
    """Tells a result in a thread, as on a device, and meanwhile that launches are prepared."""
    if start.rank == start.options.layout.speaker:
        process = RankProcess(start)
        ring = process._reports.ring
        write = ring.write
        is_written = threading.Event()

        def noting(message: bytes) -> None:
            is_written.set()
            write(message)

        ring.write = noting  # type: ignore[method-assign]
        threading.Thread(target=process._take, args=(LONG_RESULT, 0.0), daemon=True).start()
        assert is_written.wait(60)
        process._get_ready(cast("Executor", SimpleNamespace(prepare=lambda: False)), PREPARE)
    os.read(start.lifeline, 1)


def test_what_a_rank_reports_beside_a_long_result_comes_behind_it() -> None:
    with two_ranks(report_in_two_threads) as ranks:
        speaker = ranks.layout.speaker
        assert decode_result(ranks.receive(speaker)).embeddings == LONG_RESULT.embeddings
        assert decode_report(ranks.receive(speaker)) == RankPrepared(is_more_left=False)


LONG_MESSAGE = bytes(2 * RING_BYTES)


def answer_at_length(start: RankStart) -> None:
    """Reads the next plan when the result of the last one is written, as ranks on CPUs do."""
    reports = RingWriter(start.rings.reports)
    plans = RingReader(start.rings.plans)
    with suppress(PeerGone):
        while True:
            plans.wait()
            for _ in plans.read():
                if start.rank == start.options.layout.speaker:
                    reports.write(LONG_MESSAGE)


def test_long_plans_behind_long_results_are_sent() -> None:
    with two_ranks(answer_at_length) as ranks:
        telling = threading.Thread(
            target=lambda: [ranks.send(LONG_MESSAGE) for _ in range(3)], daemon=True
        )
        telling.start()
        telling.join(60)
        assert not telling.is_alive()
        assert all(ranks.receive(ranks.layout.speaker) == LONG_MESSAGE for _ in range(3))


def test_the_config_of_a_rank_comes_back_as_it_was_sent() -> None:
    sizes = PageSizes(page=100, filled=(90, 80), of_set=7)
    config = EngineConfig(
        block_size=16, num_blocks=64, max_model_len=64, page_windows=(0, 32), page_sizes=sizes
    )
    hello = Hello(config=config)
    assert decode_report(encode_report(hello)) == hello
