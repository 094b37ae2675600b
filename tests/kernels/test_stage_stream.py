"""Streams and tokens between the pieces of memory of three stages, here all in one process."""

from __future__ import annotations

import pytest
import torch

from headwater.engine_core.executors.device.locked_memory import LockedMemory, mapped
from headwater.kernels.peer.peer_memory import host_address
from headwater.kernels.stage.stage_memory import NUM_LANES, StageMemory, StageSizes
from headwater.kernels.stage.stage_stream import (
    receive_ends,
    receive_stream,
    receive_tokens,
    send_ends,
    send_stream,
    send_tokens,
)
from tests.kernels.paging import GPU, LONG_INTERPRETED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN = 24
MOST_TOKENS = 2 * NUM_LANES.value + 3
SIZES = StageSizes(
    stream_bytes=4 * HIDDEN * MOST_TOKENS,
    most_rows=5,
    most_positions=9,
    num_messages=3,
)


class Stages:
    """The memory of each of three stages, on a GPU or the host; it stays as long as this object."""

    def __init__(self, *, is_host: bool) -> None:
        shape = 3, SIZES.num_bytes // 16 * 16 + 16
        self._pieces = (
            mapped(shape, torch.uint8)
            if is_host
            else torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
        )
        host = LockedMemory(self._pieces) if is_host and DEVICE.type == "cuda" else self._pieces
        first = (
            host_address(self._pieces.data_ptr())
            if isinstance(host, LockedMemory)
            else self._pieces.data_ptr()
        )
        addresses = [first + i * shape[1] for i in range(3)]
        self.memory = [
            StageMemory(
                own=addresses[i],
                before=addresses[i - 1] if i else 0,
                behind=addresses[i + 1] if i < 2 else 0,
                others=torch.tensor(
                    {0: addresses[1:], 2: addresses[:2]}.get(i, []),
                    dtype=torch.int64,
                    device=DEVICE,
                ),
                sizes=SIZES,
                host=host if is_host else None,
            )
            for i in range(3)
        ]


@pytest.fixture(params=["GPUs", pytest.param("host", marks=LONG_INTERPRETED)])
def stages(request: pytest.FixtureRequest) -> Stages:
    return Stages(is_host=request.param == "host")


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=LONG_INTERPRETED)]
)
def test_streams_of_any_length_arrive_in_their_order(stages: Stages, dtype: torch.dtype) -> None:
    first, second, third = stages.memory
    lengths = (1, MOST_TOKENS, 3, NUM_LANES.value + 1, 2, 1)
    for num_tokens in lengths if torch.cuda.is_available() else lengths[1:4]:
        sent = torch.randn(num_tokens, HIDDEN, device=DEVICE).to(dtype)
        passed = torch.zeros_like(sent)
        received = torch.zeros_like(sent)
        send_stream(first, sent)
        receive_stream(second, passed)
        send_stream(second, passed)
        receive_stream(third, received)
        assert torch.equal(received, sent)


def test_a_stage_sends_two_streams_before_the_first_is_read(stages: Stages) -> None:
    first, second, _ = stages.memory
    streams = [
        torch.randn(num_tokens, HIDDEN, device=DEVICE) for num_tokens in (5, NUM_LANES.value + 2, 4)
    ]
    received = [torch.zeros_like(stream) for stream in streams]
    send_stream(first, streams[0])
    send_stream(first, streams[1])
    receive_stream(second, received[0])
    send_stream(first, streams[2])
    receive_stream(second, received[1])
    receive_stream(second, received[2])
    for sent, stream in zip(streams, received, strict=True):
        assert torch.equal(stream, sent)


