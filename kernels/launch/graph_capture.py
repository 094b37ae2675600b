"""Capture of launches as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Memory that another thread frees during a capture is no part of the graph.
_MODE = "relaxed"


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Scope whose launches on the current stream go into the graph instead of the GPU. `pool`: pool
    of memory of an earlier graph that this one shares.

    The collector of garbage pauses. Pinned memory that it frees has been used on this stream,
    perhaps by an engine that is closed, and torch records an event there, which would become part
    of the graph: looking at that event later fails with "invalid argument", in whatever next asks
    for pinned memory.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool=pool, capture_error_mode=_MODE)
        try:
            yield
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()
