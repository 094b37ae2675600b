from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import timeit
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine_core.system.ring import (
    BroadcastWriter,
    PeerGone,
    RingReader,
    RingWriter,
    create_broadcast,
    create_ring,
)
from tests.polling import holds_within
from tests.shared_memory import shared_memory


@pytest.fixture
def ring() -> Iterator[tuple[RingWriter, RingReader]]:
    """1 KiB: a piece is at most 256 bytes."""
    writer_end, reader_end = create_ring(1024)
    writer = RingWriter(writer_end)
    reader = RingReader(reader_end)
    yield writer, reader
    writer.close()
    reader.close()


def read_all(reader: RingReader, count: int) -> list[bytes]:
    messages: list[bytes] = []
    while len(messages) < count:
        reader.wait()
        messages += reader.read()
    return messages


@settings(max_examples=60, deadline=None)
@given(
    messages=st.lists(st.binary(max_size=5000) | st.binary(max_size=20), max_size=60),
    capacity=st.integers(16, 4096),
)
def test_messages_of_any_length_arrive_whole_and_in_order(
    messages: list[bytes], capacity: int
) -> None:
    writer_end, reader_end = create_ring(capacity)
    writer = RingWriter(writer_end)
    reader = RingReader(reader_end)
    writing = threading.Thread(target=lambda: [writer.write(message) for message in messages])
    writing.start()
    assert read_all(reader, len(messages)) == messages
    writing.join()
    writer.close()
    reader.close()


@contextlib.contextmanager
def descriptors_from(number: int) -> Iterator[None]:
    """Takes all descriptors below a number, so that those of a ring lie above."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(limits[0], min(number + 200, limits[1])), limits[1])
    )
    with contextlib.ExitStack() as taken:
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        while (fd := os.open(os.devnull, os.O_RDONLY)) < number:
            taken.callback(os.close, fd)
        os.close(fd)
        yield


@pytest.mark.parametrize("first_descriptor", [0, 1024])
def test_very_many_small_messages_wait_for_their_reader(first_descriptor: int) -> None:
    """So they do where `select` would refuse the ring's descriptors."""
    messages = [i.to_bytes(3, "little") for i in range(50_000)]
    with (
        ThreadPoolExecutor(1) as threads,
        descriptors_from(first_descriptor),
        contextlib.ExitStack() as ends,
    ):
        writer_end, reader_end = create_ring(1024)
        writer = RingWriter(writer_end)
        reader = RingReader(reader_end)
        ends.callback(writer.close)
        ends.callback(reader.close)
        assert reader.fileno() >= first_descriptor
        writing = threads.submit(lambda: [writer.write(message) for message in messages])
        assert read_all(reader, len(messages)) == messages
        writing.result()


def test_a_wait_of_less_than_a_millisecond_is_no_longer_than_that(
    ring: tuple[RingWriter, RingReader],
) -> None:
    writer, reader = ring
    # The shortest of many: other processes lengthen some of them.
    assert min(timeit.repeat(lambda: reader.wait(0.0001), number=1, repeat=200)) < 0.0009
    writer.write(b"x")
    reader.wait(0.0001)
    assert reader.read() == [b"x"]


def test_a_wait_works_for_descriptors_that_select_would_refuse() -> None:
    with descriptors_from(1024), contextlib.ExitStack() as ends:
        writer_end, reader_end = create_ring(1024)
        writer = RingWriter(writer_end)
        reader = RingReader(reader_end)
        ends.callback(writer.close)
        ends.callback(reader.close)
        reader.wait(0.0001)
        assert reader.read() == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a pipe has the size that it has")
def test_released_pieces_fit_the_smallest_pipe() -> None:
    writer_end, reader_end = create_ring()
    for pipe in (writer_end.release, writer_end.announce):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
    writer = RingWriter(writer_end)
    reader = RingReader(reader_end)
    # Nothing of it makes the writer ask for room.
    for _ in range(300):
        for _ in range(1024):
            writer.write(b"x")
        assert reader.read() == [b"x"] * 1024
    writer.close()
    reader.close()


