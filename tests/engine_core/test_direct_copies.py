"""Blocks out of the memory of another process, on CPUs and GPUs."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.executor import DirectCopies, DirectCopy
from tests.engine_core.direct_copy_owner import contents, shared
from tests.polling import holds_within

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OWN = 1
THEIRS = 2
"""Seeds of contents."""


class Owner:
    """Another process with a KV cache."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.process = process
        self.handle = process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def owner(device: str) -> Iterator[Owner]:
    command = [sys.executable, "-m", "tests.engine_core.direct_copy_owner", device, str(THEIRS)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield Owner(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def lender() -> Iterator[Callable[[str], Owner]]:
    """The process on a device that tests share which leave it alive."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda device: stack.enter_context(owner(device)))


def own(device: str, num_blocks: int = 7) -> tuple[list[torch.Tensor], DirectCopies]:
    """Caches of this process, with another number of blocks, and what copies into them."""
    blocks, copies = shared(contents(OWN, num_blocks), torch.device(device))
    return blocks.kv_caches, copies


def ints(values: Sequence[int]) -> Any:
    return np.array(values, np.int32)


def wait(copy: DirectCopy) -> None:
    assert holds_within(lambda: copy.is_done, 60)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_another_process_come_as_they_are_and_others_stay(
    device: str, lender: Callable[[str], Owner]
) -> None:
    caches, copies = own(device)
    other = lender(device)
    wait(copies.copy(other.handle, ints([11, 0, 5]), ints([1, 6, 2])))
    wait(copies.copy(other.handle, ints([3]), ints([4])))
    for cache, mine, theirs in zip(caches, contents(OWN, 7), contents(THEIRS), strict=True):
        assert torch.equal(cache[:, :, [1, 6, 2, 4]].cpu(), theirs[:, :, [11, 0, 5, 3]])
        assert torch.equal(cache[:, :, [0, 3, 5]].cpu(), mine[:, :, [0, 3, 5]])


@pytest.mark.parametrize("device", DEVICES)
def test_a_process_that_is_killed_while_its_blocks_are_copied_kills_no_other(device: str) -> None:
    caches, copies = own(device)
    with owner(device) as other:
        pending = [copies.copy(other.handle, ints(range(7)), ints(range(7))) for _ in range(50)]
        other.kill()
        for copy in pending:
            wait(copy)
        copies.close(other.handle)
        # What came is not promised; that this process goes on is.
        with owner(device) as another:
            wait(copies.copy(another.handle, ints([11]), ints([0])))
    for cache, theirs in zip(caches, contents(THEIRS), strict=True):
        assert torch.equal(cache[:, :, 0].cpu(), theirs[:, :, 11])


@pytest.mark.gpu
def test_memory_of_a_dead_process_is_free_once_its_handle_is_closed() -> None:
    _, copies = own("cuda")
    with owner("cuda") as other:
        wait(copies.copy(other.handle, ints([1]), ints([1])))
        other.kill()
        copies.close(other.handle)
    with pytest.raises(OSError, match="failed with error"):
        copies.copy(other.handle, ints([1]), ints([1]))


def elsewhere(described: dict[str, Any]) -> None:
    described["host"] = "another host"


def ended(described: dict[str, Any]) -> None:
    # The number of a process that has ended.
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    described["process"] = child.pid


def other_memory(described: dict[str, Any]) -> None:
    described["process"] = os.getpid()


@pytest.mark.parametrize("change", [elsewhere, ended, other_memory])
def test_memory_that_is_not_the_engines_is_not_opened(
    change: Callable[[dict[str, Any]], None], lender: Callable[[str], Owner]
) -> None:
    _, copies = own("cpu")
    described = json.loads(lender("cpu").handle)
    change(described)
    with pytest.raises(OSError, match=r"host|not the memory|No such file"):
        copies.copy(json.dumps(described).encode(), ints([1]), ints([1]))


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_that_the_other_cache_does_not_have_is_not_read(
    device: str, lender: Callable[[str], Owner]
) -> None:
    _, copies = own(device)
    with pytest.raises(OSError, match="block 12 is not in a KV cache of 12 blocks"):
        copies.copy(lender(device).handle, ints([1, 12]), ints([1, 2]))


def test_more_blocks_than_the_memory_has_are_not_mapped(lender: Callable[[str], Owner]) -> None:
    _, copies = own("cpu")
    described = json.loads(lender("cpu").handle) | {"num_blocks": 1000}
    with pytest.raises(OSError, match="has not 1000 blocks"):
        copies.copy(json.dumps(described).encode(), ints([1]), ints([1]))


def test_an_engine_that_shares_nothing_has_an_empty_handle() -> None:
    _, copies = own("cpu")
    with pytest.raises(OSError, match="another host"):
        copies.copy(b"", ints([1]), ints([1]))
    assert json.loads(copies.handle)["num_blocks"] == 7
