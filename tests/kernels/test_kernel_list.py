"""Kernels that one process lists are loaded by the next one before it launches them; Triton
compiles them for a GPU that is not there."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from headwater.kernels.launch import standby
from headwater.kernels.launch.compile_ahead import CompileAhead
from headwater.kernels.launch.kernel_list import Facts, KernelList, loads_of_process
from tests.kernels.test_compile_ahead import CPU, NoGpu, no_gpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="puts things in the place of a GPU"
)
__all__ = ["no_gpu"]
X = torch.zeros(64)


def _listed(p_x, SHAPE: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton compiles it
    pass


FUNCTION = _listed


def new_process(monkeypatch: pytest.MonkeyPatch) -> JITFunction[Any]:
    """The kernel as a process has it that has launched nothing."""
    loads_of_process.cache_clear()
    kernel = JITFunction(FUNCTION)
    monkeypatch.setattr(sys.modules[__name__], "_listed", kernel)
    return kernel


def compile_and_list(
    kernel: JITFunction[Any], *sizes: int, shape: object = None, facts: Facts | None = None
) -> None:
    kernels = KernelList("id")
    kernels.begin()
    with kernels.loading(num_cores=2), CompileAhead(CPU, num_cores=2) as ahead:
        for size in sizes:
            ahead.note(lambda size=size: kernel[1,](X, SHAPE=shape, SIZE=size))
    kernels.keep("engine", facts)


def listed_of(no_gpu: NoGpu) -> list[tuple[str, bool]]:
    """(thread, whether it was in the cache) of each kernel that the list's scope loads."""
    no_gpu.compiled.clear()
    with KernelList("id").loading(num_cores=2):
        pass
    return list(no_gpu.compiled)


