"""Kernels that copies of a process compile: the process finds them in Triton's cache. Triton
compiles for a GPU that is not there."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from headwater.engine_core.executors.device.compiler_copies import compiler_processes
from headwater.kernels.launch.compile_ahead import CompileAhead
from headwater.kernels.launch.compiler_processes import CompilerProcesses
from headwater.kernels.launch.kernel_list import KernelList
from tests.kernels.test_compile_ahead import CPU, NoGpu, no_gpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="puts things in the place of a GPU"
)
__all__ = ["no_gpu"]
X = torch.zeros(64)


def _named(p_x, SHAPE: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton compiles it
    if SIZE == 64:
        this_is_not_defined(p_x)  # type: ignore[name-defined]  # noqa: F821


FUNCTION = _named


@pytest.fixture
def kernel(no_gpu: NoGpu, monkeypatch: pytest.MonkeyPatch) -> JITFunction[Any]:
    no_gpu.may_compile.set()
    # Copies have its result, as those of a forked engine do.
    triton_key()
    kernel = JITFunction(FUNCTION)
    monkeypatch.setattr(sys.modules[__name__], "_named", kernel)
    return kernel


@pytest.fixture
def processes(kernel: JITFunction[Any]) -> Iterator[CompilerProcesses]:
    with compiler_processes("id", is_alone=True) as processes:
        yield processes


def compile_ahead(
    kernel: JITFunction[Any], processes: CompilerProcesses, *sizes: int, shape: object = None
) -> None:
    with CompileAhead(CPU, 2, processes) as ahead:
        for size in sizes:
            ahead.note(lambda size=size: kernel[1,](X, SHAPE=shape, SIZE=size))


def children() -> set[int]:
    """Process ids of the processes that this one has started."""
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


def test_what_other_processes_compile_is_loaded(
    no_gpu: NoGpu, kernel: JITFunction[Any], processes: CompilerProcesses
) -> None:
    compile_ahead(kernel, processes, 8, 16, 32)
    assert no_gpu.compiled == [("compiler", True)] * 3
    kernel[1,](X, SHAPE=None, SIZE=16)
    assert no_gpu.launched == [16]


def test_what_cannot_be_named_to_another_process_is_compiled_here(
    no_gpu: NoGpu, kernel: JITFunction[Any], processes: CompilerProcesses
) -> None:
    compile_ahead(kernel, processes, 16, shape=(2, 4))
    assert no_gpu.compiled == [("compiler", False)]


def test_what_does_not_compile_there_says_why_here(
    kernel: JITFunction[Any], processes: CompilerProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    compile_ahead(kernel, processes, 64)
    assert "this_is_not_defined" in caplog.text


def test_processes_that_died_leave_the_work_to_this_one(
    no_gpu: NoGpu, kernel: JITFunction[Any]
) -> None:
    # Servers of other tests are children of this process, too.
    others = children()
    with compiler_processes("id", is_alone=True) as processes:
        for pid in children() - others:
            os.kill(pid, signal.SIGKILL)
        compile_ahead(kernel, processes, 8, 16, 32)
    assert no_gpu.compiled == [("compiler", False)] * 3


def test_no_processes_begin_where_kernels_are_listed(kernel: JITFunction[Any]) -> None:
    kernels = KernelList("id")
    kernels.begin()
    compile_ahead(kernel, CompilerProcesses(), 16)
    kernels.keep()
    with compiler_processes("id", is_alone=True) as processes:
        assert not processes
