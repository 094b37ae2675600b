"""Hidden states that draft heads of the first pipeline stage read, on their way there from the
stages that compute them, over memory that GPUs reach. Launches only, so that graphs can hold them.

Each tensor of a step that is shown has a channel, which has one slot for each step that may be in
flight. A launch that
sends waits for nothing: the first stage receives all but the last steps before it sends the stream
of the next one, and
every later stage waits for that stream. One that receives waits as those of `stage_stream` do. Both
stages launch the
same numbers of rows in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .peer_memory import MAX_POLLS, fetched, written
from .stage_memory import NUM_LANES
from .stage_stream import await_count, say_count


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """Sizes of the memory of some channels: their counts of tensors that have arrived, one for each
    lane, and slots."""

    num_channels: int
    num_slots: int
    """Slots of each channel, a power of two."""
    slot_bytes: int

    @property
    def counts_bytes(self) -> int:
        return 4 * int(NUM_LANES.value) * self.num_channels

    @property
    def num_bytes(self) -> int:
        return self.counts_bytes + self.num_channels * self.num_slots * self.slot_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMemory:
    """The memory of channels, which the first stage reads."""

    address: int
    """Where this process's GPU reaches it."""
    sizes: StateSizes
    owner: object | None = None
    """Object with which the memory ends; None: it lasts as long as the process."""
    is_host: bool = False
    """Whether it lies in host memory."""
    max_polls: int = MAX_POLLS

    def arrived(self, channel: int) -> int:
        """Address of the counts of tensors that have arrived."""
        return self.address + 4 * int(NUM_LANES.value) * channel

    def slots(self, channel: int) -> int:
        """Address of the first slot."""
        sizes = self.sizes
        return self.address + sizes.counts_bytes + channel * sizes.num_slots * sizes.slot_bytes


def new_counts(device: torch.device) -> torch.Tensor:
    """Counts, by lane, of what one end of a channel has sent or received."""
    return torch.zeros(NUM_LANES.value, dtype=torch.int32, device=device)


def send_states(
    memory: StateMemory, channel: int, counts: torch.Tensor, states: torch.Tensor
) -> None:
    """Sends states [T, H] to the first stage. `counts`: those of this end, which go up."""
    assert states.nbytes <= memory.sizes.slot_bytes
    _launch(_send_states, memory, channel, counts, states)


def receive_states(
    memory: StateMemory, channel: int, counts: torch.Tensor, states: torch.Tensor
) -> None:
    """Fills states [T, H] with the next tensor of the channel. `counts`: those of this end, which
    go up."""
    _launch(_receive_states, memory, channel, counts, states, memory.max_polls)


def _launch(
    kernel: Any,
    memory: StateMemory,
    channel: int,
    counts: torch.Tensor,
    states: torch.Tensor,
    *more: int,
) -> None:
    num_tokens, hidden = states.shape
    assert states.is_contiguous()
    kernel[(min(num_tokens, NUM_LANES.value),)](
        states,
        counts,
        memory.arrived(channel),
        memory.slots(channel),
        num_tokens,
        hidden,
        memory.sizes.slot_bytes,
        *more,
        NUM_SLOTS=memory.sizes.num_slots,
        HOST=memory.is_host,
        BLOCK=triton.next_power_of_2(hidden),
        ON_GPU=states.is_cuda,
    )


@triton.jit
def _slot(p_state, first, number, slot_bytes, NUM_SLOTS: tl.constexpr):
    """Pointer to the slot of a lane's tensor of that number; numbers wrap."""
    slot = first + (number & (NUM_SLOTS - 1)).to(tl.int64) * slot_bytes
    return slot.to(tl.pointer_type(p_state.dtype.element_ty))


@triton.jit(do_not_specialize=["arrived", "first", "num_tokens"])
def _send_states(
    p_state,
    p_count,
    arrived,
    first,
    num_tokens,
    hidden,
    slot_bytes,
    NUM_SLOTS: tl.constexpr,
    HOST: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    i_lane = tl.program_id(0)
    o_h = tl.arange(0, BLOCK)
    inside = o_h < hidden
    number = tl.load(p_count + i_lane) + 1
    p_slot = _slot(p_state, first, number, slot_bytes, NUM_SLOTS)
    i_row = i_lane.to(tl.int64)
    while i_row < num_tokens:
        b_row = tl.load(p_state + i_row * hidden + o_h, mask=inside, other=0.0)
        written(p_slot + i_row * hidden + o_h, b_row, inside, HOST)
        i_row += NUM_LANES
    say_count(arrived.to(tl.pointer_type(tl.int32)) + i_lane, number, HOST, ON_GPU)
    tl.store(p_count + i_lane, number)


@triton.jit(do_not_specialize=["arrived", "first", "num_tokens"])
def _receive_states(
    p_state,
    p_count,
    arrived,
    first,
    num_tokens,
    hidden,
    slot_bytes,
    max_polls,
    NUM_SLOTS: tl.constexpr,
    HOST: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    i_lane = tl.program_id(0)
    o_h = tl.arange(0, BLOCK)
    inside = o_h < hidden
    number = tl.load(p_count + i_lane) + 1
    await_count(arrived.to(tl.pointer_type(tl.int32)) + i_lane, number, max_polls, HOST, ON_GPU)
    p_slot = _slot(p_state, first, number, slot_bytes, NUM_SLOTS)
    i_row = i_lane.to(tl.int64)
    while i_row < num_tokens:
        b_row = fetched(p_slot + i_row * hidden + o_h, inside, HOST)
        tl.store(p_state + i_row * hidden + o_h, b_row, mask=inside)
        i_row += NUM_LANES
    tl.store(p_count + i_lane, number)
