from __future__ import annotations

import ctypes
import time

import pytest
import torch

from headwater.engine_core.executors.device.locked_memory import LockedMemory, mapped
from headwater.kernels.blocks import copy_rows as module
from headwater.kernels.blocks.copy_rows import _Copy, copy_rows
from tests.kernels.row_driver import copied_by_hand

DELAY_CYCLES = 400_000_000
"""A fifth of a second."""
SHAPES = [(1, 1), (1, 7), (5, 3), (64, 1024)]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_launch", copied_by_hand)
    monkeypatch.setattr(module, "_stream", lambda: 0)


def apart(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [rows, 2 words + 5] of one host, and rows in the middle of them."""
    num_rows, num_words = shape
    whole = torch.arange(num_rows * (2 * num_words + 5), dtype=torch.int32).view(num_rows, -1)
    return whole, whole[:, 2 : 2 + num_words]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("host")
def test_rows_that_lie_apart_are_copied_both_ways_and_nothing_beside_them(
    shape: tuple[int, int],
) -> None:
    whole, rows = apart(shape)
    near = torch.zeros(shape, dtype=torch.int32)
    copy_rows(rows, near)
    assert torch.equal(near, rows)
    expected = whole.clone()
    expected[:, 2 : 2 + shape[1]] = -7
    copy_rows(torch.full(shape, -7, dtype=torch.int32), rows)
    assert torch.equal(whole, expected)


@pytest.mark.usefixtures("host")
def test_no_rows_are_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_launch", None)
    copy_rows(torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, 4, dtype=torch.int32))


@pytest.mark.usefixtures("host")
def test_a_refusal_of_the_driver_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_launch", lambda copy, stream: 700)
    with pytest.raises(
        OSError, match="a copy of 2 rows of 12 bytes failed with error 700 of the GPU's driver"
    ):
        copy_rows(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32))


def test_the_structure_is_as_large_as_the_drivers() -> None:
    """Eight fields of eight bytes a side but for the one that is missing, width and height."""
    assert ctypes.sizeof(_Copy) == 2 * 7 * 8 + 2 * 8
    assert (_Copy.target.offset, _Copy.width.offset, _Copy.height.offset) == (56, 112, 120)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_cross_to_a_gpu_and_back(shape: tuple[int, int]) -> None:
    _, rows = apart(shape)
    memory = mapped((shape[0], 2 * shape[1] + 5))
    locked = LockedMemory(memory)
    own = memory[:, 3 : 3 + shape[1]]
    copy_rows(rows.contiguous().cuda(), own)
    torch.cuda.synchronize()
    assert torch.equal(own, rows)
    assert not memory[:, :3].any()
    assert not memory[:, 3 + shape[1] :].any()
    back = torch.zeros(shape, dtype=torch.int32, device="cuda")
    copy_rows(own, back)
    torch.cuda.synchronize()
    assert torch.equal(back.cpu(), rows)
    locked.release()


@pytest.mark.gpu
@pytest.mark.parametrize("is_out", [True, False], ids=["out", "in"])
def test_a_copy_waits_for_its_stream_and_the_caller_does_not(is_out: bool) -> None:
    memory = mapped((256, 8192))
    locked = LockedMemory(memory)
    own = memory[:, :4096]
    near = torch.ones(256, 4096, dtype=torch.int32, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        begin = time.perf_counter()
        copy_rows(*((near, own) if is_out else (own, near)))
        seconds = time.perf_counter() - begin
        event = stream.record_event()
    assert not event.query()
    assert seconds < 0.05
    event.synchronize()
    assert (own == near.cpu()).all()
    locked.release()
