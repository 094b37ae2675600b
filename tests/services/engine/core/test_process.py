"""The core's loop, in a thread of this process."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import StepPlan
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel, expected_tokens
from headwater.engine_core.kv.block_source import BlockSource
from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import MaskReport
from headwater.engine_core.system.ring import RingReader, RingWriter, create_ring
from headwater.services.engine.core import process as core_process
from headwater.services.engine.core.messages import (
    Add,
    Cancel,
    Command,
    Credit,
    MasksFilled,
    Prepared,
    Progress,
    Report,
    Step,
    Waiting,
    decode_mask_report,
    decode_report,
    encode,
)
from headwater.services.engine.core.process import SpokenProgress, run
from headwater.services.engine.core.rates import MeasuredExecutor
from tests.engine_core.lying_source import ScriptedSource

CONFIG = EngineConfig(
    num_blocks=100, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=64, async_depth=2
)
MODEL = SimulatedModel(vocab_size=1000)


class Pace:
    """A clock that stands still until a step may end."""

    def __init__(self) -> None:
        self.now = 0.0
        self._permits = threading.Semaphore(0)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self._permits.acquire()
        self.now += seconds

    def may_end(self, num_steps: int = 1) -> None:
        self._permits.release(num_steps)


class AtOnce(SimulatedExecutor):
    """Computes a plan where it is submitted, each when the test permits."""

    computes_at_once = True

    def __init__(self, *parts: Any, permits: threading.Semaphore) -> None:
        super().__init__(*parts)
        self._permits = permits

    def submit(self, plan: StepPlan) -> int:
        self._permits.acquire()
        return super().submit(plan)


class HungSource(ScriptedSource):
    """Says that it has all blocks, and brings none."""

    def find(self, hashes: Sequence[bytes]) -> int:
        return len(hashes)


class Core:
    """A running loop, seen from the server."""

    def __init__(
        self,
        step_seconds: float,
        executor_class: type[SimulatedExecutor] = SimulatedExecutor,
        *,
        sources: Sequence[BlockSource] = (),
        **parts: Any,
    ) -> None:
        command_writer, command_reader = create_ring(1 << 16)
        report_writer, report_reader = create_ring(1 << 16)
        self.commands = RingWriter(command_writer)
        self.reports = RingReader(report_reader)
        timing = SimulatedTiming(step_seconds=step_seconds)
        executor = MeasuredExecutor(executor_class(CONFIG, MODEL, timing, **parts))
        mask_report_writer, mask_report_reader = create_ring(1 << 16)
        self.mask_reports = RingReader(mask_report_reader)
        inner = (RingReader(command_reader), RingWriter(report_writer))
        mask_writer = RingWriter(mask_report_writer)
        masks = np.full((1, CONFIG.max_num_seqs, -(-MODEL.vocab_size // 32)), -1, np.int32)
        self.engine = Engine(
            CONFIG,
            executor,
            masks=masks,
            sources=sources,
            report_masks=lambda report: mask_writer.write(encode(report)),
        )
        self.thread = threading.Thread(target=run, args=(self.engine, executor, *inner))
        self.thread.start()

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.commands.write(encode(command))

    def sent(self) -> Iterator[Report]:
        """For ever, as it comes."""
        while True:
            self.reports.wait()
            yield from map(decode_report, self.reports.read())

    def steps(self) -> Iterator[Step]:
        return (report for report in self.sent() if isinstance(report, Step))

    def masks_reported(self) -> Iterator[MaskReport]:
        """Reports to those who fill masks, as they come."""
        while True:
            self.mask_reports.wait()
            yield from map(decode_mask_report, self.mask_reports.read())


@pytest.fixture
def pace() -> Pace:
    return Pace()


@pytest.fixture
def permits() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def core(
    request: pytest.FixtureRequest, pace: Pace, permits: threading.Semaphore
) -> Iterator[Core]:
    """A core whose steps take 5 ms, end when `pace` permits, or are computed at once where
    `permits` lets them."""
    kind = getattr(request, "param", None)
    if kind == "at once":
        core = Core(0.0, AtOnce, permits=permits)
    elif kind == "beside a hung source":
        core = Core(
            0.005, sources=[HungSource(np.zeros((CONFIG.num_blocks, CONFIG.block_size), np.uint64))]
        )
    else:
        core = Core(1.0, clock=pace.clock, sleep=pace.sleep) if kind == "paced" else Core(0.005)
    yield core
    core.commands.close()
    pace.may_end(1000)
    permits.release(1000)
    core.thread.join(60)
    assert not core.thread.is_alive()


def request(key: int, max_tokens: int = 500, **fields: int) -> Add:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Add(
        NewRequest(key=key, prompt_ids=[key] * 40, output_ids=[], sampling=sampling, **fields)
    )


@pytest.mark.parametrize("core", ["at once"], indirect=True)
def test_a_step_is_reported_before_the_next_one_where_launching_computes(
    core: Core, permits: threading.Semaphore
) -> None:
    core.send(request(1))
    permits.release()
    assert next(core.steps()).output.num_tokens == [1]


@pytest.mark.parametrize("core", ["beside a hung source"], indirect=True)
def test_a_core_that_waits_for_blocks_alone_says_so_now_and_then(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_process, "WAITING_SECONDS", 0.01)
    core.send(request(1))
    waiting = (report for report in core.sent() if isinstance(report, Waiting))
    assert [report.load.num_waiting for report in itertools.islice(waiting, 3)] == [1, 1, 1]
    core.send(Cancel([1]))


def test_an_engine_that_has_prepared_everything_reports_it_once(core: Core) -> None:
    sent = core.sent()
    assert any(isinstance(report, Prepared) for report in sent)
    core.send(request(1, max_tokens=3))
    last = next(
        report
        for report in sent
        if isinstance(report, Prepared) or (isinstance(report, Step) and report.output.finishes)
    )
    assert isinstance(last, Step)


@pytest.mark.parametrize("core", ["paced"], indirect=True)
def test_a_cancelled_request_says_nothing_after_the_step_that_runs_and_gives_its_blocks_back(
    core: Core, pace: Pace
) -> None:
    core.send(request(1), request(2))
    sent = core.steps()

    def ended_steps() -> Iterator[Step]:
        """Steps one by one. Each step runs until the test asks for it."""
        while True:
            pace.may_end()
            yield next(sent)

    steps = ended_steps()
    last_step = next(step.output.step for step in steps if len(step.output.keys) == 2)
    core.send(Cancel([1]))
    ended = next(step.output for step in steps if step.output.finishes)
    assert (ended.finishes[0].key, ended.finishes[0].reason) == (1, FinishReason.CANCELLED)
    assert ended.step - last_step <= 2
    for _ in range(CONFIG.async_depth):
        ended = next(steps).output
    assert ended.keys == [2]
    # 40 prompt tokens and some more: three blocks of one request.
    assert core.engine.load().num_used_blocks == 3
    core.send(Cancel([2]))
    next(step for step in steps if step.output.finishes)


def test_a_step_in_which_no_request_starts_or_ends_reports_no_load_soon_after_another(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_process, "LOAD_SECONDS", math.inf)
    core.send(request(2, max_tokens=3), request(3, max_tokens=8))
    sent = core.steps()
    steps: list[Step] = []
    while not steps or 3 not in [end.key for end in steps[-1].output.finishes]:
        steps.append(next(sent))
    says_more = [bool(step.output.starts or step.output.finishes) for step in steps]
    assert [step.load is not None for step in steps] == says_more
    assert not all(says_more)
    assert [load.num_running for step in steps if (load := step.load)][-2:] == [1, 0]


def test_an_idle_core_sleeps_until_a_command_comes(core: Core) -> None:
    core.send(request(1, 20, credit=4))
    tokens: list[int] = []
    steps = core.steps()
    while len(tokens) < 4:
        tokens += next(steps).output.token_ids
    while core.engine.has_work():
        time.sleep(0.001)
    core.send(Credit([1], [100]))
    while len(tokens) < 20:
        tokens += next(steps).output.token_ids
    assert tokens == expected_tokens(
        MODEL, [1] * 40, SamplingParams(temperature=0.0, max_tokens=20)
    )


def test_a_step_says_what_it_computed_and_how_long_it_took(core: Core) -> None:
    began = time.monotonic()
    core.send(request(1, 10))
    steps = list(itertools.islice(core.steps(), 10))
    assert [(step.prefill_tokens, step.decode_rows) for step in steps] == [(40, 0)] + [(0, 1)] * 9
    assert 0.045 < sum(step.seconds for step in steps) < time.monotonic() - began


def test_the_thread_that_fills_masks_gets_only_wanted_masks_and_tokens_drawn_under_them(
    core: Core,
) -> None:
    core.send(request(1), request(2, max_tokens=3, has_grammar=True))
    mask_reports = core.masks_reported()
    tokens = list[int]()
    wanted = next(mask_reports).wanted
    assert wanted is not None
    assert wanted.keys == [2]
    for output_index in range(3):
        core.send(MasksFilled(wanted.rows, wanted.tickets, [output_index], [1]))
        # An answer that has ended needs no mask.
        if output_index < 2:
            drawn = next(mask_reports)
            assert (drawn.keys, drawn.wanted) == ([2], None)
            tokens += drawn.token_ids
    # The server hears of everything, as if nobody else did.
    reported: dict[int, list[int]] = {1: [], 2: []}
    for step in core.steps():
        for key, token_id in zip(step.output.keys, step.output.token_ids, strict=True):
            reported[key].append(token_id)
        if any(finished.key == 2 for finished in step.output.finishes):
            break
    assert reported[2][:2] == tokens
    assert not core.mask_reports.read()


def test_the_core_ends_when_its_reader_is_gone(core: Core) -> None:
    core.send(request(1))
    next(core.steps())
    core.reports.close()
    core.thread.join(60)
    assert not core.thread.is_alive()


def test_a_start_that_comes_no_further_says_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    report_writer, report_reader = create_ring(1 << 16)
    writer = RingWriter(report_writer)
    reader = RingReader(report_reader)
    say = SpokenProgress(writer)
    for repeat_seconds, num_reported in ((60.0, 1), (0.0, 3)):
        monkeypatch.setattr(core_process, "REPEAT_SECONDS", repeat_seconds)
        for _ in range(3):
            say("waiting for other hosts", 0, 2)
        assert len(reader.read()) == num_reported
    writer.close()
    reader.close()


def test_loading_is_reported_by_tenths_and_not_with_every_tensor() -> None:
    report_writer, report_reader = create_ring(1 << 16)
    writer = RingWriter(report_writer)
    reader = RingReader(report_reader)
    say = SpokenProgress(writer)
    for done in range(0, 1001, 3):
        say("loading weights", done, 1000)
    say("loading weights", 1000, 1000)
    sent = [decode_report(message) for message in reader.read()]
    assert [report.done // 100 for report in sent if isinstance(report, Progress)] == list(
        range(11)
    )
    writer.close()
    reader.close()
