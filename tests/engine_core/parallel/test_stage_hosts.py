"""Engines whose last stages are computed by other processes over sockets, beside one process: every
bit is the same."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest

from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.executors.ranks import multi
from headwater.engine_core.executors.ranks.multi import MultiExecutor
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.parallel import rank_processes
from headwater.engine_core.parallel.host_link import LEAST_SILENCE
from headwater.engine_core.parallel.rank_facts import RankLost
from headwater.engine_core.request import NewRequest
from headwater.engine_core.step_output import StepOutput
from tests.engine_core.parallel.cable import Cable
from tests.engine_core.parallel.parallel_models import QWEN3, engine_of, folder_of
from tests.engine_core.parallel.test_pipeline_parallel import reported
from tests.engine_core.parallel.test_tensor_parallel import PROMPTS, SAMPLINGS
from tests.engine_core.small_models import Answer, SmallEngine, greedy, receive
from tests.forked_host import ForkedHost, forked_host, free_address, write_secret
from tests.long_values import long_but
from tests.polling import holds_within
from tests.services.engine.engine_process import wait_for_end


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(QWEN3, tmp_path_factory.mktemp("qwen3"))[1]


@contextlib.contextmanager
def engine_with_hosts(
    folder: Path, base: Path, *, size: int = 2, num_hosts: int = 1, **options: Any
) -> Iterator[tuple[SmallEngine, list[ForkedHost]]]:
    address = free_address()
    secret = write_secret(base)
    asked = {
        "pipeline_parallel_size": size,
        "stage_hosts": num_hosts,
        "stage_listen": address,
    } | options
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(forked_host(address, secret, folder)) for _ in range(num_hosts)
        ]
        yield stack.enter_context(engine_of(folder, stage_secret_file=secret, **asked)), hosts


@pytest.mark.long
def test_a_tree_of_sums_over_hosts_has_the_bits_of_one_process(qwen3: Path, tmp_path: Path) -> None:
    scored = greedy(12, num_logprobs=3)
    with engine_with_hosts(qwen3, tmp_path, tensor_parallel_size=2, numerics="tree") as (four, _):
        answers = reported(four.answer(PROMPTS, scored))
    with engine_of(qwen3, numerics="tree") as one:
        assert answers == reported(one.answer(PROMPTS, scored))


@pytest.mark.parametrize(
    ("size", "num_hosts", "tensor"),
    [(3, 2, 1), *(pytest.param(*each, marks=pytest.mark.long) for each in ((2, 1, 1), (2, 1, 2)))],
)
def test_stages_on_other_hosts_answer_to_the_bit_as_one_process(
    size: int, num_hosts: int, tensor: int, qwen3: Path, tmp_path: Path
) -> None:
    scored = greedy(12, num_logprobs=3, num_prompt_logprobs=1)
    asked = {"size": size, "num_hosts": num_hosts, "tensor_parallel_size": tensor}
    with (
        engine_with_hosts(qwen3, tmp_path, **asked) as (many, _),
        engine_of(qwen3, tensor_parallel_size=tensor) as one,
    ):
        assert reported(many.answer(PROMPTS, scored)) == reported(one.answer(PROMPTS, scored))
        assert reported(many.answer(PROMPTS, *SAMPLINGS)) == reported(
            one.answer(PROMPTS, *SAMPLINGS)
        )
        prompts = [prompt[:20] for prompt in PROMPTS] * 16
        lengths = [greedy(1 + i % 7) for i in range(len(prompts))]
        assert reported(many.answer(prompts, *lengths)) == reported(one.answer(prompts, *lengths))


def tokens_beside_cancelled(engine: SmallEngine, prompts: list[list[int]]) -> list[list[int]]:
    """Answers to prompts, beside others as long that are cancelled while plans are in flight."""
    answers = {key: Answer([], [], []) for key in range(2 * len(prompts))}
    for key in answers:
        sampling = greedy(24)
        new = NewRequest(key=key, prompt_ids=prompts[key // 2], output_ids=[], sampling=sampling)
        engine.engine.add(new)
    num_cancelled = 0
    while engine.engine.has_work():
        if (output := engine.engine.step()) is not None:
            receive(output, answers)
            for key in range(1, len(answers), 2):
                if len(answers[key].token_ids) == key:
                    engine.engine.cancel(key)
                    num_cancelled += 1
    assert num_cancelled >= len(prompts)
    return [answers[key].token_ids for key in range(0, len(answers), 2)]


def test_plans_that_are_cancelled_in_flight_change_no_token_of_other_requests(
    qwen3: Path, tmp_path: Path
) -> None:
    prompts = [prompt[:40] for prompt in PROMPTS]
    with engine_with_hosts(qwen3, tmp_path) as (two, _), engine_of(qwen3) as one:
        expected = one.tokens(prompts, greedy(24))
        assert tokens_beside_cancelled(two, prompts) == expected
        assert two.tokens(prompts, greedy(24)) == expected


class Loss:
    """How an engine loses a rank while it answers, and when."""

    def __init__(self, engine: SmallEngine) -> None:
        self.at = 0.0
        self.lost: RankLost | None = None
        assert isinstance(engine.executor, MultiExecutor)
        engine.executor.on_rank_lost(self._note)

    def _note(self, lost: RankLost) -> None:
        self.lost = lost
        self.at = time.monotonic()

    def wait(self) -> RankLost:
        """Waits until the engine reports the loss, and returns it. Answers may fail before that."""
        assert holds_within(lambda: self.lost is not None, 60)
        assert self.lost is not None
        return self.lost


def strike_behind_step(
    number: int, strike: Callable[[], None], engine: SmallEngine, patch: pytest.MonkeyPatch
) -> None:
    """Has the engine call `strike` once it has made so many more steps."""
    step = engine.engine.step
    made = itertools.count(1)

    def counted() -> StepOutput | None:
        output = step()
        if next(made) == number:
            strike()
        return output

    patch.setattr(engine.engine, "step", counted)


PROMPT = [(7 * i) % 500 for i in range(900)]
MOMENTS = {
    "prefill": ([PROMPT] * 8, greedy(4), 2),
    "decode": ([PROMPT[:20]] * 8, greedy(900), 60),
}
"""Prompts, what is asked, and the number of steps after which the host is ended."""


@pytest.mark.parametrize("moment", long_but(("idle", *MOMENTS), "decode"))
def test_a_host_that_is_killed_ends_the_engine_at_once(
    moment: str, qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its silence would be noticed later, and for another reason."""
    with engine_with_hosts(qwen3, tmp_path) as (engine, [host]):
        loss = Loss(engine)
        pids = host.rank_pids
        if moment == "idle":
            host.signal(signal.SIGKILL)
        else:
            prompts, asked, num_steps = MOMENTS[moment]
            kill = partial(host.signal, signal.SIGKILL)
            strike_behind_step(num_steps, kill, engine, monkeypatch)
            with pytest.raises(RankLost):
                engine.answer(prompts, asked)
        assert re.fullmatch(
            r"rank 1 \(stage 1 on 127.0.0.1\) has closed its connection( \(.*\))?; all ranks of the engine end",
            str(loss.wait()),
        )
        for pid in pids:
            wait_for_end(pid, 60)


