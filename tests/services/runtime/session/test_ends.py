"""The two ends of a session over real gRPC, and what becomes of it when either of them, or what is
between, fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.services.runtime import cluster_key
from headwater.services.runtime.channel import open_channel
from headwater.services.runtime.listener import Listener
from headwater.services.runtime.session import calling, silence
from headwater.services.runtime.session.answering import AnsweringEnd
from headwater.services.runtime.session.calling import CallingEnd, Cause, Ending, keep_up
from headwater.services.runtime.session.silence import Silence

METHOD = "/test.Sessions/Session"


class Letters:
    """Text that waits to be sent, a few letters a frame."""

    def __init__(self, per_frame: int = 3) -> None:
        self.waiting: deque[str] = deque()
        self._per_frame = per_frame

    def next_frame(self) -> bytes | None:
        if not self.waiting:
            return None
        return "".join(
            self.waiting.popleft() for _ in range(min(self._per_frame, len(self.waiting)))
        ).encode()


class Echo:
    """An answering end that says what it hears, until it hears a full stop."""

    def __init__(self) -> None:
        self.letters = Letters()
        self.has_left = asyncio.Event()
        self.end: AnsweringEnd[bytes, bytes] = AnsweringEnd(
            self.letters.next_frame, self._on_frame, self._on_left
        )

    def _on_frame(self, frame: bytes) -> None:
        self.letters.waiting.extend(frame.decode())
        self.end.wake()
        if b"." in frame:
            self.end.close()

    def _on_left(self, _is_clean: bool) -> None:
        self.has_left.set()
        self.end.close()


Handler = Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]


@contextlib.asynccontextmanager
async def server(handler: Handler | None) -> AsyncIterator[str]:
    listener = Listener("127.0.0.1", 0)
    if handler is not None:
        method = grpc.stream_stream_rpc_method_handler(handler)  # type: ignore[arg-type]
        listener.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Sessions", {"Session": method}),)
        )
    await listener.start()
    try:
        yield listener.address
    finally:
        await listener.server.stop(None)


def echoing(echoes: list[Echo]) -> Handler:
    async def session(frames: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        echoes.append(echo := Echo())
        async for frame in echo.end.run(frames):
            yield frame

    return session


class Caller:
    """A calling end that keeps what it hears; a frame that holds `unreadable` contradicts
    itself."""

    def __init__(self, quiet: Silence | None = None, unreadable: bytes = b"\x00") -> None:
        self.letters = Letters()
        self.received = ""
        self._unreadable = unreadable
        self.opened = asyncio.Event()
        self.answered = asyncio.Event()
        self.end: CallingEnd[bytes, bytes] = CallingEnd(
            self.letters.next_frame, self._on_frame, quiet
        )

    def send(self, text: str) -> None:
        self.letters.waiting.extend(text)
        self.end.wake()

    def _on_frame(self, frame: bytes) -> None:
        if frame == self._unreadable:
            raise ValueError("rows and columns differ")
        self.received += frame.decode()
        self.answered.set()

    async def run(self, address: str) -> Ending:
        async with open_channel(address) as channel:
            call = channel.stream_stream(METHOD)()
            return await self.end.run(channel, call, self.opened.set)


async def test_all_frames_come_back_in_order_and_then_the_session_ends() -> None:
    echoes: list[Echo] = []
    async with server(echoing(echoes)) as address:
        caller = Caller()
        caller.send("what is said before it is open, ")
        running = asyncio.create_task(caller.run(address))
        await caller.opened.wait()
        caller.send("and after.")
        assert await running == Ending(Cause.ENDED, "it ended the session")
    assert caller.received == "what is said before it is open, and after."


@settings(max_examples=25, deadline=None)
@given(
    sent=st.lists(st.text(alphabet="abcde", max_size=9), max_size=12),
    pauses=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_no_letter_is_lost_or_doubled_whenever_it_is_sent(
    sent: list[str], pauses: list[bool]
) -> None:
    async def talk() -> str:
        async with server(echoing([])) as address:
            caller = Caller()
            running = asyncio.create_task(caller.run(address))
            for text, pause in zip(sent, pauses, strict=False):
                caller.send(text)
                if pause:
                    await asyncio.sleep(0.001)
            caller.send(".")
            assert (await running).cause is Cause.ENDED
            return caller.received

    assert asyncio.run(talk()) == "".join(sent) + "."


async def test_the_other_end_notices_a_cancelled_caller() -> None:
    echoes: list[Echo] = []
    async with server(echoing(echoes)) as address:
        caller = Caller()
        running = asyncio.create_task(caller.run(address))
        caller.send("hello")
        async with asyncio.timeout(60):
            await caller.answered.wait()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await echoes[0].has_left.wait()


async def test_a_process_that_fails_in_the_middle_breaks_the_session_with_its_reason() -> None:
    async def session(frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"ab"
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the disk burns")

    async with server(session) as address:
        caller = Caller()
        # NOTE: gRPC would name a write that fails at that moment instead.
        ending = await caller.run(address)
    assert ending == Ending(Cause.BROKEN, "the disk burns")
    assert caller.received == "ab"


async def test_a_process_without_the_method_is_named_as_one() -> None:
    async with server(None) as address:
        caller = Caller()
        ending = await caller.run(address)
    assert ending.cause is Cause.UNSERVED


async def test_a_frame_that_contradicts_itself_ends_the_session() -> None:
    async def session(frames: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        yield b"\x00"
        async for _ in frames:
            pass

    async with server(session) as address:
        ending = await Caller().run(address)
    assert ending == Ending(
        Cause.UNREADABLE, "it sent a frame that cannot be read: rows and columns differ"
    )


async def test_a_process_that_answers_nothing_is_probed_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(silence, "TICK_SECONDS", 0.01)

    async def session(frames: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        async for _ in frames:
            pass
        yield b"never"

    probes: list[str] = []
    async with server(session) as address:
        caller = Caller(Silence(lambda: probes.append("?") is None))
        ending = await caller.run(address)
    assert ending.cause is Cause.SILENT
    assert len(probes) == silence.LOST_TICKS - silence.PROBE_TICKS + 1


async def test_a_fault_in_what_is_to_be_sent_is_raised_and_no_session_stands_without_a_writer() -> (
    None
):
    async with server(echoing([])) as address:
        caller = Caller()
        caller.letters.next_frame = lambda: 1 / 0  # type: ignore[assignment,method-assign]
        broken: CallingEnd[bytes, bytes] = CallingEnd(caller.letters.next_frame, caller._on_frame)
        async with open_channel(address) as channel, asyncio.timeout(60):
            with pytest.raises(ZeroDivisionError):
                await broken.run(channel, channel.stream_stream(METHOD)(), caller.opened.set)


async def test_a_caller_without_proof_receives_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[bytes] = []

    async def session(frames: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        async for frame in frames:
            received.append(frame)
            yield frame

    async with server(session) as address:
        monkeypatch.setattr(cluster_key, "current", lambda: cluster_key.ClusterKey(["k" * 32]))
        caller = Caller()
        caller.send("a secret")
        ending = await caller.run(address)
    assert ending.cause is Cause.STRANGER
    assert not ending.was_open
    assert received == []
    assert not caller.opened.is_set()


async def test_sessions_follow_each_other_until_one_is_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calling, "RECONNECT_SECONDS", 0.0)
    echoes: list[Echo] = []
    received: list[str] = []
    async with server(echoing(echoes)) as address:

        async def one() -> Ending:
            caller = Caller()
            caller.send(f"session {len(received)}.")
            ending = await caller.run(address)
            received.append(caller.received)
            return ending

        await keep_up(one, "a session", address, is_over=lambda _: len(received) == 3)
    assert received == ["session 0.", "session 1.", "session 2."]
