"""Memory that a GPU reads is unlocked before it is given back, also where nobody says that it is
needed no more."""

from __future__ import annotations

import gc
import mmap
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headwater.bench.pytest_locks import MAPS, covers, mappings
from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executors.device import locked_memory
from headwater.engine_core.executors.device.locked_memory import (
    LockedMemory,
    has_own_pages,
    is_mapped,
    mapped,
)
from headwater.engine_core.executors.exit.draw_buffers import DrawBuffers
from headwater.services.engine.core.mask_table import Int32Array, create_mask_memory, map_masks

CONFIG = EngineConfig(num_blocks=600, max_model_len=4096, max_num_seqs=4)


class Runtime:
    """CUDA's, as far as locks go."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815  # CUDA's name

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refuses = False

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # CUDA's name
        if self.refuses:
            return 2
        assert address not in self.locked
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # CUDA's name
        if self.refuses:
            return 1
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(locked_memory, "_runtime", lambda: runtime)
    return runtime


def mapped_table() -> Int32Array:
    return np.frombuffer(mmap.mmap(-1, 48), np.int32).reshape(1, 4, 3)


def test_memory_is_unlocked_when_it_is_released_and_only_once(runtime: Runtime) -> None:
    memory = mapped((100,))
    locked = LockedMemory(memory)
    assert runtime.locked == {memory.data_ptr(): 400}
    locked.release()
    assert not runtime.locked
    locked.release()
    del locked
    gc.collect()
    assert not runtime.locked


def test_memory_is_unlocked_with_its_last_holder(runtime: Runtime) -> None:
    locked = LockedMemory(mapped((100,)))
    assert runtime.locked
    del locked
    gc.collect()
    assert not runtime.locked


def test_memory_that_cannot_be_locked_is_an_error(runtime: Runtime) -> None:
    runtime.refuses = True
    with pytest.raises(RuntimeError, match="400 bytes cannot be locked"):
        LockedMemory(mapped((100,)))


def test_memory_that_cannot_be_unlocked_is_an_error(runtime: Runtime) -> None:
    locked = LockedMemory(mapped((100,)))
    runtime.refuses = True
    address = locked.memory.data_ptr()
    with pytest.raises(RuntimeError, match="400 bytes cannot be unlocked: CUDA error 1"):
        locked.release()
    del locked
    gc.collect()
    assert covers(mappings(MAPS.read_text()), address, address + 400), "it is kept"


def test_a_table_of_masks_is_unlocked_with_its_inbox(runtime: Runtime) -> None:
    first, second = (mapped_table() for _ in range(2))
    buffers = DrawBuffers(CONFIG, 96, torch.device("cpu"))
    buffers._is_gpu = True
    buffers._source(first)
    buffers._source(first)
    assert list(runtime.locked) == [first.ctypes.data]
    buffers._source(second)
    assert list(runtime.locked) == [second.ctypes.data]
    del buffers
    gc.collect()
    assert not runtime.locked


def test_memory_of_the_heap_is_read_without_a_lock(runtime: Runtime) -> None:
    """Its pages are not its own: copies of what lies beside it would fail."""
    words = np.zeros(mmap.PAGESIZE, np.int32)
    # Of all tables one in some hundred begins where a page does.
    by_chance = words[-words.ctypes.data % mmap.PAGESIZE // 4 :][:12].reshape(1, 4, 3)
    assert by_chance.ctypes.data % mmap.PAGESIZE == 0
    buffers = DrawBuffers(CONFIG, 96, torch.device("cpu"))
    buffers._is_gpu = True
    for table in (by_chance, np.ones((1, 4, 3), np.int32), mapped_table()[:, 1:]):
        assert np.array_equal(buffers._source(table).numpy(), table)
        assert not runtime.locked


def test_a_table_of_an_engine_is_mapped() -> None:
    memory = create_mask_memory()
    assert is_mapped(map_masks(memory, 2, 3, 96))
    os.close(memory)


def test_mapped_memory_has_pages_of_its_own_and_zeros_in_them() -> None:
    for shape in ((1,), (3, 5), (1025, 7)):
        memory = mapped(shape)
        assert memory.shape == shape
        assert has_own_pages(memory)
        assert not memory.any()
        memory.fill_(7)
        assert (memory == 7).all()
