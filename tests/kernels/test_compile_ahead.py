"""Kernels are compiled by Triton for a GPU that is not there; what would bring them to it and run
them takes notes."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from headwater.kernels.launch.compile_ahead import CompileAhead

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="puts things in the place of a GPU"
)
CPU = torch.device("cpu")
TOO_LARGE = tl.constexpr(64)


def _nothing(p_x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton compiles it
    # NOTE: no operation of the language: the interpreter, once it ran in this process, has put its
    # own in their place.
    if SIZE == TOO_LARGE:
        this_is_not_defined(p_x)  # type: ignore[name-defined]  # noqa: F821


class NoGpu:
    """What was compiled by which thread, and the sizes that were launched, into graphs and
    otherwise. No compilation ends before `may_compile` is set."""

    def __init__(self) -> None:
        self.is_capturing = False
        self.may_compile = threading.Event()
        self.compiled: list[tuple[str, bool]] = []
        self.captured: list[int] = []
        self.launched: list[int] = []
        self.driver = SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            launcher_cls=lambda source, metadata: self.launch,
            utils=SimpleNamespace(
                get_device_properties=lambda device: {"max_shared_mem": 1 << 17},
                load_binary=lambda *args: (object(), object(), 32, 0, 1024),
            ),
        )

    def launch(self, *args: Any) -> None:
        (self.captured if self.is_capturing else self.launched).append(args[-1])

    def capture(self, is_capturing: bool) -> None:
        self.is_capturing = is_capturing

    def note(self, *, src: Any, cache_hit: bool, **rest: object) -> None:
        assert self.may_compile.wait(60)
        thread = threading.current_thread()
        self.compiled.append((thread.name.rstrip("0123456789_"), cache_hit))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NoGpu:
    nothing = NoGpu()
    graph = SimpleNamespace(
        capture_begin=lambda **options: nothing.capture(True),
        capture_end=lambda: nothing.capture(False),
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", nothing.driver)
    monkeypatch.setattr(triton.knobs.compilation, "listener", nothing.note)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda **options: graph)
    return nothing


def test_kernels_are_compiled_once_by_threads_and_launched_only_afterwards(no_gpu: NoGpu) -> None:
    kernel = JITFunction(_nothing)
    x = torch.zeros(64)
    with CompileAhead(CPU, num_cores=2) as ahead:
        for size in (16, 32, 16):
            assert ahead.note(lambda size=size: kernel[1,](x, SIZE=size)) is None
        no_gpu.may_compile.set()
    assert [each.exception() for each in ahead.raw_futures] == [None, None]
    assert no_gpu.compiled == [("compiler", False)] * 2
    assert not no_gpu.captured + no_gpu.launched
    for size in (16, 32, 16):
        kernel[1,](x, SIZE=size)
    assert no_gpu.launched == [16, 32, 16]
    assert len(no_gpu.compiled) == 2


def test_a_kernel_that_is_compiled_by_then_is_launched_into_a_graph(no_gpu: NoGpu) -> None:
    kernel = JITFunction(_nothing)
    x = torch.zeros(64)
    no_gpu.may_compile.set()
    with CompileAhead(CPU, num_cores=2) as ahead:
        ahead.note(lambda: kernel[1,](x, SIZE=16))
        wait(ahead.raw_futures, timeout=60)
        assert ahead.note(lambda: kernel[1,](x, SIZE=16)) is not None
        assert (no_gpu.captured, no_gpu.launched) == ([16], [])
    assert no_gpu.compiled == [("compiler", False)]


def test_what_does_not_compile_says_so_ahead_and_where_it_is_launched(
    no_gpu: NoGpu, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = JITFunction(_nothing)
    x = torch.zeros(64)
    with CompileAhead(CPU, num_cores=2) as ahead:
        ahead.note(lambda: kernel[1,](x, SIZE=TOO_LARGE.value))
    assert "a kernel did not compile ahead: " in caplog.text
    assert "this_is_not_defined" in caplog.text
    with pytest.raises(CompilationError):
        kernel[1,](x, SIZE=TOO_LARGE.value)
    assert not no_gpu.launched


def test_an_error_ends_the_scope_though_kernels_were_not_compiled_yet(no_gpu: NoGpu) -> None:
    kernel = JITFunction(_nothing)
    x = torch.zeros(64)

    def fail() -> None:
        with contextlib.suppress(ValueError), CompileAhead(CPU, num_cores=1) as ahead:
            for size in (16, 32):
                ahead.note(lambda size=size: kernel[1,](x, SIZE=size))
            # The first one is being compiled until the second one is given up.
            ahead.raw_futures[1].add_done_callback(lambda future: no_gpu.may_compile.set())
            raise ValueError

    engine = threading.Thread(target=fail, daemon=True)
    engine.start()
    engine.join(60)
    assert not engine.is_alive()
    assert no_gpu.compiled == [("compiler", False)]