def test_a_host_that_is_killed_while_the_engine_starts_ends_the_start(
    qwen3: Path, tmp_path: Path
) -> None:
    address = free_address()
    secret = write_secret(tmp_path)
    options = ExecutorOptions(
        model_folder=qwen3,
        num_threads=1,
        num_blocks=600,
        pipeline_parallel_size=2,
        stage_hosts=1,
        stage_listen=address,
        stage_secret_file=secret,
    )

    def build() -> None:
        executor, _, _ = build_executor(options, kill_when_loading)
        with contextlib.closing(executor):
            executor.warm_up()

    def kill_when_loading(phase: str, done: int, total: int) -> None:
        if phase == "loading weights" and host.exitcode is None:
            host.signal(signal.SIGKILL)

    with (
        forked_host(address, secret, qwen3) as host,
        pytest.raises(RankLost, match=r"rank 1 \(stage 1 on 127.0.0.1\) has closed its connection"),
    ):
        build()


def test_a_rank_of_a_host_that_is_killed_ends_the_engine_and_the_host_joins_the_next_one(
    qwen3: Path, tmp_path: Path
) -> None:
    address = free_address()
    secret = write_secret(tmp_path)
    asked = {
        "pipeline_parallel_size": 2,
        "stage_hosts": 1,
        "stage_listen": address,
        "stage_secret_file": secret,
    }
    with engine_of(qwen3) as one, forked_host(address, secret, qwen3) as host:
        expected = reported(one.answer(PROMPTS, greedy(12, num_logprobs=1)))
        descriptors = list[list[str]]()
        for _ in range(2):
            with engine_of(qwen3, **asked) as engine:
                assert reported(engine.answer(PROMPTS, greedy(12, num_logprobs=1))) == expected
                loss = Loss(engine)
                [pid] = host.rank_pids
                descriptors.append(host.descriptors())
                os.kill(pid, signal.SIGKILL)
                assert (
                    str(loss.wait())
                    == "rank 1 (stage 1 on 127.0.0.1) was ended by SIGKILL; all ranks of the "
                    "engine end"
                )
                with pytest.raises(RankLost):
                    engine.answer(PROMPTS[:1], greedy(4))
        assert descriptors[0] == descriptors[1]
        assert holds_within(lambda: host.rank_pids == [], 60)
        # The host closes the descriptors of a rank after the rank has ended.
        assert holds_within(lambda: len(host.descriptors()) < len(descriptors[0]), 60)
        host.signal(signal.SIGTERM)
        assert host.wait() == 0


