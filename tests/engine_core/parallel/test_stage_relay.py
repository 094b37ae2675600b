"""Streams and tokens between pipeline stages whose pieces of memory lie on three hosts, in one
process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from headwater.engine_core.executors.device.locked_memory import LockedMemory, mapped
from headwater.engine_core.executors.ranks.stage_link import RingSender
from headwater.engine_core.executors.ranks.stage_pieces import Piece
from headwater.engine_core.executors.ranks.stage_relay import (
    ReceivedStreams,
    SendThread,
    SentStreams,
    StageRelay,
)
from headwater.engine_core.weights.shards import ParallelLayout
from headwater.kernels.peer.peer_memory import host_address
from headwater.kernels.stage.stage_memory import LAST_TOKENS, NUM_LANES, StageMemory, StageSizes
from headwater.kernels.stage.stage_stream import (
    receive_ends,
    receive_stream,
    receive_tokens,
    send_ends,
    send_stream,
    send_tokens,
)
from tests.engine_core.parallel.thread_ranks import links_of
from tests.kernels import interpreter
from tests.kernels.paging import LONG_INTERPRETED
from tests.polling import holds_within

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN = 16
MOST_TOKENS = 2 * NUM_LANES.value + 3
ROW_BYTES = 2 * 16
SIZES = StageSizes(
    stream_bytes=-(-ROW_BYTES * MOST_TOKENS // 128) * 128,
    most_rows=4,
    most_positions=9,
    num_messages=3,
)
THREE = ParallelLayout(pipeline=3)
PIECE_BYTES = -(-SIZES.num_bytes // 128) * 128


@pytest.fixture(scope="module", autouse=True)
def _interpreted() -> None:
    if DEVICE.type == "cpu":
        interpreter.mend()


class Host:
    """The host of one stage: pieces of memory of that stage and of those next to it."""

    def __init__(self, index: int) -> None:
        pieces = mapped((3, PIECE_BYTES), torch.uint8)
        self._host = LockedMemory(pieces) if DEVICE.type == "cuda" else pieces
        first = host_address(pieces.data_ptr()) if DEVICE.type == "cuda" else pieces.data_ptr()
        before, own, behind = (first + i * PIECE_BYTES for i in range(3))
        others = {0: [behind], 1: [], 2: [before]}[index]
        self.memory = StageMemory(
            own=own,
            before=before if index > 0 else 0,
            behind=behind if index < 2 else 0,
            first=0,
            others=torch.tensor(others, dtype=torch.int64, device=DEVICE),
            sizes=SIZES,
            host=self._host,
        )
        self.pieces = [Piece(each.numpy(), SIZES, ROW_BYTES) for each in pieces]


class Hosts:
    """Three of them, joined by rings as by links between hosts."""

    def __init__(self) -> None:
        self.all = [Host(i) for i in range(3)]
        self.memory = [host.memory for host in self.all]
        self._links = links_of(THREE)
        self.relays = []
        for i, host in enumerate(self.all):
            before, own, behind = host.pieces
            sides = before if i > 0 else None, behind if i < 2 else None
            self.relays.append(StageRelay(own, *sides, self._links[i]))
        for relay in self.relays:
            relay.start()

    def send(self, stage: int, stream: torch.Tensor) -> None:
        send_stream(self.memory[stage], stream)
        self.relays[stage].note_layers()

    def receive(self, stage: int, num_tokens: int) -> torch.Tensor:
        stream = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
        receive_stream(self.memory[stage], stream)
        return stream

    def close(self) -> None:
        """Closes what the first stage writes and what the last one does, so that all threads
        end."""
        for link in self._links:
            for sender in (link.stream_out, *link.tokens_out):
                if isinstance(sender, RingSender):
                    sender.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    before = set(threading.enumerate())
    hosts = Hosts()
    yield hosts
    hosts.close()
    started = [thread for thread in threading.enumerate() if thread not in before]
    # Those that send wait for what is noted, until the process ends.
    assert holds_within(lambda: sum(thread.is_alive() for thread in started) <= 3, 30)


def streams_of(lengths: list[int]) -> list[torch.Tensor]:
    return [torch.randn(length, HIDDEN, device=DEVICE).bfloat16() for length in lengths]


@pytest.mark.parametrize(
    "lengths",
    [
        [1, 3, 2, 1, 5],
        pytest.param([1, MOST_TOKENS, 3, NUM_LANES.value + 1, 2], marks=LONG_INTERPRETED),
    ],
)
def test_streams_pass_from_host_to_host_in_their_order(hosts: Hosts, lengths: list[int]) -> None:
    for sent in streams_of(lengths):
        hosts.send(0, sent)
        passed = hosts.receive(1, len(sent))
        hosts.send(1, passed)
        assert torch.equal(hosts.receive(2, len(sent)), sent)


def test_a_stage_sends_ahead_of_one_that_has_received_nothing(hosts: Hosts) -> None:
    """Streams wait in the ring when both slots are full on either side."""
    sent = streams_of([2, 1, 3, 3, 1, 2])
    for stream in sent:
        hosts.send(0, stream)
    for stream in sent:
        assert torch.equal(hosts.receive(1, len(stream)), stream)


def test_tokens_and_ends_of_the_last_stage_reach_every_other_host(hosts: Hosts) -> None:
    table = torch.randint(1, 500, (4, 40), dtype=torch.int32, device=DEVICE)
    known = torch.tensor([3, 0, 36, 9], dtype=torch.int32, device=DEVICE)
    row, position, token = (
        torch.tensor([n, -1], dtype=torch.int32, device=DEVICE) for n in (3, 1, 17)
    )
    # More messages than slots.
    for number in (1, 3, 5):
        send_tokens(hosts.memory[2], number, row, position, token)
        hosts.relays[2].note_tokens(number, 1 + 3 * 2)
        send_ends(
            hosts.memory[2],
            number + 1,
            torch.tensor([2], dtype=torch.int32, device=DEVICE),
            known,
            table,
        )
        hosts.relays[2].note_tokens(number + 1, 1 + 2 + LAST_TOKENS)
        for memory in hosts.memory[:2]:
            theirs = torch.zeros_like(table)
            seen = torch.zeros_like(known)
            receive_tokens(memory, number, 2, theirs)
            assert theirs[3, 2] == 17
            assert int((theirs != 0).sum()) == 1
            receive_ends(memory, number + 1, 1, seen, theirs)
            assert seen.tolist() == [0, 0, 36, 0]
            assert torch.equal(theirs[2, 4:36], table[2, 4:36])


def pieces() -> list[Piece]:
    return [Piece(np.zeros(PIECE_BYTES, np.uint8), SIZES, ROW_BYTES) for _ in range(2)]


def rows_of(num_rows: int) -> np.ndarray:
    return np.random.default_rng(num_rows).integers(0, 256, (num_rows, ROW_BYTES), np.uint8)


class Kernels:
    """Does to the pieces of a sending and a receiving stage what their kernels do."""

    def __init__(self, first: int) -> None:
        (self._own, self._behind), (self._theirs, self._before) = pieces(), pieces()
        self._out = SentStreams(self._own, self._behind)
        self._in = ReceivedStreams(self._theirs, self._before)
        self._sent, self._received = (np.full(NUM_LANES.value, first, np.int32) for _ in range(2))
        for counts in (self._out._taken, self._in._sent, self._own.taken, self._before.taken):
            counts[:] = first

    def send(self, rows: np.ndarray) -> None:
        lanes = slice(min(len(rows), NUM_LANES.value))
        numbers = self._sent[lanes] + 1
        assert (self._own.taken[lanes] - (numbers - 2) >= 0).all()
        self._behind.streams.write(numbers, rows)
        self._behind.lengths[numbers[:1] & 1] = len(rows)
        self._behind.arrived[lanes] = self._sent[lanes] = numbers

    def relay(self) -> int:
        num_streams = 0
        while (stream := self._out.take()) is not None:
            self._in.put(memoryview(stream))
            num_streams += 1
        return num_streams

    def receive(self, num_rows: int) -> np.ndarray:
        lanes = slice(min(num_rows, NUM_LANES.value))
        numbers = self._received[lanes] + 1
        assert (self._theirs.arrived[lanes] - numbers >= 0).all()
        rows = np.empty((num_rows, ROW_BYTES), np.uint8)
        self._theirs.streams.read(numbers, rows)
        self._before.taken[lanes] = self._received[lanes] = numbers
        return rows

    def is_half_there(self, rows: np.ndarray) -> bool:
        """Whether a stream is relayed whose first lane alone has arrived."""
        self._behind.arrived[:1] += 1
        self._behind.lengths[self._behind.arrived[:1] & 1] = len(rows)
        return self._out.take() is not None


@pytest.mark.parametrize("first", [0, 2**31 - 4], ids=["from the start", "over the end of int32"])
def test_rows_of_a_lane_lie_in_the_slot_of_that_lanes_turn(first: int) -> None:
    kernels = Kernels(first)
    lengths = [1, MOST_TOKENS, 3, NUM_LANES.value + 1, 2, MOST_TOKENS, NUM_LANES.value, 1]
    for one, another in zip(lengths[::2], lengths[1::2], strict=True):
        kernels.send(rows_of(one))
        kernels.send(rows_of(another))
        assert kernels.relay() == 2
        assert np.array_equal(kernels.receive(one), rows_of(one))
        assert np.array_equal(kernels.receive(another), rows_of(another))


def test_a_stream_is_relayed_when_all_of_it_is_there() -> None:
    assert not Kernels(0).is_half_there(rows_of(2))
    assert Kernels(0).is_half_there(rows_of(1))


def test_a_stream_of_another_size_is_no_stream() -> None:
    own, before = pieces()
    streams = ReceivedStreams(own, before)
    for stream in (bytes(ROW_BYTES + 1), bytes(ROW_BYTES * (SIZES.stream_bytes // ROW_BYTES + 1))):
        with pytest.raises(ValueError, match="allowed: at most 260 rows of 32 bytes"):
            streams.put(memoryview(stream))
    assert not own.arrived.any()


def test_room_for_a_stream_is_awaited_until_the_stage_has_taken_one() -> None:
    own, before = pieces()
    waited = threading.Event()
    streams = ReceivedStreams(own, before)
    for value in range(2):
        streams.put(memoryview(rows_of(value + 1).tobytes()))

    def put() -> None:
        streams.put(memoryview(rows_of(3).tobytes()))
        waited.set()

    thread = threading.Thread(target=put)
    thread.start()
    assert not waited.wait(0.1)
    before.taken[:1] += 1
    thread.join(30)
    assert waited.is_set()
    rows = np.empty((3, ROW_BYTES), np.uint8)
    own.streams.read(np.array([3, 2, 1], np.int32), rows)
    assert np.array_equal(rows, rows_of(3))


class Sent:
    """What is sent, each message behind its length."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def send(self, tensor: torch.Tensor) -> None:
        self.tensors.append(tensor)

    @property
    def messages(self) -> list[bytes]:
        lengths = [int(each) for each in self.tensors[::2]]
        messages = [each.numpy().tobytes() for each in self.tensors[1::2]]
        assert lengths[: len(messages)] == [len(each) for each in messages]
        return messages


def test_what_a_launch_has_yet_to_write_holds_up_what_is_noted_behind_it() -> None:
    own, behind = pieces()
    sent = Sent()
    sender = SendThread()
    words = behind.message(1)[:3]
    sender.note_message(1, words, [sent])
    sender.note(SentStreams(own, behind).take, [sent])
    threading.Thread(target=sender.run, daemon=True).start()
    rows = rows_of(2)
    behind.streams.write(np.ones(2, np.int32), rows)
    behind.lengths[1] = len(rows)
    behind.arrived[:2] = 1
    time.sleep(0.05)
    assert not sent.messages
    words[1:] = 7, 8
    words[:1] = 1
    assert holds_within(lambda: len(sent.messages) == 2, 30)
    assert sent.messages == [np.array([1, 7, 8], np.int32).tobytes(), rows.tobytes()]
