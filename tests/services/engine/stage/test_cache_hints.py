"""Hints on cached blocks, from the gateway's to those of the engine's turns."""

from __future__ import annotations

from headwater.engine_core.kv.value.turn import Turn
from headwater.engine_core.scheduling.table.request_state import turn_of
from headwater.gateway.cache_hints import NO_HINTS, CacheHints
from headwater.gateway.request.open_request import cache_hints_of
from headwater.proto.common_pb2 import Sampling
from headwater.proto.engine_pb2 import Add
from headwater.services.engine.stage.requests import Limits, PendingAdd, requests_of


def turn_by(hints: CacheHints) -> Turn:
    add = Add(
        stream_ids=[1],
        num_prompt_tokens=1,
        prompt_ids=[3],
        cache_namespace=bytes(16),
        sampling=Sampling(max_tokens=1, stop_token_ids=[9]),
        eos_token_ids=[7],
        tenant="acme",
        weight=2.0,
        cache_hints=cache_hints_of(hints),
    )
    limits = Limits(vocab_size=10, max_model_len=10)
    [request] = requests_of(PendingAdd(add, limits), limits, [1])
    return turn_of(request)


def test_hints_of_a_request_are_those_of_its_turn() -> None:
    hints = CacheHints(session="s", turn_kind="tool", priority=-3, keep_seconds=60)
    assert turn_by(hints) == Turn(
        tenant="acme",
        weight=2.0,
        kind="tool",
        session="s",
        priority=-3,
        keep_seconds=60.0,
        end_token_ids=(7,),
    )


def test_a_request_without_hints_has_its_tenant_alone() -> None:
    assert turn_by(NO_HINTS) == Turn(tenant="acme", weight=2.0, end_token_ids=(7,))
    add = Add(
        stream_ids=[1],
        num_prompt_tokens=1,
        prompt_ids=[3],
        cache_namespace=bytes(16),
        sampling=Sampling(max_tokens=1),
    )
    limits = Limits(vocab_size=10, max_model_len=10)
    [request] = requests_of(PendingAdd(add, limits), limits, [1])
    assert turn_of(request) == Turn()
