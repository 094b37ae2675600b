from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest

from headwater.engine_core.step_output import EngineLoad
from headwater.services.engine.metrics import EngineCollector


class Door:
    """What a collector reads of one."""

    num_prompt_tokens = 0
    num_finished: Mapping[str, int] = {}
    is_prepared = True

    def __init__(self, load: EngineLoad) -> None:
        self.totals = load


def shown(load: EngineLoad) -> list[str]:
    registry = CollectorRegistry()
    registry.register(EngineCollector(Door(load), "m"))
    return [line for line in generate_latest(registry).decode().splitlines() if line.startswith("headwater_spec_")]


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
