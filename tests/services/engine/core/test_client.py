"""What a core reports before its server listens: it reports its load once when it starts, then
nothing until it gets a request."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack, closing

import pytest

from headwater.engine_core.request import FinishReason
from headwater.engine_core.step_output import (
    CacheEvents,
    EngineLoad,
    Finished,
    PeerUse,
    Started,
    StepOutput,
    StoredChain,
)
from headwater.engine_core.system.ring import RingWriter
from headwater.proto import engine_pb2 as pb
from headwater.proto.common_pb2 import LOSS_CAUSE_ENGINE_GONE
from headwater.proto.events_pb2 import Incarnation, KvEventBatch
from headwater.services.engine.core import client as core_client
from headwater.services.engine.core import launch
from headwater.services.engine.core.client import CoreClient
from headwater.services.engine.core.messages import Idle, Prepared, Ready, Step, encode
from headwater.services.engine.settings import EngineSettings
from headwater.services.engine.stage.grammars import GrammarCompiler
from headwater.services.engine.stage.kv_events import KvEventLog
from headwater.services.engine.stage.server import EngineServer
from headwater.services.runtime.member import ReplicaLoad
from tests.services.engine.engine_process import add, client_of, engine_process

PEER_USE = PeerUse(seconds_per_token=0.002)


async def load_after(*reports: Idle, first: EngineLoad) -> ReplicaLoad:
    """Load that a server publishes whose core had said all of this before the server listened."""
    core = CoreClient()
    try:
        core._take(Ready("", "", 32, "", 16, first, 64, 4, 4, 0.0))
        for report in reports:
            core._take(report)
        return EngineServer(
            core, await core.ready(), KvEventLog(Incarnation()), "m", GrammarCompiler(None)
        ).load()
    finally:
        await core._stop()


async def test_an_engine_publishes_that_it_can_pull_from_its_first_load_message_on() -> None:
    load = await load_after(first=EngineLoad(num_total_blocks=7, peers=PEER_USE))
    assert (load.num_total_blocks, load.seconds_per_pulled_token) == (7, 0.002)


class EndedCore:
    """A process that has ended."""

    pid = 1

    async def wait(self) -> int:
        return 0


@pytest.mark.parametrize("takes_turns", [False, True])
async def test_the_next_core_stands_by_when_all_is_prepared_but_where_memory_is_others_too(
    monkeypatch: pytest.MonkeyPatch, takes_turns: bool
) -> None:
    asked: list[str] = []

    async def start_core(arguments: object, **given: object) -> EndedCore:
        return EndedCore()

    monkeypatch.setattr(launch, "start_core", start_core)
    monkeypatch.setattr(launch, "stand_by", lambda environment, id: asked.append(id))
    core = CoreClient()
    lifeline, held = os.pipe()
    await core._start(EngineSettings(executor="simulated", takes_turns=takes_turns), lifeline)
    core._take(Ready("", "", 32, "id", 16, EngineLoad(), 64, 4, 4, 0.0))
    assert not asked
    core._take(Prepared())
    assert asked == ([] if takes_turns else ["id"])
    await core._stop()
    os.close(held)


async def test_a_load_that_came_before_the_server_listened_counts() -> None:
    load = await load_after(
        Idle(EngineLoad(num_total_blocks=7, peers=PEER_USE), 0), first=EngineLoad()
    )
    assert (load.num_total_blocks, load.seconds_per_pulled_token) == (7, 0.002)


async def test_blocks_that_were_found_on_a_disk_before_the_server_listened_are_published() -> None:
    found = [bytes([number]) * 16 for number in range(3)]
    batches = list[KvEventBatch]()
    core = CoreClient()
    try:
        core._take(Ready("", "", 32, "", 16, EngineLoad(), 64, 4, 4, 0.0))
        for block_hash in found[:2]:
            core._take(step_that_stored(block_hash))
        events = KvEventLog(Incarnation())
        server = EngineServer(core, await core.ready(), events, "m", GrammarCompiler(None))
        core._take(step_that_stored(found[2]))
        server.open(batches.append)
        assert set(events.snapshot()[1]) == set(found)
        assert [
            block for batch in batches for chain in batch.stored for block in chain.block_hashes
        ] == found
    finally:
        await core._stop()


async def test_a_step_in_which_answers_only_get_longer_makes_no_load_message_due() -> None:
    core = CoreClient()
    started = Started(key=1, cached_tokens=0, queue_seconds=0.0, prefill_seconds=0.0)
    ended = Finished(key=1, reason=FinishReason.LENGTH, num_output_tokens=1)
    try:
        core._take(Ready("", "", 32, "", 16, EngineLoad(), 64, 4, 4, 0.0))
        server = EngineServer(
            core, await core.ready(), KvEventLog(Incarnation()), "m", GrammarCompiler(None)
        )
        server.open(lambda _: None)
        reports = {
            "longer answers": Step(StepOutput(step=1), 0, 3, 0.0),
            "a prompt": Step(StepOutput(step=2), 16, 3, 0.0),
            "a start": Step(StepOutput(step=3, starts=[started]), 0, 3, 0.0),
            "an end": Step(StepOutput(step=4, finishes=[ended]), 0, 3, 0.0),
            "idle": Idle(EngineLoad(), 0),
        }
        due = []
        for name, report in reports.items():
            server.load_changed.clear()
            core._take(report)
            if server.load_changed.is_set():
                due.append(name)
        assert due == ["a prompt", "a start", "an end", "idle"]
    finally:
        await core._stop()


async def test_a_report_that_fails_keeps_no_later_one_from_its_requests() -> None:
    core = CoreClient()
    taken = list[int]()

    def take(report: Step | Idle) -> None:
        assert isinstance(report, Step)
        if report.output.step == 1:
            raise LookupError("a bug")
        taken.append(report.output.step)

    core.connect(take, lambda: None)
    try:
        with closing(RingWriter(core.memory.report_writer)) as reports:
            for step in range(3):
                reports.write(encode(Step(StepOutput(step=step), 0, 0, 0.0)))
            core._on_reports()
        assert taken == [0, 2]
    finally:
        await core._stop()


async def test_a_step_that_cannot_be_sent_to_one_session_ends_that_one_alone() -> None:
    core = CoreClient()
    try:
        core._take(Ready("", "", 32, "", 16, EngineLoad(), 64, 4, 4, 0.0))
        server = EngineServer(
            core, await core.ready(), KvEventLog(Incarnation()), "m", GrammarCompiler(None)
        )
        server.open(lambda _: None)
        with ExitStack() as left:
            sessions = [left.enter_context(server.session()) for _ in range(3)]
            for session in sessions:
                session.take(pb.ClientFrame(adds=[add(7, [1, 2, 3])]))
            # No frame can have the second one's token.
            columns = {
                "keys": [1, 2, 3],
                "first_index": [0, 0, 0],
                "num_tokens": [1, 1, 1],
                "token_ids": [4, -1, 5],
            }
            core._take(Step(StepOutput(step=1, **columns), 0, 3, 0.0))
            frames = [session._outbox.next_frame() or pb.EngineFrame() for session in sessions]
        assert [list(frame.token_ids) for frame in frames] == [[4], [], [5]]
        assert [finish.cause for frame in frames for finish in frame.finishes] == [
            LOSS_CAUSE_ENGINE_GONE
        ]
    finally:
        await core._stop()


class ReapedProcess:
    """A core that has ended and been reaped when it is to be killed, and whose exit status comes
    after that."""

    pid = 1

    def __init__(self) -> None:
        self._is_known = asyncio.Event()

    async def wait(self) -> int:
        await self._is_known.wait()
        return 1

    def kill(self) -> None:
        self._is_known.set()
        raise ProcessLookupError(self.pid)


async def test_a_core_that_ends_just_before_it_is_killed_does_not_hide_why_it_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core_client, "EXIT_SECONDS", 0.01)
    core = CoreClient()
    core._process = ReapedProcess()
    await core._stop()
    assert await core.ended() == 1


def step_that_stored(block_hash: bytes) -> Step:
    events = CacheEvents(stored=[StoredChain(parent=b"", hashes=[block_hash])])
    return Step(StepOutput(step=0, cache_events=events), 0, 0, 0.0)


async def test_an_engine_that_never_computed_anything_says_that_it_can_pull() -> None:
    with engine_process("--role=decode", "--kv-peer-memory=1000000") as engine:
        async with client_of(engine) as client:
            load = await client.load()
    assert load.role == "decode"
    assert load.seconds_per_pulled_token > 0
