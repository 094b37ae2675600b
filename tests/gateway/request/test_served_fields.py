"""Fields that the engines of a model refuse are refused at the gateway, before a stage is asked."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from headwater.gateway.request.served_fields import check_fields
from headwater.proto.common_pb2 import Sampling
from headwater.proto.events_pb2 import RefusedField
from headwater.services.runtime.errors import UnsupportedField
from headwater.services.runtime.member import Kind, Member
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import Behind, completion_body
from tests.gateway.scripted_output import scripted_stages

WHY = "the platform of this engine lacks it"
ASKED = Sampling(prompt_logprobs=2, temperature=0.0)


def engine(number: int, *refused: str) -> Member:
    fields = tuple((name, WHY) for name in refused)
    member = Member(
        kind=Kind.ENGINE,
        replica_id=f"e{number}",
        epoch=number,
        address=f"e{number}:1",
        refused_fields=fields,
    )
    assert Member.from_pb(member.to_pb()) == member
    return member


def test_a_field_that_every_engine_refuses_is_refused_with_the_reason() -> None:
    engines = [engine(1, "logit_bias", "prompt_logprobs"), engine(2, "prompt_logprobs")]
    with pytest.raises(UnsupportedField) as refused:
        check_fields(engines, ASKED)
    assert refused.value.param == "prompt_logprobs"
    assert str(refused.value) == f"prompt_logprobs is not supported: {WHY}"


@pytest.mark.parametrize(
    "engines",
    [
        [],
        [engine(1)],
        [engine(1, "prompt_logprobs"), engine(2)],
        [engine(1, "logit_bias"), engine(2, "logit_bias")],
    ],
    ids=["no engine is known", "one serves it", "one of two serves it", "another field"],
)
def test_a_field_that_some_engine_serves_is_not_refused(engines: list[Member]) -> None:
    check_fields(engines, ASKED)


async def test_a_refused_request_reaches_no_stage(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    refused = [RefusedField(name="prompt_logprobs", why=WHY)]
    async with scripted_stages(behind.processor, 1, refused) as (script, output, engines):
        script.begin()
        starting = start_gateway(Behind(behind.processor, output, tuple(engines)))
        gateway = await asyncio.to_thread(starting.__enter__)
        try:
            await asyncio.to_thread(gateway.wait_for_replicas, 1)
            async with httpx.AsyncClient(base_url=gateway.rest, timeout=60) as client:
                body = completion_body(max_tokens=4, prompt_logprobs=2)
                reply = await client.post("/v1/completions", json=body)
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "prompt_logprobs"
        assert reply.json()["error"]["message"] == f"prompt_logprobs is not supported: {WHY}"
        assert not script.opens
