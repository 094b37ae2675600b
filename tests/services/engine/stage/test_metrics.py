from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest

from headwater.engine_core.expert_figures import ExpertFigures
from headwater.engine_core.parallel.rank_facts import RankFigures
from headwater.engine_core.step_output import DiskUse, EngineLoad
from headwater.services.engine.core.figures import CoreFigures
from headwater.services.engine.stage.adapters import EngineAdapters
from headwater.services.engine.stage.metrics import EngineCollector


class EngineServer:
    """What a collector reads of one."""

    num_prompt_tokens = 0
    num_finished: Mapping[str, int] = {}
    is_prepared = True
    adapters = EngineAdapters(send=lambda command: None)
    cache_config: Mapping[str, str] = {
        "cache_dtype": "fp8",
        "block_size": "64",
        "num_blocks": "100",
    }

    def __init__(self, load: EngineLoad) -> None:
        self.totals = load
        self.core_figures = CoreFigures()


def shown(load: EngineLoad, prefix: str = "headwater_spec_") -> list[str]:
    registry = CollectorRegistry()
    registry.register(EngineCollector(EngineServer(load), "m"))
    return [
        line for line in generate_latest(registry).decode().splitlines() if line.startswith(prefix)
    ]


def test_drafts_are_counted_as_vllm_counts_them() -> None:
    load = EngineLoad(
        num_drafts=4,
        num_draft_tokens=9,
        num_accepted_tokens=6,
        num_accepted_by_position=[3, 2, 1],
        num_drafter_bytes=4096,
    )
    assert shown(load) == [
        'headwater_spec_decode_num_drafts_total{model_name="m"} 4.0',
        'headwater_spec_decode_num_draft_tokens_total{model_name="m"} 9.0',
        'headwater_spec_decode_num_accepted_tokens_total{model_name="m"} 6.0',
        'headwater_spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 3.0',
        'headwater_spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 2.0',
        'headwater_spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="2"} 1.0',
        'headwater_spec_decode_drafter_bytes{model_name="m"} 4096.0',
    ]


def test_an_engine_that_drafted_nothing_counts_from_zero() -> None:
    assert 'headwater_spec_decode_num_draft_tokens_total{model_name="m"} 0.0' in shown(EngineLoad())


def test_metrics_say_what_the_kv_cache_is() -> None:
    labels = 'block_size="64",cache_dtype="fp8",model_name="m",num_blocks="100"'
    assert shown(EngineLoad(), "headwater_cache_config") == [
        f"headwater_cache_config_info{{{labels}}} 1.0"
    ]


def test_the_ranks_of_an_engine_are_counted_one_by_one_and_an_engine_without_ranks_has_none() -> (
    None
):
    server = EngineServer(EngineLoad())
    server.core_figures.ranks = [RankFigures(7, 1.5, 0.25), RankFigures(6, 1.25, 0.5)]
    registry = CollectorRegistry()
    registry.register(EngineCollector(server, "m"))
    lines = [
        line
        for line in generate_latest(registry).decode().splitlines()
        if line.startswith("headwater_rank")
    ]
    assert lines == [
        'headwater_rank_plans_total{model_name="m",rank="0"} 7.0',
        'headwater_rank_plans_total{model_name="m",rank="1"} 6.0',
        'headwater_rank_busy_seconds_total{model_name="m",rank="0"} 1.5',
        'headwater_rank_busy_seconds_total{model_name="m",rank="1"} 1.25',
        'headwater_rank_wait_seconds_total{model_name="m",rank="0"} 0.25',
        'headwater_rank_wait_seconds_total{model_name="m",rank="1"} 0.5',
    ]
    assert shown(EngineLoad(), "headwater_rank") == []


