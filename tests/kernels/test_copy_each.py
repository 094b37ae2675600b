from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.executors.device.locked_memory import LockedMemory, mapped
from headwater.kernels.blocks import copy_each as module
from headwater.kernels.blocks.copy_each import copy_each

SOURCES = np.array([3, 0, 4, 1], np.int32)
TARGETS = np.array([0, 5, 2, 3], np.int32)


def copied_by_hand(targets: Any, sources: Any, width: int, stream: int) -> int:
    for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
        ctypes.memmove(target, source, width)
    return 0


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_launch", copied_by_hand)
    monkeypatch.setattr(module, "_stream", lambda: 0)
    monkeypatch.setattr(module, "_use_context_of", lambda stream: None)


def rows(count: int, width: int) -> torch.Tensor:
    return torch.arange(count * width, dtype=torch.int32).view(count, width) + 1


@pytest.mark.usefixtures("host")
def test_rows_come_to_their_places_and_others_stay() -> None:
    source = rows(5, 7)
    target = torch.zeros(6, 7, dtype=torch.int32)
    copy_each(source, target, SOURCES, TARGETS)
    assert torch.equal(target[TARGETS], source[SOURCES])
    assert not target[[1, 4]].any()


@pytest.mark.usefixtures("host")
def test_no_rows_are_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_launch", None)
    copy_each(rows(2, 3), rows(2, 3), SOURCES[:0], TARGETS[:0])


@pytest.mark.usefixtures("host")
def test_a_refusal_of_the_driver_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_launch", lambda *_: 700)
    with pytest.raises(
        OSError, match="copies of 4 rows of 28 bytes failed with error 700 of the GPU's driver"
    ):
        copy_each(rows(5, 7), rows(6, 7), SOURCES, TARGETS)


def as_it_is() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def without_batches() -> Any:
    driver = as_it_is()
    names = ("cuMemcpyAsync", "cuCtxGetCurrent", "cuStreamGetCtx", "cuCtxSetCurrent")
    return SimpleNamespace(**{name: getattr(driver, name) for name in names})


@pytest.mark.gpu
@pytest.mark.parametrize("driver", [as_it_is, without_batches])
def test_rows_go_to_a_gpu_and_back(
    driver: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_driver", driver)
    locked = LockedMemory(mapped((6, 5000)))
    memory = locked.memory
    there = rows(5, 5000).cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # torch ships it so
        copy_each(there, memory, SOURCES, TARGETS)
        back = torch.zeros_like(there)
        copy_each(memory, back, TARGETS, SOURCES)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(memory[TARGETS], there[SOURCES].cpu())
    assert torch.equal(back[SOURCES], there[SOURCES])
    assert not back[2].any()
    assert not memory[[1, 4]].any()
    locked.release()


@pytest.mark.gpu
def test_a_thread_that_launched_nothing_yet_copies() -> None:
    locked = LockedMemory(mapped((6, 5000)))
    there = rows(5, 5000).cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch ships it so

    def copy() -> None:
        with torch.cuda.stream(stream):
            copy_each(there, locked.memory, SOURCES, TARGETS)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(copy).result()
    stream.synchronize()
    assert torch.equal(locked.memory[TARGETS], there[SOURCES].cpu())
    locked.release()
