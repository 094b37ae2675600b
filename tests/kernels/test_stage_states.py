"""Hidden states of several steps between two ends of channels, here both in one process."""

from __future__ import annotations

from itertools import cycle, islice

import pytest
import torch

from headwater.engine_core.executors.locked_memory import LockedMemory, mapped
from headwater.kernels.peer_memory import host_address
from headwater.kernels.stage_memory import NUM_LANES
from headwater.kernels.stage_states import (
    StateMemory,
    StateSizes,
    new_counts,
    receive_states,
    send_states,
)
from tests.kernels.paging import GPU, LONG_INTERPRETED

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN = 24
MOST_TOKENS = NUM_LANES.value + 2
NUM_SLOTS = 2
SIZES = StateSizes(num_channels=2, num_slots=NUM_SLOTS, slot_bytes=4 * HIDDEN * MOST_TOKENS)


def memory_of(*, is_host: bool) -> StateMemory:
    shape = (-(-SIZES.num_bytes // 16) * 16,)
    if not is_host:
        piece = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
        return StateMemory(address=piece.data_ptr(), sizes=SIZES, owner=piece)
    pages = mapped(shape, torch.uint8)
    if DEVICE.type == "cpu":
        return StateMemory(address=pages.data_ptr(), sizes=SIZES, owner=pages, is_host=True)
    locked = LockedMemory(pages)
    return StateMemory(
        address=host_address(pages.data_ptr()), sizes=SIZES, owner=locked, is_host=True
    )


@pytest.fixture(params=["GPUs", pytest.param("host", marks=LONG_INTERPRETED)])
def memory(request: pytest.FixtureRequest) -> StateMemory:
    return memory_of(is_host=request.param == "host")


class Ends:
    """Both ends of each channel."""

    def __init__(self, memory: StateMemory) -> None:
        self._memory = memory
        self._sent, self._received = (
            [new_counts(DEVICE) for _ in range(SIZES.num_channels)] for _ in range(2)
        )

    def send(self, channel: int, states: torch.Tensor) -> None:
        send_states(self._memory, channel, self._sent[channel], states)

    def receive(self, channel: int, num_tokens: int) -> torch.Tensor:
        states = torch.full((num_tokens, HIDDEN), -1.0, device=DEVICE)
        receive_states(self._memory, channel, self._received[channel], states)
        return states


def test_as_many_steps_of_any_length_wait_as_there_are_slots(memory: StateMemory) -> None:
    ends = Ends(memory)
    lengths = list(islice(cycle((1, MOST_TOKENS, 3)), 4 if DEVICE.type == "cpu" else 50))
    steps = [
        [torch.randn(length, HIDDEN, device=DEVICE) for length in (each, 2)] for each in lengths
    ]
    for number in range(len(steps) + NUM_SLOTS - 1):
        if number < len(steps):
            for channel in (1, 0):
                ends.send(channel, steps[number][channel])
        if number >= NUM_SLOTS - 1:
            sent = steps[number - NUM_SLOTS + 1]
            for channel in (0, 1):
                assert torch.equal(ends.receive(channel, len(sent[channel])), sent[channel])


def test_counts_wrap(memory: StateMemory) -> None:
    ends = Ends(memory)
    largest = torch.iinfo(torch.int32).max
    for counts in (ends._sent[0], ends._received[0]):
        counts.fill_(largest - 1)
    arrived = SIZES.num_channels * NUM_LANES.value
    assert memory.owner is not None
    piece = memory.owner.memory if isinstance(memory.owner, LockedMemory) else memory.owner
    assert isinstance(piece, torch.Tensor)
    piece[: 4 * arrived].view(torch.int32).fill_(largest - 1)
    for value in range(4):
        sent = torch.full((2, HIDDEN), float(value), device=DEVICE)
        ends.send(0, sent)
        assert torch.equal(ends.receive(0, 2), sent)
    assert int(ends._sent[0][0]) < 0


def test_states_pass_through_host_memory() -> None:
    """The cheapest case; the others run in `make test-long` and on GPUs."""
    ends = Ends(memory_of(is_host=True))
    sent = torch.randn(2, HIDDEN, device=DEVICE)
    ends.send(1, sent)
    assert torch.equal(ends.receive(1, 2), sent)


@GPU
def test_a_launch_waits_for_states_and_a_replayed_graph_goes_on_where_the_last_launch_ended(
    memory: StateMemory,
) -> None:
    ends = Ends(memory)
    sent = torch.zeros(3, HIDDEN, device=DEVICE)
    received = torch.zeros_like(sent)
    ends.send(0, sent)
    receive_states(memory, 0, ends._received[0], received)
    torch.cuda.synchronize()
    sending = torch.cuda.CUDAGraph()
    receiving = torch.cuda.CUDAGraph()
    with torch.cuda.graph(sending):
        ends.send(0, sent)
    with torch.cuda.graph(receiving):
        receive_states(memory, 0, ends._received[0], received)
    other = torch.cuda.Stream()
    for value in range(5):
        with torch.cuda.stream(other):
            receiving.replay()
        sent.fill_(value)
        sending.replay()
        torch.cuda.synchronize()
        assert torch.equal(received, sent)