class SlowImport(MetaPathFinder):
    """Delays the import of the program of ranks for longer than a host may be silent."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == rank_processes.MODULE:
            time.sleep(1.5 * LEAST_SILENCE)


def forget_program() -> None:
    sys.modules.pop(rank_processes.MODULE)
    sys.meta_path.insert(0, SlowImport())


def test_a_host_on_a_slow_disk_joins_when_its_libraries_are_loaded(
    qwen3: Path, tmp_path: Path
) -> None:
    address = free_address()
    secret = write_secret(tmp_path)
    asked = {"pipeline_parallel_size": 2, "stage_hosts": 1, "stage_listen": address}
    with (
        forked_host(address, secret, qwen3, prepare=forget_program),
        engine_of(qwen3, stage_secret_file=secret, **asked) as engine,
    ):
        assert len(engine.tokens(PROMPTS[:1], greedy(2))[0]) == 2


def has_reported_all_plans(engine: SmallEngine) -> bool:
    """Whether the last heartbeat of each rank says that it has computed as many plans as the
    others."""
    assert isinstance(engine.executor, MultiExecutor)
    figures = engine.executor.ranks.board.figures()
    return len({each.num_plans for each in figures}) == 1


def test_a_host_that_stands_still_ends_an_engine_that_is_idle(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multi, "LEAST_SILENCE", LEAST_SILENCE)
    with engine_with_hosts(qwen3, tmp_path) as (engine, [host]):
        engine.executor.warm_up()
        engine.tokens([[5, 6, 7]], greedy(2))
        # A host that stands still before it reports its last plan counts as one that computes.
        assert holds_within(lambda: has_reported_all_plans(engine), 60)
        loss = Loss(engine)
        host.signal(signal.SIGSTOP)
        silence = re.search(
            r"rank 1 \(stage 1 on 127.0.0.1\) has been silent for (\d+\.\d) s", str(loss.wait())
        )
        assert silence is not None
        assert float(silence[1]) >= LEAST_SILENCE


def test_a_link_that_is_cut_ends_the_engine_and_the_stage_of_the_host(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = free_address()
    secret = write_secret(tmp_path)
    asked = {
        "pipeline_parallel_size": 2,
        "stage_hosts": 1,
        "stage_listen": address,
        "stage_secret_file": secret,
    }
    monkeypatch.setattr(multi, "LEAST_SILENCE", LEAST_SILENCE)
    with Cable(address) as cable, forked_host(cable.address, secret, qwen3) as host:
        with engine_of(qwen3, **asked) as engine:
            engine.executor.warm_up()
            loss = Loss(engine)
            pids = host.rank_pids
            strike_behind_step(30, cable.cut, engine, monkeypatch)
            with pytest.raises(RankLost):
                engine.answer([PROMPT[:20]] * 8, greedy(900))
            # A pause of the machine during a step makes the silence longer than two seconds.
            reported = re.search(
                r"rank [01] .*(?:silent|computed no plan) for (\d+\.\d) s", str(loss.wait())
            )
            assert reported is not None
            assert float(reported[1]) >= LEAST_SILENCE
            assert host.says(f"the engine at {cable.address} has been silent for ", 60)
            for pid in pids:
                wait_for_end(pid, 60)
        cable.mend()
        with engine_of(qwen3, **asked) as engine, engine_of(qwen3) as one:
            assert engine.tokens(PROMPTS, greedy(8)) == one.tokens(PROMPTS, greedy(8))


@pytest.mark.long
def test_a_host_that_is_asked_to_end_does_so_with_its_ranks(qwen3: Path, tmp_path: Path) -> None:
    with engine_with_hosts(qwen3, tmp_path) as (engine, [host]):
        loss = Loss(engine)
        pids = host.rank_pids
        host.signal(signal.SIGTERM)
        assert host.wait() == 0
        assert "has closed its connection" in str(loss.wait())
        for pid in pids:
            wait_for_end(pid, 60)
    # While it waits for an engine, too.
    with forked_host(free_address(), write_secret(tmp_path), qwen3) as host:
        assert host.says("no engine is at 127.0.0.1:")
        host.signal(signal.SIGTERM)
        assert host.wait() == 0


@pytest.mark.long
def test_a_second_host_waits_until_a_stage_is_missing(qwen3: Path, tmp_path: Path) -> None:
    address = free_address()
    secret = write_secret(tmp_path)
    asked = {
        "pipeline_parallel_size": 2,
        "stage_hosts": 1,
        "stage_listen": address,
        "stage_secret_file": secret,
    }
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(forked_host(address, secret, qwen3))
        engine = stack.enter_context(engine_of(qwen3, **asked))
        spare = stack.enter_context(forked_host(address, secret, qwen3))
        assert spare.says(f"the engine at {address} has a host for each of its stages")
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
        with pytest.raises(RankLost):
            engine.answer(PROMPTS[:1], greedy(4))
        engine.close()
        again = stack.enter_context(engine_of(qwen3, **asked))
        assert len(again.tokens(PROMPTS, greedy(4))) == len(PROMPTS)
        assert spare.says("stage 1 of the engine at")