def test_experts_are_counted_and_a_model_without_experts_has_none() -> None:
    server = EngineServer(EngineLoad())
    server.core_figures.experts = ExpertFigures([5, 1], [0.75, 1.0], 3, 3 << 20)
    registry = CollectorRegistry()
    registry.register(EngineCollector(server, "m"))
    lines = [
        line
        for line in generate_latest(registry).decode().splitlines()
        if line.startswith(("headwater_expert", "headwater_step_expert"))
    ]
    assert lines == [
        'headwater_expert_rows_total{expert="0",model_name="m"} 5.0',
        'headwater_expert_rows_total{expert="1",model_name="m"} 1.0',
        'headwater_expert_largest_share{layer="0",model_name="m"} 0.75',
        'headwater_expert_largest_share{layer="1",model_name="m"} 1.0',
        'headwater_step_experts{model_name="m"} 3.0',
        'headwater_step_expert_bytes{model_name="m"} 3.145728e+06',
    ]
    assert shown(EngineLoad(), "headwater_expert") == []


def test_metrics_say_how_much_of_the_used_blocks_stands_for_tokens() -> None:
    load = EngineLoad(num_used_blocks=10, num_wasted_slots=32, num_copied_blocks=3)
    assert shown(load, "headwater_kv_cache_utilisation") == [
        'headwater_kv_cache_utilisation{model_name="m"} 0.95'
    ]
    assert shown(EngineLoad(), "headwater_kv_cache_utilisation") == [
        'headwater_kv_cache_utilisation{model_name="m"} 1.0'
    ]
    assert 'headwater_kv_copied_blocks_total{model_name="m"} 3.0' in shown(
        load, "headwater_kv_copied"
    )


def test_hits_are_counted_by_tier_and_those_of_a_disk_only_where_there_is_one() -> None:
    load = EngineLoad(prefix_hits=100, hits_by_tier={"host": 20, "disk": 30})
    assert shown(load, "headwater_prefix_cache_hits_by_tier_total") == [
        'headwater_prefix_cache_hits_by_tier_total{model_name="m",tier="device"} 50.0',
        'headwater_prefix_cache_hits_by_tier_total{model_name="m",tier="host"} 20.0',
        'headwater_prefix_cache_hits_by_tier_total{model_name="m",tier="disk"} 30.0',
    ]
    assert shown(load, "headwater_kv_disk") == []
    disk = DiskUse(num_blocks=5, num_bytes=250, max_bytes=1000, failure="it is full")
    assert 'headwater_kv_disk_on{model_name="m"} 0.0' in shown(
        EngineLoad(disk=disk), "headwater_kv_disk"
    )
    assert 'headwater_kv_disk_usage_perc{model_name="m"} 0.25' in shown(
        EngineLoad(disk=disk), "headwater_kv_disk"
    )


def test_pages_of_a_cache_with_several_groups_are_shown_by_window() -> None:
    load = EngineLoad(num_pages_by_window={"0": 20, "512": 35})
    assert shown(load, "headwater_kv_cache_pages") == [
        'headwater_kv_cache_pages{model_name="m",window="0"} 20.0',
        'headwater_kv_cache_pages{model_name="m",window="512"} 35.0',
    ]
    assert shown(EngineLoad(), "headwater_kv_cache_pages") == []


def test_bytes_of_requests_are_shown_by_kind_of_layer() -> None:
    load = EngineLoad(kv_bytes={"full": 4096, "state": 512})
    assert shown(load, "headwater_kv_cache_bytes") == [
        'headwater_kv_cache_bytes{kind="full",model_name="m"} 4096.0',
        'headwater_kv_cache_bytes{kind="state",model_name="m"} 512.0',
    ]
    assert shown(EngineLoad(), "headwater_kv_cache_bytes") == []


def test_bytes_that_hold_nothing_are_shown_by_kind_of_cache() -> None:
    load = EngineLoad(wasted_bytes={"0": 96, "state": 1024})
    assert shown(load, "headwater_kv_cache_wasted_bytes") == [
        'headwater_kv_cache_wasted_bytes{model_name="m",window="0"} 96.0',
        'headwater_kv_cache_wasted_bytes{model_name="m",window="state"} 1024.0',
    ]
    assert shown(EngineLoad(), "headwater_kv_cache_wasted_bytes") == []
