"""Calls of a CPU's kernels, noted while a computation makes them; `replay` makes the same calls
again."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = (torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like)


class UnrecordableError(Exception):
    """A computation cannot be replayed: it needs more than the CPU's kernels."""

    def __init__(
        self, what: str, allowed: str = "the CPU's kernels, new tensors and views"
    ) -> None:
        super().__init__(f"a recorded computation has {what}; allowed: {allowed}")


class RecordedCall(NamedTuple):
    """One call of a kernel."""

    address: int
    """Address of the kernel's machine code."""
    memory: array[int]
    """Arguments as they were before the call, see `Kernel.run`."""


class Recording:
    """Calls of kernels in their order, and the tensors that were made between them."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.tensors: list[torch.Tensor] = []
        """New tensors, kept alive so that each has memory of its own."""

    def note(self, address: int, memory: array[int]) -> None:
        """Adds a call that is about to be made."""
        self.calls.append(RecordedCall(address, memory[:]))


_CURRENT: ContextVar[Recording | None] = ContextVar("cpu_recording", default=None)
current_recording: Callable[[], Recording | None] = _CURRENT.get


@contextmanager
def recording() -> Iterator[Recording]:
    """Scope whose calls of kernels are noted as they are made. Raises `UnrecordableError` at the
    first operation of torch that reads or writes numbers: no replay would repeat it."""
    notes = Recording()
    token = _CURRENT.set(notes)
    try:
        with _OnlyTensors(notes):
            yield notes
    finally:
        _CURRENT.reset(token)


class _OnlyTensors(TorchDispatchMode):
    """Lets torch make tensors and views, and nothing else."""

    def __init__(self, notes: Recording) -> None:
        super().__init__()
        self._notes = notes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here; to leave torch's compiler out takes importing it, 1.5 s of each
        # start.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _EMPTY:
            tensor = func(*args, **(kwargs or {}))
            self._notes.tensors.append(tensor)
            return tensor
        if not func.is_view:
            raise UnrecordableError(f"the operation {func}")
        views = func(*args, **(kwargs or {}))
        memory = args[0].untyped_storage().data_ptr()
        # Some operations are views of most tensors, and copies of others.
        for view in views if isinstance(views, list | tuple) else (views,):
            if view.untyped_storage().data_ptr() != memory:
                raise UnrecordableError(f"the operation {func}")
        return views
