"""Compiles the kernels of launches before any of them happens, many at a time. Knows nothing about
what is launched."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import triton
from triton import AsyncCompileMode, FutureKernel

from .compiler_processes import CompilerProcesses
from .graph_capture import capturing
from .kernel_list import named, serialize_safely
from .launchers import keep_launchers_apart

NO_PROCESSES = CompilerProcesses()
T = TypeVar("T")
log = logging.getLogger(__name__)
MAX_THREADS = 16
"""Number of compiling threads. Each takes some 22 MiB, and the assembler that it calls up to 108
more."""
# Besides these threads one copies blocks to host memory, by a kernel that it may be the first to
# load.
keep_launchers_apart()


class CompileAhead(AsyncCompileMode):  # type: ignore[misc]  # Triton has no types
    """Scope in which a kernel that is not compiled yet goes to a thread instead of the GPU. On exit
    all kernels are compiled.

    A kernel that fails to compile is logged, and compiled again where it is launched afterwards,
    which raises if it fails there too.
    """

    def __init__(
        self,
        device: torch.device,
        num_cores: int,
        processes: CompilerProcesses = NO_PROCESSES,
    ) -> None:
        """`num_cores`: those that compilers may use; each gets a thread, up to `MAX_THREADS`.
        `processes` compile kernels that can be named to them; threads then load these, and compile
        the rest."""
        self._processes = processes
        self._named: tuple[str, str, str] | None = None
        """Module, function, and types, constants and options of the kernel that Triton submits
        next; None: it cannot be named."""
        self._num_threads = min(num_cores, MAX_THREADS)
        self._pool = ThreadPoolExecutor(self._num_threads, "compiler")
        super().__init__(self._pool, ignore_errors=True)
        self._begin = time.perf_counter()
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            # A library takes its handle and its workspace outside a graph.
            some = torch.zeros(16, 16, dtype=torch.bfloat16, device=device)
            some @ some

    def __enter__(self) -> Self:
        super().__enter__()
        if self._processes:
            serialize_safely()
            triton.knobs.runtime.jit_cache_hook = self._name_next
        return self

    def note(self, launch: Callable[[], T]) -> T:
        """Compiles the kernels that a call launches, and keeps the GPU from all of it. Results have
        only their size."""
        with torch.cuda.stream(self._stream), _unlaunched():
            result = launch()
        torch.cuda.empty_cache()
        return result

    def submit(
        self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]
    ) -> FutureKernel | None:
        """Submits a compilation to the threads. Returns the kernel where it is compiled already,
        since a launch costs less than another submission; otherwise None, and Triton launches
        nothing."""
        load = partial(_load, compile_fn)
        if self._named is not None:
            load = partial(_load_compiled, self._processes, self._named, compile_fn)
        kernel = super().submit(key, load, finalize_fn)
        is_there = kernel.future.done() and kernel.future.exception() is None
        return kernel if is_there else None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        triton.knobs.runtime.jit_cache_hook = None
        self._pool.shutdown(wait=False, cancel_futures=error is not None)
        # NOTE: a future that its pool cancels never counts as completed: Triton would wait for
        # ever.
        self.raw_futures[:] = [each for each in self.raw_futures if not each.cancelled()]
        super().__exit__(exc_type, error, traceback)
        seconds = time.perf_counter() - self._begin
        log.info(
            "kernels: %d by %d threads, %.1f s", len(self.raw_futures), self._num_threads, seconds
        )
        for future in self.raw_futures:
            if (failure := future.exception()) is not None:
                log.warning("a kernel did not compile ahead: %r", failure)

    def _name_next(self, *, fn: Any, compile: dict[str, Any], **rest: object) -> None:
        self._named = named(fn, compile)


class NotAhead:
    """Compiles no kernel before its launch."""

    def note(self, launch: Callable[[], object]) -> None:
        pass


def _load_compiled(
    processes: CompilerProcesses, kernel: tuple[str, str, str], compile_fn: Callable[[], Any]
) -> Any:
    processes.compile(*kernel)
    return _load(compile_fn)


def _load(compile_fn: Callable[[], Any]) -> Any:
    kernel = compile_fn()
    # The first access compiles a launcher, in C, and loads the kernel on the GPU.
    assert kernel.run
    return kernel


@contextmanager
def _unlaunched() -> Iterator[None]:
    """Scope whose launches on the current stream go into a graph that is discarded."""
    with capturing(torch.cuda.CUDAGraph(keep_graph=True)):
        yield