def test_kernels_of_a_list_are_loaded_before_they_are_launched(
    no_gpu: NoGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_gpu.may_compile.set()
    compile_and_list(new_process(monkeypatch), 16, 32)
    kernel = new_process(monkeypatch)
    assert listed_of(no_gpu) == [("kernels", True)] * 2
    for size in (32, 16):
        kernel[1,](X, SHAPE=None, SIZE=size)
    assert no_gpu.launched == [32, 16]
    assert len(no_gpu.compiled) == 2
    # A process that stood by has them: its engine loads none again.
    assert not listed_of(no_gpu)


def test_a_list_grows_by_what_a_later_process_compiles(
    no_gpu: NoGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_gpu.may_compile.set()
    compile_and_list(new_process(monkeypatch), 16)
    compile_and_list(new_process(monkeypatch), 32)
    new_process(monkeypatch)
    assert listed_of(no_gpu) == [("kernels", True)] * 2


def test_kernels_whose_constants_json_would_change_are_not_listed(
    no_gpu: NoGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_gpu.may_compile.set()
    compile_and_list(new_process(monkeypatch), 16, shape=(2, 4))
    assert not listed_of(no_gpu)


def kept_facts(engine: str = "engine") -> Facts | None:
    loads_of_process.cache_clear()
    kernels = KernelList("id")
    assert kernels.kept_facts(engine) is None, "before its kernels are loaded"
    with kernels.loading(num_cores=2):
        pass
    return kernels.kept_facts(engine)


def test_facts_are_for_engines_of_the_same_configuration_that_have_loaded_all_kernels(
    no_gpu: NoGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_gpu.may_compile.set()
    compile_and_list(new_process(monkeypatch), 16, facts={"step_bytes": 7})
    new_process(monkeypatch)
    assert kept_facts() == {"step_bytes": 7}
    assert kept_facts("another") is None
    monkeypatch.delattr(sys.modules[__name__], "_listed")
    assert kept_facts() is None


def test_no_facts_are_kept_beside_a_kernel_that_cannot_be_listed(
    no_gpu: NoGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_gpu.may_compile.set()
    compile_and_list(new_process(monkeypatch), 16)
    compile_and_list(new_process(monkeypatch), 32, shape=(2, 4), facts={"step_bytes": 7})
    new_process(monkeypatch)
    assert kept_facts() is None


@pytest.fixture
def stand_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The work of a process that stands by for the list."""
    device = SimpleNamespace(
        mem_get_info=lambda: (standby.LEAST_FREE_BYTES, 0),
        synchronize=lambda: None,
        empty_cache=lambda: None,
    )
    names = {name: getattr(torch, name) for name in ("bfloat16", "int64", "mm")}
    stood_for = SimpleNamespace(cuda=device, zeros=lambda *size, **options: X.view(8, 8), **names)
    monkeypatch.setattr(standby, "torch", stood_for)
    monkeypatch.setattr(sys, "argv", ["standby", "id"])
    return standby.main


def test_a_process_that_stands_by_is_ready_before_its_kernels_are_loaded(
    no_gpu: NoGpu, monkeypatch: pytest.MonkeyPatch, stand_by: Callable[[], None]
) -> None:
    no_gpu.may_compile.set()
    compile_and_list(new_process(monkeypatch), 16, 32)
    new_process(monkeypatch)
    no_gpu.may_compile.clear()
    no_gpu.compiled.clear()
    stand_by()
    assert not no_gpu.compiled
    no_gpu.may_compile.set()
    loads_of_process().join()
    assert len(no_gpu.compiled) == 2


def test_an_engine_that_takes_over_loads_what_it_launches_and_the_rest_behind_it(
    no_gpu: NoGpu, monkeypatch: pytest.MonkeyPatch, stand_by: Callable[[], None]
) -> None:
    no_gpu.may_compile.set()
    compile_and_list(new_process(monkeypatch), 16, 32, 128, facts={"step_bytes": 7})
    kernel = new_process(monkeypatch)
    no_gpu.compiled.clear()
    waits = no_gpu.may_compile
    waits.clear()

    def load(**facts: Any) -> None:
        # Each thread waits with its first kernel; a launch does not.
        if threading.current_thread() is not threading.main_thread():
            assert waits.wait(60)
        loaded.append(threading.current_thread().name)

    loaded: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", load)
    stand_by()
    kernels = KernelList("id")
    with kernels.loading(num_cores=1):
        pass
    assert kernels.kept_facts("engine") == {"step_bytes": 7}
    kernel[1,](X, SHAPE=None, SIZE=128)
    assert (loaded, no_gpu.launched) == (["MainThread"], [128])
    waits.set()
    loads_of_process().join()
    for size in (16, 32):
        kernel[1,](X, SHAPE=None, SIZE=size)
    assert loaded == ["MainThread", "kernels", "kernels"], "each is loaded once"


def test_a_load_that_fails_while_a_process_stands_by_is_tried_again_by_its_engine(
    no_gpu: NoGpu, monkeypatch: pytest.MonkeyPatch, stand_by: Callable[[], None]
) -> None:
    no_gpu.may_compile.set()
    compile_and_list(new_process(monkeypatch), 16, 32, facts={"step_bytes": 7})
    new_process(monkeypatch)

    def fail(**facts: Any) -> None:
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.compilation, "listener", fail)
        stand_by()
        loads_of_process().join()
    no_gpu.compiled.clear()
    kernels = KernelList("id")
    with kernels.loading(num_cores=1):
        pass
    assert len(no_gpu.compiled) == 2
    assert kernels.kept_facts("engine") == {"step_bytes": 7}


@pytest.mark.parametrize("text", ["", '[["no_module", "kernel", "{}"]]', '{"a": 1}'])
def test_a_list_that_cannot_be_used_loads_nothing(no_gpu: NoGpu, text: str, tmp_path: Path) -> None:
    (tmp_path / "list-id").mkdir()
    (tmp_path / "list-id/kernels.json").write_text(text)
    assert not listed_of(no_gpu)
