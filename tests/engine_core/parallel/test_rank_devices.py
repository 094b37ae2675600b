from __future__ import annotations

from headwater.engine_core.executors.rank_devices import MOST_SHARING, SHARE, most_ranks, rank_variables


def test_each_rank_sees_its_own_gpu_first_and_those_of_its_engine_alone() -> None:
    seen = [rank_variables({}, 4, rank, 3)["CUDA_VISIBLE_DEVICES"] for rank in range(3)]
    assert seen == ["0,1,2", "1,0,2", "2,0,1"]
    given = {"CUDA_VISIBLE_DEVICES": "6,7"}
    assert [rank_variables(given, 2, rank, 2)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["6,7", "7,6"]


def test_ranks_share_a_gpu_only_where_a_developer_says_so() -> None:
    assert most_ranks({}, 2) == 2
    assert most_ranks({SHARE: "1"}, 1) == MOST_SHARING
    assert most_ranks({SHARE: "1"}, 0) == 0
    assert rank_variables({SHARE: "1"}, 1, 1, 2) == {}
