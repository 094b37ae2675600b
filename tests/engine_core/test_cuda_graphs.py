from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from headwater.engine_core.executors.device.cuda_graphs import Graphs


def test_what_recurs_is_captured_when_all_is_launched_a_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    graph = SimpleNamespace(
        capture_begin=lambda **options: seen.append("begin"),
        capture_end=lambda: seen.append("end"),
        pool=lambda: None,
        replay=lambda: seen.append("replay"),
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    graphs = Graphs()
    for step in (["launch"], ["launch", "draw", "begin", "launch", "end"], ["replay"], ["replay"]):
        graphs.run("prompts", lambda: seen.append("launch"))
        if "draw" in step:
            seen.append("draw")
        graphs.capture_due()
        assert seen == step
        seen.clear()
