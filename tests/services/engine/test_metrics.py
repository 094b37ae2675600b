from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest

from headwater.engine_core.rank_facts import RankFigures
from headwater.engine_core.step_output import EngineLoad
from headwater.services.engine.metrics import EngineCollector


class Door:
    """What a collector reads of one."""

    num_prompt_tokens = 0
    num_finished: Mapping[str, int] = {}
    is_prepared = True
    rank_figures: Sequence[RankFigures] = ()
    cache_config: Mapping[str, str] = {"cache_dtype": "fp8", "block_size": "64", "num_blocks": "100"}

    def __init__(self, load: EngineLoad) -> None:
        self.totals = load


def shown(load: EngineLoad, prefix: str = "headwater_spec_") -> list[str]:
    registry = CollectorRegistry()
    registry.register(EngineCollector(Door(load), "m"))
    return [line for line in generate_latest(registry).decode().splitlines() if line.startswith(prefix)]


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
    assert shown(EngineLoad(), "headwater_cache_config") == [f"headwater_cache_config_info{{{labels}}} 1.0"]


def test_the_ranks_of_an_engine_are_counted_one_by_one_and_an_engine_without_ranks_has_none() -> None:
    door = Door(EngineLoad())
    door.rank_figures = [RankFigures(7, 1.5, 0.25), RankFigures(6, 1.25, 0.5)]
    registry = CollectorRegistry()
    registry.register(EngineCollector(door, "m"))
    lines = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("headwater_rank")]
    assert lines == [
        'headwater_rank_plans_total{model_name="m",rank="0"} 7.0',
        'headwater_rank_plans_total{model_name="m",rank="1"} 6.0',
        'headwater_rank_busy_seconds_total{model_name="m",rank="0"} 1.5',
        'headwater_rank_busy_seconds_total{model_name="m",rank="1"} 1.25',
        'headwater_rank_wait_seconds_total{model_name="m",rank="0"} 0.25',
        'headwater_rank_wait_seconds_total{model_name="m",rank="1"} 0.5',
    ]
    assert shown(EngineLoad(), "headwater_rank") == []
