"""Memory that kernels on several GPUs reach, and how ranks meet within a kernel.

Each rank allocates one piece with cudaMalloc's allocator and maps those of the others by their CUDA
IPC handles. Where GPUs do not reach one another's memory, the pieces lie in host memory that all
ranks have mapped. A block of a launch exchanges data through slots of its own, in two ways:

- Slots, two by turns, and counts: a rank writes into the slots of the others, then adds to their
  counts. A block's n-th meeting is over when its count is n times the number of ranks. In host
  memory each rank has a count of its own at every other one, which it stores, so that there are no
  atomic operations.
- Flagged slots, two by turns, for few data: each word of 32 bits carries 16 bits of data and 16 of
  the number of the exchange, so that a word says itself when it is there. That saves a round trip,
  and takes twice as many bytes.

Numbers of meetings and exchanges are kept on each rank's GPU, so that a graph which is replayed
goes on where the last launch ended. Knows nothing about what is exchanged, nor how handles reach
the other ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .plain_words import await_words, put_word, settle

NUM_BLOCKS = tl.constexpr(512)
"""Most blocks of a launch: those of a GPU of 132 multiprocessors that work at the same time, and
few more."""
COUNTS = tl.constexpr(4 * 512)
"""Bytes of a count for each block. Before the slots there are as many as ranks; GPUs that reach one
another use the first."""
FLAGGED_BLOCKS = tl.constexpr(128)
"""Most blocks of a launch that exchanges flagged words."""
MAX_POLLS = 1 << 26
"""Looks at a count before a rank gives up, which traps: some 40 s, in which another rank may
compile a kernel."""
HOST_POLLS = 1 << 25
"""The same over host memory, where a look takes longer: a minute or two, not measured."""
HANDLE_BYTES = 64
ALIGNMENT = 128
_LAZY_ACCESS = 1
_NATIVE_ATOMICS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMemory:
    """The memory of all ranks, mapped in one of them."""

    index: int
    """Place of this rank among all."""
    bases: torch.Tensor
    """int64 [ranks]: addresses, in the order of the ranks."""
    numbers: torch.Tensor
    """int32 [2, NUM_BLOCKS], where this rank computes: of each block the number of its meetings,
    and that of its exchanges of flagged words. Zero at first."""
    slot_bytes: int
    """Bytes that a rank exchanges in one meeting of a block."""
    flagged_len: int = 0
    """Numbers of 16 bits in a row that flagged words may carry. Always the same: a word that a
    longer row left behind would be taken for a new one, 65,536 exchanges later."""
    host: object | None = None
    """Owner of the mapped host memory with the pieces; None: they are in GPU memory."""
    max_polls: int = MAX_POLLS

    @property
    def is_host(self) -> bool:
        return self.host is not None

    @property
    def size(self) -> int:
        return self.bases.shape[0]

    def grid(self, num_items: int, most: int = NUM_BLOCKS.value) -> tuple[int]:
        """Blocks of a launch that takes so many items by turns."""
        return (min(num_items, most),)


class PeerError(OSError):
    """The driver refuses to share memory."""


class OwnMemory:
    """The piece of this process on its current GPU, zeroed. It lasts until the process ends, since
    others have it mapped."""

    def __init__(self, num_ranks: int, slot_bytes: int) -> None:
        """Raises `PeerError`."""
        self.slot_bytes = slot_bytes
        size = memory_bytes(num_ranks, slot_bytes)
        # The driver's calls need the context that torch makes with its first tensor.
        torch.cuda.synchronize()
        address = ctypes.c_uint64()
        call_driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        call_driver("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        torch.cuda.synchronize()
        self.address = address.value

    def handle(self) -> bytes:
        """Handle by which another process opens the piece, of `HANDLE_BYTES`."""
        handle, _ = handle_of(self.address)
        return handle

    def beside(self, index: int, handles: Sequence[bytes], flagged_len: int = 0) -> PeerMemory:
        """Maps the pieces of all ranks, given in their order; this process's own is number `index`.
        Raises `PeerError`."""
        bases = [
            self.address if rank == index else open_address(handle)
            for rank, handle in enumerate(handles)
        ]
        places = torch.tensor(bases, device="cuda")
        return PeerMemory(
            index=index,
            bases=places,
            numbers=new_numbers(),
            slot_bytes=self.slot_bytes,
            flagged_len=flagged_len,
        )


def in_host_memory(
    index: int,
    address: int,
    piece_bytes: int,
    num_ranks: int,
    slot_bytes: int,
    flagged_len: int,
    host: object,
) -> PeerMemory:
    """The pieces of all ranks in host memory, where this GPU has the first one at an address. The
    next ones follow at distances of `piece_bytes`, which may be more than `memory_bytes`. `host`
    keeps the memory mapped."""
    places = torch.tensor(
        [address + rank * piece_bytes for rank in range(num_ranks)], device="cuda"
    )
    return PeerMemory(
        index=index,
        bases=places,
        numbers=new_numbers(),
        slot_bytes=slot_bytes,
        flagged_len=flagged_len,
        host=host,
        max_polls=HOST_POLLS,
    )


def new_numbers(device: str = "cuda") -> torch.Tensor:
    """The numbers of a rank that has not met any other."""
    return torch.zeros(2, NUM_BLOCKS.value, dtype=torch.int32, device=device)


def host_address(pointer: int) -> int:
    """Address at which this process's current GPU reaches host memory that it has locked. Raises
    `PeerError`."""
    address = ctypes.c_uint64()
    call_driver(
        "cuMemHostGetDevicePointer_v2",
        ctypes.byref(address),
        ctypes.c_void_p(pointer),
        ctypes.c_uint(0),
    )
    return address.value


def handle_of(address: int) -> tuple[bytes, int]:
    """Handle by which another process opens the allocation that contains an address of this GPU,
    and the address's offset in it. Raises `PeerError` where the driver does not share it."""
    base = ctypes.c_uint64()
    size = ctypes.c_size_t()
    handle = _Handle()
    call_driver(
        "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    call_driver("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle), address - base.value


