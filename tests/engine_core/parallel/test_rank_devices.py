from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headwater.engine_core.devices import cuda
from headwater.engine_core.executors.ranks.rank_devices import (
    MOST_SHARING,
    SHARE,
    VISIBLE,
    most_ranks,
    rank_variables,
)
from headwater.engine_core.options import ExecutorOptions


def test_each_rank_sees_its_own_gpu_first_and_those_of_its_engine_alone() -> None:
    seen = [rank_variables({}, 4, rank, 3)["CUDA_VISIBLE_DEVICES"] for rank in range(3)]
    assert seen == ["0,1,2", "1,0,2", "2,0,1"]
    given = {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert [rank_variables(given, 2, rank, 2)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == [
        "6,7",
        "7,6",
    ]


def test_ranks_share_a_gpu_only_where_a_developer_says_so() -> None:
    assert most_ranks({}, 2) == 2
    assert most_ranks({SHARE: "1"}, 1) == MOST_SHARING
    assert most_ranks({SHARE: "1"}, 0) == 0
    assert rank_variables({SHARE: "1"}, 1, 1, 2) == {}


def test_ranks_on_another_host_have_the_first_gpus_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for variable in (SHARE, VISIBLE):
        monkeypatch.delenv(variable, raising=False)
    options = ExecutorOptions(
        model_folder=None, tensor_parallel_size=2, pipeline_parallel_size=3, stage_hosts=1
    )
    seen = [cuda.rank_variables(options, rank)[VISIBLE] for rank in range(6)]
    # The engine's host has two stages, the other one the last.
    assert seen == ["0,1,2,3", "1,0,2,3", "2,0,1,3", "3,0,1,2", "0,1", "1,0"]


def test_ranks_of_several_hosts_keep_nvlink_multicast_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    two = ExecutorOptions(model_folder=None, pipeline_parallel_size=2)
    assert "NCCL_NVLS_ENABLE" not in cuda.rank_variables(two, 0)
    assert cuda.rank_variables(replace(two, stage_hosts=1), 1)["NCCL_NVLS_ENABLE"] == "0"