@GPU
def test_launches_wait_for_a_stream_for_a_slot_and_for_a_message(stages: Stages) -> None:
    first, second, last = stages.memory
    sent = [torch.full((4, HIDDEN), float(value), device=DEVICE) for value in range(4)]
    received = [torch.zeros_like(each) for each in sent]
    table = torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)
    row, position, token = torch.tensor([[0], [1], [5]], dtype=torch.int32, device=DEVICE).unbind()
    # A kernel is loaded once nothing runs, for addresses that are aligned as these.
    send_stream(first, sent[0])
    receive_stream(second, received[0])
    send_tokens(last, 2, row, position, token)
    receive_tokens(first, 2, 1, table)
    table.zero_()
    sending = torch.cuda.Stream()
    receiving = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(receiving):
        receive_stream(second, received[0])
    with torch.cuda.stream(sending):
        # The last one finds no slot free.
        for each in sent:
            send_stream(first, each)
        receive_tokens(first, 1, 1, table)
    with torch.cuda.stream(receiving):
        for each in received[1:]:
            receive_stream(second, each)
        send_tokens(last, 1, row, position, token)
    torch.cuda.synchronize()
    for ours, theirs in zip(sent, received, strict=True):
        assert torch.equal(theirs, ours)
    assert table.tolist() == [[0, 0, 5, 0]]


def test_tokens_are_written_behind_their_positions_in_the_table_of_every_other_stage(
    stages: Stages,
) -> None:
    *others, last = stages.memory
    for number in range(1, 6):
        rows = torch.tensor([3, -1, 0], dtype=torch.int32, device=DEVICE)
        positions = torch.tensor([number, 0, 7], dtype=torch.int32, device=DEVICE)
        tokens = torch.tensor([10 + number, 99, 20 + number], dtype=torch.int32, device=DEVICE)
        send_tokens(last, number, rows, positions, tokens)
        for memory in others:
            table = torch.zeros(4, 12, dtype=torch.int32, device=DEVICE)
            receive_tokens(memory, number, 3, table)
            assert table[3, number + 1] == 10 + number
            assert table[0, 8] == 20 + number
            assert int((table != 0).sum()) == 2


def test_streams_and_tokens_pass_through_host_memory() -> None:
    """The cheapest case of each; the others run in `make test-long` and on GPUs."""
    first, second, last = Stages(is_host=True).memory
    sent = torch.randn(2, HIDDEN, device=DEVICE).bfloat16()
    received = torch.zeros_like(sent)
    send_stream(first, sent)
    receive_stream(second, received)
    assert torch.equal(received, sent)
    row, position, token = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (3, 1, 17))
    send_tokens(last, 1, row, position, token)
    for memory in (first, second):
        table = torch.zeros(4, 12, dtype=torch.int32, device=DEVICE)
        receive_tokens(memory, 1, 1, table)
        assert table[3, 2] == 17
        assert int((table != 0).sum()) == 1


def test_ends_of_rows_are_the_same_in_every_stage(stages: Stages) -> None:
    *others, last = stages.memory
    rows = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=DEVICE)
    known = torch.tensor([40, 3, 35, 9], dtype=torch.int32, device=DEVICE)
    table = torch.randint(1, 500, (4, 50), dtype=torch.int32, device=DEVICE)
    send_ends(last, 7, rows, known, table)
    for memory in others:
        copied = torch.where(torch.arange(50, device=DEVICE) < known[:, None] - 32, table, 0)
        theirs = torch.zeros_like(known)
        receive_ends(memory, 7, 4, theirs, copied)
        assert theirs.tolist() == [40, 3, 35, 0]
        for row in (0, 1, 2):
            assert torch.equal(copied[row, : known[row]], table[row, : known[row]])
            assert not copied[row, known[row] :].any()
        assert not copied[3].any()


@GPU
def test_a_replayed_graph_goes_on_where_the_last_launch_ended(stages: Stages) -> None:
    first, second, _ = stages.memory
    sent = torch.zeros(NUM_LANES.value + 9, HIDDEN, device=DEVICE)
    received = torch.zeros(0)

    def launch() -> torch.Tensor:
        out = torch.empty_like(sent)
        send_stream(first, sent)
        receive_stream(second, out)
        return out

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        received = launch()
    for value in range(5):
        sent.fill_(value)
        graph.replay()
        short = torch.full((1 + value, HIDDEN), 100.0 + value, device=DEVICE)
        send_stream(first, short)
        out = torch.empty_like(short)
        receive_stream(second, out)
        assert torch.equal(received, sent)
        assert torch.equal(out, short)