def open_address(handle: bytes) -> int:
    """Maps another process's allocation, of this GPU or a reachable one, and returns its address
    here. Raises `PeerError`."""
    address = ctypes.c_uint64()
    call_driver(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(address),
        _Handle.from_buffer_copy(handle),
        ctypes.c_uint(_LAZY_ACCESS),
    )
    return address.value


def close_address(address: int) -> None:
    """Unmaps memory that is no longer read."""
    call_driver("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def memory_bytes(num_ranks: int, slot_bytes: int) -> int:
    """Bytes of each rank's piece."""
    return int(
        num_ranks * (COUNTS.value + 2 * (NUM_BLOCKS.value + FLAGGED_BLOCKS.value) * slot_bytes)
    )


def slot_bytes_of(num_bytes: int) -> int:
    """The smallest size of a slot that holds so many bytes."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def reaches(own: int, other: int) -> bool:
    """Whether kernels on one GPU of this process reach the memory of another one, with atomic
    operations."""
    if own == other:
        return True
    if not torch.cuda.can_device_access_peer(own, other):
        return False
    found = ctypes.c_int()
    call_driver("cuDeviceGetP2PAttribute", ctypes.byref(found), _NATIVE_ATOMICS, own, other)
    return bool(found.value)


@triton.jit
def slot(p_bases, rank, i_block, epoch, part, slot_bytes, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """Pointer to a block's slot in the memory of a rank: `part` 0 … SIZE − 1 of those whose turn
    the epoch is."""
    number = (i_block * 2 + epoch % 2) * SIZE + part
    address = tl.load(p_bases + rank) + COUNTS * SIZE + number.to(tl.int64) * slot_bytes
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def flagged_slot(p_bases, rank, i_block, exchange, part, slot_bytes, SIZE: tl.constexpr):
    """Pointer to the words of a block's flagged slot in the memory of a rank, as `slot`."""
    number = (i_block * 2 + exchange % 2) * SIZE + part
    first = COUNTS * SIZE + NUM_BLOCKS * 2 * SIZE * slot_bytes.to(tl.int64)
    address = tl.load(p_bases + rank) + first + number.to(tl.int64) * slot_bytes
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def epoch_of(p_number, i_block):
    """Pointer to the number of meetings that a block has had."""
    return p_number + i_block


@triton.jit
def exchange_of(p_number, i_block):
    """Pointer to the number of exchanges of flagged words that a block has had."""
    return p_number + NUM_BLOCKS + i_block


@triton.jit
def written(p, b_data, inside, HOST: tl.constexpr):
    """Stores data for another rank."""
    if HOST:
        # Past a cache that keeps what is meant for the host.
        tl.store(p, b_data, mask=inside, cache_modifier=".wt")
    else:
        tl.store(p, b_data, mask=inside)


@triton.jit
def fetched(p, inside, HOST: tl.constexpr):
    """The data that another rank has written, 0 outside."""
    if HOST:
        # From memory each time: what a cache holds of the host is two meetings old.
        return tl.load(p, mask=inside, other=0, volatile=True)
    else:
        return tl.load(p, mask=inside, other=0, cache_modifier=".cg")


@triton.jit
def meet(
    p_bases,
    index,
    i_block,
    epoch,
    max_polls,
    SIZE: tl.constexpr,
    HOST: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Returns when this block has come to its meeting number `epoch`, from 1 on, on every rank.
    What the ranks wrote before is there then."""
    if HOST:
        _meet_by_words(p_bases, index, i_block, epoch, max_polls, SIZE, ON_GPU)
    else:
        _meet_by_atomics(p_bases, index, i_block, epoch, max_polls, SIZE, ON_GPU)


@triton.jit
def _meet_by_words(
    p_bases, index, i_block, epoch, max_polls, SIZE: tl.constexpr, ON_GPU: tl.constexpr
):
    settle(ON_GPU)
    p_own = tl.load(p_bases + index).to(tl.pointer_type(tl.int32)) + i_block
    for rank in tl.static_range(SIZE):
        p_there = (
            tl.load(p_bases + rank).to(tl.pointer_type(tl.int32)) + index * NUM_BLOCKS + i_block
        )
        put_word(p_there, epoch, ON_GPU)
    await_words(p_own, COUNTS, SIZE, epoch, max_polls, ON_GPU)


@triton.jit
def _meet_by_atomics(
    p_bases, index, i_block, epoch, max_polls, SIZE: tl.constexpr, ON_GPU: tl.constexpr
):
    tl.debug_barrier()
    for rank in tl.static_range(SIZE):
        p_count = tl.load(p_bases + rank).to(tl.pointer_type(tl.int32)) + i_block
        tl.atomic_add(p_count, 1, sem="release", scope="sys")
    p_own = tl.load(p_bases + index).to(tl.pointer_type(tl.int32)) + i_block
    # A difference, which is right when both have wrapped.
    num_missing = epoch * SIZE - tl.atomic_add(p_own, 0, sem="acquire", scope="sys")
    polls = 0
    while (num_missing > 0) & (polls < max_polls):
        num_missing = epoch * SIZE - tl.atomic_add(p_own, 0, sem="acquire", scope="sys")
        polls += 1
    stop_unless_over(num_missing, ON_GPU)
    tl.debug_barrier()


@triton.jit
def stop_unless_over(num_missing, ON_GPU: tl.constexpr):
    """Traps where a rank has waited in vain."""
    if ON_GPU:
        stop: tl.constexpr = "{ .reg .pred %p; setp.gt.s32 %p, $1, 0; @%p trap; mov.u32 $0, 0; }"
        tl.inline_asm_elementwise(
            stop, "=r,r", [num_missing], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def flagged(b_data, exchange):
    """Words [N] int32 that carry the data [N], of 16 bits, and the number of an exchange."""
    return (exchange << 16) | (b_data.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)


@triton.jit
def received(p_words, inside, exchange, max_polls, DTYPE: tl.constexpr, ON_GPU: tl.constexpr):
    """The data of all words [N], when they are those of this exchange."""
    number = (exchange << 16) >> 16
    b_words = tl.load(p_words, mask=inside, other=0, volatile=True)
    num_missing = tl.sum((((b_words >> 16) != number) & inside).to(tl.int32), axis=0)
    polls = 0
    while (num_missing > 0) & (polls < max_polls):
        b_words = tl.load(p_words, mask=inside, other=0, volatile=True)
        num_missing = tl.sum((((b_words >> 16) != number) & inside).to(tl.int32), axis=0)
        polls += 1
    stop_unless_over(num_missing, ON_GPU)
    return b_words.to(tl.int16).to(DTYPE, bitcast=True)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def call_driver(function: str, *arguments: object) -> None:
    code = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    if code:
        raise PeerError(f"{function} failed with error {code} of the GPU's driver")
