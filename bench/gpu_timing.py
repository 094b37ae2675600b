"""Times launches on a GPU by replays of a CUDA graph. Knows no kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

BYTES_PER_US = 4.27e6
FLOPS_PER_US = 796e6
"""Ceilings of an H200, measured 2026-11-21: a reduction's read, and a bf16 product of 8192
cubed."""
L2_BYTES = 60 << 20


@dataclass(frozen=True, slots=True)
class Figure:
    kernel: str
    case: str
    us: float
    limit_us: float
    note: str = ""


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """CUDA graph of the calls in sequence."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def timed(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Median microseconds of one call; the calls run in sequence inside a graph."""
    return timed_in_turn(calls, replays=replays)[0]


def timed_in_turn(*lists: Sequence[Callable[[], object]], replays: int = 15) -> list[float]:
    """Like `timed`, for each list. Their graphs take turns: a GPU at its limit of power slows down
    for all alike."""
    graphs = [captured(calls) for calls in lists]
    for graph in graphs:
        graph.replay()
    times: list[list[float]] = [[] for _ in lists]
    for _ in range(replays):
        for calls, graph, found in zip(lists, graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3 / len(calls))
    return [sorted(found)[replays // 2] for found in times]


def copies_for(num_bytes: int) -> int:
    """Number of copies of an input that overflow the cache twice, at most 64."""
    return max(min(3 * L2_BYTES // max(num_bytes, 1) + 1, 64), 2)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