def test_a_full_ring_takes_nothing_until_its_reader_has_read(
    ring: tuple[RingWriter, RingReader],
) -> None:
    writer, reader = ring
    assert [writer.try_write(bytes(250)) for _ in range(5)] == [True, True, True, True, False]
    assert reader.read() == [bytes(250)] * 4
    assert writer.try_write(b"more")
    assert reader.read() == [b"more"]


def test_a_reader_receives_everything_and_then_that_the_writer_is_gone(
    ring: tuple[RingWriter, RingReader],
) -> None:
    writer, reader = ring
    writer.write(b"last words")
    writer.close()
    assert reader.read() == [b"last words"]
    with pytest.raises(PeerGone):
        reader.read()


def test_a_writer_learns_that_its_reader_is_gone(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    reader.close()
    with pytest.raises(PeerGone):
        writer.write(b"hello")


def test_a_writer_that_waits_for_room_learns_that_its_reader_is_gone(
    ring: tuple[RingWriter, RingReader],
) -> None:
    writer, reader = ring
    gone = threading.Event()

    def fill() -> None:
        try:
            writer.write(bytes(100_000))
        except PeerGone:
            gone.set()

    writing = threading.Thread(target=fill)
    writing.start()
    reader.wait()
    reader.close()
    assert gone.wait(60)
    writing.join()


async def test_an_event_loop_is_woken_by_a_message(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    received: asyncio.Queue[list[bytes]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_reader(reader.fileno(), lambda: received.put_nowait(reader.read()))
    writer.write(b"hello")
    assert await received.get() == [b"hello"]
    loop.remove_reader(reader.fileno())


KILLED_WRITER = """
import sys, time
from headwater.engine_core.system.ring import RingEnd, RingWriter
writer = RingWriter(RingEnd(*map(int, sys.argv[1:])))
writer.write(b"whole")
piece, flag = next(writer.pieces(bytes(10_000)))
assert writer.try_write(piece, flag)
print("written", flush=True)
time.sleep(600)
"""


def test_a_killed_writer_leaves_its_whole_messages_and_no_memory_behind() -> None:
    before = shared_memory()
    writer_end, reader_end = create_ring(1024)
    reader = RingReader(reader_end)
    arguments = [str(fd) for fd in writer_end]
    command = [sys.executable, "-c", KILLED_WRITER, *arguments]
    with subprocess.Popen(command, pass_fds=writer_end, stdout=subprocess.PIPE) as process:
        writer_end.close()
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
    assert reader.read() == [b"whole"]
    with pytest.raises(PeerGone):
        reader.read()
    reader.close()
    # Other tests that run at the same time hold shared memory for a moment.
    assert holds_within(lambda: shared_memory() <= before, 60)


def test_every_reader_of_a_broadcast_reads_every_message_whatever_its_length() -> None:
    writers, readers = create_broadcast(3, 1 << 12)
    writer = BroadcastWriter(writers)
    opened = [RingReader(end) for end in readers]
    sent = [bytes([i % 251]) * (i * 37 % 3000) for i in range(300)]

    def read_all(reader: RingReader) -> list[bytes]:
        found: list[bytes] = []
        while len(found) < len(sent):
            reader.wait()
            found += reader.read()
        return found

    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(read_all, reader) for reader in opened]
        for message in sent:
            writer.write(message)
        assert [each.result(60) == sent for each in reading] == [True, True, True]
    writer.close()
    for reader in opened:
        with pytest.raises(PeerGone):
            reader.read()
        reader.close()


def test_a_broadcast_whose_reader_is_gone_says_so() -> None:
    writers, readers = create_broadcast(2, 1 << 12)
    writer = BroadcastWriter(writers)
    kept = RingReader(readers[0])
    readers[1].close()
    with pytest.raises(PeerGone):
        writer.write(b"one")
    writer.close()
    kept.close()
