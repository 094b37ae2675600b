from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headwater.kernels.launch.graph_capture import capturing

GPU = pytest.mark.gpu


class Broken(Exception):
    pass


@pytest.fixture
def recorded() -> tuple[Any, list[str]]:
    """A graph that stands for one of CUDA, and what becomes of it."""
    seen: list[str] = []
    graph = SimpleNamespace(
        capture_begin=lambda **options: seen.append(f"begin in {options['pool']}"),
        capture_end=lambda: seen.append("end"),
    )
    return graph, seen


@pytest.fixture(params=[True, False], ids=["collecting", "not collecting"])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_the_collector_pauses_while_launches_are_captured(
    recorded: tuple[Any, list[str]], collects: bool
) -> None:
    graph, seen = recorded
    with capturing(graph, "a pool"):
        assert not gc.isenabled()
    assert gc.isenabled() == collects
    assert seen == ["begin in a pool", "end"]


def test_a_launch_that_fails_ends_the_capture(
    recorded: tuple[Any, list[str]], collects: bool
) -> None:
    graph, seen = recorded
    with pytest.raises(Broken), capturing(graph):
        raise Broken
    assert gc.isenabled() == collects
    assert seen == ["begin in None", "end"]


@GPU
def test_pinned_memory_in_garbage_survives_a_capture_on_the_stream_that_used_it() -> None:
    stream = torch.cuda.Stream()
    for _ in range(20):
        for _ in range(20):
            # Pinned memory that only the collector frees, copied from on this stream.
            cycle: dict[str, Any] = {"pinned": torch.zeros(100, dtype=torch.int32).pin_memory()}
            cycle["itself"] = cycle
            with torch.cuda.stream(stream):
                cycle["pinned"].to("cuda", non_blocking=True)
        del cycle
        with torch.cuda.stream(stream), capturing(torch.cuda.CUDAGraph()):
            torch.zeros(16, device="cuda")
            # So many containers start the collector wherever it runs.
            made = [[i] for i in range(100_000)]
        assert len(made) == 100_000
        gc.collect()
        for _ in range(50):
            assert (
                torch.arange(100, dtype=torch.int32).pin_memory().to("cuda", non_blocking=True)[99]
                == 99
            )
